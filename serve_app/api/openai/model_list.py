"""Writes the JSON of the models that can be requested, with the fields that each API's clients look for.
Never decides which models there are."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from serve_app.engines.engine_client import ServedModel

Json = dict[str, Any]


ANTHROPIC_VERSION = "anthropic-version"
"""The header by which Anthropic's clients are known here. It asks for `for_anthropic`."""


def models_json(listed: Sequence[tuple[str, ServedModel]], *, for_anthropic: bool = False) -> Json:
    """Write OpenAI's list, with the paging fields that Anthropic's clients look for; there is only one page."""
    names = [name for name, _ in listed]
    pages = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
    data = [model_json(name, model, for_anthropic=for_anthropic) for name, model in listed]
    return {"object": "list", "data": data, **pages}


def model_json(name: str, model: ServedModel, *, for_anthropic: bool = False) -> Json:
    """Describe the model or adapter that a client requests by `name`; `root` is the model's own name. `for_anthropic`:
    add what Anthropic's type requires. Its `capabilities` are of another form than Ollama's, and null if not known."""
    of_anthropic: Json = {
        "capabilities": None,
        "max_input_tokens": model.max_model_len,
        "max_tokens": model.max_model_len,
        "lifecycle": "active",
        **dict.fromkeys(("deprecated_at", "retires_at", "line")),
    }
    created = datetime.fromtimestamp(model.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": model.owned_by,
        # vLLM's.
        "root": model.base or model.id,
        "parent": model.base,
        "max_model_len": model.max_model_len,
        # OpenRouter's and Groq's names of the same limit.
        "context_length": model.max_model_len,
        "context_window": model.max_model_len,
        # Ollama's.
        "capabilities": list(model.capabilities),
        # Anthropic's.
        "type": "model",
        "display_name": name,
        "created_at": created,
        **(of_anthropic if for_anthropic else {}),
    }
