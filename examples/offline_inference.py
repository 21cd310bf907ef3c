"""Offline inference: a few sample prompts as one batch. `make run` runs this.

For each prompt one line:
DP 0; INPUT: '...'; OUTPUT: '...'; output_tokens=...; accept_rate=...; decode_ppl=...

accept_rate is accepted over verified drafts, N/A without drafting (--nextn 0, or a checkpoint without draft stages).
decode_ppl is exp of the mean negative log-probability that the model itself gave to the tokens it generated.

--check_structured_output answers a regex, a JSON schema and an EBNF grammar instead, one line each:
STRUCTURED regex; OUTPUT: '...'; output_tokens=...; accept_rate=...; ok

The flags are the vendor's; DEEPINFER_BATCH_INVARIANT, DEEPINFER_ENABLE_MTP_VARLEN and DEEPINFER_USE_NEXTN_DECODE count
too (docs/environment.md).
"""

import argparse
import json
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from deepinfer import LLM, CompletionOutput, RequestOutput, SamplingParams
from deepinfer.codec.conversation import Conversation, Turn
from deepinfer.codec.template import render

ENGLISH = "The old lighthouse stood at the edge of the village, and every evening"
PYTHON = 'def fibonacci(n):\n    """Return the n-th Fibonacci number."""'
CHAT = Conversation(
    turns=(
        Turn(role="system", text="You are a helpful assistant."),
        Turn(role="user", text="What is the capital of France?"),
    ),
    thinking=False,
)
LONG_TOKENS = 1500
LONG_CONTEXT = (16_389, 4_096)  # prompt and output tokens of the vendor's --long_context run
THINGS = ["a brass key", "three blue marbles", "a folded map", "an empty bottle", "a silver coin", "a box of matches"]
SHOWN = 120  # characters of a prompt that are printed


def long_prompt(llm: LLM, tokens: int) -> str:
    """A list of facts of nearly `tokens` tokens, and a question about one in its first half."""
    question = "\nQuestion: what does drawer 7 hold?\nAnswer: drawer 7 holds"
    text = "A list of drawers and what each of them holds."
    room = tokens - len(llm.tokenizer.encode_prompt(text + question))
    number = 0
    while True:
        number += 1
        line = f"\nDrawer {number} holds {THINGS[number * 5 % len(THINGS)]}."
        room -= len(llm.tokenizer.encode_text(line))
        if room < 0 and number > 8:  # the drawer of the question is there, however few tokens were asked for
            return text + question
        text += line


def long_context(max_model_len: int) -> tuple[int, int]:
    """Prompt and output tokens of the long run: the vendor's, in proportion where the context is shorter."""
    prompt, output = LONG_CONTEXT
    if prompt + output <= max_model_len:
        return LONG_CONTEXT
    scaled = prompt * max_model_len // (prompt + output)
    return scaled, max_model_len - scaled


def shortened(text: str) -> str:
    """The text, cut in the middle if it is long."""
    half = SHOWN // 2
    return text if len(text) <= SHOWN else f"{text[:half]} ... {text[-half:]}"


def accept_rate(completion: CompletionOutput) -> float | None:
    drafted = sum(completion.draft_tok)
    return sum(completion.accept_tok) / drafted if drafted else None


def decode_ppl(completion: CompletionOutput) -> float | None:
    if not completion.token_logprobs:
        return None
    return math.exp(-sum(completion.token_logprobs) / len(completion.token_logprobs))


def number(value: float | None) -> str:
    return "N/A" if value is None else f"{value:.3f}"


def as_record(output: RequestOutput, completion: CompletionOutput) -> dict[str, object]:
    return {
        "prompt_len": output.prompt_len,
        "text": completion.text,
        "token_id": completion.token_id,
        "token_logprobs": completion.token_logprobs,
        "draft_tok": completion.draft_tok,
        "accept_tok": completion.accept_tok,
        "accept_rate": accept_rate(completion),
        "decode_ppl": decode_ppl(completion),
    }


class Check(NamedTuple):
    name: str
    prompt: str
    asked: dict[str, Any]  # of SamplingParams
    is_met: Callable[[str], object]  # by a reader that knows nothing of grammars


def is_person(text: str) -> bool:
    """Whether the text is what PERSON describes."""
    try:
        person = json.loads(text)
    except ValueError:
        return False
    return (
        isinstance(person, dict)
        and person.keys() == {"name", "age", "likes"}
        and isinstance(person["name"], str)
        and len(person["name"]) <= 20
        and isinstance(person["age"], int)
        and 0 <= person["age"] <= 150
        and isinstance(person["likes"], list)
        and len(person["likes"]) <= 3
        and all(like in THINGS for like in person["likes"])
    )


DATE = r"(Mon|Tues|Wednes|Thurs|Fri)day, [1-9]\d? (January|June|October) \d{4}"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "likes": {"type": "array", "items": {"enum": THINGS}, "maxItems": 3},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
SUM = 'root ::= number (" " [-+*] " " number){1,4}\nnumber ::= [0-9]{1,3}'
CHECKS = (
    Check("regex", "We meet on ", {"regex": DATE}, re.compile(DATE).fullmatch),
    Check("JSON", "A person, as JSON: ", {"json_schema": PERSON}, is_person),
    Check("EBNF", "An exercise: ", {"ebnf": SUM}, re.compile(r"\d{1,3}( [-+*] \d{1,3}){1,4}").fullmatch),
)


def check_structured_output(llm: LLM, params: SamplingParams) -> bool:
    """A line for each of CHECKS, all of them in one batch; True if every answer is what was asked for and has ended
    with the model's end token, as one that is whole does."""
    asked = [params.with_changes(max_tokens=None, **check.asked) for check in CHECKS]
    outputs = llm.generate([check.prompt for check in CHECKS], asked)
    fine = True
    for check, output in zip(CHECKS, outputs, strict=True):
        for completion in output.outputs:
            ended = completion.finish_reason == "stop" and completion.token_id[-1] == llm.config.eos_token_id
            verdict = "not what was asked" if not check.is_met(completion.text) else "ok" if ended else "not ended"
            fine = fine and verdict == "ok"
            print(
                f"STRUCTURED {check.name}; OUTPUT: {completion.text!r}; output_tokens={len(completion.token_id)}; "
                f"accept_rate={number(accept_rate(completion))}; {verdict}"
            )
    return fine


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model_name", "--model", help="directory, hub id or nano; default DEEPINFER_HF_MODEL_DIR or nano"
    )
    parser.add_argument("--max_tokens", type=int, default=64, help="longest output in tokens")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the most likely token")
    parser.add_argument("--top_p", type=float, default=1.0, help="choose among tokens whose probabilities sum to this")
    parser.add_argument("--top_k", type=int, default=0, help="choose among the k most likely tokens; 0 = all")
    parser.add_argument("--sampler_force_topk", type=int, help="cap on top_k")
    parser.add_argument("--seq_seed", type=int, help="seed of every prompt's random stream")
    parser.add_argument("--nextn", type=int, help="drafts per step at most, 0 to 5; 0 = no drafting")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--dtype", default="auto", help="auto, float32 or bfloat16")
    parser.add_argument("--max_model_len", type=int, help="longest prompt plus output in tokens")
    parser.add_argument("--max_num_seqs", type=int, default=8, help="sequences computed at once")
    parser.add_argument("--ep", type=int, default=1, help="ranks that share the experts; only 1 is built")
    parser.add_argument("--dp", type=int, help="data-parallel ranks; only 1 is built")
    parser.add_argument("--cp", type=int, default=1, help="ranks that split a prompt; only 1 is built")
    parser.add_argument("--disable_eplb", action="store_true", help="no expert re-balancing; one rank has none anyway")
    parser.add_argument(
        "--long_context",
        action="store_true",
        help="one prompt of 16,389 tokens, 4,096 tokens out, scaled down to the model's context",
    )
    parser.add_argument("--yoco_clip", action="store_true", help="decoder truncation of prompts: faster, not exact")
    parser.add_argument("--result_jsonl", metavar="FILE", help="also write one JSON object per completion to this file")
    parser.add_argument(
        "--check_structured_output",
        action="store_true",
        help="answer a regex, a JSON schema and an EBNF grammar instead of the prompts; exit code 1 if one is not met",
    )
    return parser.parse_args()


def main() -> None:
    options = arguments()
    top_k = options.top_k
    if options.sampler_force_topk is not None:
        top_k = min(top_k if top_k > 0 else options.sampler_force_topk, options.sampler_force_topk)
    params = SamplingParams(
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=top_k,
        max_tokens=options.max_tokens,
        seq_seed=options.seq_seed,
    )
    llm = LLM(
        options.model_name,
        device=options.device,
        dtype=options.dtype,
        max_model_len=options.max_model_len,
        max_num_seqs=options.max_num_seqs,
        nextn=options.nextn,
        yoco_truncation="compact" if options.yoco_clip else None,
        ep=options.ep,
        dp=options.dp,
        cp=options.cp,
    )
    if options.check_structured_output:
        raise SystemExit(0 if check_structured_output(llm, params) else 1)
    if options.long_context:
        tokens, output_tokens = long_context(llm.engine_config.max_model_len)
        prompts = [long_prompt(llm, tokens)]
        params = params.with_changes(max_tokens=output_tokens, ignore_eos=True)
    else:
        room = llm.engine_config.max_model_len - options.max_tokens  # a small test model has less than 1,500 tokens
        prompts = [ENGLISH, PYTHON, render(CHAT).text, long_prompt(llm, min(LONG_TOKENS, room - 100))]
    records = []
    for output in llm.generate(prompts, params):
        for completion in output.outputs:
            records.append(as_record(output, completion))
            print(
                f"DP 0; INPUT: {shortened(output.prompt or '')!r}; OUTPUT: {completion.text!r}; "
                f"output_tokens={len(completion.token_id)}; accept_rate={number(accept_rate(completion))}; "
                f"decode_ppl={number(decode_ppl(completion))}"
            )
    if options.result_jsonl is not None:
        with open(options.result_jsonl, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from None
