"""Owns what a model is told of a request's tools, and which tool a call of the model is for.
Never reads a call's arguments."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from typing import Any, ClassVar, TypeAlias

from pydantic import InstanceOf

from serve_app.api.generation.field_grammars import refused
from serve_app.api.generation.tool_grammars import can_be_kept, fault_of, num_bytes
from serve_app.api.openai.responses.given_tools import GivenTool
from serve_app.api.openai.responses.input_text import INPUT
from serve_app.api.openai.responses.local_tools import LocalKind, description, parameters
from serve_app.api.openai.responses.patterns import Patterns
from serve_app.api.openai.responses.tools import (
    CustomTool,
    FunctionTool,
    GrammarFormat,
    HostedTool,
    LocalTool,
    ShellTool,
)
from serve_app.api.requests.messages import MAX_TOOLS, FunctionDefinition, ToolDefinition
from serve_app.api.requests.strict_model import Unsupported
from serve_app.engines.engine_client import ServedModel
from serve_app.grammars.lark_rules import Lark
from serve_app.grammars.notation import MAX_UNASKED_BYTES, GrammarRefused
from serve_app.grammars.schema_work import check_tools
from serve_app.grammars.tool_texts import ToolText
from serve_app.parsing.call_grammar import CallableTool

Json = dict[str, Any]
_MOST = 128
"""Most characters of a function's name."""
_FREE = ToolText()


class TextFunction(FunctionDefinition):
    """A free-form tool as a function of one argument. No client writes it."""

    hints: ClassVar[Unsupported] = {}
    text: InstanceOf[ToolText]

    @property
    def kept_schema(self) -> Json | None:
        return _schema_of(self.text)

    @property
    def kept_text(self) -> Lark | None:
        return self.text.nested


def _schema_of(given: ToolText) -> Json:
    text = {"type": "string"} | ({} if given.pattern is None else {"pattern": given.pattern})
    return {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}


OfferedTool: TypeAlias = FunctionTool | CustomTool | LocalTool | ShellTool
Elsewhere: TypeAlias = LocalTool | ShellTool | HostedTool


@dataclass(frozen=True, slots=True)
class Offer:
    """A tool that the model is told of. `shown`: the name that the model reads; `place`: the tool's field."""

    tool: OfferedTool
    namespace: str | None
    shown: str
    place: str
    strict: bool = False
    text: ToolText = _FREE
    """What the text's grammar allows."""
    fault: str = ""
    """Why its grammar cannot be kept."""

    @property
    def is_text(self) -> bool:
        return isinstance(self.tool, CustomTool)

    @property
    def local_kind(self) -> LocalKind | None:
        """Return the tool's kind if its calls have a shape of their own, or None."""
        return self.tool.name if isinstance(self.tool, LocalTool | ShellTool) else None

    @property
    def kept_field(self) -> str:
        """The field that constrains a call."""
        if self.local_kind is not None:
            return self.place
        return f"{self.place}.{'format' if self.is_text else 'parameters'}"

    @property
    def is_strict_by_default(self) -> bool:
        """Return whether the tool does not say if it is strict."""
        return self.local_kind is not None or (isinstance(self.tool, FunctionTool) and self.tool.strict is None)

    @property
    def kept_schema(self) -> Json | None:
        """The schema of constrained arguments."""
        return self._function().kept_schema

    def definition(self) -> ToolDefinition:
        return ToolDefinition(type="function", function=self._function())

    def _function(self) -> FunctionDefinition:
        tool = self.tool
        if isinstance(tool, FunctionTool):
            return FunctionDefinition(
                name=self.shown, description=tool.description, parameters=tool.parameters, strict=self.strict
            )
        if not isinstance(tool, CustomTool):
            return FunctionDefinition(
                name=self.shown, description=_purpose(tool), parameters=parameters(tool.name), strict=self.strict
            )
        return TextFunction(
            name=self.shown,
            description=_described(tool),
            parameters=_schema_of(_FREE),
            strict=self.strict,
            text=self.text,
        )


def _described(tool: CustomTool) -> str:
    told = tool.description or ""
    if isinstance(tool.format, GrammarFormat):
        what = {"lark": "this Lark grammar", "regex": "this regular expression"}[tool.format.syntax]
        told += f"\n\nThe argument {INPUT} is text of {what}:\n{tool.format.definition}"
    return told.strip() or f"Takes any text as its argument {INPUT}."


def _purpose(tool: LocalTool | ShellTool) -> str:
    skills = (tool.environment or {}).get("skills") if isinstance(tool, ShellTool) else None
    told = f"\n\nSkills:\n{json.dumps(skills, ensure_ascii=False)}" if skills else ""
    return description(tool.name) + told


class Toolbox:
    """The tools of a request that the model is told of, in order. `hosted`: those that would run on OpenAI's servers,
    with their places."""

    def __init__(self, offers: Sequence[Offer] = (), hosted: Sequence[tuple[str, Elsewhere]] = ()) -> None:
        self.offers = tuple(offers)
        self.hosted = tuple(hosted)
        self._by_shown = {offer.shown: offer for offer in self.offers}
        self._local = {offer.local_kind: offer.shown for offer in self.offers}
        self._shown = {(offer.namespace, offer.tool.name): offer.shown for offer in self.offers}
        self._named: defaultdict[tuple[bool, str], list[Offer]] = defaultdict(list)
        for offer in self.offers:
            if offer.local_kind is None:
                for name in {offer.tool.name, offer.shown}:
                    self._named[offer.is_text, name].append(offer)

    def called(self, shown: str) -> Offer | None:
        """Return the tool that a model's call is for, or None for one that the model made up."""
        return self._by_shown.get(shown)

    def shown_name(self, namespace: str | None, name: str) -> str:
        """Return the name that the model reads of a tool, which may have been offered in an earlier request."""
        if namespace is None:
            return name
        return self._shown.get((namespace, name)) or joined(namespace, name)

    def local_name(self, name: str) -> str:
        """Return the name that the model reads of a tool whose calls have a shape of their own."""
        return next((shown for kind, shown in self._local.items() if kind == name), name)

    def chosen_local(self, kind: LocalKind) -> str:
        """Return the name that the model reads of a chosen tool of this kind.

        Raises:
            ApiError: it is not offered.
        """
        if kind not in self._local:
            raise refused("tool_choice", f"names {kind}, which is not among the tools")
        return self._local[kind]

    def chosen(self, namespace: str | None, name: str, *, is_text: bool) -> str:
        """Return the name that the model reads of a chosen tool.

        Raises:
            ApiError: no tool or more than one has this name.
        """
        offers = self._named.get((is_text, name), ())
        ways = (
            [offer for offer in offers if (offer.namespace, offer.tool.name) == (namespace, name)],
            [offer for offer in offers if namespace is None and offer.shown == name],
            [offer for offer in offers if namespace is None and offer.tool.name == name],
        )
        found = next((way for way in ways if way), [])
        if len(found) > 1 and found[0].namespace is not None:
            raise refused("tool_choice", f"names {name!r}, which is the name of tools of several namespaces")
        if not found:
            kind = "custom tool" if is_text else "function"
            raise refused("tool_choice", f"names the {kind} {name!r}, which is not among the tools")
        return found[0].shown

    def names(self) -> dict[str, str]:
        """Map the names of the chat's tools to the names in the request."""
        found = {}
        for number, offer in enumerate(self.offers):
            found[f"tools.{number}.function.parameters"] = offer.kept_field
            found[f"tools.{number}.function.name"] = f"{offer.place}.name"
        return found


def joined(namespace: str, name: str) -> str:
    """Return the function's name of a tool in a namespace. A long one is cut, and made unique by its digest."""
    both = f"{namespace.rstrip('_')}__{name}"
    return both if len(both) <= _MOST else _distinct(both)


def _distinct(name: str, number: int = 1) -> str:
    """Cut a name and append a digest. `number`: the attempt's, from 1."""
    told = name if number == 1 else f"{name} {number}"
    return f"{name[: _MOST - 9]}_{hashlib.sha256(told.encode()).hexdigest()[:8]}"


def _free(name: str, taken: set[str]) -> str:
    """Return the name, or one made from it if another tool has it. Adds it to `taken`."""
    attempts = (_distinct(name, number) for number in count(1))
    shown = next(one for one in chain((name,), attempts) if one not in taken)
    taken.add(shown)
    return shown


def open_toolbox(given: Sequence[GivenTool], model: ServedModel) -> Toolbox:
    """Build the toolbox. A tool that does not say whether it is strict is, if what it asks for can be kept.

    Raises:
        ApiError: there are too many tools, two of a namespace have one name, two are of one type whose calls have no
            name, or the grammars of all tools are too large together.
    """
    if len(given) > MAX_TOOLS:  # before any of them is looked at, because each takes time
        raise refused("tools", f"should be at most {MAX_TOOLS} with those of namespaces, but there are {len(given)}")
    offers: list[Offer] = []
    hosted: list[tuple[str, Elsewhere]] = []
    patterns, in_namespaces = Patterns(), set[tuple[str, str]]()
    taken = {tool.name for _, space, tool in given if space is None and isinstance(tool, FunctionTool | CustomTool)}
    for place, namespace, tool in given:
        if isinstance(tool, FunctionTool | CustomTool):
            shown = tool.name
            if namespace is not None:
                if (namespace, tool.name) in in_namespaces:
                    text = f"is the name of two tools of the namespace {namespace!r}, {tool.name!r}"
                    raise refused(f"{place}.name", text)
                in_namespaces.add((namespace, tool.name))
                shown = _free(joined(namespace, tool.name), taken)
            offers.append(_offer(tool, namespace, shown, place, model, patterns))
        elif isinstance(tool, HostedTool) or tool.is_elsewhere:
            hosted.append((place, tool))
        else:
            if any(offer.local_kind == tool.name for offer in offers):
                raise refused(f"{place}.type", f"a second tool of type {tool.name}: a call would be of either")
            offers.append(Offer(tool, None, _free(tool.name, taken), place))
    return Toolbox(offers if model.tool_parser is None else _with_defaults(offers, model.tool_parser), hosted)


def _offer(
    tool: FunctionTool | CustomTool,
    namespace: str | None,
    shown: str,
    place: str,
    model: ServedModel,
    patterns: Patterns,
) -> Offer:
    """Make the offer of a tool. A function that does not say whether it is strict is not."""
    if isinstance(tool, FunctionTool):
        return Offer(tool, namespace, shown, place, bool(tool.strict))
    parser = model.tool_parser
    try:
        text = patterns.tool_text(tool, f"{place}.format")
    except GrammarRefused as error:
        return Offer(tool, namespace, shown, place, fault=error.text)
    kept = CallableTool(shown, _schema_of(text), "", text=text.nested)
    if parser is not None and (fault := fault_of(kept, parser)):
        return Offer(tool, namespace, shown, place, fault=fault)
    return Offer(tool, namespace, shown, place, parser is not None, text)


def _with_defaults(offers: Sequence[Offer], parser: str) -> list[Offer]:
    """Make tools that do not say whether they are strict so if their schemas can be kept, but none of them if the
    grammar of all would be too large, or too much work."""
    total, schemas = 0, []
    for offer in offers:
        if offer.strict or offer.is_strict_by_default:
            tool = CallableTool(offer.shown, offer.kept_schema, "", text=offer.text.nested)
            if (size := num_bytes(tool, parser)) is not None:  # the others stay unstrict, and make no work
                total += size
                schemas.append(tool.parameters)
        if total > MAX_UNASKED_BYTES:
            return list(offers)
    try:
        check_tools(schemas)  # before the first is compiled
    except GrammarRefused:
        return list(offers)
    return [
        replace(offer, strict=can_be_kept(offer.shown, offer.kept_schema, parser))
        if offer.is_strict_by_default
        else offer
        for offer in offers
    ]
