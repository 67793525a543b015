"""Owns the translation of a Responses request's items to the messages of a chat.
Never renders them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from serve_app.api.generation.field_grammars import refused
from serve_app.api.generation.sealing import Seal
from serve_app.api.openai.responses.input_text import arguments_of
from serve_app.api.openai.responses.items import (
    AdditionalToolsItem,
    CallItem,
    CustomCallItem,
    Item,
    ItemImage,
    ItemPart,
    MessageItem,
    OutputItem,
    ReasoningItem,
)
from serve_app.api.openai.responses.passing import pass_over
from serve_app.api.openai.responses.replays import Answered, Called, Replay
from serve_app.api.openai.responses.toolbox import Toolbox
from serve_app.api.requests.content_parts import IMAGE_PLACE
from serve_app.api.requests.messages import MAX_TOOLS

Json = dict[str, Any]


class Turns:
    """Turns the items of one request into messages. `seal` opens the thoughts that come back."""

    def __init__(self, toolbox: Toolbox, seal: Seal | None) -> None:
        self._toolbox = toolbox
        self._seal = seal
        self._messages: list[Json] = []
        self._has_just_spoken = False
        """Whether the last item was an assistant's message."""
        self._shown: list[Json] = []
        """Images of outputs. They become the user's, after all outputs, as in `image_prompt.turns`."""
        self.images: list[str] = []
        """The places of the messages' images, in order."""

    def messages(self, items: Iterable[tuple[str, Item]]) -> list[Json]:
        """Read items with their places in the request. References are already resolved.

        Raises:
            ApiError: a turn has too many calls, or the server is strict and an item is a hint.
        """
        for place, item in items:
            self._add(item, place)
        self._show()
        for message in self._messages:
            if "reasoning_content" in message:
                message["reasoning_content"] = "".join(message["reasoning_content"])
            if message["content"] is None and "tool_calls" not in message:
                message["content"] = ""
        return self._messages

    def _add(self, item: Item, place: str) -> None:
        if isinstance(item, AdditionalToolsItem):
            return  # it says nothing: the toolbox has its tools
        if not isinstance(item, OutputItem | Replay):
            self._show()
        match item:
            case MessageItem(role="assistant"):
                self._say(_text(item.content))
            case MessageItem():
                self._messages.append({"role": item.role, "content": self._parts(item.content, f"{place}.content")})
            case ReasoningItem():
                self._think(self._thoughts(item, place))
            case CallItem():
                self._call(item.call_id, self._toolbox.shown_name(item.namespace, item.name), item.arguments, place)
            case CustomCallItem():
                name = self._toolbox.shown_name(item.namespace, item.name)
                self._call(item.call_id, name, arguments_of(item.input), place)
            case OutputItem():
                self._answer(item.call_id, _text(item.output))
                parts = self._parts(item.output, f"{place}.output")
                self._shown += [part for part in parts if isinstance(part, dict) and part["type"] == "image_url"]
            case Replay():
                for told in item.told:
                    self._replay(told, place)

    def _replay(self, told: Called | Answered, place: str) -> None:
        if isinstance(told, Called):
            given = told.arguments
            arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
            self._call(told.call_id, self._toolbox.local_name(told.name), arguments, place)
        else:
            self._answer(told.call_id, told.text)

    def _call(self, call_id: str, name: str, arguments: str, place: str) -> None:
        self._has_just_spoken = False
        calls = self._turn().setdefault("tool_calls", [])
        if len(calls) == MAX_TOOLS:
            text = f"the assistant should make at most {MAX_TOOLS} calls before their outputs, but this is one more"
            raise refused(place, text)
        calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})

    def _answer(self, call_id: str, text: str) -> None:
        self._messages.append({"role": "tool", "tool_call_id": call_id, "content": text})

    def _show(self) -> None:
        if self._shown:
            self._messages.append({"role": "user", "content": self._shown})
            self._shown = []

    def _parts(self, content: str | Sequence[ItemPart], place: str) -> str | list[Json]:
        if isinstance(content, str) or not any(isinstance(part, ItemImage) for part in content):
            return _text(content)
        parts: list[Json] = []
        for number, part in enumerate(content):
            if isinstance(part, ItemImage):
                self.images.append(f"{place}.{number}.image_url")
                parts.append({"type": "image_url", "image_url": {"url": part.image_url, "detail": part.detail}})
            else:
                parts.append({"type": "text", "text": part.text})
        return parts

    def _say(self, text: str) -> None:
        """Add an assistant's text. The texts before and after a call are joined, as in a chat's answer. Two consecutive
        messages are two turns."""
        turn = self._turn(is_new=self._has_just_spoken)
        turn["content"] = (turn["content"] or "") + text
        self._has_just_spoken = True

    def _think(self, text: str) -> None:
        """Add thoughts. After a text they begin another turn, because a template shows them before the text."""
        turn = self._turn(is_new=self._has_just_spoken)
        parts = turn.setdefault("reasoning_content", [])  # joined once: a request may have thousands of items
        if whole := ("\n" if parts and not text.startswith("\n") else "") + text:
            parts.append(whole)
        self._has_just_spoken = False

    def _turn(self, *, is_new: bool = False) -> Json:
        """Return the assistant's message to continue. What it says with nobody else in between is one turn, as in an
        answer."""
        last = self._messages[-1] if self._messages else {}
        if last.get("role") != "assistant" or is_new:
            self._messages.append({"role": "assistant", "content": None})
        return self._messages[-1]

    def _thoughts(self, item: ReasoningItem, place: str) -> str:
        if item.content or item.encrypted_content is None:
            return "\n".join(thought.text for thought in item.content or item.summary or ())
        opened = None if self._seal is None else self._seal.open(item.encrypted_content)
        if opened is not None:
            return opened
        text = "sealed elsewhere, or with a key that is gone"
        pass_over("input.reasoning.encrypted_content", f"{place}.encrypted_content", text)
        return "\n".join(thought.text for thought in item.summary or ())


def _text(content: str | Sequence[ItemPart]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(IMAGE_PLACE if isinstance(part, ItemImage) else part.text for part in content)
