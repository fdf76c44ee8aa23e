// The live picture of the pool: who holds which page, the slots, the parked queue and the rates. Fed from GET /pool.

const FREE = -1;
const CACHED = -2;
const LARGEST_CELL = 26; // CSS pixels, as below
const SMALLEST_CELL = 4;
const MAX_HEIGHT = 300;
const RATE_WINDOW_MS = 3000;
const WORDS = {
  idle: "idle",
  prompt: "reading its prompt",
  generating: "answering",
  preempting: "being parked",
  preempted: "parked",
  restoring: "being restored",
};
const isDark = matchMedia("(prefers-color-scheme: dark)");

// Neighbouring slots get colours far apart, for any number of slots.
export function slotColour(slot) {
  const hue = (210 + slot * 137.5) % 360;
  return `hsl(${hue} ${isDark.matches ? "60% 62%" : "62% 46%"})`;
}

export class PoolView {
  constructor() {
    this.canvas = document.getElementById("grid");
    this.samples = []; // [time, counters], for the rates
    this.last = null;
    new ResizeObserver(() => this.last && this.draw(this.last)).observe(this.canvas.parentElement);
    isDark.addEventListener("change", () => this.last && this.draw(this.last));
  }

  show(pool) {
    this.last = pool;
    this.draw(pool);
    this.showText(pool);
    this.showRates(pool);
    this.showSlots(pool);
    this.showParked(pool);
  }

  draw(pool) {
    const { canvas } = this;
    const width = canvas.parentElement.clientWidth - 2; // the border
    const { cell, pagesPerCell } = layout(pool.num_pages, width);
    const columns = Math.max(1, Math.floor(width / cell));
    const numCells = Math.ceil(pool.num_pages / pagesPerCell);
    const height = Math.max(cell, Math.ceil(numCells / columns) * cell);
    const scale = window.devicePixelRatio || 1;
    canvas.style.height = `${height}px`;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    const context = canvas.getContext("2d");
    context.scale(scale, scale);
    const style = getComputedStyle(document.documentElement);
    const colours = { [FREE]: style.getPropertyValue("--free"), [CACHED]: style.getPropertyValue("--cached") };
    const moving = new Set(pool.slots.filter((slot) => isMoving(slot)).map((slot) => slot.id));
    const holders = holdersOf(pool);
    const size = cell - (cell > 6 ? 2 : cell > SMALLEST_CELL ? 1 : 0);
    for (let index = 0; index < numCells; index++) {
      const holder = mostCommon(holders, index * pagesPerCell, pagesPerCell);
      const x = (index % columns) * cell;
      const y = Math.floor(index / columns) * cell;
      context.fillStyle = colours[holder] ??= slotColour(holder);
      context.fillRect(x, y, size, size);
      if (moving.has(holder)) {
        context.fillStyle = colours[FREE];
        context.fillRect(x + size * 0.3, y + size * 0.3, size * 0.4, size * 0.4);
      }
    }
  }

  showText(pool) {
    const percent = (pages) => `${Math.round((100 * pages) / Math.max(1, pool.num_pages))} %`;
    const text =
      `${pool.num_pages} pages of ${pool.page_size} tokens: ${pool.held} held (${percent(pool.held)}), ` +
      `${pool.cached} in the prompt cache, ${pool.transfer} being copied, ${pool.free} free`;
    document.getElementById("pool-text").textContent = text;
    this.canvas.setAttribute("aria-label", text);
  }

  showRates(pool) {
    const now = performance.now();
    if (this.samples.length && pool.counters.generated_tokens < this.samples.at(-1)[1].generated_tokens) {
      this.samples = []; // another server
    }
    this.samples.push([now, pool.counters]);
    while (this.samples.length > 2 && this.samples[1][0] < now - RATE_WINDOW_MS) this.samples.shift();
    const [since, before] = this.samples[0];
    const rate = (name) =>
      now > since ? ((1000 * (pool.counters[name] - before[name])) / (now - since)).toFixed(1) : "0.0";
    const rates = [
      ["answers, tokens/s", rate("generated_tokens")],
      ["prompts, tokens/s", rate("prompt_tokens")],
      ["parked so far", pool.counters.preempts],
      ["restored so far", pool.counters.resumes],
    ];
    const entries = rates.map(([name, value]) => {
      const pair = document.createElement("div");
      pair.append(element("dt", name), element("dd", value));
      return pair;
    });
    document.getElementById("rates").replaceChildren(...entries);
  }

  showSlots(pool) {
    const rows = pool.slots.map((slot) => {
      const row = document.createElement("tr");
      row.dataset.state = slot.state;
      const name = element("th", String(slot.id));
      name.scope = "row";
      name.prepend(dot(slot.id));
      const pages = slot.pages.reduce((sum, [, count]) => sum + count, 0);
      const texts = [WORDS[slot.state] ?? slot.state, slot.cells, pages, slot.n_preempt];
      row.append(name, ...texts.map((text) => element("td", text)));
      return row;
    });
    document.getElementById("slots").replaceChildren(...rows);
  }

  showParked(pool) {
    const isListed = new Set(pool.parked);
    const rest = pool.slots.filter((slot) => slot.is_preempted && !isListed.has(slot.id)).map((slot) => slot.id);
    const byId = new Map(pool.slots.map((slot) => [slot.id, slot]));
    const items = [...pool.parked, ...rest].map((id) => {
      const slot = byId.get(id);
      const tokens = slot.prompt_tokens + slot.generated_tokens;
      const item = element("li", `slot ${id}: ${tierText(slot)}, ${tokens} tokens, ${seconds(slot.parked_ms)}`);
      item.prepend(dot(id));
      return item;
    });
    document.getElementById("parked").replaceChildren(...(items.length ? items : [element("li", "none")]));
    document.getElementById("parked").classList.toggle("is-empty", !items.length);
    document.getElementById("waiting").textContent = pool.waiting ? `${pool.waiting} more waiting for a slot` : "";
  }
}

// As large as fits; past that, several pages share a cell.
function layout(numPages, width) {
  for (let cell = LARGEST_CELL; cell >= SMALLEST_CELL; cell--) {
    const columns = Math.max(1, Math.floor(width / cell));
    if (Math.ceil(numPages / columns) * cell <= MAX_HEIGHT) return { cell, pagesPerCell: 1 };
  }
  const numCells = Math.max(1, Math.floor(width / SMALLEST_CELL)) * Math.floor(MAX_HEIGHT / SMALLEST_CELL);
  return { cell: SMALLEST_CELL, pagesPerCell: Math.ceil(numPages / numCells) };
}

function holdersOf(pool) {
  const holders = new Int32Array(pool.num_pages).fill(FREE);
  for (const [first, count] of pool.cached_runs) holders.fill(CACHED, first, first + count);
  for (const slot of pool.slots) {
    for (const [first, count] of slot.pages) holders.fill(slot.id, first, first + count);
  }
  return holders;
}

function mostCommon(holders, first, count) {
  if (count === 1) return holders[first];
  const counts = new Map();
  let best = FREE;
  for (const holder of holders.subarray(first, first + count)) {
    counts.set(holder, (counts.get(holder) ?? 0) + 1);
    if (counts.get(holder) > (counts.get(best) ?? 0)) best = holder;
  }
  return best;
}

function isMoving(slot) {
  return slot.state === "preempting" || slot.state === "restoring";
}

function tierText(slot) {
  const mebibytes = `${(slot.parked_bytes / 2 ** 20).toFixed(1)} MiB`;
  if (isMoving(slot)) return WORDS[slot.state];
  if (slot.tier === "recompute") return "to be computed again";
  return slot.tier === "disk" ? `${mebibytes} on disk` : `${mebibytes} in memory`;
}

function seconds(ms) {
  return `${(ms / 1000).toFixed(1)} s`;
}

function dot(slot) {
  const mark = document.createElement("i");
  mark.className = "dot";
  mark.style.setProperty("--slot", slotColour(slot));
  return mark;
}

function element(tag, text) {
  const made = document.createElement(tag);
  made.textContent = text;
  return made;
}
