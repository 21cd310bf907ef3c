"""A synthetic tokenizer.json for random checkpoints: byte-level BPE with every V4.1 control token (codec.md 1.1).

It has exactly `vocab_size` ids, and exactly `engram_compressed_vocab_size` of them are distinct after the Engram token
map: words are made of lower-case letters, and the surplus ids are the same words with a leading space, which the map
folds together.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, pre_tokenizers

from deepinfer.model.config import ConfigError, ModelConfig

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
IMAGE = "<｜deepseek_image｜>"
FIRST_ADDED = 128000  # released id of the first added token; BPE ids stand below
NOISE = 128799  # released dspark_noise_token_id, a reserved slot
# Released ids of the control tokens, and whether the file marks them special (decoding with skip_special_tokens drops
# those).
RELEASED: dict[int, tuple[str, bool]] = {
    NOISE: (f"<｜place▁holder▁no▁{NOISE - FIRST_ADDED}｜>", False),
    128803: ("<｜User｜>", False),
    128804: ("<｜Assistant｜>", False),
    128821: ("<think>", False),
    128822: ("</think>", False),
    128825: ("｜DSML｜", False),
    128828: ("<｜latest_reminder｜>", False),
    128829: ("<｜action｜>", False),
    128830: ("<｜query｜>", False),
    128831: ("<｜authority｜>", False),
    128832: ("<｜domain｜>", False),
    128836: ("<｜title｜>", False),
    128845: ("<｜read_url｜>", False),
    129264: (IMAGE, False),
    129271: ("<｜/polygon｜>", True),
    129272: ("<｜polygon｜>", True),
    129273: ("<｜/point｜>", True),
    129274: ("<｜point｜>", True),
    129275: ("<｜/box｜>", True),
    129276: ("<｜box｜>", True),
    129277: ("<｜/ref｜>", True),
    129278: ("<｜ref｜>", True),
    129279: ("<｜System｜>", False),
}
LETTERS = "etaoinshrdlucmfwygpbvkqxjz"  # by English frequency, so that the first two-letter words are common pairs
SPACE = "Ġ"  # how byte-level BPE spells a space


def control_tokens(vocab_size: int) -> dict[int, tuple[str, bool]]:
    """Ids of the added tokens: the released ones for the released vocabulary (reserved slots filled with placeholders);
    packed at the end, in the same order, for a smaller one."""
    if vocab_size == 129280:
        placeholder = {i: (f"<｜place▁holder▁no▁{i - FIRST_ADDED}｜>", False) for i in range(FIRST_ADDED, vocab_size)}
        return placeholder | RELEASED
    return dict(zip(range(vocab_size - len(RELEASED), vocab_size), RELEASED.values(), strict=True))


def build_tokenizer(config: ModelConfig) -> dict[str, Any]:
    """The content of tokenizer.json for `config`. Raises ConfigError if its vocabulary cannot hold the bytes, the
    control tokens and the wanted number of distinct ids, or if its special ids differ from the layout."""
    added = control_tokens(config.vocab_size)
    wanted = {
        config.bos_token_id: BOS,
        config.eos_token_id: EOS,
        config.pad_token_id: PAD,
        config.image_token_id: IMAGE,
    }
    ids = {0: BOS, 1: EOS, 2: PAD} | {i: text for i, (text, _) in added.items()}
    if wrong := [f"id {i} must be {text}" for i, text in wanted.items() if ids.get(i) != text]:
        raise ConfigError("synthetic tokenizer", wrong)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = config.vocab_size - 3 - len(alphabet) - len(added)
    repeated = 0
    if config.engram_layer_ids:
        # base ids are distinct as they are; each further id is either a new word or a repeated one
        base = count_distinct(_json(alphabet, [], added))
        repeated = merges - (config.engram_compressed_vocab_size - base)
    fresh = merges - repeated
    if merges < 0 or repeated < 0 or fresh < repeated:
        raise ConfigError(
            "synthetic tokenizer",
            [
                f"vocab_size = {config.vocab_size} with engram_compressed_vocab_size = "
                f"{config.engram_compressed_vocab_size} "
                f"would need {fresh} new and {repeated} repeated words; choose a compressed size "
                "nearer to the vocabulary"
            ],
        )
    words = list(itertools.islice(_words(), fresh))
    pairs = words + [(SPACE, left + right) for left, right in words[:repeated]]
    return _json(alphabet, pairs, added)


def count_distinct(tokenizer: dict[str, Any]) -> int:
    """Distinct ids of the Engram token map (model.md 2.3)."""
    from deepinfer.model.engram import token_map

    return int(token_map(Tokenizer.from_str(json.dumps(tokenizer))).max()) + 1


def write_tokenizer(directory: Path, config: ModelConfig) -> None:
    """Write tokenizer.json and tokenizer_config.json. Raises ConfigError as build_tokenizer, also if the token map does
    not come out at engram_compressed_vocab_size."""
    tokenizer = build_tokenizer(config)
    if config.engram_layer_ids and (got := count_distinct(tokenizer)) != config.engram_compressed_vocab_size:
        raise ConfigError("synthetic tokenizer", [f"{got} distinct ids, engram_compressed_vocab_size differs"])
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "add_bos_token": True,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": config.max_position_embeddings,
    }
    (directory / "tokenizer_config.json").write_text(
        json.dumps(settings, ensure_ascii=False, indent=1), encoding="utf-8"
    )


def _words() -> Iterator[tuple[str, str]]:
    """Merges, shortest words first: a word of n letters is a word of n - 1 letters and one more."""
    for length in itertools.count(2):
        for letters in itertools.product(LETTERS, repeat=length):
            yield "".join(letters[:-1]), letters[-1]


def _json(alphabet: list[str], pairs: list[tuple[str, str]], added: dict[int, tuple[str, bool]]) -> dict[str, Any]:
    tokens = [BOS, EOS, PAD, *alphabet, *(left + right for left, right in pairs)]
    first = len(tokens)
    entries = [(i, text, True) for i, text in enumerate((BOS, EOS, PAD))]
    # With fewer merges than the vocabulary has room for (counting), added tokens follow the last token directly.
    entries += [(first + n, text, special) for n, (text, special) in enumerate(added.values())]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": text, **flags, "special": special} for i, text, special in entries],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [list(pair) for pair in pairs],
        },
    }
