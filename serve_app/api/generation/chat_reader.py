"""Separates the reasoning, the tool calls and the content of one chat answer.
Never knows a model's grammar, nor how a response writes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from serve_app.api.requests.schema import ChatRequest
from serve_app.api.requests.structured import JsonObjectFormat, JsonSchemaFormat
from serve_app.api.text.tokenizer import Tokenizer
from serve_app.engines.engine_client import ServedModel
from serve_app.parsing.deltas import Arguments, CallStart, Content, Delta
from serve_app.parsing.reasoning import Part, ReasoningParser
from serve_app.parsing.reasoning_parsers import REASONING_PARSERS, reasoning_parser
from serve_app.parsing.tool_parser import ToolParser
from serve_app.parsing.tools import TOOL_PARSERS

_PROMPT_END = 16  # tokens: enough for the longest tag that a template may end with


@dataclass(frozen=True, slots=True)
class Thought:
    """A piece of reasoning. `line`: the line break that separates it from the reasoning before it."""

    text: str
    line: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """Tells that the next content begins with a line break, which only separates it from the content before it."""


Item: TypeAlias = Thought | Line | Delta


@dataclass(frozen=True, slots=True)
class Read:
    """A piece of an answer, separated into its parts."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[CallStart | Arguments, ...] = ()


class ChatReader:
    """Reads one answer. Used once."""

    def __init__(
        self,
        reasoning: ReasoningParser | None,
        tools: ToolParser | None,
        *,
        shows_reasoning: bool = True,
        parallel: bool = True,
        is_either: bool = False,
    ) -> None:
        """`parallel`: show every call; without it, only the first, as in vLLM. `is_either`: the answer is either
        text or calls, never text with calls in it: a call that is quoted within JSON is text."""
        self._reasoning = reasoning
        self._tools = tools
        self._shows_reasoning = shows_reasoning
        self._parallel = parallel
        self._is_either = is_either
        self._undecided: list[str] = []

    @property
    def has_called(self) -> bool:
        return self._tools is not None and self._tools.calls > 0

    @property
    def is_in_call(self) -> bool:
        """Whether further arguments of the last call may follow the content that was read after it."""
        return self._tools is not None and self._tools.is_in_call

    @property
    def num_held(self) -> int:
        """How many characters at the end of the received text are in no item yet."""
        held = 0 if self._reasoning is None else self._reasoning.num_held
        if self._tools is None:
            return held
        return held + (sum(map(len, self._undecided)) if self._is_either else self._tools.num_waiting)

    def read(self, text: str, *, last: bool) -> Read:
        """Read the next text of the answer. `last`: no text follows."""
        items = self.read_in_order(text, last=last)
        reasoning = "".join(f"{item.line}{item.text}" for item in items if isinstance(item, Thought))
        content = "".join(item.text for item in items if isinstance(item, Content))
        return Read(reasoning, content, tuple(item for item in items if isinstance(item, CallStart | Arguments)))

    def read_in_order(self, text: str, *, last: bool) -> list[Item]:
        """Like `read`, but return everything in the order in which the text has it."""
        items: list[Item] = []
        for part in self._parts(text, last=last):
            if part.is_new and self._tools is not None and self._tools.frames_content:
                items += self._shown(self._tools.end_message())
            if part.is_reasoning:
                items += [Thought(part.text, part.line)] if self._shows_reasoning else []
                continue
            items += [Line()] if part.line else []
            items += self._read_content(f"{part.line}{part.text}")
        if last and self._tools is not None:
            items += self._read_content("", last=True)
        return items

    def _read_content(self, text: str, *, last: bool = False) -> list[Delta]:
        if self._tools is None:
            return [Content(text)] if text else []
        deltas = [*self._tools.push(text), *(self._tools.flush() if last else ())]
        return self._shown(self._decided(text, deltas, last) if self._is_either else deltas)

    def _decided(self, text: str, deltas: list[Delta], last: bool) -> list[Delta]:
        """Hold everything back while there is only white space; then keep to what comes first, text or calls."""
        self._undecided.append(text)
        first = next((delta for delta in deltas if not isinstance(delta, Content) or delta.text.strip()), None)
        if first is None and not last:
            return []
        self._is_either = False
        if first is not None and not isinstance(first, Content):
            return deltas
        self._tools = None
        undecided = "".join(self._undecided)
        return [Content(undecided)] if undecided else []

    def _parts(self, text: str, *, last: bool) -> Iterator[Part]:
        if self._reasoning is None:
            yield Part(is_reasoning=False, text=text)
            return
        yield from self._reasoning.push(text).parts
        if last:
            yield from self._reasoning.flush().parts

    def _shown(self, deltas: Sequence[Delta]) -> list[Delta]:
        return [delta for delta in deltas if self._parallel or isinstance(delta, Content) or delta.index == 0]


def needs_reader(request: ChatRequest, model: ServedModel) -> bool:
    return model.reasoning_parser is not None or request.may_call


def make_reader(request: ChatRequest, model: ServedModel, prompt_end: str) -> ChatReader:
    """Make a reader for one answer to a prompt that ends with `prompt_end`."""
    reasoning, tools = make_parsers(request, model, prompt_end)
    return ChatReader(
        reasoning,
        tools,
        shows_reasoning=request.shows_reasoning,
        parallel=request.parallel_tool_calls is not False,
        is_either=is_either(request, tools),
    )


def make_parsers(
    request: ChatRequest, model: ServedModel, prompt_end: str
) -> tuple[ReasoningParser | None, ToolParser | None]:
    """Make fresh parsers for one answer to a prompt that ends with `prompt_end`."""
    tools = None
    if request.may_call:
        assert model.tool_parser is not None, "checked when the request was prepared"
        tools = TOOL_PARSERS[model.tool_parser](request.shown_tools)
    return make_reasoning_parser(request, model, prompt_end), tools


def is_either(request: ChatRequest, tools: ToolParser | None) -> bool:
    """Whether the answer is either text or calls, never text with calls in it."""
    return _asks_for_json(request) and tools is not None and not tools.frames_content


def make_reasoning_parser(request: ChatRequest, model: ServedModel, prompt_end: str) -> ReasoningParser | None:
    """Make a fresh parser; None if the model does not mark its thoughts."""
    name = model.reasoning_parser
    return None if name is None else reasoning_parser(name, prompt_end, request.continued)


def _asks_for_json(request: ChatRequest) -> bool:
    """Whether the answer's text is to be JSON and nothing else."""
    outputs = request.structured_outputs
    return (
        isinstance(request.response_format, JsonObjectFormat | JsonSchemaFormat)
        or request.json_schema is not None
        or (outputs is not None and bool(outputs.json_ is not None or outputs.json_object))
    )


def prompt_end(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """The end of the prompt's text, which shows whether the answer begins inside a block of thoughts."""
    return tokenizer.decode(token_ids[-_PROMPT_END:])


def markers(request: ChatRequest, model: ServedModel) -> tuple[str, ...]:
    """The texts of the special tokens that a reader must see."""
    reasoning = REASONING_PARSERS[model.reasoning_parser].markers if model.reasoning_parser else ()
    calls = TOOL_PARSERS[model.tool_parser].markers if request.may_call and model.tool_parser else ()
    return (*reasoning, *calls)
