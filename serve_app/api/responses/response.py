"""Owns the JSON of a response: what it repeats of its request, its output items, and what it took.
Never decides what an answer says."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Literal

from engine.protocol import Usage
from serve_app.api.blocks import Block
from serve_app.api.responses.schema import ChosenFunction, ChosenTools, ResponsesRequest

Json = dict[str, Any]
Status = Literal["in_progress", "completed", "incomplete"]
_ITEM_ID = {"text": "msg", "call": "fc", "reasoning": "rs"}


def response_json(request: ResponsesRequest, response_id: str, created: int, model: str) -> Json:
    """One that is in progress and has said nothing yet."""
    return {
        "id": response_id,
        "object": "response",
        "created_at": created,
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "model": model,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "text": {"format": _format(request)},
        "tool_choice": _choice(request),
        "tools": [tool.model_dump() for tool in request.tools or ()],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "max_tool_calls": None,
        "service_tier": "default",
        "safety_identifier": request.safety_identifier,
        "prompt_cache_key": request.prompt_cache_key,
        "truncation": "disabled",
        "usage": None,
        "user": request.user,
        "metadata": request.metadata or {},
    }


def ending_json(*, cut_off: bool, blocks: Sequence[Block], response_id: str, usage: Json) -> Json:
    """What an answered response says besides."""
    last = len(blocks) - 1
    items = [item_json(block, response_id, status_of(cut_off=cut_off and block.index == last)) for block in blocks]
    details = {"reason": "max_output_tokens"} if cut_off else None
    completed = None if cut_off else int(time.time())
    ended = {"status": status_of(cut_off=cut_off), "completed_at": completed}
    return ended | {"incomplete_details": details, "output": items, "usage": usage}


def status_of(*, cut_off: bool) -> Status:
    return "incomplete" if cut_off else "completed"


def usage_json(usage: Usage, reasoning_tokens: int) -> Json:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def item_id(block: Block, response_id: str) -> str:
    return f"{_ITEM_ID[block.kind]}_{response_id.removeprefix('resp_')}_{block.index}"


def item_json(block: Block, response_id: str, status: Status) -> Json:
    item: Json = {"id": item_id(block, response_id), "status": status}
    if block.kind == "call":
        call = {"call_id": block.call_id, "name": block.name, "arguments": block.text}
        return item | {"type": "function_call"} | call
    content = [] if status == "in_progress" else [part_json(block)]
    if block.kind == "reasoning":
        return item | {"type": "reasoning", "summary": [], "content": content}
    return item | {"type": "message", "role": "assistant", "content": content}


def part_json(block: Block) -> Json:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": block.logprobs}


def _format(request: ResponsesRequest) -> Json:
    given = None if request.text is None else request.text.format
    return {"type": "text"} if given is None else given.model_dump(by_alias=True)


def _choice(request: ResponsesRequest) -> Any:
    choice = request.tool_choice
    return choice.model_dump() if isinstance(choice, ChosenFunction | ChosenTools) else choice or "auto"
