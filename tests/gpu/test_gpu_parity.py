"""nano in float32 on the GPU: the CPU's greedy tokens, whatever the chunks, with drafts and without."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpu_device import DEVICE, free_gpu, on_gpu

from deepinfer import LLM, SamplingParams

pytestmark = on_gpu

NANO = Path(__file__).parents[2] / "models" / "nano"
PROMPTS = [
    "def fibonacci(n):\n",
    "The old lighthouse stood at the edge of the village, and",
    "import os\nimport sys\n\n\ndef main(argv):\n" + "    print(argv)\n" * 40,  # past the window and index_topk
    "A",
]
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


def answers(device: str, drafts: int, step_tokens: int) -> list[tuple[list[int], list[float]]]:
    """Tokens and their logprobs of every prompt, all in one engine."""
    llm = LLM(
        NANO,
        device=device,
        dtype="float32",
        max_num_seqs=4,
        max_model_len=640,
        num_blocks=20,
        max_num_batched_tokens=step_tokens,
        nextn=drafts,
        mtp_varlen=False,
        verbose=False,
    )
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    return [(output.outputs[0].token_id, output.outputs[0].token_logprobs) for output in outputs]


@pytest.fixture(scope="module")
def expected() -> list[tuple[list[int], list[float]]]:
    return answers("cpu", 0, 640)


@pytest.mark.parametrize(("drafts", "step_tokens"), [(0, 640), (0, 37), (5, 640), (5, 37)])
def test_greedy_tokens_in_float32_are_those_of_the_cpu(expected, drafts: int, step_tokens: int) -> None:
    """Logprobs within 1e-3: sums in another order move a logit by 1e-4 of the largest at most (docs/kernels.md)."""
    got = answers(str(DEVICE), drafts, step_tokens)
    free_gpu()
    assert [ids for ids, _ in got] == [ids for ids, _ in expected]
    for (_, own), (_, theirs) in zip(got, expected, strict=True):
        assert own == pytest.approx(theirs, abs=1e-3)
