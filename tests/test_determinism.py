"""`batch_invariant` on the bundled model: the same request gives the same bits, whoever is computed beside it and how.

Real text has what random weights lack: drafts that are accepted in runs, near ties, experts that are really chosen.
tests/test_drafting.py holds the same promise on a random model with top_logprobs and prompt_logprobs.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from integrity import assert_all_free

from deepinfer import LLM, RequestOutput, SamplingParams
from deepinfer.codec.conversation import Conversation, Turn
from deepinfer.codec.template import render
from deepinfer.kernels import select

NANO = Path(__file__).parent.parent / "models" / "nano"
pytestmark = pytest.mark.skipif(
    not select.cpu_twins(torch.device("cpu"), torch.float32), reason="without a C++ compiler nothing is batch invariant"
)

SENTENCE = "The old lighthouse stood at the edge of the village. "
NEEDLES = [
    "import os\nimport sys\n\n\ndef main(argv):\n"
    + "    print(argv)\n" * 80,  # past window and index_topk, three blocks
    SENTENCE * 7,  # ends just before a block does: its output needs another one
    render(Conversation(turns=(Turn(role="user", text="What is the capital of France?"),), thinking=False)).text,
]
NEEDLE_PARAMS = [
    SamplingParams(
        temperature=0.8, top_p=0.95, frequency_penalty=0.3, presence_penalty=0.1, repetition_penalty=1.05,
        seq_seed=seed, max_tokens=16, ignore_eos=True,
    )
    for seed in range(3)
]  # fmt: skip
OTHERS = [SENTENCE[i:] * (1 + i % 2) + "def f(x):\n" * (i % 3) for i in range(29)]
OTHER_PARAMS = [SamplingParams(temperature=i % 3 / 2, seq_seed=50 + i, max_tokens=2 + i % 5) for i in range(29)]

Said = list[tuple[list[int], list[float]]]


def open_nano(**options) -> LLM:
    return LLM(NANO, **{"max_model_len": 512, "batch_invariant": True, "seed": None, "verbose": False, **options})


def said(outputs: list[RequestOutput]) -> Said:
    """Tokens and their log-probabilities, to the bit."""
    return [(completion.token_id, completion.token_logprobs) for output in outputs for completion in output.outputs]


@pytest.fixture(scope="module")
def alone() -> Said:
    """Each request by itself, cold, in a plain loop, with all drafts verified."""
    llm = open_nano(max_num_seqs=1, mtp_varlen=False, overlap=False, enable_prefix_caching=False)
    outputs = [
        llm.generate([prompt], params, use_tqdm=False)[0] for prompt, params in zip(NEEDLES, NEEDLE_PARAMS, strict=True)
    ]
    assert sum(output.metrics.drafts.accepted for output in outputs) > 10  # so there were drafts to be wrong about
    return said(outputs)


def among_others(llm: LLM, order: int) -> list[RequestOutput]:
    """The needles' outputs, asked for among 29 others in a random order."""
    requests = [*zip(NEEDLES, NEEDLE_PARAMS, strict=True), *zip(OTHERS, OTHER_PARAMS, strict=True)]
    places = list(range(len(requests)))
    random.Random(order).shuffle(places)
    prompts, params = zip(*(requests[place] for place in places), strict=True)
    outputs = llm.generate(list(prompts), list(params), use_tqdm=False)
    assert_all_free(llm.engine.cache)
    return [outputs[places.index(needle)] for needle in range(len(NEEDLES))]


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 48, "overlap": True},
        {"mtp_varlen": False, "max_num_batched_tokens": 512},
        {"nextn": 0, "max_num_batched_tokens": 100},
    ],
    ids=lambda options: ", ".join(f"{name} {value}" for name, value in options.items()),
)
def test_bits_of_a_request_on_real_text_are_those_that_it_has_alone(alone: Said, options) -> None:
    assert said(among_others(open_nano(max_num_seqs=32, **options), order=len(options))) == alone


def test_bits_do_not_depend_on_a_hot_cache_nor_on_who_fits_into_the_batch(alone: Said) -> None:
    llm = open_nano(max_num_seqs=7, nextn=2, overlap=True)
    beginning = llm.tokenizer.encode_prompt(NEEDLES[0])[:270]  # it leaves its blocks and the window at 256
    llm.generate(prompt_token_ids=[beginning], sampling_params=NEEDLE_PARAMS[2], use_tqdm=False)
    outputs = among_others(llm, order=4)
    assert outputs[0].cached_tokens == 256
    assert said(outputs) == alone


def test_bits_of_a_request_outlive_that_it_is_preempted(alone: Said) -> None:
    """Four sequences that need a second block as they grow, in five blocks; the needle gives way to all others."""
    llm = open_nano(max_num_seqs=4, num_blocks=5)
    prompts = [f"{i} {NEEDLES[1]}" for i in range(3)]
    params = [NEEDLE_PARAMS[1].with_changes(seq_seed=70 + i) for i in range(3)]
    *_, needle = llm.generate(
        [*prompts, NEEDLES[1]], [*params, NEEDLE_PARAMS[1].with_changes(priority=1)], use_tqdm=False
    )
    assert needle.prompt_len <= 128 < needle.prompt_len + 16
    assert needle.metrics.preemptions > 0
    assert said([needle]) == alone[1:2]


def test_twenty_repeats_at_sixteen_at_once_have_one_output(alone: Said) -> None:
    llm = open_nano(max_num_seqs=16)
    outputs = llm.generate([NEEDLES[1]] * 20, NEEDLE_PARAMS[1], use_tqdm=False)
    assert said(outputs) == alone[1:2] * 20


def test_a_request_repeats_itself_without_a_seed_of_its_own_only_where_it_is_greedy() -> None:
    """batch_invariant keeps bits equal for equal seeds; it does not give two requests the same one."""
    llm = open_nano(max_num_seqs=4)
    sampled = llm.generate([NEEDLES[1]] * 3, SamplingParams(max_tokens=16, ignore_eos=True), use_tqdm=False)
    greedy = llm.generate([NEEDLES[1]] * 3, SamplingParams(temperature=0, max_tokens=16), use_tqdm=False)
    assert len({tuple(ids) for ids, _ in said(sampled)}) == 3
    assert len({tuple(ids) for ids, _ in said(greedy)}) == 1
