"""Owns the translation of a Responses request's `tool_choice` to a chat request's.
Never knows how a call is constrained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from serve_app.api.generation.field_grammars import refused
from serve_app.api.openai.responses.choice import ChosenCustom, ChosenFunction, ChosenLocal, ChosenTools
from serve_app.api.openai.responses.passing import pass_over, unsupported
from serve_app.api.openai.responses.schema import ResponsesRequest
from serve_app.api.openai.responses.toolbox import Elsewhere, Toolbox
from serve_app.api.openai.responses.tools import HostedTool

Json = dict[str, Any]
_FREE = "the text is free: its format"
_CANNOT = "cannot be kept"


def choice_of(request: ResponsesRequest, toolbox: Toolbox) -> Any:
    """Return the chat's `tool_choice`.

    Raises:
        ApiError: it names a tool that cannot be called, or forces a call whose grammar cannot be kept.
    """
    choice, must, named = _read(request, toolbox)
    names = None if named is None else frozenset(named)
    for offer in toolbox.offers:
        if not offer.fault or choice == "none" or (must and names is not None and offer.shown not in names):
            continue
        if must:
            raise refused(offer.kept_field, f"the grammar of the tool {offer.tool.name!r} {_CANNOT}: {offer.fault}")
        pass_over("tools.format", offer.kept_field, f"{_FREE} {_CANNOT}: {offer.fault}")
    return choice


def _read(request: ResponsesRequest, toolbox: Toolbox) -> tuple[Any, bool, list[str] | None]:
    """Return the chat's choice, whether a call must be made, and which functions it is limited to, if any."""
    given = request.tool_choice
    if isinstance(given, ChosenFunction | ChosenCustom | ChosenLocal):
        name = _shown(given, toolbox)
        return _named(name), True, [name]
    if isinstance(given, ChosenTools):
        return _allowed(given, toolbox)
    if given == "required" and not toolbox.offers:
        _refuse_hosted("tool_choice", [tool for _, tool in toolbox.hosted])
    return given, given == "required", None


def _allowed(given: ChosenTools, toolbox: Toolbox) -> tuple[Any, bool, list[str] | None]:
    names, others = [], []
    for number, one in enumerate(given.tools):
        if isinstance(one, HostedTool):
            pass_over(f"tools.{one.type}", f"tool_choice.tools.{number}", f"this server runs no {one.type}")
            others.append(one)
        else:
            names.append(_shown(one, toolbox))
    must = given.mode == "required"
    if not names:
        if must:
            _refuse_hosted("tool_choice.tools", others)
        return "none", False, []
    tools = {"mode": given.mode, "tools": [_named(name) for name in names]}
    return {"type": "allowed_tools", "allowed_tools": tools}, must, names


def _refuse_hosted(field: str, tools: Sequence[Elsewhere]) -> None:
    if tools:
        raise unsupported(field, f"{tools[0].type} cannot be called: this server runs no such tool")


def _shown(chosen: ChosenFunction | ChosenCustom | ChosenLocal, toolbox: Toolbox) -> str:
    if isinstance(chosen, ChosenLocal):
        return toolbox.chosen_local(chosen.type)
    return toolbox.chosen(chosen.namespace, chosen.name, is_text=isinstance(chosen, ChosenCustom))


def _named(name: str) -> Json:
    return {"type": "function", "function": {"name": name}}
