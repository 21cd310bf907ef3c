"""Cuts of a long text that change no token, so that its pieces can be encoded by several threads.

BPE works inside of pre-tokens, so a cut is harmless where a pre-token ends, if the text before the cut alone and the
text behind it alone have the same pre-tokens as the whole. That is proved here for one kind of place, *a letter or
digit in front and a blank, line feed or punctuation mark behind*, and for the pre-tokenizers of `_PATTERNS` only:

- No alternative of these patterns matches a letter or digit followed by such a character (where such a character and
  letters share a match, the letters stand behind). So no match spans the cut; and every letter and every digit is
  within a match, so one ends there (or, for digits in a later pattern of a sequence, a piece did before).
- The text in front, alone: a match that comes up to the cut looks at the character behind it only to see whether it can
  go on, and the end of a text stops it like such a character does. The one look-ahead, `(?!\\S)`, stands behind
  whitespace, and what stands in front of the cut is none.
- The text behind, alone: the patterns have no look-behind, and in the whole text the search goes on at the cut.

The characters are named one by one, of ranges that have been assigned for decades, so that no library's version of
Unicode has another opinion. For any other tokenizer texts are not cut.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

_PATTERNS = frozenset(
    {
        # DeepSeek V3 to V4.1, in this order
        r"\p{N}{1,3}",
        "[一-龥\u3040-\u309f\u30a0-\u30ff]+",
        "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+"
        "|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
        # models/nano
        r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}|[\r\n]+[ \t]*| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    }
)
_FRONT = "0-9A-Za-zÀ-ÖØ-öø-ÿΑ-ΡΣ-Ωα-ωА-яא-תぁ-ゖァ-ヺ一-龥가-힣"
_BEHIND = " \n" + re.escape("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~") + "，。、；：？！「」（）"
_CUT = re.compile(f"(?<=[{_FRONT}])(?=[{_BEHIND}])")


def can_be_cut(definition: Mapping[str, Any]) -> bool:
    """Whether the proof holds for a tokenizer. definition: the content of its tokenizer.json."""
    normalizer = definition.get("normalizer") or {"type": "Sequence", "normalizers": []}
    pre_tokenizer = definition.get("pre_tokenizer") or {}
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    return (
        normalizer.get("normalizers") == []
        and not definition["model"].get("dropout")
        and bool(steps)
        and all(_is_known(step) for step in steps)
    )


def _is_known(step: Mapping[str, Any]) -> bool:
    if step.get("type") == "ByteLevel":  # with or without its own pattern, GPT-2's, for which the proof holds as well
        return not step.get("add_prefix_space", True)
    pattern = (step.get("pattern") or {}).get("Regex")
    return step.get("type") == "Split" and step.get("behavior") == "Isolated" and pattern in _PATTERNS


def pieces(text: str, size: int) -> Iterator[str]:
    """The text in pieces of `size` characters or somewhat more, longer where there is no place to cut."""
    start = 0
    while len(text) - start > size:
        cut = _CUT.search(text, start + size)
        if cut is None:
            break
        yield text[start : cut.start()]
        start = cut.start()
    yield text[start:]
