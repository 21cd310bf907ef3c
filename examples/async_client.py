"""An engine in a process of its own and two answers at once from it: streamed, the second one cancelled half-way."""

import argparse
import asyncio

from deepinfer import SamplingParams
from deepinfer.codec.tokenizer import Tokenizer
from deepinfer.engine.client import AsyncEngineClient
from deepinfer.engine.model_core import ModelCore

PROMPTS = ("The old lighthouse stood at the edge of the village, and", "def fibonacci(n):")


async def show(client: AsyncEngineClient, prompt: str, token_ids: list[int], params: SamplingParams) -> None:
    """Prints an answer as it comes. Cancelling this ends the request in the engine too."""
    async for delta in client.generate(token_ids, params):
        print(f"{prompt[:12]!r} ... {delta.text!r} {delta.finish_reason or ''}", flush=True)


async def main(model: str | None) -> None:
    core = ModelCore.of(model, max_num_seqs=8)  # arguments of LLM
    tokenizer = Tokenizer.from_directory(core.path)
    async with await AsyncEngineClient.start(core, detokenizer=tokenizer.text_stream) as client:
        ids = [tokenizer.encode_prompt(prompt, add_bos=True) for prompt in PROMPTS]
        short = SamplingParams(temperature=0.0, max_tokens=16)
        endless = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
        first = asyncio.create_task(show(client, PROMPTS[0], ids[0], short))
        second = asyncio.create_task(show(client, PROMPTS[1], ids[1], endless))
        await first
        second.cancel()
        await asyncio.wait({second})
        print("cancelled:", second.cancelled())
        now = (await client.stats()).totals
        print(f"{now.generated_tokens} tokens generated, {now.running} requests running")


if __name__ == "__main__":  # the engine's process starts afresh and imports this file
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="directory, hub id or nano; default DEEPINFER_HF_MODEL_DIR or nano")
    asyncio.run(main(parser.parse_args().model))
