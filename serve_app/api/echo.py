"""Owns the prompt as it is shown again: its text, and where in it each token begins.
Never changes a text that a client sent: what it gave as text, it gets back letter for letter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from serve_app.api.detokenizer import Detokenizer


@dataclass(frozen=True, slots=True)
class Echo:
    """`offsets`: for each of the prompt's tokens, how many characters of `text` come before what it adds."""

    text: str
    offsets: tuple[int, ...]


def read_prompt(
    token_ids: Sequence[int], given: str | None, detokenizer: Detokenizer, special_texts: Mapping[int, str]
) -> Echo:
    """Read a prompt through the answer's detokenizer, which then goes on where the prompt ends: the answer's first
    word keeps its space, and a character that the prompt begins and the answer ends is shown, with the answer.

    `given` is the prompt's text, or None where the prompt was given as token ids: it is then their text as an answer
    would show it, without special tokens.
    """
    offsets: list[int] = []
    texts: list[str] = []
    at = 0
    held = False
    for token_id in token_ids:
        offsets.append(at)
        text = detokenizer.push(token_id)
        held = not text and (held or token_id not in special_texts)
        if given is None:
            texts.append(text)
            at += len(text)
        else:
            at = _advance(given, at, text, special_texts.get(token_id, ""))
    if held and given is not None:
        detokenizer.drop()  # a text that ends in U+FFFD looks incomplete; the answer must not bring it again
    return Echo("".join(texts) if given is None else given, tuple(offsets))


def _advance(given: str, at: int, text: str, special: str) -> int:
    """Where the next token begins, after one that shows as `text`, or is the special token `special`.

    A special token may be in the text, as a chat template writes it, or not, as the one that encoding puts first.
    """
    if special and not text:
        return at + len(special) if given.startswith(special, at) else at
    return min(at + len(text), len(given))
