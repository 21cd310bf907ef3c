"""Token ids to text, one id at a time, never half a character.

Byte-level BPE cuts text anywhere, also inside a UTF-8 character, so bytes that do not yet make a character wait for
the next token. Whatever the cuts, the text is the same as decoding all bytes at once, with U+FFFD for what never
becomes a character.
"""

import codecs
from collections.abc import Callable
from functools import cache


class Detokenizer:
    """The text stream of one output."""

    def __init__(self, token_bytes: Callable[[int], bytes], skip: frozenset[int] = frozenset()) -> None:
        """token_bytes: the bytes of an id. skip: ids that leave no text."""
        self._token_bytes = token_bytes
        self._skip = skip
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The characters that this token completes; often one word, sometimes nothing."""
        if token_id in self._skip:
            return ""
        return self._decoder.decode(self._token_bytes(token_id))

    def finish(self) -> str:
        """U+FFFD for a character that never got its last bytes, else nothing."""
        return self._decoder.decode(b"", final=True)


@cache
def byte_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE (Radford et al. 2019, GPT-2): printable Latin-1 characters stand for
    themselves, the other 68 bytes for the characters from U+0100 on, in order."""
    themselves = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]  # 94 + 12 + 82 = 188
    others = [byte for byte in range(256) if byte not in themselves]  # 256 - 188 = 68
    table = {chr(byte): byte for byte in themselves}
    table.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return table
