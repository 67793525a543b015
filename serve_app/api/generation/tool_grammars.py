"""Owns the grammar of a chat's calls: which tools, by which schemas, from the first letter or where a call begins.
Never knows how a model writes a call."""

from __future__ import annotations

from serve_app.api.generation.field_grammars import refused
from serve_app.api.requests.schema import ChatRequest
from serve_app.api.requests.tool_choice import NamedFunction, must_call, names_of
from serve_app.grammars.check import find_fault
from serve_app.grammars.json_schema import json_schema
from serve_app.grammars.notation import Grammar, GrammarRefused, Json, Specials
from serve_app.parsing.call_grammar import CallableTool, arguments_schema
from serve_app.parsing.call_grammars import CALL_GRAMMARS


def call_grammar(request: ChatRequest, parser: str, specials: Specials, *, or_else: bool) -> tuple[str, Grammar]:
    """The field that asked for it, and its grammar. `or_else`: the answer may also be something else that is
    constrained, so that text around the calls is not free.

    Raises:
        ApiError: a tool's schema cannot be kept.
    """
    must = must_call(request.tool_choice)
    field = "tool_choice" if must else "tools"
    try:
        tools = callable_tools(request, all_strict=must)
        parallel = request.parallel_tool_calls is not False and not isinstance(request.tool_choice, NamedFunction)
        grammar = CALL_GRAMMARS[parser](tools, specials, parallel=parallel)
        calls = grammar.calls() if must or or_else else grammar.lazy()
        calls.bounded_text()  # before each schema is compiled: many large ones take long
        for tool in tools:
            if not tool.is_free:
                check(tool)
        return field, calls
    except GrammarRefused as error:
        raise refused(error.place or field, error.text) from error


def callable_tools(request: ChatRequest, *, all_strict: bool) -> list[CallableTool]:
    """`all_strict`: a call that must be made is constrained whatever the tool says of itself.

    Raises:
        GrammarRefused: two tools have one name.
    """
    names = names_of(request.tool_choice)
    allowed = None if names is None else frozenset(names)
    found: dict[str, CallableTool] = {}
    for number, tool in enumerate(request.tools or ()):
        function, place = tool.function, f"tools.{number}.function"
        if function.name in found:
            raise GrammarRefused(f"is the name of two tools, {function.name!r}", f"{place}.name")
        is_free = not (all_strict or function.strict)
        found[function.name] = CallableTool(
            function.name, function.kept_schema, f"{place}.parameters", is_free, None if is_free else function.kept_text
        )
    return [tool for name, tool in found.items() if allowed is None or name in allowed]


def check(tool: CallableTool) -> None:
    """Each alone, so that a refusal can say which.

    Raises:
        GrammarRefused: its schema is none, or cannot be kept.
    """
    if fault := find_fault(json_schema(arguments_schema(tool)).text()):
        raise GrammarRefused(fault, tool.place)


def num_bytes(tool: CallableTool, parser: str) -> int | None:
    """How long the grammar of its calls is; None where it has none."""
    try:
        grammar = CALL_GRAMMARS[parser]([tool], {}, parallel=False).calls()
        return len(grammar.text().encode())
    except GrammarRefused:
        return None


def can_be_kept(name: str, parameters: Json | None, parser: str) -> bool:
    """Whether calls of such a function can be constrained by its schema."""
    try:
        _calls_of(CallableTool(name, parameters, ""), parser)
    except GrammarRefused:
        return False
    return True


def fault_of(tool: CallableTool, parser: str) -> str:
    """Why calls of a tool of free text cannot be constrained by its grammar; empty if they can."""
    try:
        return find_fault(_calls_of(tool, parser).bounded_text())
    except GrammarRefused as refused:
        return refused.text


def _calls_of(tool: CallableTool, parser: str) -> Grammar:
    check(tool)
    return CALL_GRAMMARS[parser]([tool], {}, parallel=False).calls()
