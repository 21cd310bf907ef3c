"""The engine on the GPU: rounds give the runner's tokens, batch mates change nothing where that is promised, and the
engine's process and the command line answer."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator

import pytest
from gpu_device import CUDA, DEVICE, free_gpu, on_gpu, twins_alone
from nano_engine import GREEDY, NANO, SEEDED, NanoEngine, prompt_ids

from deepinfer import LLM
from deepinfer.engine.arguments import EngineArguments
from deepinfer.engine.client import AsyncEngineClient
from deepinfer.engine.loop import OverlappedLoop
from deepinfer.engine.model_core import ModelCore
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.engine.settings import resolve_settings


@pytest.fixture(scope="module", params=[0, 5], ids=["no_drafts", "drafts"])
def nano(request: pytest.FixtureRequest) -> Iterator[NanoEngine]:
    engine = NanoEngine(drafts=request.param)
    yield engine
    engine.close()
    free_gpu()


class TestRounds:
    pytestmark = twins_alone

    @pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
    def test_rounds_give_the_tokens_of_the_runners_own_path(self, nano: NanoEngine, params: SamplingParams) -> None:
        before = nano.rounds_run
        got = nano.complete(params, prompt_ids())
        ran = nano.rounds_run - before
        again = nano.complete(params, prompt_ids())
        plain = nano.complete(params, prompt_ids(), rounds=False)
        assert ran >= 4
        assert nano.rounds_run - before == 2 * ran
        assert got == again
        assert got == plain

    @pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
    def test_rounds_in_flight_give_the_tokens_of_rounds_one_by_one(
        self, nano: NanoEngine, params: SamplingParams
    ) -> None:
        core, before = nano.engine.core, nano.rounds_behind
        one_by_one = nano.complete(params, prompt_ids())
        assert nano.rounds_behind == before
        plain, core.loop = core.loop, OverlappedLoop(nano.runner)
        try:
            in_flight = nano.complete(params, prompt_ids())
        finally:
            core.loop.close()
            core.loop = plain
        assert nano.rounds_behind - before >= 4
        assert in_flight == one_by_one


class TestBatchMates:
    pytestmark = on_gpu

    def test_batch_mates_do_not_change_a_bit_where_that_is_promised(self) -> None:
        """Elsewhere they do: of the four greedy answers one is another alone than in company, measured on an H200."""
        arguments = EngineArguments(device=str(DEVICE), dtype="bfloat16", max_num_seqs=4, batch_invariant=True)
        try:
            resolve_settings(arguments, environ={})
        except ValueError as refused:
            pytest.skip(f"batch_invariant is refused: {refused}")
        sizes = {"max_model_len": 512, "num_blocks": 24, "max_num_batched_tokens": 256, "verbose": False}
        llm = LLM(NANO, device=str(DEVICE), dtype="bfloat16", max_num_seqs=4, batch_invariant=True, **sizes)

        def said(prompts: list[list[int]], params: SamplingParams) -> list[tuple[list[int], list[float]]]:
            done = llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
            return [(one.outputs[0].token_id, one.outputs[0].token_logprobs) for one in done]

        for params in (GREEDY, SEEDED):
            assert said(prompt_ids(), params) == [said([prompt], params)[0] for prompt in prompt_ids()]


class TestProcess:
    pytestmark = on_gpu

    def test_the_command_line_answers(self) -> None:
        sizes = ["--max-model-len", "256", "--max-num-seqs", "2"]
        asked = ["--max-tokens", "24", "--temperature", "0", "--json", "--device", DEVICE.type, *sizes]
        command = [sys.executable, "-m", "deepinfer", "generate", "def fibonacci(n):", "--model", str(NANO), *asked]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr[-2000:]
        answer = json.loads(done.stdout.strip().splitlines()[-1])
        assert len(answer["token_id"]) == 24
        assert "Fibonacci" in answer["text"], answer["text"]  # nano writes Python

    def test_the_engines_process_answers_several_at_once(self) -> None:
        dtype = "bfloat16" if CUDA else "float32"
        core = ModelCore.of(
            NANO,
            device=DEVICE.type,
            dtype=dtype,
            max_model_len=512,
            max_num_seqs=4,
            max_num_batched_tokens=256,
            num_blocks=24,
        )

        async def answer(client: AsyncEngineClient, prompt: list[int]) -> list[int]:
            got: list[int] = []
            async for delta in client.generate(prompt, GREEDY):
                got.extend(delta.token_ids)
            return got

        async def work() -> list[list[int]]:
            async with await AsyncEngineClient.start(core, timeout=200) as client:
                return await asyncio.gather(*(answer(client, prompt) for prompt in prompt_ids()))

        answers = asyncio.run(asyncio.wait_for(work(), 280))
        assert [len(one) for one in answers] == [GREEDY.max_tokens] * len(prompt_ids())
