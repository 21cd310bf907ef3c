// The live figures: /metrics once a second, a card with a line of the last minute for each.

import { ServerError, ask } from "./api.js";
import { byId, make } from "./dom.js";
import { HISTOGRAMS, Window, parse } from "./metrics.js";

const PERIOD = 1000; // ms between two scrapes
const WINDOW = 30; // seconds that percentiles and shares are taken over
const RATE = 3; // seconds that a rate is taken over: steps come in bursts
const POINTS = 60; // of a line
const PATIENCE = 3000; // ms for a scrape

const NOTHING = "–";
const whole = (value) => (value === null ? NOTHING : Math.round(value).toLocaleString("en"));
const percent = (value) => (value === null ? NOTHING : `${(value * 100).toFixed(value < 0.1 ? 1 : 0)} %`);

function seconds(value) {
  if (value === null) return NOTHING;
  if (value < 0.01) return `${(value * 1000).toFixed(1)} ms`;
  return value < 1 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(value < 10 ? 2 : 0)} s`;
}

const TTFT = "time_to_first_token_seconds";
const TBT = "inter_token_latency_seconds";

/** name, meaning, what the line shows, the figure, the small words beside it. */
const CARDS = [
  {
    id: "running", title: "Running", help: "Requests that the engine computes; waiting ones have no place yet.",
    line: (w) => w.value("requests_running"), figure: (w) => whole(w.value("requests_running")),
    aside: (w) => `${whole(w.value("requests_waiting"))} waiting`,
  },
  {
    id: "rate", title: "Tokens per second", help: "Generated tokens, all requests together.",
    line: (w) => w.rate("generation_tokens_total", RATE), figure: (w) => whole(w.rate("generation_tokens_total", RATE)),
    aside: (w) => `${whole(w.rate("prompt_tokens_total", RATE))} of prompts`,
  },
  {
    id: "ttft", title: "First token", help: "Submission to first token, of requests that ended: half of them, and 99 of 100, are faster.",
    line: (w) => w.quantile(TTFT, 0.5), figure: (w) => seconds(w.quantile(TTFT, 0.5)),
    aside: (w) => `P99 ${seconds(w.quantile(TTFT, 0.99))}`,
  },
  {
    id: "tbt", title: "Between tokens", help: "Gap between two tokens of an answer; tokens that come together share theirs.",
    line: (w) => w.quantile(TBT, 0.5), figure: (w) => seconds(w.quantile(TBT, 0.5)),
    aside: (w) => `P99 ${seconds(w.quantile(TBT, 0.99))}`,
  },
  {
    id: "cache", title: "Prefix cache", help: "Prompt tokens that were found in the cache, of those looked up.",
    line: (w) => w.share("prefix_cache_hits_total", "prefix_cache_queries_total"),
    figure: (w) => percent(w.share("prefix_cache_hits_total", "prefix_cache_queries_total")),
    aside: (w) => `${percent(w.value("kv_cache_usage_ratio"))} of blocks in use`, top: 1,
  },
  {
    id: "drafts", title: "Drafts accepted", help: "Drafted tokens that became output, per round of one request.",
    line: (w) => w.share("spec_decode_accepted_tokens_total", "spec_decode_drafts_total"),
    figure: (w) => {
      const accepted = w.share("spec_decode_accepted_tokens_total", "spec_decode_drafts_total");
      return accepted === null ? NOTHING : accepted.toFixed(1);
    },
    aside: (w) => `a round, ${percent(w.share("spec_decode_accepted_tokens_total", "spec_decode_draft_tokens_total"))} of drafts`,
  },
];

class Card {
  constructor(kind) {
    this.kind = kind;
    this.points = [];
    this.figure = make("output", { className: "figure", id: `live-${kind.id}`, textContent: NOTHING });
    this.aside = make("span", { className: "aside", textContent: "" });
    this.canvas = make("canvas", { className: "spark", "aria-hidden": "true" });
    this.node = make(
      "div",
      { className: "card", title: kind.help },
      make("label", { htmlFor: `live-${kind.id}`, textContent: kind.title }),
      make("div", { className: "split" }, this.figure, this.aside),
      this.canvas,
    );
  }

  update(window) {
    this.figure.textContent = this.kind.figure(window);
    this.aside.textContent = this.kind.aside(window);
    this.points.push(this.kind.line(window));
    if (this.points.length > POINTS) this.points.shift();
    this.draw();
  }

  draw() {
    const { canvas, points } = this;
    const scale = globalThis.devicePixelRatio || 1;
    const width = canvas.clientWidth;
    const height = canvas.clientHeight;
    if (!width) return; // hidden
    if (canvas.width !== Math.round(width * scale)) {
      canvas.width = Math.round(width * scale);
      canvas.height = Math.round(height * scale);
    }
    const paint = canvas.getContext("2d");
    paint.setTransform(scale, 0, 0, scale, 0, 0);
    paint.clearRect(0, 0, width, height);
    const top = Math.max(this.kind.top ?? 0, ...points.map((point) => point ?? 0)) || 1;
    const x = (at) => width - 1 - ((points.length - 1 - at) * (width - 2)) / (POINTS - 1);
    const y = (value) => height - 1.5 - (value / top) * (height - 4);
    const style = getComputedStyle(canvas);
    paint.lineWidth = 1.5;
    paint.lineJoin = "round";
    for (const run of runs(points)) {
      paint.beginPath();
      run.forEach((at, step) => (step ? paint.lineTo(x(at), y(points[at])) : paint.moveTo(x(at), y(points[at]))));
      paint.strokeStyle = style.color;
      paint.stroke();
      paint.lineTo(x(run.at(-1)), height);
      paint.lineTo(x(run[0]), height);
      paint.globalAlpha = 0.12;
      paint.fillStyle = style.color;
      paint.fill();
      paint.globalAlpha = 1;
    }
  }
}

/** Places of values without gaps: a missing value breaks the line. */
function runs(points) {
  const found = [];
  points.forEach((point, at) => {
    if (point === null) return;
    if (at && points[at - 1] !== null) found.at(-1).push(at);
    else found.push([at]);
  });
  return found;
}

export class Panel {
  constructor() {
    this.cards = CARDS.map((kind) => new Card(kind));
    this.window = new Window(WINDOW);
    this.timer = null;
    byId("cards").append(...this.cards.map((card) => card.node));
    document.addEventListener("visibilitychange", () => this.wake());
    document.addEventListener("key-changed", () => this.wake());
    addEventListener("resize", () => this.redraw());
  }

  redraw() {
    for (const card of this.cards) card.draw();
  }

  get isShown() {
    return !byId("live").hidden && !document.hidden;
  }

  /** Scrapes at once, and every second as long as somebody can see it. */
  wake() {
    clearTimeout(this.timer);
    this.timer = null;
    if (this.isShown) this.scrape();
  }

  async scrape() {
    const turn = (this.turn = {}); // of two that overlap, the newer one goes on
    let note = `last ${WINDOW} s`;
    try {
      const response = await ask("metrics", { signal: AbortSignal.timeout(PATIENCE) });
      const text = await response.text();
      if (this.turn !== turn) return;
      this.window.push(performance.now() / 1000, parse(text, HISTOGRAMS));
      for (const card of this.cards) card.update(this.window);
    } catch (error) {
      if (this.turn !== turn) return;
      note = error instanceof ServerError && error.status === 401 ? "needs the API key" : "no figures now";
    }
    byId("live-note").textContent = note;
    if (this.isShown) this.timer = setTimeout(() => this.scrape(), PERIOD);
  }
}
