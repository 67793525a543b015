"""Owns how much text one token can stand for, which says of a long text how many tokens it has at least.
Never encodes, and says nothing of a tokenizer whose parts it does not know."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import tokenizers

_COMPOSED = 4
"""A character of NFC or NFKC stands for at most so many: no canonical decomposition is longer (UAX #15, table 1)."""
_SHRINKS = {"NFC": _COMPOSED, "NFKC": _COMPOSED, "NFD": 1, "NFKD": 1, "Lowercase": 1, "Prepend": 1, "ByteLevel": 1}
_KEEPS_ALL = ("ByteLevel", "Digits", "Metaspace", "UnicodeScripts", "Split", "Punctuation")


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """`num_chars`: the most characters that one token can stand for, those in `dropped` aside: they become no token."""

    num_chars: int
    dropped: str = ""

    def least_tokens(self, text: str) -> int:
        """A bound from below on the text's tokens; costs a look at the text for each dropped character."""
        kept = len(text) - sum(map(text.count, self.dropped))
        return -(-kept // self.num_chars)


def longest_span(core: tokenizers.Tokenizer) -> TokenSpan | None:
    """None where one token may stand for any number of characters.

    That is so where text can be dropped: by a normalizer or a pre-tokenizer, by a special token that takes the white
    space around it, or by an unknown token, which stands for a word of any length.
    """
    normalizers = list(_parts(core.normalizer, "normalizers"))
    splitters = list(_parts(core.pre_tokenizer, "pretokenizers"))
    factors = [_shrinks(part) for part in normalizers]
    if None in factors or not all(map(_keeps_all, splitters)) or _takes_spaces(core):
        return None
    vocabulary = core.get_vocab()
    is_byte_level = any(part["type"] == "ByteLevel" for part in (*normalizers, *splitters))
    dropped = _dropped(core.model, vocabulary, is_byte_level)
    if dropped is None or (dropped and any(part["type"] == "Replace" for part in normalizers)):
        return None
    return TokenSpan(max(map(len, vocabulary)) * math.prod(factor or 1 for factor in factors), dropped)


def _parts(part: Any, name: str) -> Iterator[dict[str, Any]]:
    """A normalizer or a pre-tokenizer as tokenizer.json has it, sequences taken apart."""
    waiting = [] if part is None else [json.loads(part.__getstate__())]
    while waiting:
        first = waiting.pop(0)
        if first["type"] == "Sequence":
            waiting = [*first[name], *waiting]
        else:
            yield first


def _shrinks(normalizer: dict[str, Any]) -> int | None:
    """How many characters may become one; None: any number."""
    if normalizer["type"] != "Replace":
        return _SHRINKS.get(normalizer["type"])
    pattern = normalizer["pattern"].get("String")
    return 1 if pattern and len(normalizer["content"]) >= len(pattern) else None


def _keeps_all(splitter: dict[str, Any]) -> bool:
    return splitter["type"] in _KEEPS_ALL and splitter.get("behavior") != "Removed"


def _takes_spaces(core: tokenizers.Tokenizer) -> bool:
    return any(token.lstrip or token.rstrip for token in core.get_added_tokens_decoder().values())


def _dropped(model: Any, vocabulary: Mapping[str, int], is_byte_level: bool) -> str | None:
    """The characters that the model has no tokens for and leaves out; None where it is not known to keep the others."""
    if not isinstance(model, tokenizers.models.BPE) or _marks_places(model):
        return None
    if is_byte_level:
        missing = [byte for letter, byte in BYTE_LETTERS.items() if letter not in vocabulary]
        # An unknown token may stand for many. Of a character of several bytes, those after the first are always there.
        if missing and (model.unk_token is not None or any(0x80 <= byte < 0xC0 for byte in missing)):
            return None
        return "".join(chr(byte) for byte in missing if byte < 0x80)
    has_bytes = model.byte_fallback and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    return "" if has_bytes else None


def _marks_places(model: tokenizers.models.BPE) -> bool:
    """Whether a character is looked up with a mark of its place in the word; the vocabulary may lack the marked one."""
    return bool(model.end_of_word_suffix or model.continuing_subword_prefix)


def byte_letters() -> dict[str, int]:
    """The letters that the byte-level decoder knows: a printable Latin-1 byte is itself, the n-th other is 256 + n."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte if byte in printable else 256 + others.index(byte)): byte for byte in range(256)}


BYTE_LETTERS = byte_letters()
