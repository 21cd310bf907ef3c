"""What a dashboard reads: only names that the specification has, values that are right, counters that only grow."""

from __future__ import annotations

import random

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from deepinfer.metrics import DraftStats, EngineMetrics, EngineStats, RequestStats, StepStats
from deepinfer.metrics.catalogue import METRICS
from deepinfer.metrics.prometheus import TOKEN_GAP_SECONDS

# The names of spec/serving.md 6.1 as they are exposed, "_total" where they count.
SPECIFIED = frozenset(
    """
    requests_running requests_waiting requests_waiting_by_reason kv_cache_usage_ratio state_slots_usage_ratio
    prefix_cache_queries_total prefix_cache_hits_total external_prefix_cache_queries_total
    external_prefix_cache_hits_total prompt_tokens_total prompt_tokens_by_source_total prompt_tokens_cached_total
    swa_window_total replay_tokens_total decoder_rows_total generation_tokens_total request_success_total
    preemptions_total time_to_first_token_seconds inter_token_latency_seconds request_time_per_output_token_seconds
    e2e_request_latency_seconds request_queue_time_seconds request_prefill_time_seconds request_decode_time_seconds
    request_inference_time_seconds request_prompt_tokens request_generation_tokens request_params_max_tokens
    request_params_n iteration_tokens spec_decode_drafts_total spec_decode_draft_tokens_total
    spec_decode_accepted_tokens_total spec_decode_accepted_tokens_per_pos_total spec_verify_length
    kv_block_lifetime_seconds kv_block_idle_before_evict_seconds kv_block_reuse_gap_seconds kv_transfer_bytes_total
    kv_transfer_seconds kv_transfer_failed_total kv_lease_expired_total kv_store_bytes_total kv_store_seconds
    kv_store_result_total moe_lb_ratio eplb_cycle_state eplb_cycle_age_seconds eplb_moved_bytes_total
    dummy_steps_total step_seconds cpu_phase_seconds gpu_idle_seconds_total last_step_age_seconds
    admission_rejections_total queue_tokens breaker_state retries_total resumed_streams_total
    duplicate_tokens_dropped_total corrupted_requests_total spec_verify_budget_usage_ratio spec_calibration_error
    grammar_compile_seconds grammar_cache_total
    fsm_errors_total goodput_requests_total slo_violations_total build_info cache_config_info
    """.split()  # noqa: SIM905
)
INFO = {"build": {"version": "0.1.0"}, "cache_config": {"num_blocks": 64, "kv_format": "packed"}}


def read(metrics: EngineMetrics) -> dict[tuple[str, str], float]:
    """Samples by (name without prefix, the values of its own labels joined)."""
    values = {}
    constant = {"model", "role", "instance", "dp_rank"}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            own = ",".join(value for name, value in sorted(sample.labels.items()) if name not in constant)
            values[sample.name.removeprefix("dsv_"), own] = sample.value
    return values


def types(metrics: EngineMetrics) -> dict[str, str]:
    """ "counter", "gauge" or "histogram" by exposed name, as the comment lines of the text say."""
    lines = [line.split() for line in metrics.render().decode().splitlines() if line.startswith("# TYPE ")]
    return {name: kind for _, _, name, kind in lines}


def test_every_name_is_one_of_the_specification() -> None:
    exposed = {name.removeprefix("dsv_") for name in types(EngineMetrics("nano", info=INFO))}
    assert exposed <= SPECIFIED
    assert len(exposed) == len(METRICS)  # and every row of the catalogue is really exposed


def test_counters_end_in_total_and_nothing_else_does() -> None:
    for name, kind in types(EngineMetrics("nano", info=INFO)).items():
        assert name.endswith("_total") == (kind == "counter"), name


def test_the_prefix_is_the_operators_choice() -> None:
    assert all(name.startswith("my_") for name in types(EngineMetrics("nano", prefix="my_", info=INFO)))


def test_values_are_right_after_a_scripted_run() -> None:
    metrics = EngineMetrics("nano")
    metrics.observe_step(
        StepStats(
            seconds=0.02, prefill_tokens=300, replay_tokens=128, decoder_rows_kept=140, decoder_rows_skipped=288,
            generated_tokens=1, prompt_tokens=512, prompt_tokens_cached=84, prefix_queries=512, prefix_hits=212,
            windows_replayed=1, preemptions_offload=1, running=1, waiting=2, waiting_by_reason={"room": 1, "prefix": 1},
            blocks_used=5, blocks_free=10, blocks_cached=5, slots_used=1, slots_total=4, schedule_seconds=0.00025,
        )
    )  # fmt: skip
    metrics.observe_step(
        StepStats(
            seconds=0.003, decode_tokens=2, generated_tokens=2, decoder_rows_kept=2, idle_seconds=0.001, running=2,
            waiting_by_reason={}, blocks_used=6, blocks_free=9, blocks_cached=5, slots_used=2, slots_total=4,
            windows_hit=1, corrupted=1, fsm_errors=2,
        )
    )  # fmt: skip
    for result, seconds in (("miss", 0.003), ("hit", 0.1), ("hit", 0.1), ("error", 1.5)):
        metrics.stats.add_grammar(result, seconds)
    values = read(metrics)
    expected = {
        ("requests_running", ""): 2, ("requests_waiting", ""): 0, ("kv_cache_usage_ratio", ""): 0.3,
        ("state_slots_usage_ratio", ""): 0.5, ("prefix_cache_queries_total", ""): 512,
        ("prefix_cache_hits_total", ""): 212, ("prompt_tokens_total", ""): 512,
        ("prompt_tokens_by_source_total", "hbm"): 84, ("prompt_tokens_by_source_total", "computed"): 428,
        ("prompt_tokens_cached_total", ""): 84, ("swa_window_total", "hit"): 1, ("swa_window_total", "replay"): 1,
        ("replay_tokens_total", ""): 128, ("decoder_rows_total", "kept"): 142, ("decoder_rows_total", "skipped"): 288,
        ("generation_tokens_total", ""): 3, ("preemptions_total", "offload"): 1, ("preemptions_total", "recompute"): 0,
        ("iteration_tokens_count", ""): 2, ("iteration_tokens_sum", ""): 430,
        ("iteration_tokens_bucket", "2.0"): 1, ("iteration_tokens_bucket", "500.0"): 2,
        ("step_seconds_count", "decode"): 1, ("step_seconds_count", "prefill"): 1,
        ("step_seconds_sum", "decode"): 0.003,
        ("cpu_phase_seconds_count", "schedule"): 1, ("cpu_phase_seconds_sum", "schedule"): 0.00025,
        ("gpu_idle_seconds_total", ""): 0.001, ("corrupted_requests_total", ""): 1,
        ("fsm_errors_total", ""): 2, ("grammar_cache_total", "hit"): 2, ("grammar_cache_total", "miss"): 1,
        ("grammar_cache_total", "error"): 1,
        ("grammar_compile_seconds_count", ""): 2, ("grammar_compile_seconds_sum", ""): 1.503,
        ("grammar_compile_seconds_bucket", "0.005"): 1,
    }  # fmt: skip
    assert {key: values.get(key) for key in expected} == expected
    assert not [key for key in values if key[0] == "requests_waiting_by_reason"]  # nobody waits any more


def test_drafts_are_counted_as_the_peer_counts_them_and_as_the_specification_asks() -> None:
    metrics = EngineMetrics("nano", vllm_names=True)
    for drafted, accepted in ((5, 3), (2, 2), (0, 0)):
        drafts = DraftStats()
        predicted = np.where(np.arange(5) < drafted, np.float32(0.5), np.float32("nan"))[None]
        drafts.observe(np.array([drafted]), np.array([accepted]), predicted)
        metrics.observe_step(StepStats(decode_tokens=1, draft_tokens=drafted, draft_budget=5, drafts=drafts))
    values = read(metrics)
    expected = {
        ("spec_decode_drafts_total", ""): 3, ("spec_decode_draft_tokens_total", ""): 7,
        ("spec_decode_accepted_tokens_total", ""): 5, ("spec_decode_accepted_tokens_per_pos_total", "0"): 2,
        ("spec_decode_accepted_tokens_per_pos_total", "2"): 1, ("spec_decode_accepted_tokens_per_pos_total", "3"): 0,
        ("spec_verify_length_count", ""): 3, ("spec_verify_length_sum", ""): 7, ("spec_verify_length_bucket", "0.0"): 1,
        ("spec_verify_length_bucket", "2.0"): 2, ("spec_verify_length_bucket", "5.0"): 3,
        ("spec_verify_budget_usage_ratio", ""): 7 / 15, ("iteration_tokens_sum", ""): 10,
        ("spec_calibration_error", ""): pytest.approx(abs(5 - 3.5) / 7),
    }  # fmt: skip
    assert {key: values.get(key) for key in expected} == expected
    text = metrics.render().decode()
    for name in ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos"):
        assert f"\nvllm:spec_decode_num_{name}_total{{" in text


def test_a_request_counts_once_in_every_place_where_it_belongs() -> None:
    metrics = EngineMetrics("nano")
    metrics.observe_gap(0.03, tokens=3)
    metrics.observe_request(
        RequestStats(
            prompt_tokens=100, max_tokens=16, completion_tokens=[16, 4], finish_reasons=["length", "stop"], queue=0.25,
            ttft=1.0, time_per_token=0.1, e2e=3.0,
        )
    )  # fmt: skip
    metrics.observe_request(
        RequestStats(prompt_tokens=5, max_tokens=16, completion_tokens=[0], finish_reasons=["abort"], e2e=0.5)
    )
    values = read(metrics)
    expected = {
        ("request_success_total", "length"): 1, ("request_success_total", "stop"): 1,
        ("request_success_total", "abort"): 1, ("time_to_first_token_seconds_sum", ""): 1,
        ("time_to_first_token_seconds_count", ""): 1, ("inter_token_latency_seconds_count", ""): 3,
        ("inter_token_latency_seconds_sum", ""): 0.03, ("inter_token_latency_seconds_bucket", "0.01"): 3,
        ("inter_token_latency_seconds_bucket", "0.006"): 0, ("request_queue_time_seconds_sum", ""): 0.25,
        ("request_prefill_time_seconds_sum", ""): 0.75, ("request_decode_time_seconds_sum", ""): 2,
        ("request_inference_time_seconds_sum", ""): 2.75, ("e2e_request_latency_seconds_sum", ""): 3.5,
        ("e2e_request_latency_seconds_count", ""): 2, ("request_prompt_tokens_sum", ""): 105,
        ("request_generation_tokens_sum", ""): 20, ("request_generation_tokens_count", ""): 3,
        ("request_params_n_sum", ""): 3, ("request_params_max_tokens_count", ""): 2,
        ("request_time_per_output_token_seconds_sum", ""): 0.1,
    }  # fmt: skip
    assert {key: values.get(key) for key in expected} == expected


def test_buckets_of_token_gaps_are_those_of_the_specification() -> None:
    assert TOKEN_GAP_SECONDS == (0.002, 0.004, 0.006, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5)


def test_counters_only_grow_over_random_steps() -> None:
    chance = random.Random(1)
    metrics = EngineMetrics("nano")
    counters = {name.removeprefix("dsv_") for name, kind in types(metrics).items() if kind == "counter"}
    before: dict[tuple[str, str], float] = {}
    for _ in range(12):
        step = StepStats()
        for name in StepStats.__dataclass_fields__:
            if name not in ("waiting_by_reason", "drafts"):
                setattr(step, name, chance.randrange(5))
        drafted = chance.randrange(6)
        step.drafts = DraftStats()
        step.drafts.observe(
            np.array([drafted]), np.array([chance.randint(0, drafted)]), np.full((1, 5), chance.random(), np.float32)
        )
        step.prompt_tokens += step.prompt_tokens_cached  # which are some of them
        metrics.observe_step(step)
        metrics.stats.reject(chance.choice(("prompt", "draining")))
        values = read(metrics)
        for key, value in values.items():
            if key[0] in counters or key[0].endswith(("_count", "_sum", "_bucket")):
                assert value >= before.get(key, 0), key
        before = values
    assert before["admission_rejections_total", "draining"] + before["admission_rejections_total", "prompt"] == 12


def test_labels_say_which_engine_it_is_and_two_engines_do_not_mix() -> None:
    first = EngineMetrics("nano", role="P", instance="a", dp_rank=3)
    second = EngineMetrics("nano", role="D", instance="b")
    first.observe_step(StepStats(decode_tokens=1, generated_tokens=5))
    assert b'dsv_generation_tokens_total{dp_rank="3",instance="a",model="nano",role="P"} 5.0' in first.render()
    assert b'dsv_generation_tokens_total{dp_rank="0",instance="b",model="nano",role="D"} 0.0' in second.render()


def test_totals_of_another_process_take_the_place_of_local_ones() -> None:
    remote = EngineStats()
    remote.add(StepStats(decode_tokens=3, generated_tokens=3, running=3))
    remote.last_step_age = 1.5
    metrics = EngineMetrics("nano")
    metrics.take_totals(remote)
    values = read(metrics)
    assert values["generation_tokens_total", ""] == 3
    assert values["last_step_age_seconds", ""] == 1.5


def test_settings_in_force_are_published() -> None:
    text = EngineMetrics("nano", info=INFO).render().decode()
    (line,) = [line for line in text.splitlines() if line.startswith("dsv_cache_config_info{")]
    assert 'num_blocks="64"' in line and 'kv_format="packed"' in line and 'model="nano"' in line
    with pytest.raises(ValueError, match="'weights' is not an info metric"):
        EngineMetrics("nano", info={"weights": {}})


def test_dashboards_made_for_vllm_find_their_names() -> None:
    metrics = EngineMetrics("nano", vllm_names=True)
    metrics.observe_step(StepStats(decode_tokens=1, generated_tokens=5, running=2))
    text = metrics.render().decode()
    assert 'vllm:num_requests_running{engine="0",model_name="nano"} 2.0' in text
    assert 'vllm:generation_tokens_total{engine="0",model_name="nano"} 5.0' in text
    assert "vllm:" not in EngineMetrics("nano").render().decode()


def test_a_scraper_that_asks_for_openmetrics_gets_it() -> None:
    body, content_type = EngineMetrics("nano").exposition("application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")
