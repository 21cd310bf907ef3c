// One answer between the network and the screen.

/** An answer on its way: deltas are taken as they come and shown once per frame. */
export class Answer {
  constructor(view, shown) {
    this.view = view;
    this.shown = shown;
    this.reason = null;
    this.usage = null;
    this.began = performance.now();
    this.first = null; // ms, when the first and the last piece came
    this.last = null;
    this.frame = null;
  }

  take(chunk) {
    if (chunk.usage) this.usage = chunk.usage;
    const choice = chunk.choices[0];
    if (!choice) return;
    this.reason = choice.finish_reason ?? this.reason;
    const { delta } = choice;
    if (!delta.content && !delta.reasoning_content && !delta.tool_calls) return;
    this.last = performance.now();
    this.first ??= this.last;
    this.view.add(delta);
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      this.view.draw();
      this.shown();
    });
  }

  end() {
    if (this.frame !== null) cancelAnimationFrame(this.frame);
    this.frame = null;
    const notes = { stopped: "Stopped", length: "Cut off: max tokens reached", error: "Broke off", content_filter: "Withheld" };
    this.view.end({ note: notes[this.reason] ?? "", figures: this.figures() });
  }

  figures() {
    const parts = [];
    if (this.first !== null) parts.push(`first token ${Math.round(this.first - this.began)} ms`);
    if (this.usage) {
      const { completion_tokens: tokens, prompt_tokens: prompt } = this.usage;
      const thinking = this.usage.completion_tokens_details?.reasoning_tokens ?? 0;
      const cached = this.usage.prompt_tokens_details?.cached_tokens ?? 0;
      parts.push(`${tokens} tokens${thinking ? ` (${thinking} thinking)` : ""}`);
      if (tokens > 1 && this.last > this.first) parts.push(`${Math.round(((tokens - 1) * 1000) / (this.last - this.first))} tokens/s`);
      parts.push(`prompt ${prompt}${cached ? `, ${cached} cached` : ""}`);
    }
    return parts.join(" · ");
  }
}
