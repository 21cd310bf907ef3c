"""Text <-> token ids, over a `tokenizer.json` (byte-level BPE), with control tokens only where the caller wants them.

Most control tokens of the V4.1 prompt format are *not* marked special in the tokenizer's file (spec/codec.md 1.1), so
the library's own "no special tokens" switch would let a user's text forge a role. `encode_text` therefore uses a
second tokenizer built from the same file without any added token.
"""

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import tokenizers

from deepinfer.codec import pieces
from deepinfer.codec.detokenizer import Detokenizer, byte_alphabet


class Tokenizer:
    """A checkpoint's tokenizer. Raises FileNotFoundError or ValueError naming the file."""

    def __init__(self, path: Path | str, bos_token: str | None = None) -> None:
        """path: a tokenizer.json. bos_token: the spelling of the token that begins every prompt, if there is one."""
        self.path = Path(path)
        if not self.path.is_file():
            raise FileNotFoundError(f"{self.path}: no such file; a checkpoint needs its tokenizer.json")
        try:
            self._definition = json.loads(self.path.read_text(encoding="utf-8"))
            self._full = tokenizers.Tokenizer.from_str(json.dumps(self._definition))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{self.path}: not a tokenizer file ({error})") from error
        _require_byte_level(self.path, self._definition)
        self._full.no_truncation()
        self._full.no_padding()
        added = self._definition.get("added_tokens") or []
        self.control_ids: dict[str, int] = {token["content"]: token["id"] for token in added}
        self._special_ids = frozenset(token["id"] for token in added if token.get("special"))
        self.bos_token = bos_token
        self.bos_token_id = None if bos_token is None else self._full.token_to_id(bos_token)
        if bos_token is not None and self.bos_token_id is None:
            raise ValueError(f"{self.path}: has no token {bos_token!r}, which tokenizer_config.json names as bos_token")

    @classmethod
    def from_directory(cls, directory: Path | str) -> "Tokenizer":
        """Reads tokenizer.json, and the bos token's spelling from tokenizer_config.json where there is one."""
        directory = Path(directory)
        settings_path = directory / "tokenizer_config.json"
        bos = None
        if settings_path.is_file():
            try:
                bos = json.loads(settings_path.read_text(encoding="utf-8")).get("bos_token")
            except (ValueError, AttributeError, RecursionError) as error:
                raise ValueError(f"{settings_path}: not a JSON object ({error})") from error
            if isinstance(bos, dict):
                bos = bos.get("content")
            if not isinstance(bos, str | None):
                raise ValueError(f"{settings_path}: bos_token must be a text, or an object with a text as content")
        return cls(directory / "tokenizer.json", bos)

    @property
    def vocab_size(self) -> int:
        """One more than the largest id; the model's vocabulary may be larger."""
        return max(self._full.get_vocab(with_added_tokens=True).values()) + 1

    def encode_prompt(self, text: str, add_bos: bool = True) -> list[int]:
        """Ids of a trusted prompt string: spellings of control tokens in it become control tokens.

        add_bos puts the begin token in front, unless the string already starts with its spelling. For text that came
        from somebody else use `encode_text`. ValueError for a lone surrogate.
        """
        ids = _encode(self._full, [text])[0]
        if add_bos and self.bos_token_id is not None and ids[:1] != [self.bos_token_id]:
            return [self.bos_token_id, *ids]
        return ids

    def encode_text(self, text: str) -> list[int]:
        """Ids of untrusted text: never a control token, whatever it spells. ValueError for a lone surrogate."""
        return _encode(self._plain, [text])[0]

    def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode_text` of each, in the library's threads; other Python threads run meanwhile."""
        return _encode(self._plain, texts)

    def control_id(self, spelling: str) -> int:
        """Id of a control token; ValueError if this tokenizer does not have it."""
        if spelling not in self.control_ids:
            raise ValueError(f"{self.path}: has no control token {spelling!r}")
        return self.control_ids[spelling]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of a whole list of ids; equals what a `text_stream` gives for them in any pieces."""
        stream = self.text_stream(skip_special_tokens)
        return "".join([*(stream.push(i) for i in ids), stream.finish()])

    def text_stream(self, skip_special_tokens: bool = True) -> Detokenizer:
        """A fresh incremental detokenizer for one output."""
        return Detokenizer(self.token_bytes, self._special_ids if skip_special_tokens else frozenset())

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that an id stands for; empty for an id without a token (the model's vocabulary may be padded)."""
        return self._bytes[token_id] if 0 <= token_id < len(self._bytes) else b""

    @cached_property
    def can_be_cut(self) -> bool:
        """Whether long texts may be encoded in pieces (pieces.py)."""
        return pieces.can_be_cut(self._definition)

    @cached_property
    def longest_token(self) -> int:
        """Bytes of the longest token: n bytes of text are at least n / longest_token tokens."""
        return max(map(len, self._bytes))

    def warm_up(self) -> None:
        """Builds what is otherwise built by the first request, which takes about a second at 128,000 tokens."""
        self.encode_text("")
        self.token_bytes(0)

    @cached_property
    def _bytes(self) -> list[bytes]:
        alphabet = byte_alphabet()
        table = [b""] * self.vocab_size
        for token, token_id in self._full.get_vocab(with_added_tokens=True).items():
            # A token with a character outside the byte alphabet (only added tokens) stands for its own UTF-8 bytes.
            if all(char in alphabet for char in token):
                table[token_id] = bytes(alphabet[char] for char in token)
            else:
                table[token_id] = token.encode("utf-8")
        return table

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        """The same tokenizer without added tokens: out of the list, and out of the BPE vocabulary if it holds them."""
        definition = dict(self._definition, added_tokens=[], post_processor=None, truncation=None, padding=None)
        model = dict(definition["model"])
        model["vocab"] = {token: i for token, i in model["vocab"].items() if token not in self.control_ids}
        definition["model"] = model
        return tokenizers.Tokenizer.from_str(json.dumps(definition))


def _require_byte_level(path: Path, definition: dict) -> None:
    """Our detokenizer works on bytes; another kind of decoder would need another one. Refused by name."""
    decoder = definition.get("decoder") or {}
    parts = decoder.get("decoders", [decoder])
    kinds = [part.get("type") for part in parts]
    if definition.get("model", {}).get("type") != "BPE" or set(kinds) != {"ByteLevel"}:
        raise ValueError(
            f"{path}: needs a BPE model with a ByteLevel decoder, "
            f"got model {definition.get('model', {}).get('type')!r} and decoder {kinds!r}"
        )


def _encode(tokenizer: tokenizers.Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    # Of the library's ways to encode only this one lets go of the interpreter, and it is the fastest: no offsets.
    encodings = tokenizer.encode_batch_fast([_unicode(text) for text in texts], add_special_tokens=False)
    return [encoding.ids for encoding in encodings]


def _unicode(text: str) -> str:
    """The text, if it can be written as UTF-8: half of a surrogate pair stands for bytes that were no text."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"character {error.start} is a lone surrogate: the input was not valid UTF-8 text") from None
    return text
