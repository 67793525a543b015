"""Owns the items of an answer as JSON: messages, thoughts and calls, each in its tool's shape.
Never decides what an answer says."""

from __future__ import annotations

from typing import Any, Literal

from serve_app.api.generation.blocks import Block
from serve_app.api.generation.sealing import Seal
from serve_app.api.openai.responses.input_text import input_of
from serve_app.api.openai.responses.local_tools import LocalKind, call_fields, id_prefix
from serve_app.api.openai.responses.toolbox import Toolbox

Json = dict[str, Any]
Status = Literal["in_progress", "completed", "incomplete"]
_ITEM_ID = {"text": "msg", "call": "fc", "reasoning": "rs"}


class OutputItems:
    """Builds the items of one response. With a `seal`, thoughts are also returned sealed."""

    def __init__(self, response_id: str, toolbox: Toolbox, seal: Seal | None) -> None:
        self._response = response_id.removeprefix("resp_")
        self._toolbox = toolbox
        self._seal = seal
        self._sealed: dict[int, str] = {}

    def takes_text(self, block: Block) -> bool:
        """Return whether the block is a call of a free-form tool."""
        offer = self._toolbox.called(block.name) if block.kind == "call" else None
        return offer is not None and offer.is_text

    def comes_whole(self, block: Block) -> bool:
        """Return whether the block is a call whose item is not sent before it is complete."""
        return self._local_kind(block) is not None

    def _local_kind(self, block: Block) -> LocalKind | None:
        offer = self._toolbox.called(block.name) if block.kind == "call" else None
        return None if offer is None else offer.local_kind

    def id(self, block: Block) -> str:
        kind = self._local_kind(block)
        prefix = "ctc" if self.takes_text(block) else _ITEM_ID[block.kind] if kind is None else id_prefix(kind)
        return f"{prefix}_{self._response}_{block.index}"

    def name(self, block: Block) -> str:
        """Return the name of the tool that is called."""
        offer = self._toolbox.called(block.name)
        return block.name if offer is None else offer.tool.name

    def json(self, block: Block, status: Status) -> Json:
        item: Json = {"id": self.id(block), "status": status}
        if block.kind == "call":
            return item | self._call(block, status)
        content = [] if status == "in_progress" else [part_json(block)]
        if block.kind == "text":
            return item | {"type": "message", "role": "assistant", "content": content}
        sealed = {} if self._seal is None or status == "in_progress" else {"encrypted_content": self._sealed_of(block)}
        return item | {"type": "reasoning", "summary": [], "content": content} | sealed

    def _call(self, block: Block, status: Status) -> Json:
        offer, kind = self._toolbox.called(block.name), self._local_kind(block)
        if kind is not None and (fields := call_fields(kind, block.text)) is not None:
            return (
                {"call_id": block.call_id}
                | fields
                | ({"status": _patch_status(status)} if "operation" in fields else {})
            )
        call: Json = {"call_id": block.call_id, "name": self.name(block)}
        if offer is not None and offer.namespace is not None:
            call["namespace"] = offer.namespace
        if self.takes_text(block):
            return call | {"type": "custom_tool_call", "input": input_of(block.text)}
        return call | {"type": "function_call", "arguments": block.text}

    def _sealed_of(self, block: Block) -> str:
        """Seal a block's text once, and return that wherever it is needed, because no two seals of a text are alike."""
        assert self._seal is not None, "asked for"
        if block.index not in self._sealed:
            self._sealed[block.index] = self._seal.close(block.text)
        return self._sealed[block.index]


def response_of(item_id: str) -> str:
    """Return the id of the response whose output has an item of this id, if any has."""
    return "resp_" + item_id.partition("_")[2].rpartition("_")[0]


def _patch_status(status: Status) -> Status:
    """Map the status of a patch. OpenAI has no other status for a patch that was cut off."""
    return "completed" if status == "completed" else "in_progress"


def part_json(block: Block) -> Json:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": block.logprobs}
