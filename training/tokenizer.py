"""The tokenizer: byte-level BPE of 8,192 ids with every V4.1 control token, and the Engram token map.

Ids: 0 bos, 1 eos, 2 pad, then 256 byte symbols and merges, then the other added tokens. Digits are split one by one
(arithmetic), a run of line breaks takes the indentation behind it along (code), a word may carry one leading mark.
"""

from __future__ import annotations

import argparse
import json
import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
SYSTEM, USER, ASSISTANT = "<｜System｜>", "<｜User｜>", "<｜Assistant｜>"
THINK, THINK_END, DSML = "<think>", "</think>", "｜DSML｜"
REMINDER, IMAGE, NOISE = "<｜latest_reminder｜>", "<｜deepseek_image｜>", "<｜place▁holder▁no▁0｜>"
QUICK_TASKS = ["action", "query", "authority", "domain", "title", "read_url"]
GROUNDING = ["/polygon", "polygon", "/point", "point", "/box", "box", "/ref", "ref"]

# (spelling, special flag); most protocol tokens are not "special", so that decoding keeps them.
ADDED = [
    (NOISE, False),
    (USER, False),
    (ASSISTANT, False),
    (THINK, False),
    (THINK_END, False),
    (DSML, False),
    (REMINDER, False),
    *[(f"<｜{name}｜>", False) for name in QUICK_TASKS],
    (IMAGE, False),
    *[(f"<｜{name}｜>", True) for name in GROUNDING],
    (SYSTEM, False),
]
SPLIT = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}|[\r\n]+[ \t]*| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def train_tokenizer(texts: Iterator[str], vocab_size: int = 8192) -> Tokenizer:
    """Trains the BPE on an iterator of documents; the result has exactly `vocab_size` ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(ADDED),
        special_tokens=[AddedToken(t, special=True, normalized=False) for t in (BOS, EOS, PAD)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        max_token_length=24,
    )
    tokenizer.train_from_iterator(texts, trainer)
    for spelling, special in ADDED:
        token = AddedToken(spelling, special=special, normalized=False)
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)([token])
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"tokenizer has {tokenizer.get_vocab_size()} ids instead of {vocab_size}; more text is needed")
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: str | Path, max_length: int = 4096) -> None:
    """Writes tokenizer.json and tokenizer_config.json."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "add_bos_token": True,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False, indent=1) + "\n")


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Loads tokenizer.json of a model folder."""
    return Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))


def token_map(tokenizer: Tokenizer) -> np.ndarray:
    """Engram id of every token, [vocab] int64: spellings that differ in case, accents or space runs share one id."""
    ids: dict[str, int] = {}
    mapped = np.empty(tokenizer.get_vocab_size(), dtype=np.int64)
    for token in range(len(mapped)):
        text = tokenizer.decode([token], skip_special_tokens=False)
        key = tokenizer.id_to_token(token) if "�" in text else _normal_form(text)
        mapped[token] = ids.setdefault(key, len(ids))
    return mapped


def _normal_form(text: str) -> str:
    folded = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    folded = "".join(c for c in folded if unicodedata.category(c) != "Mn").lower()
    folded = re.sub(r"[ \t\r\n]+", " ", folded)
    if folded != " ":
        folded = folded.strip()
    return folded or text


def main() -> None:
    from training.corpus import sample_texts

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", required=True, help="folder of the .jsonl.xz shards")
    parser.add_argument("--out", default="models/nano")
    parser.add_argument("--megabytes", type=float, default=25)
    args = parser.parse_args()
    save_tokenizer(train_tokenizer(sample_texts(args.corpus, args.megabytes)), args.out)


if __name__ == "__main__":
    main()
