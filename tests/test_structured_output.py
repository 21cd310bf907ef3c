"""Structured output on the bundled model: every answer is what was asked for, whatever runs beside it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jsonschema
import pytest
from integrity import assert_all_free

from deepinfer import LLM, InvalidRequestError, SamplingParams
from deepinfer.codec.conversation import Conversation, Turn
from deepinfer.codec.encoder import encode
from deepinfer.codec.template import render
from deepinfer.engine.checkpoint_grammars import checkpoint_grammars
from deepinfer.grammar.structure import Grammar, Structure

ROOT = Path(__file__).parent.parent
NANO = ROOT / "models" / "nano"
SIZES = {"max_num_seqs": 8, "max_model_len": 1024, "verbose": False}
PLACE = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["town", "river", "Größe"]},
        "people": {"type": "integer", "minimum": 0, "maximum": 99999},
    },
    "required": ["name", "kind", "people"],
    "additionalProperties": False,
}
FLAT = {"type": "object", "properties": {"at": {"type": "number"}}, "additionalProperties": False}
SCHEMAS = [
    PLACE,
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    {"anyOf": [{"const": "yes"}, {"const": "no"}, {"type": "null"}]},
    {
        "$ref": "#/$defs/tree",
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {
                    "leaf": {"type": "integer"},
                    "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/flat"}]},
                },
                "required": ["leaf", "next"],
                "additionalProperties": False,
            },
            "flat": FLAT,
        },
    },
]
QUESTIONS = ["Name a place.", "What is true?", "Do you agree? Answer in JSON.", "Draw a tree.", "def f(x):"]


@pytest.fixture(scope="module")
def nano() -> LLM:
    return LLM(NANO, **SIZES)  # drafts as many as pay


def thinking_prompt(llm: LLM, question: str) -> list[int]:
    turns = (Turn(role="user", text=question),)
    return encode(render(Conversation(turns=turns)), llm.tokenizer).tolist()


def content_of(llm: LLM, token_ids: list[int]) -> str:
    """What stands behind </think>; there must be one."""
    end = llm.tokenizer.control_ids["</think>"]
    assert end in token_ids
    stream = llm.tokenizer.text_stream(True)
    return "".join(map(stream.push, token_ids[token_ids.index(end) + 1 :])) + stream.finish()


def think_and_answer(llm: LLM, number: int) -> None:
    """One streamed answer, valid; every fifth caller is a batch mate that nothing constrains."""
    prompt = thinking_prompt(llm, QUESTIONS[number % len(QUESTIONS)])
    schema = SCHEMAS[number % len(SCHEMAS)]
    budget = number % 3 * 10
    free = number % 5 == 4
    structure = Structure(
        content=Grammar("json_schema", json.dumps(schema)), thinking=True, thinking_budget=budget or None
    )
    params = SamplingParams(
        temperature=(0.0, 0.7, 1.0)[number % 3],
        seq_seed=number,
        max_tokens=40 if free else 600,
        structure=None if free else structure,
        logit_bias={llm.tokenizer.control_ids["</think>"]: 100.0} if not budget and number % 2 else {},
    )
    token_ids: list[int] = []
    reason = None
    for delta in llm.stream(prompt, params):
        token_ids += delta.token_ids
        reason = delta.finish_reason or reason
    if free:
        return
    if budget:
        assert llm.tokenizer.control_ids["</think>"] in token_ids[: budget + 1]
    assert reason == "stop", llm.tokenizer.decode(token_ids)
    jsonschema.validate(json.loads(content_of(llm, token_ids)), schema)


def converse(llm: LLM, numbers: range) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: think_and_answer(llm, number), numbers))
    assert_all_free(llm.engine.cache)


def test_answers_behind_thinking_are_valid_with_drafts_streams_and_mates(nano: LLM) -> None:
    converse(nano, range(50))  # 40 of them structured
    assert nano.engine.core.stats().drafts.drafted > 0
    assert nano.engine.core.stats().totals.fsm_errors == 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])
def test_two_hundred_answers_behind_thinking_are_valid(overlap: bool) -> None:
    llm = LLM(NANO, overlap=overlap, nextn=5, mtp_varlen=False, **SIZES)
    converse(llm, range(250))
    assert llm.engine.core.stats().totals.fsm_errors == 0


SETTINGS = 'root ::= item (", " item){2,5}\nitem ::= [a-z]+ "=" [0-9]{1,3}'
ASKED = [
    SamplingParams(temperature=0, max_tokens=300, json_schema=PLACE),
    SamplingParams(temperature=0, max_tokens=300, regex=r"(\d{4})-(0\d|1[0-2]): [a-z ]{5,30}\."),
    SamplingParams(temperature=0, max_tokens=300, ebnf=SETTINGS),
    SamplingParams(temperature=0.8, seq_seed=5, n=2, max_tokens=300, json_schema=SCHEMAS[1]),
]
PROMPTS = ["A place: ", "On ", "Settings: ", "[true, "]


def answers(llm: LLM, prompts=PROMPTS, params=ASKED) -> list[list[list[int]]]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert all(c.finish_reason == "stop" for output in outputs for c in output.outputs)
    return [[c.token_id for c in output.outputs] for output in outputs]


def test_every_kind_of_structure_is_met_and_speed_changes_no_token(nano: LLM) -> None:
    expected = answers(nano)
    place, date, settings, truths = ([nano.tokenizer.decode(ids) for ids in listed] for listed in expected)
    jsonschema.validate(json.loads(place[0]), PLACE)
    assert re.fullmatch(r"(\d{4})-(0\d|1[0-2]): [a-z ]{5,30}\.", date[0])
    assert re.fullmatch(r"[a-z]+=\d{1,3}(, [a-z]+=\d{1,3}){2,5}", settings[0])
    for text in truths:
        jsonschema.validate(json.loads(text), SCHEMAS[1])
    alone = [answers(nano, [prompt], [params])[0] for prompt, params in zip(PROMPTS, ASKED, strict=True)]
    assert alone == expected
    for options in (
        {"nextn": 0},
        {"nextn": 5, "mtp_varlen": False, "overlap": True},
        {"nextn": 3, "mtp_varlen": False, "max_num_seqs": 3, "num_blocks": 8, "max_num_batched_tokens": 32},
    ):
        assert answers(LLM(NANO, **{**SIZES, **options})) == expected, options


def test_a_neighbour_of_structured_answers_says_what_it_says_alone(nano: LLM) -> None:
    free = SamplingParams(temperature=0.9, seq_seed=3, max_tokens=30, frequency_penalty=0.3)
    (alone,) = nano.generate("The old lighthouse", free, use_tqdm=False)
    mixed = nano.generate([*PROMPTS, "The old lighthouse"], [*ASKED, free], use_tqdm=False)[-1]
    assert mixed.outputs[0].token_id == alone.outputs[0].token_id
    assert mixed.outputs[0].token_logprobs == alone.outputs[0].token_logprobs


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("regex", "(", "regex"),
        ("ebnf", "root = x", "line 1"),
        ("json_schema", {"type": "strange"}, "strange"),
        ("json_schema", "{", "not JSON"),
        ("json_schema", False, "allows nothing"),
        ("structure", Structure(content=Grammar("choice", "[]")), "choices"),
    ],
)
def test_a_grammar_that_makes_no_sense_is_refused_before_anything_runs(
    nano: LLM, field: str, value, words: str
) -> None:
    params = [SamplingParams(max_tokens=2), SamplingParams(**{field: value})]
    with pytest.raises(InvalidRequestError) as error:
        nano.generate(["a", "b"], params, use_tqdm=False)
    assert error.value.field == f"prompt 1, {field}" and words in error.value.message
    assert not nano.engine.has_unfinished


def test_a_checkpoint_without_a_tokenizer_file_says_why_it_enforces_nothing(tmp_path: Path) -> None:
    grammars, filler = checkpoint_grammars(tmp_path, 512, 1)
    assert filler is None
    with pytest.raises(InvalidRequestError, match=r"regex: cannot be enforced: the checkpoint has no tokenizer\.json"):
        grammars.check(SamplingParams(regex="a"))
    (tmp_path / "tokenizer.json").write_text("{}")
    grammars, _ = checkpoint_grammars(tmp_path, 512, 1)
    broken = grammars.begin(SamplingParams(regex="a"))
    assert broken is not None
    with pytest.raises(InvalidRequestError, match=r"regex: the checkpoint's tokenizer\.json cannot be used"):
        broken.wait()
    grammars.close()


def test_grammars_are_counted(tiny_checkpoint: Path) -> None:
    llm = LLM(tiny_checkpoint, max_model_len=512, max_num_seqs=4, verbose=False)
    params = SamplingParams(regex="[ab]{3}", max_tokens=8, temperature=0)
    for _ in range(2):
        (output,) = llm.generate(prompt_token_ids=[[0, 5, 6]], sampling_params=params, use_tqdm=False)
        assert re.fullmatch("[ab]{3}", output.outputs[0].text) and output.outputs[0].finish_reason == "stop"
    stats = llm.engine.core.stats()
    assert stats.grammar_cache["miss"] == 1 and stats.grammar_cache["hit"] >= 1
    assert stats.grammar_compile_seconds.count == 1 and stats.grammar_compile_seconds.total > 0


def test_the_check_of_the_example_passes_on_nano() -> None:
    script = [sys.executable, ROOT / "examples" / "offline_inference.py", "--model", str(NANO)]
    done = subprocess.run([*script, "--check_structured_output"], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("STRUCTURED")]
    assert len(lines) == 3 and all(line.endswith("ok") for line in lines), done.stdout
