"""Builds the grammar of a chat's tool calls from its tools and their schemas.
It applies from the first character of an answer, or from where a call begins. Never knows how a model writes a call."""

from __future__ import annotations

from serve_app.api.generation.field_grammars import refused
from serve_app.api.requests.schema import ChatRequest
from serve_app.api.requests.tool_choice import NamedFunction, must_call, names_of
from serve_app.grammars.check import find_fault
from serve_app.grammars.json_schema import json_schema
from serve_app.grammars.notation import Grammar, GrammarRefused, Json, Specials
from serve_app.grammars.schema_work import check_tools
from serve_app.parsing.call_grammar import CallableTool, arguments_schema
from serve_app.parsing.call_grammars import CALL_GRAMMARS


def call_grammar(request: ChatRequest, parser: str, specials: Specials, *, or_else: bool) -> tuple[str, Grammar]:
    """Return the field that asked for the grammar, and the grammar. `or_else`: the answer may instead be other
    constrained text, so text around the calls is not free.

    Raises:
        ApiError: a tool's schema cannot be enforced.
    """
    must = must_call(request.tool_choice)
    field = "tool_choice" if must else "tools"
    try:
        tools = callable_tools(request, all_strict=must)
        parallel = request.parallel_tool_calls is not False and not isinstance(request.tool_choice, NamedFunction)
        grammar = CALL_GRAMMARS[parser](tools, specials, parallel=parallel)
        calls = grammar.calls() if must or or_else else grammar.lazy()
        calls.bounded_text()  # refuses by length before each schema is compiled: many large ones take long
        check_tools(tool.parameters for tool in tools if not tool.is_free)  # each alone is within its limits by now
        for tool in tools:
            if not tool.is_free:
                check(tool)
        return field, calls
    except GrammarRefused as error:
        raise refused(error.place or field, error.text) from error


def callable_tools(request: ChatRequest, *, all_strict: bool) -> list[CallableTool]:
    """List the tools that may be called. `all_strict`: constrain each of them, even if its `strict` is not set.


    Raises:
        GrammarRefused: two tools have one name.
    """
    names = names_of(request.tool_choice)
    allowed = None if names is None else frozenset(names)
    tools: dict[str, CallableTool] = {}
    for number, tool in enumerate(request.tools or ()):
        function, place = tool.function, f"tools.{number}.function"
        if function.name in tools:
            raise GrammarRefused(f"is the name of two tools, {function.name!r}", f"{place}.name")
        is_free = not (all_strict or function.strict)
        tools[function.name] = CallableTool(
            function.name, function.kept_schema, f"{place}.parameters", is_free, None if is_free else function.kept_text
        )
    return [tool for name, tool in tools.items() if allowed is None or name in allowed]


def check(tool: CallableTool) -> None:
    """Check one tool alone, so that a refusal can name it.

    Raises:
        GrammarRefused: the tool's schema is not valid, or cannot be enforced.
    """
    if fault := find_fault(json_schema(arguments_schema(tool)).text()):
        raise GrammarRefused(fault, tool.place)


def num_bytes(tool: CallableTool, parser: str) -> int | None:
    """Return the length of the grammar of the tool's calls; None if it has none."""
    try:
        grammar = CALL_GRAMMARS[parser]([tool], {}, parallel=False).calls()
        return len(grammar.text().encode())
    except GrammarRefused:
        return None


def can_be_kept(name: str, parameters: Json | None, parser: str) -> bool:
    """Whether calls of the function can be constrained by its schema."""
    try:
        _calls_of(CallableTool(name, parameters, ""), parser)
    except GrammarRefused:
        return False
    return True


def fault_of(tool: CallableTool, parser: str) -> str:
    """Say why calls of a free-text tool cannot be constrained by the tool's grammar; empty if they can."""
    try:
        return find_fault(_calls_of(tool, parser).bounded_text())
    except GrammarRefused as refused:
        return refused.text


def _calls_of(tool: CallableTool, parser: str) -> Grammar:
    check(tool)
    return CALL_GRAMMARS[parser]([tool], {}, parallel=False).calls()
