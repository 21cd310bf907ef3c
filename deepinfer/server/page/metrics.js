// Prometheus' text format, and what the last seconds of it say.

const PREFIX = "dsv_";
const LINE = /^(\w+)(?:\{(.*)\})? (\S+)$/;

/**
 * The samples of an exposition: name -> sum over all labels, for counters and gauges, and name -> Map from upper bound
 * to count for the buckets of histograms, of which only those in `histograms` are kept.
 */
export function parse(text, histograms) {
  const sums = new Map();
  const buckets = new Map(histograms.map((name) => [name, new Map()]));
  for (const line of text.split("\n")) {
    if (!line.startsWith(PREFIX)) continue;
    const match = LINE.exec(line);
    if (!match) continue;
    const name = match[1].slice(PREFIX.length);
    if (name.endsWith("_bucket")) {
      const own = buckets.get(name.slice(0, -"_bucket".length));
      if (!own) continue;
      const bound = parseBound(/le="([^"]+)"/.exec(match[2])?.[1]);
      own.set(bound, (own.get(bound) ?? 0) + Number(match[3]));
    } else sums.set(name, (sums.get(name) ?? 0) + Number(match[3]));
  }
  return { sums, buckets };
}

const parseBound = (text) => (text === "+Inf" ? Infinity : Number(text));

/**
 * The value below which a share q of the observations between two scrapes lies, linear inside its bucket; null without
 * observations. One above all bounds is given as the highest bound.
 */
export function quantile(before, after, q) {
  const bounds = [...after.keys()].sort((a, b) => a - b);
  const counts = bounds.map((bound) => after.get(bound) - (before?.get(bound) ?? 0));
  const total = counts.at(-1) ?? 0;
  if (!(total > 0)) return null;
  const rank = q * total;
  const at = counts.findIndex((count) => count >= rank);
  if (bounds[at] === Infinity) return bounds[at - 1] ?? null;
  const low = at ? bounds[at - 1] : 0;
  const below = at ? counts[at - 1] : 0;
  const inside = counts[at] - below;
  return low + (bounds[at] - low) * (inside > 0 ? (rank - below) / inside : 1);
}

export const HISTOGRAMS = ["time_to_first_token_seconds", "inter_token_latency_seconds"];

/** Scrapes of the last `seconds`, and what changed over them. */
export class Window {
  constructor(seconds) {
    this.seconds = seconds;
    this.scrapes = []; // {at: seconds, sums, buckets}
  }

  push(at, scrape) {
    const last = this.scrapes.at(-1);
    // a counter that falls is that of another engine: what was before it says nothing
    if (last && (scrape.sums.get("generation_tokens_total") ?? 0) < (last.sums.get("generation_tokens_total") ?? 0)) this.scrapes = [];
    this.scrapes.push({ at, ...scrape });
    // one older than the window stays, as its beginning
    while (this.scrapes.length > 2 && this.scrapes[1].at <= at - this.seconds) this.scrapes.shift();
  }

  get last() {
    return this.scrapes.at(-1);
  }

  value(name) {
    return this.last?.sums.get(name) ?? null;
  }

  /** Growth of a counter over the window; null before there are two scrapes. */
  growth(name) {
    if (this.scrapes.length < 2) return null;
    return (this.last.sums.get(name) ?? 0) - (this.scrapes[0].sums.get(name) ?? 0);
  }

  /** Growth per second over the last `seconds`. */
  rate(name, seconds) {
    const last = this.last;
    const first = this.scrapes.find((scrape) => scrape.at >= last.at - seconds - 0.5);
    if (!first || first === last) return null;
    return ((last.sums.get(name) ?? 0) - (first.sums.get(name) ?? 0)) / (last.at - first.at);
  }

  /** The growth of one counter over that of another; null where the other one did not grow. */
  share(part, whole) {
    const all = this.growth(whole);
    return all ? this.growth(part) / all : null;
  }

  quantile(name, q) {
    if (this.scrapes.length < 2) return null;
    return quantile(this.scrapes[0].buckets.get(name), this.last.buckets.get(name), q);
  }
}
