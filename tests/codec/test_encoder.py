"""Ids of a prompt: those of the vendor's own encoder, however long the prompt is and however it was cut."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import deepseek_recipe
import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from test_template import EXAMPLES

from deepinfer.codec import encoder
from deepinfer.codec.conversation import Conversation, Turn
from deepinfer.codec.encoder import checked_ids, encode
from deepinfer.codec.errors import RequestError
from deepinfer.codec.pieces import can_be_cut, pieces
from deepinfer.codec.spellings import BOS, PICTURE, USER, Control, control_id
from deepinfer.codec.template import Rendered, plain_prompt, render
from deepinfer.codec.tokenizer import Tokenizer

NANO = Path(__file__).parents[2] / "models" / "nano"
SPACED = st.text(st.sampled_from("ab1Ж你か，。'\"-/<|｜ \n\r\t\u3000\u00a0\u200bé\u0301é😀²"), max_size=120)
WORDS = st.lists(
    st.sampled_from(
        ["the", "we're", "don't", " ", "  ", "\n", "\n\n", ", ", ".", "\r\n", "1234", "你好", "。", "é", "\t"]
    ),
    max_size=40,
).map("".join)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_directory(NANO)


def deepseek_definition() -> dict[str, Any]:
    """nano's vocabulary behind the released checkpoint's pre-tokenizer."""
    definition = json.loads((NANO / "tokenizer.json").read_text(encoding="utf-8"))
    patterns = [
        r"\p{N}{1,3}",
        "[一-龥\u3040-\u309f\u30a0-\u30ff]+",
        "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
        "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
    ]
    splits = [{"type": "Split", "pattern": {"Regex": p}, "behavior": "Isolated", "invert": False} for p in patterns]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return definition | {
        "normalizer": {"type": "Sequence", "normalizers": []},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, byte_level]},
    }


def gpt2_definition() -> dict[str, Any]:
    definition = json.loads((NANO / "tokenizer.json").read_text(encoding="utf-8"))
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return definition | {"pre_tokenizer": byte_level}


DEFINITIONS = {
    "nano": json.loads((NANO / "tokenizer.json").read_text(encoding="utf-8")),
    "deepseek": deepseek_definition(),
    "gpt2": gpt2_definition(),
}
LIBRARY = {name: tokenizers.Tokenizer.from_str(json.dumps(d)) for name, d in DEFINITIONS.items()}


@pytest.fixture(scope="module")
def vendor() -> deepseek_recipe.DeepseekV41Encoding:
    """The vendor's encoder, on nano's tokenizer with the picture's token spelt as the encoder does by default."""
    text = (NANO / "tokenizer.json").read_text(encoding="utf-8").replace("<｜deepseek_image｜>", "<｜image｜>")
    return deepseek_recipe.DeepseekV41Encoding().with_tokenizer(deepseek_recipe.Tokenizer.from_str(text))


def as_vendors(conversation: Conversation) -> deepseek_recipe.Conversation:
    """The same conversation in the vendor's classes, where arguments and efforts are such that it renders alike."""
    messages: list[deepseek_recipe.Message] = []
    for turn in conversation.turns:
        text = turn.text.replace("\ufdd0", "<｜image｜>") if turn.images else turn.text
        if turn.role == "assistant":
            calls = [deepseek_recipe.ToolCall(*call) for call in turn.tool_calls]
            messages.append(deepseek_recipe.AssistantMessage(text, turn.reasoning, calls or None, turn.prefix))
        elif turn.role == "tool":
            messages.append(deepseek_recipe.ToolMessage(text, turn.tool_call_id))
        elif turn.role == "user":
            sources = [deepseek_recipe.UrlImageSource(image.url) for image in turn.images]
            messages.append(deepseek_recipe.UserMessage(text, sources))
        elif turn.role == "system":
            messages.append(deepseek_recipe.SystemMessage(text))
        else:
            messages.append(deepseek_recipe.LatestReminderMessage(text))
    form = conversation.format
    shown: dict[str, Any] = {}
    if form is not None:
        shown = {"response_format": "json_object"} if form.kind == "json_object" else {"response_schema": form.value}
    return deepseek_recipe.Conversation(
        messages,
        thinking_mode=conversation.thinking,
        tools=[deepseek_recipe.ToolDefinition(t.name, t.description, t.parameters) for t in conversation.tools],
        reasoning_effort={50: "low", 75: "high", 100: "max"}[conversation.effort] if conversation.thinking else None,  # type: ignore[arg-type]
        **shown,
    )


@pytest.mark.parametrize("name", EXAMPLES)
def test_ids_are_those_of_the_vendors_encoder(tokenizer: Tokenizer, vendor, name: str) -> None:
    ids = encode(render(EXAMPLES[name]), tokenizer)
    assert ids.dtype == np.int32
    assert ids.tolist() == vendor.encode(as_vendors(EXAMPLES[name]))


@settings(max_examples=100, deadline=None)
@given(texts=st.lists(SPACED | st.text(st.characters(exclude_categories=["Cs"]), max_size=30), min_size=1, max_size=4))
def test_ids_of_any_texts_are_those_of_the_vendors_encoder(tokenizer: Tokenizer, vendor, texts: list[str]) -> None:
    roles = ["system", "user", "assistant", "user"]
    turns = tuple(Turn(role=role, text=text) for role, text in zip(roles, texts, strict=False))  # type: ignore[arg-type]
    for thinking in (True, False):
        conversation = Conversation(turns=turns, thinking=thinking)
        assert encode(render(conversation), tokenizer).tolist() == vendor.encode(as_vendors(conversation))


def test_two_texts_side_by_side_are_one_text(tokenizer: Tokenizer) -> None:
    split = Rendered((BOS, "hel", "lo wor", "ld"), (), "content")
    assert encode(split, tokenizer).tolist() == encode(plain_prompt("hello world"), tokenizer).tolist()


@pytest.mark.parametrize("name", DEFINITIONS)
@settings(max_examples=400, deadline=None)
@given(text=SPACED | WORDS, size=st.integers(1, 30))
def test_cutting_a_text_changes_no_token(name: str, text: str, size: int) -> None:
    assert can_be_cut(DEFINITIONS[name])
    cut = list(pieces(text, size))
    assert "".join(cut) == text
    ids = [i for piece in cut for i in LIBRARY[name].encode(piece, add_special_tokens=False).ids]
    assert ids == LIBRARY[name].encode(text, add_special_tokens=False).ids


def test_long_prose_and_code_are_cut_and_one_endless_word_is_not() -> None:
    prose = "The lighthouse stood. " * 1000
    assert max(map(len, pieces(prose, 500))) < 520
    assert max(map(len, pieces("春天来了，花开了。" * 1000, 500))) < 520
    assert max(map(len, pieces('{"a":1,"b":[2,3]}' * 1000, 500))) < 520
    assert list(pieces("a" * 10_000, 500)) == ["a" * 10_000]
    assert list(pieces("", 500)) == [""]


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "NFC"}},
        {"pre_tokenizer": None},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": ".{1,5}"}, "behavior": "Isolated", "invert": False}},
        {"model": DEFINITIONS["nano"]["model"] | {"dropout": 0.1}},
    ],
)
def test_tokenizers_without_a_proof_are_not_cut(change: dict[str, Any]) -> None:
    assert not can_be_cut(DEFINITIONS["nano"] | change)


def test_a_prompt_of_many_waves_has_the_ids_of_the_whole(tokenizer: Tokenizer, monkeypatch) -> None:
    source = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8") * 3
    rendered = render(Conversation(turns=(Turn(role="user", text=source), Turn(role="user", text="x" * 5000))))
    whole = encode(rendered, tokenizer).tolist()
    text = rendered.segments[4]
    assert text in rendered.segments
    library = LIBRARY["nano"].encode(text, add_special_tokens=False).ids  # the README spells no control token
    assert len(library) > 1000
    start = len(whole) - 2 - len(library)
    assert whole[start:-2] == library
    monkeypatch.setattr(encoder, "PIECE", 100)
    monkeypatch.setattr(encoder, "WAVE", 3)
    assert encode(rendered, tokenizer).tolist() == whole


def test_a_tokenizer_that_cannot_be_cut_gives_the_same_ids(tokenizer: Tokenizer, monkeypatch) -> None:
    rendered = plain_prompt("The lighthouse stood. " * 2000)
    ids = encode(rendered, tokenizer)
    other = Tokenizer.from_directory(NANO)
    other.can_be_cut = False  # type: ignore[misc]  # a cached property holds what is put in its place
    assert (encode(rendered, other) == ids).all()


def test_a_prompt_that_is_too_long_ends_early(tokenizer: Tokenizer, monkeypatch) -> None:
    rendered = plain_prompt("word " * 200_000)
    assert len(encode(rendered, tokenizer)) > 100_000
    encoded: list[int] = []
    encode_texts = tokenizer.encode_texts

    def counting(texts: list[str]) -> list[list[int]]:
        encoded.append(sum(map(len, texts)))
        return encode_texts(texts)

    monkeypatch.setattr(tokenizer, "encode_texts", counting)
    for limit, most in [(100, 0), (50_000, 2 * encoder.WAVE * encoder.PIECE)]:
        encoded.clear()
        with pytest.raises(RequestError, match=f"more than {limit} tokens") as caught:
            encode(rendered, tokenizer, max_tokens=limit)
        assert caught.value.code == "context_length_exceeded"
        assert sum(encoded) <= most


def test_the_longest_prompt_that_fits_is_taken(tokenizer: Tokenizer) -> None:
    rendered = plain_prompt("one two three four")
    tokens = len(encode(rendered, tokenizer))
    assert len(encode(rendered, tokenizer, max_tokens=tokens)) == tokens
    with pytest.raises(RequestError):
        encode(rendered, tokenizer, max_tokens=tokens - 1)


def test_pictures_have_the_id_that_the_checkpoint_spells(tokenizer: Tokenizer, tmp_path: Path) -> None:
    assert control_id(tokenizer, PICTURE) == tokenizer.control_ids["<｜deepseek_image｜>"]
    text = (NANO / "tokenizer.json").read_text(encoding="utf-8").replace("<｜deepseek_image｜>", "<｜image｜>")
    (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
    assert control_id(Tokenizer(tmp_path / "tokenizer.json"), PICTURE) == control_id(tokenizer, PICTURE)
    assert encode(Rendered((PICTURE,), (), "content"), tokenizer).tolist() == [control_id(tokenizer, PICTURE)]


def test_a_tokenizer_without_roles_is_named(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.json: has no control token"):
        encode(Rendered((Control("<｜nobody｜>"),), (), "content"), tokenizer)


def test_ids_that_clients_give_are_checked(tokenizer: Tokenizer) -> None:
    ids = checked_ids([0, 17, control_id(tokenizer, USER)], tokenizer, 8192)
    assert ids.tolist() == [0, 17, control_id(tokenizer, USER)]
    assert ids.dtype == np.int32
    assert checked_ids([], tokenizer, 8192).tolist() == []
    for wrong in (8192, -1, 2**31, 2**62):
        with pytest.raises(RequestError, match=rf"prompt\.1: token ids must be 0 to 8191, got {wrong}"):
            checked_ids([5, wrong], tokenizer, 8192, param="prompt.1")
    with pytest.raises(RequestError, match="picture"):
        checked_ids([5, control_id(tokenizer, PICTURE)], tokenizer, 8192)


def test_threads_get_the_same_ids(tokenizer: Tokenizer) -> None:
    from concurrent.futures import ThreadPoolExecutor

    random_words = random.Random(5)
    texts = [" ".join(random_words.choices(["tea", "for", "two", "1,2", "\n"], k=2000)) for _ in range(16)]
    alone = [encode(plain_prompt(text), tokenizer).tolist() for text in texts]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda text: encode(plain_prompt(text), tokenizer).tolist(), texts))
    assert together == alone
