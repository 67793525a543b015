"""Writes the JSON of answers, for chat and for plain completions: whole bodies and the chunks of a stream.
Never decides what an answer says."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from engine.protocol import TokenLogprobs, Usage
from serve_app.api.generation.chat_reader import ChatReader
from serve_app.api.generation.completion import Piece
from serve_app.api.generation.logprobs import (
    TokenIdsAsTexts,
    chat_logprobs_json,
    logprobs_json,
    prompt_logprobs_json,
    token_id_text,
)
from serve_app.api.openai.chat_message import delta_json, message_json
from serve_app.api.text.tokenizer import Tokenizer

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Shown:
    """What a response shows about tokens."""

    logprobs: bool = False
    token_ids: bool = False
    prompt_logprobs: bool = False
    as_token_ids: bool = False
    """Log-probabilities name tokens as `token_id:7` instead of by their texts."""
    eos_token_id: int | None = None
    """The model's own end of sequence, which `stop_reason` does not report, as in vLLM."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a response may show of a choice's prompt. `scores`: those of its second and later tokens, if requested."""

    token_ids: Sequence[int]
    scores: Sequence[TokenLogprobs] | None = None


class Shape(Protocol):
    """Writes what differs between the two endpoints. A choice is an item of `choices`."""

    object: ClassVar[str]
    chunk_object: ClassVar[str]
    opens_in_order: ClassVar[bool]
    """Whether a choice's first chunk follows those of all choices before it. OpenAI's SDK appends new choices to a list
    that it then indexes."""

    def whole(self, index: int, piece: Piece, prompt: Prompt) -> Json: ...

    def opening(self, index: int, prompt: Prompt) -> Json | None:
        """Write the choice of a stream's first chunk, sent before any text; None if the endpoint has no such chunk."""
        ...

    @property
    def is_plain(self) -> bool:
        """Whether later chunks show their pieces' text unchanged."""
        ...

    def delta(self, index: int, piece: Piece) -> Json | None:
        """Write the choice of a later chunk; None if the piece has nothing to show yet."""
        ...

    def beside(self, prompt: Prompt) -> Json:
        """Write the fields about the first prompt that stand beside `choices` in a body and in a stream's first
        chunk."""
        ...


class ChatShape:
    object: ClassVar[str] = "chat.completion"
    chunk_object: ClassVar[str] = "chat.completion.chunk"
    opens_in_order: ClassVar[bool] = True

    def __init__(
        self,
        tokenizer: Tokenizer,
        shown: Shown,
        make_reader: Callable[[], ChatReader] | None = None,
        *,
        names_function: bool = False,
    ) -> None:
        """`make_reader`: given if the answer may have thoughts or calls. `names_function`: the client chose the
        function to call, so the finish reason stays `stop`, as with OpenAI."""
        self._tokenizer = tokenizer
        self._shown = shown
        self._make_reader = make_reader
        self._names_function = names_function
        self._readers: dict[int, ChatReader] = {}

    @property
    def is_plain(self) -> bool:
        return self._make_reader is None

    def whole(self, index: int, piece: Piece, prompt: Prompt) -> Json:
        message: Json = {"role": "assistant", "content": piece.text, "refusal": None, "annotations": []}
        message |= {"reasoning": None, "reasoning_content": None}
        if self._make_reader is not None:
            message |= message_json(self._make_reader(), piece.text)
        choice = self._choice(index, "message", message, piece, has_called="tool_calls" in message)
        return {"token_ids": None} | choice

    def opening(self, index: int, prompt: Prompt) -> Json | None:
        return self._choice(index, "delta", {"role": "assistant", "content": ""}, Piece(""))

    def delta(self, index: int, piece: Piece) -> Json | None:
        if self._make_reader is None:
            return self._choice(index, "delta", {"content": piece.text} if piece.text else {}, piece)
        reader = self._readers.get(index) or self._readers.setdefault(index, self._make_reader())
        delta = delta_json(reader.read(piece.text, last=piece.finish_reason is not None))
        if not delta and not piece.tokens and piece.finish_reason is None:
            return None
        return self._choice(index, "delta", delta, piece, has_called=reader.has_called)

    def beside(self, prompt: Prompt) -> Json:
        return _of_prompt(prompt, self._shown, self._tokenizer)

    def _choice(self, index: int, key: str, value: Any, piece: Piece, *, has_called: bool = False) -> Json:
        wanted = self._shown.logprobs and piece.tokens is not None
        texts = TokenIdsAsTexts(self._tokenizer) if self._shown.as_token_ids else self._tokenizer
        logprobs = chat_logprobs_json(piece.tokens or (), texts) if wanted else None
        choice = _choice(index, key, value, piece, logprobs, self._shown)
        if has_called and piece.finish_reason == "stop" and not self._names_function:
            choice["finish_reason"] = "tool_calls"
        return choice


class TextShape:
    object: ClassVar[str] = "text_completion"
    chunk_object: ClassVar[str] = "text_completion"
    opens_in_order: ClassVar[bool] = False  # it has its own prompt's scores, which may not be known yet
    is_plain: ClassVar[bool] = True

    def __init__(self, tokenizer: Tokenizer, shown: Shown) -> None:
        self._tokenizer = tokenizer
        self._shown = shown

    def whole(self, index: int, piece: Piece, prompt: Prompt) -> Json:
        return self.delta(index, piece) | _of_prompt(prompt, self._shown, self._tokenizer)

    def opening(self, index: int, prompt: Prompt) -> Json | None:
        fields = _without_nulls(_of_prompt(prompt, self._shown, self._tokenizer))
        # vLLM's clients read each chunk's tokens, so the first chunk has an empty list.
        return self.delta(index, Piece("", tokens=())) | fields if fields else None

    def delta(self, index: int, piece: Piece) -> Json:
        """Write the choice, whole or in part. Fields that vLLM's clients read in every chunk are null if not shown."""
        wanted = self._shown.logprobs and piece.tokens is not None
        name = token_id_text if self._shown.as_token_ids else self._tokenizer.token_text
        logprobs = logprobs_json(piece.tokens or (), name) if wanted else None
        nulls = {"token_ids": None, "prompt_token_ids": None, "stop_reason": None}
        return nulls | _choice(index, "text", piece.text, piece, logprobs, self._shown)

    def beside(self, prompt: Prompt) -> Json:
        return {}


def _of_prompt(prompt: Prompt, shown: Shown, tokenizer: Tokenizer) -> Json:
    """Write both fields about a prompt, null if not requested: vLLM's clients read both in every whole answer."""
    return {
        "prompt_token_ids": prompt.token_ids if shown.token_ids else None,
        "prompt_logprobs": prompt_logprobs_json(prompt.scores or (), tokenizer) if shown.prompt_logprobs else None,
    }


def _without_nulls(fields: Json) -> Json:
    return {name: value for name, value in fields.items() if value is not None}


def _choice(index: int, key: str, value: Any, piece: Piece, logprobs: Json | None, shown: Shown) -> Json:
    choice = {"index": index, key: value, "logprobs": logprobs, "finish_reason": piece.finish_reason}
    if piece.finish_reason is not None:
        choice |= _stop_json(piece, shown)
    if shown.token_ids and piece.tokens is not None:
        choice["token_ids"] = [token.token_id for token in piece.tokens if not token.of_prompt]
    return choice


def _stop_json(last: Piece, shown: Shown) -> Json:
    """Write what ended the answer in vLLM's field and in SGLang's, which differ for the end of sequence."""
    is_eos = last.stop_string is None and last.stop_token_id == shown.eos_token_id
    return {"stop_reason": None if is_eos else last.matched_stop, "matched_stop": last.matched_stop}


@dataclass(frozen=True, slots=True)
class Envelope:
    """Writes what every body and chunk of one answer has in common."""

    id: str
    model: str
    shape: Shape
    created: int = field(default_factory=lambda: int(time.time()))

    def body(self, pieces: Sequence[Piece], prompts: Sequence[Prompt], usage: Json) -> Json:
        """Write a whole body. `prompts`: the prompt of each choice."""
        whole = self.shape.whole
        choices = [whole(index, *answer) for index, answer in enumerate(zip(pieces, prompts, strict=True))]
        named = self._named(self.shape.object, choices)
        return named | {"usage": usage} | self.shape.beside(prompts[0])

    def opening(self, index: int, prompt: Prompt) -> Json | None:
        """Write the first chunk of a choice; None if the endpoint has no such chunk."""
        choice = self.shape.opening(index, prompt)
        if choice is None:
            return None
        return self.chunk([choice]) | (_without_nulls(self.shape.beside(prompt)) if index == 0 else {})

    def delta(self, index: int, piece: Piece) -> Json | None:
        choice = self.shape.delta(index, piece)
        return None if choice is None else self.chunk([choice])

    def chunk(self, choices: list[Json]) -> Json:
        return self._named(self.shape.chunk_object, choices)

    def _named(self, name: str, choices: list[Json]) -> Json:
        return {"id": self.id, "object": name, "created": self.created, "model": self.model, "choices": choices}


def usage_json(usage: Usage, reasoning_tokens: int | None) -> Json:
    """`reasoning_tokens`: how many of the answer's tokens are thoughts; None if the model does not mark them."""
    fields: Json = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
    if reasoning_tokens is not None:
        fields["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
    return fields
