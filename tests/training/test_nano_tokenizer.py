"""The bundled tokenizer."""

import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from training.tokenizer import ADDED, BOS, EOS, PAD, load_tokenizer, token_map

MODEL = Path(__file__).parents[2] / "models/nano"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(MODEL)


def test_every_control_token_is_one_id(tokenizer: Tokenizer) -> None:
    for spelling in [BOS, EOS, PAD, *(s for s, _ in ADDED)]:
        assert len(tokenizer.encode(spelling).ids) == 1, spelling
        assert tokenizer.decode(tokenizer.encode(spelling).ids, skip_special_tokens=False) == spelling
    assert [tokenizer.token_to_id(t) for t in (BOS, EOS, PAD)] == [0, 1, 2]
    assert tokenizer.get_vocab_size() == 8192


def test_protocol_tokens_survive_skipping_specials(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<｜User｜>a<｜Assistant｜><think>b</think>c<｜end▁of▁sentence｜>").ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<｜User｜>a<｜Assistant｜><think>b</think>c"


@pytest.mark.parametrize("seed", range(20))
def test_any_text_comes_back(tokenizer: Tokenizer, seed: int) -> None:
    rng = random.Random(seed)
    text = "".join(
        chr(rng.choice([rng.randrange(32, 127), rng.randrange(0x250), rng.randrange(0xE000, 0x11000)]))
        for _ in range(300)
    )
    text += "\r\n\t  x\n\n    y \u00a0 中文🙂\x00" + "".join(rng.choices(" \n\tab", k=50))
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_every_byte_has_a_token(tokenizer: Tokenizer) -> None:
    from tokenizers.pre_tokenizers import ByteLevel

    assert all(tokenizer.token_to_id(symbol) is not None for symbol in ByteLevel.alphabet())


def test_digits_stand_alone(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode("12345").ids) == 5


def test_token_map_is_dense_and_folds_case(tokenizer: Tokenizer) -> None:
    mapped = token_map(tokenizer)
    assert sorted(set(mapped.tolist())) == list(range(mapped.max() + 1))
    assert mapped[tokenizer.token_to_id("The")] == mapped[tokenizer.token_to_id("the")]
