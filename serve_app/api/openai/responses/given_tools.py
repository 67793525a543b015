"""Owns which tools a Responses request has: its own, and those that its items add, each once.
Never decides what the model is told of them; `toolbox` does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from serve_app.api.openai.responses.items import AdditionalToolsItem, Item
from serve_app.api.openai.responses.tools import (
    CustomTool,
    FunctionTool,
    HostedTool,
    LocalTool,
    NamespaceTool,
    ShellTool,
    Tool,
)


class GivenTool(NamedTuple):
    place: str
    namespace: str | None
    tool: FunctionTool | CustomTool | LocalTool | ShellTool | HostedTool

    @property
    def key(self) -> tuple[bool, str | None, str]:
        """What a request may have once: functions by their names, and all others by their types."""
        tool = self.tool
        if isinstance(tool, FunctionTool | CustomTool):
            return True, self.namespace, tool.name
        return False, None, tool.type


def given_tools(own: Sequence[Tool], items: Iterable[tuple[str, Item]]) -> list[GivenTool]:
    """List the tools in order: the request's `own`, then those of the items, with the items' places. Of tools with one
    name, keep the request's, or else that of the last item. Within one list both are kept, and refused later."""
    lists = [_flat("tools", own)]
    lists += [_flat(f"{place}.tools", item.tools) for place, item in items if isinstance(item, AdditionalToolsItem)]
    owner = dict[tuple[bool, str | None, str], int]()
    for number, given in enumerate(lists):
        owner |= {tool.key: number for tool in given if owner.get(tool.key) != 0}
    return [tool for number, given in enumerate(lists) for tool in given if owner[tool.key] == number]


def _flat(place: str, tools: Sequence[Tool]) -> list[GivenTool]:
    flat: list[GivenTool] = []
    for number, tool in enumerate(tools):
        at = f"{place}.{number}"
        if isinstance(tool, NamespaceTool):
            flat += [GivenTool(f"{at}.tools.{inner}", tool.name, one) for inner, one in enumerate(tool.tools)]
        else:
            flat.append(GivenTool(at, None, tool))
    return flat
