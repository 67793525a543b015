"""Owns one response through its life: begun, ended, failed.
Never knows whether it is streamed."""

from __future__ import annotations

import time
from collections.abc import Sequence

from serve_app.api.generation.blocks import Block
from serve_app.api.generation.sealing import Seal
from serve_app.api.openai.forms import Answering
from serve_app.api.openai.responses.keeping import Keeping
from serve_app.api.openai.responses.output import OutputItems
from serve_app.api.openai.responses.response import Json, ending_json, response_json, usage_json
from serve_app.api.openai.responses.schema import ResponsesRequest
from serve_app.api.openai.responses.toolbox import Toolbox
from serve_app.errors.api_error import ApiError


class Answer:
    def __init__(
        self,
        request: ResponsesRequest,
        toolbox: Toolbox,
        answering: Answering,
        seal: Seal | None = None,
        keeping: Keeping | None = None,
        num_repeated: int = 0,
    ) -> None:
        """`keeping`: None if the response is not to be kept. `num_repeated`: about how many bytes of the request it has
        again, which are its tools and instructions."""
        self._request = request
        self._toolbox = toolbox
        self._answering = answering
        self._keeping = keeping
        self._created = int(time.time())
        self.num_repeated = num_repeated
        self.id = answering.request_id
        self.items = OutputItems(self.id, toolbox, seal)

    def begun(self) -> Json:
        store, model = self._keeping is not None, self._answering.model
        return response_json(self._request, self._toolbox, self.id, self._created, model, store=store)

    def ended(self, blocks: Sequence[Block], *, cut_off: bool) -> Json:
        usage = usage_json(self._answering.choices.usage, self._answering.choices.reasoning_tokens or 0)
        return self.begun() | ending_json(cut_off=cut_off, blocks=blocks, items=self.items, usage=usage)

    async def keep(self, response: Json) -> None:
        """Keep a response that has ended, if it is to be kept. Its `store` then says whether it was."""
        if self._keeping is not None:
            response["store"] = await self._keeping.keep(response)

    def failed(self, error: ApiError) -> Json:
        """Return the failed response. OpenAI allows few error codes here; ours is in the error event."""
        told = {"code": "server_error", "message": error.message}
        return self.begun() | {"status": "failed", "error": told, "store": False}
