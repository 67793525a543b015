"""Writes the JSON of the models that can be requested, with the fields that each API's clients look for.
Never decides which models there are."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from serve_app.engines.engine_client import ServedModel

Json = dict[str, Any]


def models_json(listed: Sequence[tuple[str, ServedModel]]) -> Json:
    """Write OpenAI's list, with the paging fields that Anthropic's clients look for; there is only one page."""
    names = [name for name, _ in listed]
    pages = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
    return {"object": "list", "data": [model_json(name, model) for name, model in listed], **pages}


def model_json(name: str, model: ServedModel) -> Json:
    """Describe the model or adapter that a client requests by `name`; `root` is the model's own name."""
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
    }
