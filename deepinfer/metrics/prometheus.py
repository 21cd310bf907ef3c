"""The engine's numbers as Prometheus reads them. Nothing here runs in the step loop: a scrape turns plain counts into
metric families, so the loop pays for additions only and no lock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from deepinfer.metrics.catalogue import INFO_METRICS, REQUEST_METRICS, STEP_METRICS, Metric
from deepinfer.metrics.drafts import DraftStats
from deepinfer.metrics.histogram import (
    COMPLETIONS,
    FIRST_TOKEN_SECONDS,
    REQUEST_SECONDS,
    TOKEN_GAP_SECONDS,
    TOKENS,
    Histogram,
)
from deepinfer.metrics.stats import EngineStats, RequestStats, StepStats

VERIFY_BOUNDS = 6  # 0 .. 5 drafts: as many as a verify step has rows

Values = Mapping[str, float | Histogram]  # by the value of the metric's own label, "" without one

_REQUEST_BOUNDS = {
    "time_to_first_token_seconds": FIRST_TOKEN_SECONDS,
    "inter_token_latency_seconds": TOKEN_GAP_SECONDS,
    "request_time_per_output_token_seconds": TOKEN_GAP_SECONDS,
    "request_prompt_tokens": TOKENS,
    "request_generation_tokens": TOKENS,
    "request_params_max_tokens": TOKENS,
    "request_params_n": COMPLETIONS,
}


class EngineMetrics(Collector):
    """Counts of one engine and of the requests that this process sent it, in a registry of their own.

    Feed the engine's side with `observe_step` where it runs, or with `take_totals` where its EngineStats arrive from
    another process; the requests' side with `observe_request` and `observe_gap`.
    Labels of every metric: model, role, instance, dp_rank. info: name ("build", "cache_config") -> what it says.
    vllm_names: also emit each metric under its name in vLLM 0.33.0, with that engine's labels.
    """

    def __init__(
        self,
        model: str,
        *,
        prefix: str = "dsv_",
        role: str = "mixed",
        instance: str = "0",
        dp_rank: int = 0,
        info: Mapping[str, Mapping[str, object]] | None = None,
        vllm_names: bool = False,
    ) -> None:
        self.stats = EngineStats()
        self._prefix = prefix
        self._labels = {"model": model, "role": role, "instance": instance, "dp_rank": str(dp_rank)}
        self._vllm_labels = {"model_name": model, "engine": str(dp_rank)}
        self._vllm_names = vllm_names
        self._info: dict[str, dict[str, str]] = {}
        for name, values in (info or {}).items():
            self.set_info(name, values)
        self._finished: dict[str, int] = {}
        self._histograms = {
            metric.name: Histogram(_REQUEST_BOUNDS.get(metric.name, REQUEST_SECONDS))
            for metric in REQUEST_METRICS
            if metric.kind == "histogram"
        }
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def set_info(self, name: str, values: Mapping[str, object]) -> None:
        """What an info metric says: `name` is one of INFO_METRICS."""
        if name not in (metric.name for metric in INFO_METRICS):
            raise ValueError(f"{name!r} is not an info metric")
        self._info[name] = {key: str(value) for key, value in values.items()}

    def observe_step(self, step: StepStats) -> None:
        self.stats.add(step)

    def take_totals(self, stats: EngineStats) -> None:
        """Replaces the engine's side by newer numbers of the same engine."""
        self.stats = stats

    def observe_gap(self, seconds: float, tokens: int = 1) -> None:
        """`tokens` tokens of one completion came `seconds` after the ones before."""
        self._histograms["inter_token_latency_seconds"].observe(seconds / tokens, tokens)

    def observe_request(self, request: RequestStats) -> None:
        """Takes in a request that has ended."""
        for reason in request.finish_reasons:
            self._finished[reason] = self._finished.get(reason, 0) + 1
        for tokens in request.completion_tokens:
            self._histograms["request_generation_tokens"].observe(tokens)
        queue, ttft, e2e = request.queue, request.ttft, request.e2e
        for name, value in (
            ("time_to_first_token_seconds", ttft),
            ("request_time_per_output_token_seconds", request.time_per_token),
            ("e2e_request_latency_seconds", e2e),
            ("request_queue_time_seconds", queue),
            ("request_prefill_time_seconds", None if ttft is None or queue is None else ttft - queue),
            ("request_decode_time_seconds", None if ttft is None else e2e - ttft),
            ("request_inference_time_seconds", None if queue is None else e2e - queue),
            ("request_prompt_tokens", request.prompt_tokens),
            ("request_params_max_tokens", request.max_tokens),
            ("request_params_n", request.n),
        ):
            if value is not None:
                self._histograms[name].observe(value)

    def render(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return self.exposition("")[0]

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """All metrics and their content type, in the format that a scraper's Accept header asks for."""
        encoder, content_type = choose_encoder(accept)
        return encoder(self.registry), content_type

    def collect(self) -> Iterator[Family]:
        """Called by a scrape."""
        values = {**_step_values(self.stats), **self._request_values()}
        for metric in STEP_METRICS + REQUEST_METRICS:
            yield _family(self._prefix + metric.name, metric, self._labels, values[metric.name])
        if self._vllm_names:
            for metric in STEP_METRICS + REQUEST_METRICS:
                if metric.vllm is not None:
                    yield _family(f"vllm:{metric.vllm}", metric, self._vllm_labels, values[metric.name])
        for metric in INFO_METRICS:
            if metric.name in self._info:
                info = InfoMetricFamily(self._prefix + metric.name, metric.help, labels=list(self._labels))
                info.add_metric(list(self._labels.values()), self._info[metric.name])
                yield info

    def _request_values(self) -> dict[str, Values]:
        histograms: dict[str, Values] = {name: {"": histogram} for name, histogram in self._histograms.items()}
        return {"request_success": dict(self._finished), **histograms}


def _verify_lengths(drafts: DraftStats) -> Histogram:
    counts = drafts.lengths()
    bounds = tuple(float(length) for length in range(max(len(counts), VERIFY_BOUNDS)))
    return Histogram(bounds, counts + [0] * (len(bounds) + 1 - len(counts)), float(drafts.drafted))


def _step_values(stats: EngineStats) -> dict[str, Values]:
    now, drafts = stats.totals, stats.drafts
    return {
        "requests_running": {"": now.running},
        "requests_waiting": {"": now.waiting},
        "requests_waiting_by_reason": dict(now.waiting_by_reason),
        "kv_cache_usage_ratio": {"": now.blocks_used / max(now.blocks_total, 1)},
        "state_slots_usage_ratio": {"": now.slots_used / max(now.slots_total, 1)},
        "prefix_cache_queries": {"": now.prefix_queries},
        "prefix_cache_hits": {"": now.prefix_hits},
        "prompt_tokens": {"": now.prompt_tokens},
        "prompt_tokens_by_source": {
            "hbm": now.prompt_tokens_cached,
            "computed": now.prompt_tokens - now.prompt_tokens_cached,
        },
        "prompt_tokens_cached": {"": now.prompt_tokens_cached},
        "swa_window": {"hit": now.windows_hit, "replay": now.windows_replayed},
        "replay_tokens": {"": now.replay_tokens},
        "decoder_rows": {"kept": now.decoder_rows_kept, "skipped": now.decoder_rows_skipped},
        "generation_tokens": {"": now.generated_tokens},
        "preemptions": {"recompute": now.preemptions_recompute, "offload": now.preemptions_offload},
        "spec_decode_drafts": {"": drafts.rounds},
        "spec_decode_draft_tokens": {"": drafts.drafted},
        "spec_decode_accepted_tokens": {"": drafts.accepted},
        "spec_decode_accepted_tokens_per_pos": {str(at): count for at, count in enumerate(drafts.accepted_at)},
        "spec_verify_length": {"": _verify_lengths(drafts)},
        "spec_verify_budget_usage_ratio": {"": now.draft_tokens / max(now.draft_budget, 1)},
        "spec_calibration_error": {"": drafts.calibration_error},
        "iteration_tokens": {"": stats.step_tokens},
        "step_seconds": dict(stats.step_seconds),
        "cpu_phase_seconds": dict(stats.phase_seconds),
        "gpu_idle_seconds": {"": now.idle_seconds},
        "last_step_age_seconds": {"": stats.last_step_age},
        "admission_rejections": dict(stats.rejections),
        "corrupted_requests": {"": now.corrupted},
        "grammar_compile_seconds": {"": stats.grammar_compile_seconds},
        "grammar_cache": dict(stats.grammar_cache),
        "fsm_errors": {"": now.fsm_errors},
    }


def _family(name: str, metric: Metric, constant: Mapping[str, str], values: Values) -> Family:
    """One metric with its values, in the library's terms."""
    labels = [*constant, *([metric.label] if metric.label is not None else [])]
    family: Family
    if metric.kind == "histogram":
        family = histogram = HistogramMetricFamily(name, metric.help, labels=labels)
        for own, value in values.items():
            assert isinstance(value, Histogram)
            histogram.add_metric(_label_values(metric, constant, own), value.cumulative(), value.total)
        return family
    family = simple = (CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily)(
        name, metric.help, labels=labels
    )
    for own, value in values.items():
        assert not isinstance(value, Histogram)
        simple.add_metric(_label_values(metric, constant, own), value)
    return family


def _label_values(metric: Metric, constant: Mapping[str, str], own: str) -> list[str]:
    return [*constant.values(), *([own] if metric.label is not None else [])]
