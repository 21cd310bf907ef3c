"""Synthetic chats follow the prompt grammar, and their tool calls fit the declared tools."""

import random
import re
from pathlib import Path

import pytest

from training.marks import ANSWER, IDS, SKIP, mark_turns
from training.synth import lookup
from training.synth.chats import chat, json_chat
from training.synth.lookup import Fact, Haystack, probe, row
from training.synth.render import Chat, Phrases, render_calls
from training.synth.tools import parse_calls, tool_chat, valid_call
from training.tokenizer import ASSISTANT, EOS, load_tokenizer

np = pytest.importorskip("numpy")
PHRASES = Phrases(("Effort: ", " of 100\n\n"), ("\n\nTOOLS\n", "\nEND\n"), ("\n\nFORMAT\n", ""))
TOKENIZER = load_tokenizer(Path(__file__).parents[2] / "models/nano")


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("split", ["train", "valid"])
def test_tool_calls_are_valid(split: str) -> None:
    rng = random.Random(1)
    for _ in range(200):
        sample = tool_chat(rng, PHRASES, split, calls_only=True)
        assert valid_call(sample.turns[1][2].strip("\n"), sample.tools)


def test_broken_calls_are_refused() -> None:
    sample = tool_chat(random.Random(2), PHRASES, "train", calls_only=True)
    block = sample.turns[1][2].strip("\n")
    name = sample.turns[1][2].split('invoke name="')[1].split('"')[0]
    for wrong in (
        block[:-1],
        block.replace(name, "unknown_tool"),
        block.replace("｜DSML｜ invoke", "｜DSML｜invoke"),
        block + "x",
        "no call",
    ):
        assert not valid_call(wrong, sample.tools)


def test_calls_parse_back() -> None:
    calls = [("f", {"a": "x > y", "n": 3, "on": True, "list": [1, "é"]}), ("g", {"b": "two\nlines"})]
    assert parse_calls(render_calls(calls)) == calls


def test_chats_are_closed_turns() -> None:
    rng = random.Random(3)
    for _ in range(300):
        text = chat(rng, PHRASES)
        assert text.startswith("<｜begin▁of▁sentence｜>") and text.endswith("<｜end▁of▁sentence｜>")
        assert text.count("<｜Assistant｜>") == text.count("</think>")
        for turn in text.split("<｜Assistant｜>")[1:]:
            assert re.match(r"(<think>[^<]*)?</think>", turn)


def test_history_reasoning_is_dropped_without_tools() -> None:
    sample = Chat(PHRASES, thinking=True).user("a").assistant("b", "old").user("c").assistant("d", "new")
    assert "old" not in sample.text() and "<think>new</think>d" in sample.text()


def test_wordings_of_the_splits_differ() -> None:
    def questions(split: str) -> set[str]:
        rng = random.Random(4)
        return {re.sub(r"[A-Z]\w+|\d+", "", json_chat(rng, PHRASES, split).turns[0][2]) for _ in range(50)}

    assert not questions("train") & questions("valid")


def test_rows_have_the_wanted_length_and_hold_their_answers() -> None:
    rng = random.Random(5)
    hay = Haystack([np.array(rng.choices(range(3, 8000), k=20000), dtype=np.uint16)])
    for _ in range(20):
        ids = row(rng, 1024, hay, encode)
        assert len(ids) == 1024 and ids[0] == 0 and all(i & ~(SKIP | ANSWER) <= IDS for i in ids)
        assert sum(i & ANSWER > 0 for i in ids) > 10
    prompt, answer, value = probe(rng, 700, hay, encode)
    assert value in TOKENIZER.decode(prompt) and value in TOKENIZER.decode(answer)
    assert 700 < len(prompt) < 1100 and answer[-1] == 1
    assert Fact(rng).value


def test_answers_are_marked_and_nothing_else() -> None:
    rng = random.Random(6)
    opening, closing = (TOKENIZER.token_to_id(token) for token in (ASSISTANT, EOS))
    text = chat(rng, PHRASES)
    while "<｜Assistant｜>" not in text:
        text = chat(rng, PHRASES)
    ids = encode(text)
    marked = mark_turns(ids, opening, closing)
    assert [i & IDS for i in marked] == ids
    answers = TOKENIZER.decode([i & IDS for i in marked if i & ANSWER], skip_special_tokens=False)
    assert answers == "".join(
        turn.split("<｜end▁of▁sentence｜>")[0] + "<｜end▁of▁sentence｜>" for turn in text.split("<｜Assistant｜>")[1:]
    )


def test_wordings_of_held_out_look_ups_are_not_trained() -> None:
    for kind, (statements, questions) in lookup.MORE_WORDINGS.items():
        for held, more in zip(lookup.KINDS[kind], (statements, questions), strict=False):
            assert not set(held) & set(more)
    held = {lookup.KINDS[kind][0][-1] for kind in lookup.KINDS}
    rng = random.Random(7)
    for _ in range(2000):
        fact = Fact(rng, "train")
        if fact.kind in lookup.KINDS:
            said = fact.statement(rng, "train")
            assert said not in {w.format(key=fact.key, value=fact.value) for w in held}
