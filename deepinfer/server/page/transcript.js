// How a conversation looks: bubbles of people, answers of the model with its thoughts, calls and figures.

import { button, make } from "./dom.js";
import { GrowingMarkdown, codeBlock } from "./markdown.js";

/** What a person wrote. */
export function userTurn(text) {
  return make("article", { className: "turn user", "aria-label": "You" }, make("div", { className: "bubble", textContent: text }));
}

/** An answer, as it comes and when it is there. */
export class AnswerView {
  /** asJson: the content is shown as code, for a schema shapes it. */
  constructor({ asJson = false } = {}) {
    this.asJson = asJson;
    this.reasoning = "";
    this.content = "";
    this.calls = []; // CallView
    this.touched = false; // a person has opened or closed the thoughts
    this.thoughts = make("div", { className: "thoughts" });
    this.title = make("span", { textContent: "Thinking" });
    this.details = make(
      "details",
      { className: "thinking", hidden: true },
      make("summary", {}, make("span", { className: "dot", "aria-hidden": "true" }), this.title),
      this.thoughts,
    );
    this.details.firstChild.addEventListener("click", () => (this.touched = true));
    this.text = make("div", { className: "text" });
    this.markdown = new GrowingMarkdown(this.text);
    this.callList = make("div", { className: "calls" });
    this.wait = make("div", { className: "wait", "aria-label": "Waiting for the first token" }, make("i"), make("i"), make("i"));
    this.foot = make("footer", { className: "foot", hidden: true });
    this.node = make(
      "article",
      { className: "turn model", "aria-label": "Answer", "aria-busy": "true" },
      this.details,
      this.text,
      this.callList,
      this.wait,
      this.foot,
    );
    this.began = performance.now();
    this.drawn = { reasoning: 0, content: 0 };
  }

  /** Takes in a delta of the protocol; `draw` shows it. */
  add(delta) {
    this.reasoning += delta.reasoning_content ?? "";
    this.content += delta.content ?? "";
    for (const call of delta.tool_calls ?? []) {
      if (!this.calls[call.index]) {
        this.calls[call.index] = new CallView(call.id, call.function.name);
        this.callList.append(this.calls[call.index].node);
      }
      this.calls[call.index].add(call.function?.arguments ?? "");
    }
    if (this.content && this.contentBegan === undefined) this.contentBegan = performance.now();
  }

  get isEmpty() {
    return !this.reasoning && !this.content && !this.calls.length;
  }

  draw() {
    this.wait.hidden = !this.isEmpty;
    if (this.reasoning.length > this.drawn.reasoning) {
      if (!this.drawn.reasoning) {
        this.details.hidden = false;
        this.details.open = !this.content;
        this.details.classList.add("active");
      }
      this.thoughts.append(this.reasoning.slice(this.drawn.reasoning)); // plain text: thoughts are no document
      this.drawn.reasoning = this.reasoning.length;
    }
    if (this.content.length > this.drawn.content || (this.calls.length && this.details.classList.contains("active"))) {
      this.endThinking();
    }
    if (this.content.length > this.drawn.content) {
      if (this.asJson) this.text.replaceChildren(codeBlock(pretty(this.content), "json"));
      else this.markdown.update(this.content);
      this.drawn.content = this.content.length;
    }
    for (const call of this.calls) call.draw();
  }

  endThinking() {
    if (!this.details.classList.contains("active")) return;
    this.details.classList.remove("active");
    if (!this.touched) this.details.open = false;
    const seconds = ((this.contentBegan ?? performance.now()) - this.began) / 1000;
    this.title.textContent = `Thought for ${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
  }

  /** The answer is over. note: how it ended, if not well. figures: a line about it. */
  end({ note = "", figures = "" } = {}) {
    this.draw();
    this.endThinking();
    this.wait.hidden = true;
    for (const call of this.calls) call.end();
    this.node.setAttribute("aria-busy", "false");
    this.foot.replaceChildren();
    if (note) this.foot.append(make("span", { className: "endnote", textContent: note }));
    if (figures) this.foot.append(make("span", { className: "figures", textContent: figures }));
    this.actions = make("span", { className: "actions" });
    if (this.content) this.actions.append(copyButton(() => this.content));
    this.foot.append(this.actions);
    this.foot.hidden = false;
  }

  /** The message as the history has it; calls whose arguments are no JSON were cut off and are left out. */
  message() {
    const message = { role: "assistant", content: this.content };
    if (this.reasoning) message.reasoning_content = this.reasoning;
    const calls = this.calls.filter((call) => call.isWhole);
    if (calls.length) message.tool_calls = calls.map((call) => call.message());
    return message;
  }

  /** Asks for the results of the calls. send: gets them as messages of the history. */
  askForResults(send) {
    const asked = this.calls.filter((call) => call.isWhole);
    for (const call of asked) call.askForResult();
    const confirm = button(asked.length > 1 ? "Send results" : "Send result", "primary", () => send(this.takeResults()));
    this.resultsButton = confirm;
    this.callList.append(confirm);
    asked[0]?.result.focus({ preventScroll: true });
  }

  takeResults() {
    this.resultsButton?.remove();
    this.resultsButton = null;
    return this.calls.filter((call) => call.isWhole).map((call) => call.takeResult());
  }

  /** A result that the history has already. */
  showResult(id, text) {
    this.calls.find((call) => call.id === id)?.showResult(text);
  }
}

/** One call of a tool: name, arguments, and a place for its result. */
class CallView {
  constructor(id, name) {
    this.id = id;
    this.name = name;
    this.arguments = "";
    this.drawn = 0;
    this.code = make("pre", { className: "arguments", "aria-label": `Arguments of ${name}` });
    this.state = make("span", { className: "state", textContent: "writing" });
    this.node = make(
      "section",
      { className: "call", "aria-label": `Call of ${name}` },
      make("header", {}, make("span", { className: "callmark", textContent: "ƒ", "aria-hidden": "true" }), make("b", { textContent: name }), this.state),
      this.code,
    );
  }

  add(text) {
    this.arguments += text;
  }

  draw() {
    if (this.arguments.length === this.drawn) return;
    this.code.textContent = this.arguments;
    this.drawn = this.arguments.length;
  }

  get isWhole() {
    try {
      return typeof JSON.parse(this.arguments) === "object";
    } catch {
      return false;
    }
  }

  end() {
    this.draw();
    this.code.textContent = pretty(this.arguments);
    this.state.textContent = this.isWhole ? "" : "cut off";
  }

  message() {
    return { id: this.id, type: "function", function: { name: this.name, arguments: this.arguments } };
  }

  askForResult() {
    this.state.textContent = "waits for a result";
    this.result = make("textarea", { rows: 2, spellcheck: false, placeholder: "Paste what the tool returned" });
    this.place = make("label", { className: "result" }, make("span", { textContent: `Result of ${this.name}` }), this.result);
    this.node.append(this.place);
  }

  takeResult() {
    const text = this.result.value;
    this.showResult(text);
    return { role: "tool", tool_call_id: this.id, content: text };
  }

  showResult(text) {
    this.state.textContent = "answered";
    this.place?.remove();
    this.node.append(
      make("div", { className: "result" }, make("span", { textContent: "Result" }), make("pre", { textContent: text || "(nothing)" })),
    );
  }
}

/** What went wrong, in words, with ways on: [[text, action], ...]. */
export function errorNote(message, actions) {
  const buttons = make("div", { className: "row" });
  for (const [text, action] of actions) buttons.append(button(text, "plain", action));
  return make("div", { className: "error", role: "alert" }, make("p", { textContent: message }), buttons);
}

export function copyButton(text) {
  const node = button("Copy", "link", async () => {
    await navigator.clipboard?.writeText(text());
    node.textContent = "Copied";
    setTimeout(() => (node.textContent = "Copy"), 1200);
  });
  return node;
}

/** JSON with line breaks; anything else as it is. */
function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
