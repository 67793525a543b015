"""Collects the options that a chat template gets besides messages and tools, and refuses those that it would ignore.
Never renders a template."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from serve_app.api.requests.effort import (
    BUDGET,
    EFFORT,
    KEEPING,
    OVERRULED,
    SWITCHES,
    switch_of,
    thinking_options,
    without_effect,
)
from serve_app.api.requests.schema import ChatRequest
from serve_app.api.requests.strict_model import UNSUPPORTED
from serve_app.api.text.chat_template import CALLERS_NAMES
from serve_app.api.text.tokenizer import Tokenizer
from serve_app.engines.engine_client import ServedModel
from serve_app.errors.api_error import ApiError, clip


def template_options(request: ChatRequest, tokenizer: Tokenizer, model: ServedModel) -> dict[str, Any]:
    """Collect what the template gets besides the messages and the tools.

    Raises:
        ApiError: the template would ignore an option.
    """
    if request.may_call and model.tool_parser is None:
        text = "This model does not call tools: its chat template shows no format for calls that the server knows."
        raise ApiError(400, text, param="tools", code=UNSUPPORTED)
    template = tokenizer.template_for(tools=request.may_call)
    known = template.variables if template else CALLERS_NAMES
    kwargs = _known_kwargs(request.chat_template_kwargs or {}, known, model)
    given = {"tools": request.may_call, "documents": bool(request.documents)}
    ignored = [name for name, is_given in given.items() if is_given and name not in known]
    ignored += [f"chat_template_kwargs.{name}" for name in kwargs if name not in known - CALLERS_NAMES]
    if ignored:
        text = f"The model's chat template takes no {clip(ignored[0], 50)} from a request: it would change nothing."
        raise ApiError(400, text, param=ignored[0], code=UNSUPPORTED)
    thinks = model.reasoning_parser is not None
    kwargs |= thinking_options(request.thinking_wishes, template, kwargs, thinks=thinks).options
    return kwargs | {
        "documents": request.documents,
        "add_generation_prompt": request.add_generation_prompt is not False,
        "continue_final_message": bool(request.continue_final_message),
    }


def _known_kwargs(kwargs: Mapping[str, Any], known: Collection[str], model: ServedModel) -> dict[str, Any]:
    """Give a switch the name that the template has for it, and leave out options that only ask a model to think the
    way it does anyway.

    Raises:
        ApiError: an option that is on or off is not a boolean: the text `"false"` would switch a template on.
    """
    for name in (*SWITCHES, *KEEPING):
        if not isinstance(kwargs.get(name), bool | None):
            field = f"chat_template_kwargs.{name}"
            raise ApiError(400, f"{field}: should be true or false", param=field, code="invalid_value")
    kwargs = _with_one_switch(kwargs, known)
    idle = {name for name in (EFFORT, *SWITCHES, BUDGET, *KEEPING) if name in kwargs and name not in known}
    for name in sorted(idle):
        if kwargs[name] not in (False, None, "none") or model.reasoning_parser is not None:
            without_effect(f"chat_template_kwargs.{name}")
    return {name: value for name, value in kwargs.items() if name not in idle}


def _with_one_switch(kwargs: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Give the template's own switch the value that a switch of another name has. If both are set, its own wins."""
    switch = switch_of(known)
    spare = [name for name in SWITCHES if name in kwargs and name not in known]
    if switch is None or not spare:
        return dict(kwargs)
    given = {name: value for name, value in kwargs.items() if name not in spare}
    for name in spare:
        if given.get(switch) is None:
            given[switch] = kwargs[name]
        elif kwargs[name] not in (None, given[switch]):
            without_effect(f"chat_template_kwargs.{name}", OVERRULED)
    return given
