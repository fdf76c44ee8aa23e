// The page: up to four chats on one side, what the server does with them on the other.

import { getJson, ServerError } from "./api.js";
import { Chat } from "./chat.js";
import { PoolView, slotColour } from "./pool.js";

const MAX_CHATS = 4;
const POLL_MS = 500;
const RETRY_MS = 1500; // while the server does not answer
const SUBJECTS = [
  "the keeper of a lighthouse at the end of the world",
  "a river that forgot the way to the sea",
  "two clockmakers who share one town",
  "a library in which every book is unfinished",
];

const byId = (id) => document.getElementById(id);
const chats = [];
const view = new PoolView();
let numOpened = 0;
let isModelKnown = false;

function openChat() {
  const chat = new Chat(`Chat ${++numOpened}`, {
    maxTokens: () => Math.floor(byId("max-tokens").valueAsNumber) || null,
    onClose: (closed) => {
      chats.splice(chats.indexOf(closed), 1);
      closed.element.remove();
      if (!chats.length) openChat();
      showButtons();
    },
  });
  chats.push(chat);
  byId("chats").append(chat.element);
  showButtons();
  return chat;
}

function showButtons() {
  byId("new-chat").disabled = chats.length >= MAX_CHATS;
}

function openFour() {
  while (chats.length < MAX_CHATS) openChat();
  chats.forEach((chat, index) => {
    const prompt =
      `Write a long story about ${SUBJECTS[index]}. Describe the place first, then the people, then what happens ` +
      "to them over many years. Use several paragraphs, and do not hurry to the end.";
    chat.send(prompt);
  });
}

async function poll() {
  let isWell = true;
  if (!document.hidden) {
    try {
      show(await getJson("pool"));
      if (!isModelKnown) await showModel();
    } catch (error) {
      isWell = false;
      await showTrouble(error);
    }
  }
  setTimeout(poll, isWell ? POLL_MS : RETRY_MS);
}

function show(pool) {
  byId("loading").hidden = true;
  byId("status").textContent = "";
  view.show(pool);
  const slotOf = new Map(pool.slots.map((slot) => [slot.request, slot.id]));
  for (const chat of chats) {
    const slot = chat.requestId === null ? undefined : slotOf.get(chat.requestId);
    chat.setColour(slot === undefined ? null : slotColour(slot));
  }
}

async function showModel() {
  const models = await getJson("v1/models");
  byId("model").textContent = models.data[0].id;
  isModelKnown = true;
}

// The model still loads, the server is gone, or it wants a key.
async function showTrouble(error) {
  const health = error.status === 503 ? await getJson("health").catch((reason) => reason) : null;
  const progress = health instanceof ServerError ? health.body.progress : undefined;
  byId("loading").hidden = progress === undefined;
  if (progress !== undefined) {
    byId("loading-text").textContent = `${health.message}: ${progress.stage}, ${Math.round(100 * progress.fraction)} %`;
    byId("progress").value = progress.fraction;
  }
  byId("status").textContent =
    progress !== undefined ? "" : error instanceof ServerError ? error.message : "The server does not answer";
}

byId("new-chat").onclick = () => openChat().input.focus();
byId("open-four").onclick = openFour;
setInterval(() => chats.forEach((chat) => chat.tick()), 200);
openChat();
poll();
