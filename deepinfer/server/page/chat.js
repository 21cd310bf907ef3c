// The page: a conversation, what is sent of it, and what comes back.

import { Answer } from "./answer.js";
import { ServerError, ask, streamChat, tab } from "./api.js";
import { byId, button } from "./dom.js";
import { Panel } from "./panel.js";
import { FieldError, Settings, TOOLS_EXAMPLE } from "./settings.js";
import { nextTheme, restoreTheme } from "./theme.js";
import { AnswerView, errorNote, userTurn } from "./transcript.js";

const STORE = "deepinfer.messages";
const WIDE = 1100; // px: there is room for the figures beside the conversation
const NEAR_END = 80; // px from the end: the view follows the answer
const STARTERS = [
  ["What is the capital of France?"],
  ["Write a Python function that returns the n-th Fibonacci number."],
  ["Reverse this list: red, green, blue, yellow"],
  ["What is the weather in Paris?", "with a tool"],
];

class Chat {
  constructor() {
    this.messages = []; // as the protocol has them, without the system prompt
    this.running = null; // AbortController of the answer that comes
    this.asker = null; // what shows the last question
    this.waiting = null; // AnswerView whose calls wait for results
    this.settings = new Settings();
    this.panel = new Panel();
    this.wire();
    this.restore();
    this.connect();
  }

  // -- the server ----------------------------------------------------------------------------------------------------

  async connect() {
    clearTimeout(this.connecting);
    let wait = 5000;
    try {
      const models = await (await ask("v1/models", { signal: AbortSignal.timeout(5000) })).json();
      const names = models.data.map((model) => model.id);
      const select = byId("model");
      const chosen = select.value;
      select.replaceChildren(...names.map((name) => new Option(name, name)));
      if (names.includes(chosen)) select.value = chosen;
      select.disabled = names.length < 2;
      byId("empty-model").textContent = select.value;
      document.title = `${select.value} · deepinfer`;
      const ready = await fetch("ready", { cache: "no-store", signal: AbortSignal.timeout(5000) });
      const state = await ready.json();
      const length = models.data[0]?.max_model_len;
      if (ready.ok) this.status("ready", length ? `ready · ${length.toLocaleString("en")} tokens of context` : "ready");
      else this.status("wait", state.reasons?.[0] ?? "not ready");
      wait = ready.ok && length ? 10000 : 1000;
    } catch (error) {
      const locked = error instanceof ServerError && error.status === 401;
      this.status("down", locked ? "needs an API key" : "not reachable");
      if (locked) this.askForKey();
    }
    this.connecting = setTimeout(() => this.connect(), wait);
  }

  status(state, words) {
    const pill = byId("status");
    if (pill.textContent !== words) pill.textContent = words;
    pill.dataset.state = state;
    pill.title = words;
  }

  askForKey() {
    if (this.asked) return;
    this.asked = true;
    this.show("settings", true);
    byId("key").focus();
  }

  // -- asking --------------------------------------------------------------------------------------------------------

  send(text) {
    if (this.running || !text.trim()) return;
    if (!this.fields()) return;
    if (this.waiting) this.messages.push(...this.takeResults());
    if (this.refused && this.messages.at(-1)?.role === "user") this.leaveOut();
    this.messages.push({ role: "user", content: text });
    this.asker = userTurn(text);
    this.append(this.asker);
    byId("prompt").value = "";
    this.fit();
    this.run();
  }

  /** The request's fields, or null after showing which of them is wrong. */
  fields() {
    try {
      return this.settings.fields();
    } catch (error) {
      if (!(error instanceof FieldError)) throw error;
      if (error.field !== "effort-number") this.show("settings", true);
      byId(error.field).focus();
      this.announce(error.message);
      return null;
    }
  }

  /** Asks for the answer to the messages as they are. */
  async run() {
    const fields = this.fields();
    if (!fields) return;
    this.error?.remove();
    this.retry?.remove();
    const system = this.settings.system;
    const body = {
      model: byId("model").value,
      messages: system ? [{ role: "system", content: system }, ...this.messages] : [...this.messages],
      stream: true,
      stream_options: { include_usage: true },
      ...fields,
    };
    const controller = new AbortController();
    this.setRunning(controller);
    const view = new AnswerView({ asJson: this.settings.asJson });
    this.append(view.node);
    this.announce("The model answers.");
    const answer = new Answer(view, () => this.follow());
    let failure = null;
    try {
      for await (const chunk of streamChat(body, controller.signal)) answer.take(chunk);
    } catch (error) {
      if (error.name !== "AbortError") failure = error;
      answer.reason = controller.signal.aborted ? "stopped" : "error";
    }
    if (this.running !== controller) return; // the conversation was cleared meanwhile
    this.setRunning(null);
    this.finish(answer, failure);
  }

  finish(answer, failure) {
    const { view } = answer;
    answer.end();
    const message = view.message();
    if (view.isEmpty && answer.reason !== "stop") view.node.remove();
    else if (failure === null || view.content || message.tool_calls) this.messages.push(message);
    if (view.isEmpty && answer.reason === "stopped") failure = new ServerError("Stopped before the first token.");
    if (failure !== null) return this.fail(failure, view);
    if (message.tool_calls) this.ask(view);
    else this.offerRetry(view);
    this.save();
    this.announce(answer.reason === "stopped" ? "Stopped." : "The answer is complete.");
    this.follow();
  }

  ask(view) {
    this.waiting = view;
    view.askForResults((results) => {
      this.waiting = null;
      this.messages.push(...results);
      this.run();
    });
    byId("prompt").placeholder = "Give the result above, or write a message";
  }

  takeResults() {
    const results = this.waiting.takeResults();
    this.waiting = null;
    return results;
  }

  /** view: what there is of the answer. */
  fail(error, view) {
    const known = error instanceof ServerError;
    if (!known) console.error(error);
    const message = known ? error.message : `This page has a fault: ${error.message}`;
    const again = error.retryAfter ? `Try again (the server says in ${Math.ceil(error.retryAfter)} s)` : "Try again";
    const actions = [[again, () => this.again()]];
    if (this.messages.at(-1)?.role === "user") actions.push(["Edit the message", () => this.takeBack()]);
    this.error = errorNote(message, actions);
    this.broken = view.node;
    this.refused = known && [400, 413, 422].includes(error.status);
    this.append(this.error);
    this.save();
    if (error.status === 401) {
      this.asked = false;
      this.askForKey();
    }
  }

  /** A question that the server will not have is no part of the conversation: the next one does without it. */
  leaveOut() {
    this.messages.pop();
    this.asker.classList.add("refused");
    this.asker.title = "Refused by the server, not part of the conversation";
    this.forget();
  }

  /** The same question once more; what there is of its answer goes. */
  again() {
    if (this.messages.at(-1)?.role === "assistant") this.messages.pop();
    this.forget();
    this.run();
  }

  /** The question goes back to where it was written. */
  takeBack() {
    const message = this.messages.pop();
    this.forget();
    this.asker.remove();
    if (!byId("prompt").value) byId("prompt").value = message.content;
    this.fit();
    this.save();
    this.drawEmpty();
    byId("prompt").focus();
  }

  /** Takes an error, and the answer that it cut off, from sight. */
  forget() {
    this.error?.remove();
    this.broken?.remove();
    this.error = this.broken = null;
    this.refused = false;
  }

  offerRetry(view) {
    this.retry = button("Again", "link", () => {
      if (this.running) return;
      this.messages.pop();
      view.node.remove();
      this.run();
    });
    view.actions.append(this.retry);
  }

  stop() {
    this.running?.abort();
  }

  clear() {
    this.stop();
    this.setRunning(null);
    this.messages = [];
    this.waiting = null;
    byId("log").replaceChildren();
    byId("prompt").placeholder = "Write a message";
    this.save();
    this.drawEmpty();
    this.announce("A new conversation.");
    byId("prompt").focus();
  }

  // -- what is seen --------------------------------------------------------------------------------------------------

  append(node) {
    byId("log").append(node);
    this.drawEmpty();
    byId("prompt").placeholder = "Write a message";
    byId("scroll").scrollTop = byId("scroll").scrollHeight;
  }

  /** Keeps the end in view for somebody who is looking at it. */
  follow() {
    const view = byId("scroll");
    if (this.atEnd) view.scrollTop = view.scrollHeight;
  }

  setRunning(controller) {
    this.running = controller;
    this.atEnd = true;
    byId("send").hidden = controller !== null;
    byId("stop").hidden = controller === null;
    this.fit();
  }

  drawEmpty() {
    byId("empty").hidden = byId("log").childElementCount > 0;
  }

  announce(words) {
    byId("announce").textContent = words;
  }

  fit() {
    const prompt = byId("prompt");
    prompt.style.height = "auto";
    prompt.style.height = `${Math.min(prompt.scrollHeight, 220)}px`;
    byId("send").disabled = !prompt.value.trim();
  }

  show(side, shown) {
    byId(side).hidden = !shown;
    byId(`show-${side}`).setAttribute("aria-expanded", String(shown));
    if (shown && innerWidth < WIDE) {
      const other = side === "live" ? "settings" : "live";
      byId(other).hidden = true;
      byId(`show-${other}`).setAttribute("aria-expanded", "false");
    }
    this.panel.wake();
    this.panel.redraw();
  }

  // -- this tab ------------------------------------------------------------------------------------------------------

  save() {
    tab.set(STORE, this.messages.length ? JSON.stringify(this.messages) : "");
  }

  /** Shows the conversation that this tab had before it was loaded anew. */
  restore() {
    try {
      this.messages = JSON.parse(tab.get(STORE) ?? "[]");
    } catch {
      this.messages = [];
    }
    let view = null;
    for (const message of this.messages) {
      if (message.role === "user") this.append((this.asker = userTurn(message.content)));
      else if (message.role === "tool") view?.showResult(message.tool_call_id, message.content);
      else {
        view = new AnswerView();
        view.add({ ...message, tool_calls: message.tool_calls?.map((call, index) => ({ ...call, index })) });
        view.end();
        view.title.textContent = "Thoughts";
        this.append(view.node);
      }
    }
    const last = this.messages.at(-1);
    if (last?.tool_calls) this.ask(view);
    else if (last?.role === "assistant") this.offerRetry(view);
    this.drawEmpty();
  }

  wire() {
    const prompt = byId("prompt");
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send(prompt.value);
    });
    prompt.addEventListener("input", () => this.fit());
    prompt.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.send(prompt.value);
    });
    addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.running) this.stop();
    });
    byId("stop").addEventListener("click", () => this.stop());
    byId("clear").addEventListener("click", () => this.clear());
    byId("scroll").addEventListener("scroll", () => {
      const view = byId("scroll");
      this.atEnd = view.scrollHeight - view.scrollTop - view.clientHeight < NEAR_END;
    });
    document.addEventListener("key-changed", () => this.connect());
    byId("model").addEventListener("change", () => (byId("empty-model").textContent = byId("model").value));
    for (const side of ["settings", "live"]) {
      byId(`show-${side}`).addEventListener("click", () => this.show(side, byId(side).hidden));
    }
    this.show("live", innerWidth >= WIDE);
    byId("theme").addEventListener("click", () => nextTheme());
    for (const [text, tool] of STARTERS) {
      const starter = button(text, "starter", () => {
        if (tool) this.settings.fill("tools", TOOLS_EXAMPLE);
        this.send(text);
      });
      if (tool) starter.append(Object.assign(document.createElement("small"), { textContent: tool }));
      byId("starters").append(starter);
    }
    this.fit();
  }
}

restoreTheme();
new Chat();
