"""Names of spec/serving.md 6.1 that the engine can fill today: one row per metric, with its name in vLLM 0.33.0.

A name whose events do not exist yet (stores, transfers, expert balance) has no row: a metric that is always zero says
something false. The two names at the end of "spec_" stand in spec/engine.md 9, in words.
"""

from __future__ import annotations

from typing import NamedTuple


class Metric(NamedTuple):
    name: str  # without prefix; counters without their "_total"
    kind: str  # "counter", "gauge", "histogram" or "info"
    help: str
    label: str | None = None  # besides the labels that every metric has
    vllm: str | None = None  # without "vllm:"


STEP_METRICS = (
    Metric("requests_running", "gauge", "Sequences with a slot.", vllm="num_requests_running"),
    Metric("requests_waiting", "gauge", "Sequences without a slot.", vllm="num_requests_waiting"),
    Metric(
        "requests_waiting_by_reason", "gauge", "Sequences without a slot, by what they wait for.", "reason",
        "num_requests_waiting_by_reason",
    ),
    Metric("kv_cache_usage_ratio", "gauge", "Blocks in use over all blocks, 0 to 1.", vllm="kv_cache_usage_perc"),
    Metric("state_slots_usage_ratio", "gauge", "Slots in use over all slots, 0 to 1."),
    Metric("prefix_cache_queries", "counter", "Tokens looked up in the prefix cache.", vllm="prefix_cache_queries"),
    Metric("prefix_cache_hits", "counter", "Tokens found in the prefix cache.", vllm="prefix_cache_hits"),
    Metric("prompt_tokens", "counter", "Prompt tokens of requests that began to run.", vllm="prompt_tokens"),
    Metric(
        "prompt_tokens_by_source", "counter", "The same by where their state came from.", "source",
        "prompt_tokens_by_source",
    ),
    Metric("prompt_tokens_cached", "counter", "Prompt tokens that were not computed.", vllm="prompt_tokens_cached"),
    Metric("swa_window", "counter", "Windows that prefix hits needed: stored ones, and replayed ones.", "result"),
    Metric("replay_tokens", "counter", "Tokens computed again to fill the windows after a hit."),
    Metric("decoder_rows", "counter", "Rows through the layers after the last KV source, or spared them.", "rows"),
    Metric("generation_tokens", "counter", "Tokens generated.", vllm="generation_tokens"),
    Metric("preemptions", "counter", "Sequences that gave up their slot for others.", "mode", "num_preemptions"),
    Metric("spec_decode_drafts", "counter", "Rounds: decode steps of one sequence, with drafts or without.",
           vllm="spec_decode_num_drafts"),
    Metric("spec_decode_draft_tokens", "counter", "Drafts that were verified.",
           vllm="spec_decode_num_draft_tokens"),
    Metric("spec_decode_accepted_tokens", "counter", "Drafts that became output.",
           vllm="spec_decode_num_accepted_tokens"),
    Metric("spec_decode_accepted_tokens_per_pos", "counter", "The same by place in the draft, the first one 0.",
           "position", "spec_decode_num_accepted_tokens_per_pos"),
    Metric("spec_verify_length", "histogram", "Drafts verified in a round."),
    Metric("spec_verify_budget_usage_ratio", "gauge", "Drafts verified over drafts allowed by the plans, 0 to 1."),
    Metric("spec_calibration_error", "gauge", "Expected calibration error of predicted acceptance, 20 bins."),
    Metric("iteration_tokens", "histogram", "Rows per step.", vllm="iteration_tokens_total"),
    Metric("step_seconds", "histogram", "Time of a step, by what it computed.", "kind"),
    Metric("cpu_phase_seconds", "histogram", "Host time per step, by phase.", "phase"),
    Metric("gpu_idle_seconds", "counter", "Time that the device waited although there was work."),
    Metric("last_step_age_seconds", "gauge", "Since the last step ended, while there is work; else 0."),
    Metric("admission_rejections", "counter", "Requests refused at the door.", "reason", "admission_rejections"),
    Metric("corrupted_requests", "counter", "Sequences ended for logits that were not finite.",
           vllm="corrupted_requests"),
    Metric("grammar_compile_seconds", "histogram", "Until a grammar not in the cache was compiled or refused."),
    Metric("grammar_cache", "counter", "Grammars asked for: in the cache (hit), compiled (miss), refused (error).",
           "result"),
    Metric("fsm_errors", "counter", "Sequences ended because their grammar let nothing follow."),
)  # fmt: skip
"""Filled from EngineStats."""

REQUEST_METRICS = (
    Metric("request_success", "counter", "Completions that ended.", "finished_reason", "request_success"),
    Metric(
        "time_to_first_token_seconds", "histogram", "Submission to first token.", vllm="time_to_first_token_seconds"
    ),
    Metric(
        "inter_token_latency_seconds", "histogram", "Between two tokens of a completion; a step's gap over its tokens.",
        vllm="inter_token_latency_seconds",
    ),
    Metric(
        "request_time_per_output_token_seconds", "histogram", "Mean of a request between tokens after the first.",
        vllm="request_time_per_output_token_seconds",
    ),
    Metric("e2e_request_latency_seconds", "histogram", "Submission to end.", vllm="e2e_request_latency_seconds"),
    Metric("request_queue_time_seconds", "histogram", "Submission to first step.", vllm="request_queue_time_seconds"),
    Metric(
        "request_prefill_time_seconds", "histogram", "First step to first token.", vllm="request_prefill_time_seconds"
    ),
    Metric("request_decode_time_seconds", "histogram", "First token to end.", vllm="request_decode_time_seconds"),
    Metric("request_inference_time_seconds", "histogram", "First step to end.", vllm="request_inference_time_seconds"),
    Metric("request_prompt_tokens", "histogram", "Prompt tokens of a request.", vllm="request_prompt_tokens"),
    Metric(
        "request_generation_tokens", "histogram", "Tokens of a completion.", vllm="request_generation_tokens"
    ),
    Metric(
        "request_params_max_tokens", "histogram", "max_tokens of a request.", vllm="request_params_max_tokens"
    ),
    Metric("request_params_n", "histogram", "Completions of a request.", vllm="request_params_n"),
)  # fmt: skip
"""Filled from requests that ended, and from the gaps between their tokens."""

INFO_METRICS = (
    Metric("build", "info", "What runs: version and model."),
    Metric("cache_config", "info", "Settings in force.", vllm="cache_config_info"),
)
"""Exposed as build_info and cache_config_info."""

SERVER_METRICS = (
    Metric("http_requests", "counter", "HTTP requests that were answered, by route and status.", "route status"),
    Metric("http_open_answers", "gauge", "Answers under way, by how they are sent.", "kind"),
    Metric("engine_restarts", "counter", "Engines that were started in place of one that was lost."),
    Metric("door_refusals", "counter", "Requests refused for want of a key, quota or room, by reason.", "reason"),
    Metric("door_queued_requests", "gauge", "Requests let in that have no first token yet."),
    Metric("door_queued_tokens", "gauge", "Prompt tokens of those."),
)
"""Filled by the HTTP server (metrics/server.py)."""

METRICS = STEP_METRICS + REQUEST_METRICS + INFO_METRICS
