"""Owns the JSON of a response: what it repeats of its request, how it ends, and its usage.
Never decides what an answer says."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from engine.protocol import Usage
from serve_app.api.generation.blocks import Block
from serve_app.api.openai.responses.output import OutputItems, Status
from serve_app.api.openai.responses.schema import ResponsesRequest
from serve_app.api.openai.responses.toolbox import Offer, Toolbox
from serve_app.api.openai.responses.tools import FunctionTool, HostedTool, NamespaceTool, ShellTool
from serve_app.engines.engine_client import ServedModel

Json = dict[str, Any]


def response_json(
    request: ResponsesRequest, toolbox: Toolbox, response_id: str, created: int, model: ServedModel, *, store: bool
) -> Json:
    """Return a response that is in progress and has no output yet. `store`: whether it is to be kept."""
    otherwise = model.sampling
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
        "model": model.id,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "reasoning": {"effort": None if request.reasoning is None else request.reasoning.effort, "summary": None},
        "store": store,
        "temperature": otherwise.temperature if request.temperature is None else request.temperature,
        "text": {"format": _format(request)},
        "tool_choice": _choice(request),
        "tools": _tools(request, toolbox),
        "top_logprobs": request.top_logprobs or 0,
        "top_p": otherwise.top_p if request.top_p is None else request.top_p,
        "presence_penalty": request.presence_penalty or 0.0,
        "frequency_penalty": request.frequency_penalty or 0.0,
        "max_tool_calls": None,
        "service_tier": "default",
        "safety_identifier": request.safety_identifier,
        "prompt_cache_key": request.prompt_cache_key,
        "truncation": "disabled",
        "usage": None,
        "user": request.user,
        "metadata": request.metadata or {},
    }


def ending_json(*, cut_off: bool, blocks: Sequence[Block], items: OutputItems, usage: Json) -> Json:
    """Return the fields that a response adds or changes when it ends."""
    last = len(blocks) - 1
    output = [items.json(block, status_of(cut_off=cut_off and block.index == last)) for block in blocks]
    details = {"reason": "max_output_tokens"} if cut_off else None
    completed = None if cut_off else int(time.time())
    ended = {"status": status_of(cut_off=cut_off), "completed_at": completed}
    return ended | {"incomplete_details": details, "output": output, "usage": usage}


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


def _tools(request: ResponsesRequest, toolbox: Toolbox) -> list[Json]:
    """List the callable tools as they were given, each with whether it is strict."""
    offers = iter(toolbox.offers)
    told = []
    for tool in request.tools or ():
        if isinstance(tool, NamespaceTool):
            told.append(tool.model_dump() | {"tools": [_tool(next(offers)) for _ in tool.tools]})
        elif not (isinstance(tool, HostedTool) or (isinstance(tool, ShellTool) and tool.is_elsewhere)):
            told.append(_tool(next(offers)))
    return told


def _tool(offer: Offer) -> Json:
    tool = offer.tool
    if isinstance(tool, FunctionTool):
        return tool.model_dump() | {"strict": offer.strict}
    return tool.model_dump(exclude_none=True)


def _format(request: ResponsesRequest) -> Json:
    given = None if request.text is None else request.text.format
    return {"type": "text"} if given is None else given.model_dump(by_alias=True)


def _choice(request: ResponsesRequest) -> Any:
    choice = request.tool_choice
    return choice or "auto" if isinstance(choice, str | None) else choice.model_dump(exclude_none=True)
