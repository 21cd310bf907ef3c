"""Text comes out whole characters at a time, and the same however the ids are cut."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepinfer.codec.tokenizer import Tokenizer

QUICK = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
IDS = st.lists(st.integers(0, 511), max_size=60)


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint: Path) -> Tokenizer:
    return Tokenizer.from_directory(tiny_checkpoint)


@pytest.fixture(scope="module")
def library(tiny_checkpoint: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(tiny_checkpoint / "tokenizer.json"))


@QUICK
@given(ids=IDS, skip=st.booleans())
def test_stream_equals_decoding_whole_for_any_ids(tokenizer, library, ids: list[int], skip: bool) -> None:
    stream = tokenizer.text_stream(skip)
    text = "".join([*(stream.push(i) for i in ids), stream.finish()])
    assert text == library.decode(ids, skip_special_tokens=skip)


@QUICK
@given(text=st.text(max_size=40))
def test_text_survives_encode_and_stream_with_no_half_character(tokenizer, text: str) -> None:
    stream = tokenizer.text_stream()
    pieces = [stream.push(i) for i in tokenizer.encode_text(text)]
    assert "".join(pieces) == text
    assert stream.finish() == ""
    so_far = ""
    for piece in pieces:
        so_far += piece
        assert text.startswith(so_far)


def test_cut_character_waits_and_ends_as_replacement(tokenizer) -> None:
    ids = tokenizer.encode_text("é")
    single = (
        ids if len(ids) > 1 else [i for b in "é".encode() for i in range(512) if tokenizer.token_bytes(i) == bytes([b])]
    )
    stream = tokenizer.text_stream()
    assert stream.push(single[0]) == ""
    assert stream.finish() == "\ufffd"


def test_every_byte_has_a_token(tokenizer) -> None:
    single = {tokenizer.token_bytes(i) for i in range(512)}
    assert {bytes([b]) for b in range(256)} <= single


def test_id_without_a_token_leaves_no_text(tokenizer) -> None:
    assert tokenizer.decode([10**6]) == ""
