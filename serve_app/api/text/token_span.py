"""Bounds how much text one token can stand for, and with it from below how many tokens a long text has.
Never encodes, and gives no bound for a tokenizer with parts that it does not know."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import tokenizers

_COMPOSED = 4
"""A character after NFC or NFKC stands for at most this many characters before: no canonical decomposition is longer
(UAX #15, table 1)."""
_SHRINKS = {"NFC": _COMPOSED, "NFKC": _COMPOSED, "NFD": 1, "NFKD": 1, "Lowercase": 1, "Prepend": 1, "ByteLevel": 1}
_KEEPS_ALL = ("ByteLevel", "Digits", "Metaspace", "UnicodeScripts", "Split", "Punctuation")


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """`num_chars`: the most characters that one token can stand for, not counting those in `dropped`, which become
    none.
    """

    num_chars: int
    dropped: str = ""

    def least_tokens(self, text: str) -> int:
        """Bound the text's number of tokens from below. Scans the text once for each dropped character."""
        kept = len(text) - sum(map(text.count, self.dropped))
        return -(-kept // self.num_chars)


def longest_span(core: tokenizers.Tokenizer) -> TokenSpan | None:
    """Find the most text that one token can stand for; None if there is no limit.

    There is none if text can be dropped: by a normalizer or a pre-tokenizer, by a special token that absorbs the white
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
    """Yield the parts of a normalizer or a pre-tokenizer as in tokenizer.json, with sequences flattened."""
    waiting = [] if part is None else [json.loads(part.__getstate__())]
    while waiting:
        first = waiting.pop(0)
        if first["type"] == "Sequence":
            waiting = [*first[name], *waiting]
        else:
            yield first


def _shrinks(normalizer: dict[str, Any]) -> int | None:
    """Return how many characters may become one; None for any number."""
    if normalizer["type"] != "Replace":
        return _SHRINKS.get(normalizer["type"])
    pattern = normalizer["pattern"].get("String")
    return 1 if pattern and len(normalizer["content"]) >= len(pattern) else None


def _keeps_all(splitter: dict[str, Any]) -> bool:
    return splitter["type"] in _KEEPS_ALL and splitter.get("behavior") != "Removed"


def _takes_spaces(core: tokenizers.Tokenizer) -> bool:
    return any(token.lstrip or token.rstrip for token in core.get_added_tokens_decoder().values())


def _dropped(model: Any, vocabulary: Mapping[str, int], is_byte_level: bool) -> str | None:
    """Return the characters without tokens, which the model leaves out; None if it may leave out others, too."""
    if not isinstance(model, tokenizers.models.BPE) or _marks_places(model):
        return None
    if is_byte_level:
        missing = [byte for character, byte in BYTE_CHARACTERS.items() if character not in vocabulary]
        # An unknown token may stand for many characters. The later bytes of a multi-byte character must all have
        # tokens.
        if missing and (model.unk_token is not None or any(0x80 <= byte < 0xC0 for byte in missing)):
            return None
        return "".join(chr(byte) for byte in missing if byte < 0x80)
    has_bytes = model.byte_fallback and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    return "" if has_bytes else None


def _marks_places(model: tokenizers.models.BPE) -> bool:
    """Whether characters are looked up with a mark of their place in the word, which the vocabulary may lack."""
    return bool(model.end_of_word_suffix or model.continuing_subword_prefix)


def byte_characters() -> dict[str, int]:
    """Map the byte-level decoder's characters to bytes: a printable Latin-1 byte is its own character, the n-th other
    one has the character with the code point 256 + n."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte if byte in printable else 256 + others.index(byte)): byte for byte in range(256)}


BYTE_CHARACTERS = byte_characters()
