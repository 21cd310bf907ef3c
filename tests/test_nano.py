"""The bundled model on real text: it speaks, and speed never changes its tokens or its log-probabilities."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from deepinfer import LLM, SamplingParams
from deepinfer.kernels import select
from deepinfer.model.config import ModelConfig
from deepinfer.model.tensors import tensor_specs

NANO = Path(__file__).parent.parent / "models" / "nano"
PROMPTS = [
    "def fibonacci(n):\n",
    "The old lighthouse stood at the edge of the village, and",
    "import os\nimport sys\n\n\ndef main(argv):\n" + "    print(argv)\n" * 60,  # past the window and index_topk
    "A",
]
GREEDY = SamplingParams(temperature=0, max_tokens=12)
SEEDED = SamplingParams(temperature=0.8, top_p=0.95, seq_seed=7, max_tokens=12)


@pytest.fixture(scope="module")
def nano() -> LLM:
    return LLM(NANO, max_num_seqs=8, max_model_len=1024, verbose=False)


def answers(llm: LLM, prompts, params) -> list[tuple[list[int], list[float]]]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [(completion.token_id, completion.token_logprobs) for output in outputs for completion in output.outputs]


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_tokens_and_logprobs_of_nano_do_not_depend_on_batch_mates_or_chunks(nano, params):
    together = answers(nano, PROMPTS, params)
    alone = [answers(nano, [prompt], params)[0] for prompt in PROMPTS]
    chunked_llm = LLM(NANO, max_num_seqs=3, max_model_len=1024, max_num_batched_tokens=37, verbose=False)
    chunked = answers(chunked_llm, PROMPTS[::-1], params)[::-1]
    if select.cpu_twins(nano.model.device, torch.float32):
        assert together == alone == chunked  # bit for bit, the log-probabilities too
    else:
        assert [ids for ids, _ in together] == [ids for ids, _ in alone] == [ids for ids, _ in chunked]


def test_threads_do_not_change_a_bit(nano):
    ids = nano.tokenizer.encode_prompt(PROMPTS[2])
    one = nano.logits(ids)
    before = torch.get_num_threads()
    try:
        for threads in (2, 3, 5):  # more than there are cores, too
            torch.set_num_threads(threads)
            many = nano.logits(ids)
            assert torch.get_num_threads() == threads  # lent for the step, given back
            if select.cpu_twins(nano.model.device, torch.float32):
                assert torch.equal(one, many)
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_process_computes_without_the_helpers_it_lost(nano):
    """Threads do not survive a fork: the child must neither hang nor differ."""
    script = FORK.format(path=str(NANO))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "same"


def test_nano_writes_python(nano):
    (output,) = nano.generate(["def fibonacci(n):\n"], SamplingParams(temperature=0, max_tokens=48), use_tqdm=False)
    assert "return" in output.outputs[0].text


def test_nano_answers_a_question_in_the_chat_format_and_stops(nano):
    from deepinfer.codec.conversation import Conversation, Turn
    from deepinfer.codec.template import render

    question = Turn(role="user", text="What is the capital of France?")
    prompt = render(Conversation(turns=(question,), thinking=False)).text
    (output,) = nano.generate([prompt], SamplingParams(temperature=0, max_tokens=40), use_tqdm=False)
    assert "Paris" in output.outputs[0].text
    assert output.outputs[0].finish_reason == "stop"


def test_reference_and_cpu_kernels_give_the_same_logits_on_text(nano):
    ids = nano.tokenizer.encode_prompt(PROMPTS[2])
    fast = nano.logits(ids)
    with select.reference_only():
        reference = nano.logits(ids)
    error = (fast - reference).abs().amax(-1) / reference.abs().max()
    # One row in a hundred may hold a choice (expert, entry) so near a tie that another order of sums decides it.
    assert (error <= 1e-4).float().mean() >= 0.99
    assert error.max() <= 1e-2
    assert torch.equal(fast.argmax(-1), reference.argmax(-1))


def test_the_release_numerics_stay_near_float32_on_text(nano):
    """bfloat16, FP8 and FP4 rounding together cost little on a trained model (a random one they would scramble)."""
    ids = nano.tokenizer.encode_prompt(PROMPTS[2])[:200]
    rounded = LLM(NANO, dtype="bfloat16", max_num_seqs=1, max_model_len=256, verbose=False).logits(ids)
    targets = torch.tensor(ids[1:])

    def loss(logits: torch.Tensor) -> float:
        return torch.nn.functional.cross_entropy(logits[:-1], targets).item()

    assert abs(loss(rounded) - loss(nano.logits(ids))) <= 0.1  # measured 0.02 nats per token


def test_the_bundled_checkpoint_fits_its_budget():
    size = sum(file.stat().st_size for file in NANO.iterdir())
    assert size <= 40_000_000


FORK = """
import os, sys, torch
torch.set_num_threads(1)  # torch's own pool hangs in a forked child
from deepinfer import LLM
from deepinfer.kernels.cpu import threads
threads._lent = 2  # the kernels' pool does have a helper
llm = LLM({path!r}, max_num_seqs=2, max_model_len=256, verbose=False)
ids = list(range(3, 130))
before = llm.logits(ids)
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(llm.logits(ids), before) else 3)
_, status = os.waitpid(child, 0)
print("same" if status == 0 else f"status {{status}}")
"""

LOAD = """
import resource, sys
from deepinfer.kernels import select
import torch
select.cpu_twins(torch.device("cpu"), torch.float32)  # compiled before the measurement
from deepinfer.model import load_model
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
model = load_model(sys.argv[1], weights=sys.argv[2])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB on Linux only")
@pytest.mark.parametrize("form, bytes_per_value", [("stored", 1), ("wide", 4)])
def test_loading_needs_no_more_memory_than_the_weights_and_one_tensor(form, bytes_per_value):
    """Peak growth against the weights as held plus the largest tensor in every form that it passes through."""
    specs = [s for s in tensor_specs(ModelConfig.from_dir(NANO)).values() if s.kind != "engram_table"]
    values = sum(s.nbytes * (2 if s.dtype == "I8" else 1) // (2 if s.dtype == "BF16" else 1) for s in specs)
    held = sum(s.nbytes for s in specs) if form == "stored" else values * bytes_per_value
    largest = max(s.nbytes for s in specs)
    done = subprocess.run([sys.executable, "-c", LOAD, str(NANO), form], capture_output=True, text=True, check=True)
    grown = int(done.stdout) * 1024
    # 3 x: stored bytes, a float32 copy, and what widening makes on the way; 24 MB: allocator slack and the tokenizer
    assert grown <= held + 3 * 4 * largest + 24_000_000


@pytest.mark.parametrize("arguments", [["def fibonacci(n):", "--max-tokens", "48", "--temperature", "0", "--json"]])
def test_the_command_line_prints_one_json_object(arguments):
    command = [sys.executable, "-m", "deepinfer", "generate", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (line,) = done.stdout.strip().splitlines()
    result = json.loads(line)
    assert {"text", "token_id", "token_logprobs", "prompt_len", "finish_reason"} <= set(result)
    assert len(result["token_id"]) == len(result["token_logprobs"]) <= 48
