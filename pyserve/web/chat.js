// One chat: its messages, its stream, and what the server says about parks. Text of a model goes in as text nodes only.

import { call, readLines } from "./api.js";

const STATES = { idle: "", waiting: "waiting for the first token", running: "answering", paused: "paused" };

export class Chat {
  constructor(title, { maxTokens, onClose }) {
    const template = document.getElementById("chat-template");
    this.element = template.content.firstElementChild.cloneNode(true);
    this.find = (selector) => this.element.querySelector(selector);
    this.maxTokens = maxTokens;
    this.messages = [];
    this.requestId = null; // the server's name for the answer that runs, also in /pool
    this.abort = null;
    this.pausedAt = null;
    this.find("h3").textContent = title;
    this.element.setAttribute("aria-label", title);
    this.log = this.find(".log");
    this.input = this.find("textarea");
    this.find("form").onsubmit = (event) => {
      event.preventDefault();
      this.send(this.input.value);
    };
    this.input.onkeydown = (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.send(this.input.value);
      }
    };
    this.find(".stop").onclick = () => this.stop();
    this.find(".close").onclick = () => {
      this.stop();
      onClose(this);
    };
    this.setState("idle");
  }

  get isBusy() {
    return this.abort !== null;
  }

  stop() {
    this.abort?.abort();
  }

  async send(text) {
    if (this.isBusy || !text.trim()) return;
    this.input.value = "";
    this.messages.push({ role: "user", content: text });
    this.add("user", text);
    this.abort = new AbortController();
    this.setState("waiting");
    this.answer = this.add("assistant", "").appendChild(document.createTextNode(""));
    this.isComplete = false;
    try {
      await this.stream();
      if (!this.isComplete) throw new Error("The stream ended early");
    } catch (error) {
      if (error.name === "AbortError") this.add("note", "Stopped.");
      else this.add("error", error instanceof TypeError ? "The connection to the server is gone" : error.message);
    } finally {
      this.end();
    }
  }

  async stream() {
    const maxTokens = this.maxTokens();
    const response = await call("v1/chat/completions", {
      isAsked: true,
      method: "POST",
      signal: this.abort.signal,
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({
        messages: this.messages,
        stream: true,
        stream_options: { include_usage: true, include_preemption: true },
        ...(maxTokens && { max_tokens: maxTokens }),
      }),
    });
    for await (const line of readLines(response)) {
      if (line.startsWith("data: ")) this.take(line.slice(6));
      else if (line === ": preempted") this.pause();
      else if (line === ": resumed") this.resume();
    }
  }

  // One data frame.
  take(data) {
    if (data === "[DONE]") {
      this.isComplete = true;
      return;
    }
    const chunk = JSON.parse(data);
    if (chunk.error) {
      this.isComplete = true;
      throw new Error(chunk.error.message);
    }
    this.requestId = chunk.id ?? this.requestId;
    if (chunk.preemption?.state === "preempted") this.pause();
    if (chunk.preemption?.state === "resumed") this.resume();
    const choice = chunk.choices?.[0];
    if (choice?.delta?.content) {
      if (this.pausedAt === null) this.setState("running");
      this.write(choice.delta.content);
    }
    if (choice?.finish_reason) this.finishReason = choice.finish_reason;
    if (chunk.timings) this.add("note", summary(chunk.timings, this.finishReason));
  }

  write(text) {
    const isAtEnd = this.isAtEnd();
    this.answer.appendData(text);
    if (isAtEnd) this.log.scrollTop = this.log.scrollHeight;
  }

  // Whether the reader follows the newest text, and did not scroll up.
  isAtEnd() {
    return this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 40;
  }

  pause() {
    this.pausedAt ??= performance.now();
    this.setState("paused");
  }

  resume() {
    this.pausedAt = null;
    this.setState("running");
  }

  end() {
    const text = this.answer.data;
    if (text) this.messages.push({ role: "assistant", content: text });
    else {
      this.messages.pop(); // a question without an answer would break the order of roles
      this.answer.parentElement.remove();
    }
    this.abort = this.requestId = this.pausedAt = null;
    this.finishReason = undefined;
    this.setState("idle");
  }

  // Called a few times a second: the seconds of a pause.
  tick() {
    if (this.pausedAt === null) return;
    this.find(".seconds").textContent = `${((performance.now() - this.pausedAt) / 1000).toFixed(1)} s`;
  }

  // The colour of the slot that computes this chat, or null.
  setColour(colour) {
    this.element.style.setProperty("--slot", colour ?? "transparent");
  }

  setState(state) {
    const isAtEnd = this.isAtEnd();
    this.element.dataset.state = state;
    this.find(".state").textContent = STATES[state];
    const isPaused = state === "paused";
    this.find(".paused").hidden = !isPaused;
    this.find(".paused [role=status]").textContent = isPaused ? "paused, waiting for room" : "";
    this.find(".send").hidden = state !== "idle";
    this.find(".stop").hidden = state === "idle";
    this.tick();
    if (isAtEnd) this.log.scrollTop = this.log.scrollHeight; // the line about the pause takes some of its height
  }

  add(kind, text) {
    const entry = document.createElement("div");
    entry.className = kind;
    entry.textContent = text;
    if (kind === "error") entry.setAttribute("role", "alert");
    this.log.append(entry);
    this.log.scrollTop = this.log.scrollHeight;
    return entry;
  }
}

function summary(timings, finishReason) {
  const parts = [`${timings.predicted_n} tokens`, `${timings.predicted_per_second.toFixed(1)} a second`];
  if (timings.n_preempt) {
    const times = timings.n_preempt === 1 ? "once" : `${timings.n_preempt} times`;
    parts.push(`paused ${times}, ${(timings.preempted_ms / 1000).toFixed(1)} s in all`);
  }
  if (finishReason === "length") parts.push("cut at its length");
  return parts.join(", ");
}
