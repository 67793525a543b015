"""Owns OpenAI's two `logprobs` objects: which tokens belong to which piece of text, and how their scores are written.
Never asks for a score, and is never reached by a request that asked for none."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from engine.protocol import TokenLogprobs

MIN_LOGPROB = -9999.0
"""What OpenAI and vLLM write for minus infinity, which JSON does not have."""
_JSON_CHARS = 20  # of a token or an alternative, with its number: about


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """`text_offset`: characters of the choice's text before what this token adds. `scores` is None where nothing
    predicted the token, or the engine does not say."""

    token_id: int
    text_offset: int
    scores: TokenLogprobs | None
    of_prompt: bool = False


class TokenQueue:
    """Tokens of one answer in order, each until the text that it belongs to is sent.

        0 ........ sent ........ read            characters of the choice's text
        | taken    | held back   | open: tokens of a character that is not complete

    Text waits for a character's last byte and behind a stop string's beginning, and a token for its text. A token that
    gives no text of its own, such as a special one, goes with the text that follows, or at the end.
    """

    def __init__(self) -> None:
        self._read = 0
        self._sent = 0
        self._held: deque[tuple[int, ScoredToken]] = deque()  # with where the token's text ends
        self._open: list[ScoredToken] = []

    def add_prompt(
        self, token_ids: Sequence[int], offsets: Sequence[int], scores: Sequence[TokenLogprobs], num_chars: int
    ) -> None:
        """The whole prompt, first of all; `scores` are of the second token to the last."""
        self._read = num_chars
        for token_id, offset, score in zip(token_ids, offsets, (None, *scores), strict=True):
            self._held.append((num_chars, ScoredToken(token_id, offset, score, of_prompt=True)))

    def add(self, token_id: int, scores: TokenLogprobs | None, num_chars: int) -> None:
        """A token, and how much text it completed."""
        self._open.append(ScoredToken(token_id, self._read, scores))
        self.complete(num_chars)

    def complete(self, num_chars: int) -> None:
        """How much text the tokens of the character that is open turned out to be."""
        if num_chars:
            self._read += num_chars
            self._held.extend((self._read, token) for token in self._open)
            self._open.clear()

    def take(self, num_chars: int) -> tuple[ScoredToken, ...]:
        """The tokens whose text ends with the next `num_chars` that are sent, or before."""
        self._sent += num_chars
        taken = []
        while self._held and self._held[0][0] <= self._sent:
            taken.append(self._held.popleft()[1])
        return tuple(taken)

    def take_all(self) -> tuple[ScoredToken, ...]:
        """What is left when the answer has ended: also the tokens whose text a stop string cut off, as at vLLM."""
        taken = (*(token for _, token in self._held), *self._open)
        self._held.clear()
        self._open.clear()
        return taken


TokenText = Callable[[int], str]


def logprobs_json(tokens: Sequence[ScoredToken], token_text: TokenText) -> dict[str, Any]:
    return {
        "tokens": [token_text(token.token_id) for token in tokens],
        "token_logprobs": [None if token.scores is None else _number(token.scores.logprob) for token in tokens],
        "top_logprobs": [None if token.scores is None else _top(token.scores, token_text) for token in tokens],
        "text_offset": [token.text_offset for token in tokens],
    }


class TokenTexts(Protocol):
    """What a tokenizer says of one token."""

    def token_text(self, token_id: int) -> str: ...

    def token_bytes(self, token_id: int) -> list[int]: ...


def token_id_text(token_id: int) -> str:
    """vLLM's way to name a token where its text could be another's."""
    return f"token_id:{token_id}"


@dataclass(frozen=True, slots=True)
class TokenIdsAsTexts:
    """Names tokens by their ids; their bytes stay."""

    texts: TokenTexts

    def token_text(self, token_id: int) -> str:
        return token_id_text(token_id)

    def token_bytes(self, token_id: int) -> list[int]:
        return self.texts.token_bytes(token_id)


def chat_logprobs_json(tokens: Sequence[ScoredToken], texts: TokenTexts) -> dict[str, Any]:
    """The chat endpoint's object, in which a token has its bytes: several tokens may share a character."""
    scored = [token.scores for token in tokens if token.scores is not None]
    return {"content": [chat_token_json(scores, texts) for scores in scored], "refusal": None}


def chat_token_json(scores: TokenLogprobs, texts: TokenTexts) -> dict[str, Any]:
    top = [_chat_alternative(token_id, logprob, texts) for token_id, logprob in scores.top]
    return _chat_alternative(scores.token_id, scores.logprob, texts) | {"top_logprobs": top}


def _chat_alternative(token_id: int, logprob: float, texts: TokenTexts) -> dict[str, Any]:
    return {"token": texts.token_text(token_id), "logprob": _number(logprob), "bytes": texts.token_bytes(token_id)}


def prompt_logprobs_json(scores: Sequence[TokenLogprobs], texts: TokenTexts) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: nothing for the first token, and for each other its alternatives by token id."""
    return [None, *(_by_token_id(score, texts) for score in scores)]


def _by_token_id(scores: TokenLogprobs, texts: TokenTexts) -> dict[str, Any]:
    ranked: list[tuple[int, float, int | None]]
    ranked = [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(scores.top, 1)]
    if all(token_id != scores.token_id for token_id, _, _ in ranked):
        ranked.append((scores.token_id, scores.logprob, scores.rank))
    return {
        str(token_id): {"logprob": _number(logprob), "rank": rank, "decoded_token": texts.token_text(token_id)}
        for token_id, logprob, rank in ranked
    }


def json_chars(tokens: Sequence[ScoredToken]) -> int:
    """About how long the object will be, to decide where to write it."""
    scored = [token.scores for token in tokens if token.scores is not None]
    return _JSON_CHARS * (len(tokens) - len(scored)) + score_chars(scored)


def score_chars(scores: Sequence[TokenLogprobs]) -> int:
    return _JSON_CHARS * sum(1 + len(score.top) for score in scores)


def _top(scores: TokenLogprobs, token_text: TokenText) -> dict[str, float]:
    """Best first; the chosen token is always there, last where it is not among the best, as at OpenAI and vLLM.

    The keys are texts, and several tokens can have one text: then the chosen token has it, or else the best, and
    the others are named `token_id:7`, which is vLLM's way. The chosen token has one number in both places: clients
    compare the two for equality to see whether a token is the best.
    """
    chosen = token_text(scores.token_id)
    told: dict[str, float] = {}
    for token_id, logprob in scores.top:
        if token_id == scores.token_id:
            told[chosen] = _number(scores.logprob)
            continue
        text = token_text(token_id)
        told[token_id_text(token_id) if text == chosen or text in told else text] = _number(logprob)
    told.setdefault(chosen, _number(scores.logprob))
    return told


def _number(logprob: float) -> float:
    return logprob if logprob > MIN_LOGPROB else MIN_LOGPROB
