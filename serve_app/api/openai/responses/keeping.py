"""Owns how a response is kept once it has ended: as JSON texts, item by item.
Never does anything before that, and never keeps a response that failed or that nobody read to its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from serve_app.api.http.json_text import json_bytes
from serve_app.api.http.offload import run_sized
from serve_app.api.openai.responses.items import Item
from serve_app.store.entry import Entry
from serve_app.store.memory import AnswerMemory

Json = dict[str, Any]

_LONG = ("instructions", "tools")
"""Fields that are the same in each response of a conversation. They are a separate text, kept once for all of them."""
_TOKEN_BYTES = 8
_SCORE_BYTES = 200
"""The estimated size of a token's log-probability, and of each alternative."""


@dataclass(frozen=True, slots=True)
class Keeping:
    """Keeps one response. `input` is its own input with references resolved, and `num_bytes` about its size."""

    memory: AnswerMemory
    tenant: str
    input: Sequence[Item]
    num_bytes: int

    async def keep(self, response: Json) -> bool:
        """Keep the response. Return whether it was kept."""
        per_token = _TOKEN_BYTES + _SCORE_BYTES * (1 + response["top_logprobs"])
        size = self.num_bytes + per_token * response["usage"]["output_tokens"]
        entry = await run_sized(size, lambda: self._entry(response))
        return await self.memory.put(self.tenant, entry)

    def _entry(self, response: Json) -> Entry:
        own = {name: value for name, value in response.items() if name not in ("output", *_LONG)}
        asked = {name: response[name] for name in _LONG}
        return Entry(
            response["id"],
            response["previous_response_id"],
            tuple(item.model_dump_json(exclude_unset=True).encode() for item in self.input),
            {item["id"]: json_bytes(item) for item in response["output"]},
            (json_bytes(own | {"store": True}), json_bytes(asked)),
        )
