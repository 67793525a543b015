"""Owns how a Responses request is read and answered, whole or streamed.
Never reads the model's text; a reader of blocks does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from serve_app.api.generation.blocks import BlockReader
from serve_app.api.generation.completion import Piece
from serve_app.api.generation.scored_blocks import ScoredBlocks
from serve_app.api.generation.sealing import Seal, of_tenant
from serve_app.api.http.offload import run_sized
from serve_app.api.http.turns import TenantTurns
from serve_app.api.openai.forms import Answering, Form, ParsedRequest
from serve_app.api.openai.responses.answer import Answer
from serve_app.api.openai.responses.conversation import as_chat, names_of
from serve_app.api.openai.responses.earlier import Earlier, own_items, recall, whole_input
from serve_app.api.openai.responses.frames import ResponseFrames
from serve_app.api.openai.responses.given_tools import given_tools
from serve_app.api.openai.responses.items import AdditionalToolsItem
from serve_app.api.openai.responses.keeping import Keeping
from serve_app.api.openai.responses.passing import pass_over_hints, with_effort
from serve_app.api.openai.responses.response import Json
from serve_app.api.openai.responses.schema import ResponsesRequest
from serve_app.api.openai.responses.toolbox import open_toolbox
from serve_app.api.openai.responses.turns import Turns
from serve_app.api.openai.sse import Frames
from serve_app.api.requests.schema import ChatRequest, parse_request
from serve_app.api.text.tokenizer import Tokenizer
from serve_app.engines.engine_client import ServedModel
from serve_app.store.memory import AnswerMemory


@dataclass(frozen=True, slots=True)
class ResponseForm(Form):
    answer: Answer
    blocks: BlockReader
    scored: ScoredBlocks

    @property
    def num_repeated(self) -> int:
        return self.answer.num_repeated

    def body(self, pieces: Sequence[Piece]) -> Json:
        (piece,) = pieces
        self.scored.read(piece)
        return self.answer.ended(self.blocks.blocks, cut_off=piece.finish_reason == "length")

    async def keep(self, body: Json) -> None:
        await self.answer.keep(body)

    def frames(self) -> Frames:
        return ResponseFrames(self.answer, self.blocks, self.scored)


@dataclass(frozen=True, slots=True)
class ResponseReader:
    """`seal`: without one, thoughts are not returned sealed. `memory`: without one, nothing is kept."""

    model: ServedModel
    tokenizer: Tokenizer
    seal: Seal | None
    memory: AnswerMemory | None
    max_body_bytes: int
    turns: TenantTurns
    """For work on tools, whose grammars may take seconds to check."""

    async def read(self, body: bytes, tenant: str) -> ParsedRequest[ChatRequest]:
        """Raises:
        ApiError: the request is wrong, or continues something that is not there.
        """
        size = len(body)
        given = await run_sized(size, lambda: parse_request(ResponsesRequest, body))
        earlier = await recall(given, body, self.memory, tenant, self.max_body_bytes)
        size += earlier.num_bytes
        added = (*own_items(given), *earlier.conversation, *earlier.items.values())
        if given.tools or any(isinstance(item, AdditionalToolsItem) for item in added):
            return await self.turns.run(tenant, lambda: self._asked(given, earlier, tenant, size))
        return await run_sized(size, lambda: self._asked(given, earlier, tenant, size))

    def _asked(self, given: ResponsesRequest, earlier: Earlier, tenant: str, size: int) -> ParsedRequest[ChatRequest]:
        own = list(whole_input(given, earlier))
        items = [*(("previous_response_id", item) for item in earlier.conversation), *own]
        toolbox = open_toolbox(given_tools(given.tools or (), items), self.model)
        seal = of_tenant(self.seal, tenant)
        seals = pass_over_hints(given, toolbox, seal=seal if self.model.reasoning_parser else None)
        may_call = bool(toolbox.offers) and given.tool_choice != "none"
        given, options = with_effort(given, self.tokenizer.template_for(tools=may_call), self.model)
        turns = Turns(toolbox, seal)
        request = as_chat(given, turns.messages(items), toolbox, options)
        num_repeated = len(given.instructions or "") + sum(len(tool.model_dump_json()) for tool in given.tools or ())
        keeping = None
        if self.memory is not None and given.store is not False:
            keeping = Keeping(self.memory, tenant, [item for _, item in own], size)

        def form(answering: Answering) -> Form:
            blocks = BlockReader(answering.reader(request))
            answer = Answer(given, toolbox, answering, seals, keeping, num_repeated)
            return ResponseForm(answer, blocks, ScoredBlocks(blocks, answering.tokenizer))

        return ParsedRequest(request, form, names_of(request, toolbox, turns))
