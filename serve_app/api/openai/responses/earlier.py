"""Owns what a Responses request continues: kept responses, and their items that it refers to.
Never reads an item; `turns` does. What is found counts towards the body's limits, as if the client had sent it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import pydantic_core
from pydantic import TypeAdapter

from serve_app.api.http.offload import run_sized
from serve_app.api.openai.responses.items import Item, MessageItem, Output, ReferenceItem
from serve_app.api.openai.responses.output import response_of
from serve_app.api.openai.responses.passing import unsupported
from serve_app.api.openai.responses.replays import LocalShellOutput
from serve_app.api.openai.responses.schema import ResponsesRequest
from serve_app.api.requests.json_size import check_size
from serve_app.errors.api_error import ApiError, clip
from serve_app.store.entry import Recalled, Wanted
from serve_app.store.memory import AnswerMemory

_ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])
_ID_CHARS = 80
_NOTHING_IS_KEPT = "this server keeps no responses (responses_store.max_mib is 0)"
_SEND_ITEMS = "set `store: false` (AI SDK: providerOptions.openai.store), and the client sends the items themselves"


@dataclass(frozen=True, slots=True)
class Earlier:
    conversation: Sequence[Item] = ()
    """What comes before the request's own input."""
    items: Mapping[str, Item] = field(default_factory=dict)
    """The items of references that are not to an item of the request itself."""
    num_bytes: int = 0


NOTHING = Earlier()


def own_items(request: ResponsesRequest) -> Sequence[Item]:
    given = request.input
    return [MessageItem(role="user", content=given)] if isinstance(given, str) else given


def whole_input(request: ResponsesRequest, earlier: Earlier) -> Iterator[tuple[str, Item]]:
    """Yield the request's own items with their places, and references resolved. An item is repeated at most once,
    because otherwise no bound on the body would bound the conversation.

    Raises:
        ApiError: two references name the same item.
    """
    items, referred = own_items(request), set()
    by_id = _by_id(items) | dict(earlier.items)
    for number, item in enumerate(items):
        place = f"input.{number}"
        if isinstance(item, ReferenceItem):
            if item.id in referred:
                text = f"repeats an item once at most, but {clip(item.id, _ID_CHARS)!r} is referred to again"
                raise unsupported(place, f"an item_reference {text}")
            referred.add(item.id)
            item = by_id[item.id]
        yield place, item


async def recall(
    request: ResponsesRequest, body: bytes, memory: AnswerMemory | None, tenant: str, max_body_bytes: int
) -> Earlier:
    """Find what `request` refers to outside its own `body`. `memory`: None if nothing is kept.

    Raises:
        ApiError: it is not there, or makes the conversation too large.
    """
    places = _places(own_items(request))
    if request.previous_response_id is None and not places:
        return NOTHING
    if memory is None:
        raise _nothing_is_kept(request, places)
    items = tuple((response_of(item_id), item_id) for item_id in places)
    wanted = Wanted(request.previous_response_id, items, max_body_bytes - len(body))
    recalled = await memory.recall(tenant, wanted)
    if recalled.missing is not None:
        raise _not_found(recalled.missing, request, places, memory)
    if recalled.is_too_large:
        text = f"The conversation is larger than {max_body_bytes} bytes, with what is kept of it."
        raise ApiError(413, text, type="request_too_large", code="body_too_large")
    texts = [*recalled.conversation, *recalled.items.values()]
    return await run_sized(sum(map(len, texts)), lambda: _read(recalled, body, texts))


def _read(recalled: Recalled, body: bytes, texts: Sequence[bytes]) -> Earlier:
    written = b"[" + b",".join(texts) + b"]"
    check_size(body + written)
    items = _ITEMS.validate_python(pydantic_core.from_json(written))
    before, referred = items[: len(recalled.conversation)], items[len(recalled.conversation) :]
    return Earlier(before, dict(zip(recalled.items, referred, strict=True)), len(written))


def _places(items: Sequence[Item]) -> dict[str, str]:
    """Return the ids that references name and no item has, each with the place of the first such reference."""
    own, places = _by_id(items), dict[str, str]()
    for number, item in enumerate(items):
        if isinstance(item, ReferenceItem) and item.id not in own:
            places.setdefault(item.id, f"input.{number}")
    return places


def _by_id(items: Sequence[Item]) -> dict[str, Item]:
    """Index the items that have an id, without references. An output's id may be its call's: then it is the call's."""
    named = [item for item in items if not isinstance(item, ReferenceItem) and not _has_its_calls_id(item)]
    ids = [(getattr(item, "id", None), item) for item in sorted(named, key=lambda item: not isinstance(item, Output))]
    return {item_id: item for item_id, item in ids if item_id is not None}


def _has_its_calls_id(item: Item) -> bool:
    return isinstance(item, LocalShellOutput) and item.call_id is None


def _nothing_is_kept(request: ResponsesRequest, places: Mapping[str, str]) -> ApiError:
    if request.previous_response_id is not None:
        return unsupported("previous_response_id", f"{_NOTHING_IS_KEPT}; send the whole conversation")
    text = f"an item_reference to an item that is not in this request: {_NOTHING_IS_KEPT}; {_SEND_ITEMS}"
    return unsupported(next(iter(places.values())), text)


def _not_found(missing: str, request: ResponsesRequest, places: Mapping[str, str], memory: AnswerMemory) -> ApiError:
    name, told = clip(missing, _ID_CHARS), how_long(memory)
    if missing in places:
        text = f"Item with id '{name}' not found. {told} Or {_SEND_ITEMS}."
        return ApiError(400, text, param=places[missing], code="item_not_found")
    text = f"Previous response with id '{name}' not found."
    if missing != request.previous_response_id:
        last = clip(request.previous_response_id or "", _ID_CHARS)
        text = f"Previous response with id '{name}' not found, which '{last}' goes on from."
    return ApiError(400, f"{text} {told}", param="previous_response_id", code="previous_response_not_found")


def how_long(memory: AnswerMemory | None) -> str:
    """Say why a response may not be there."""
    if memory is None:
        return f"It cannot be, since {_NOTHING_IS_KEPT}."
    kept = memory.settings
    return (
        f"This server keeps a key's responses in memory until {kept.max_age_s:g} s after their last use, as far as "
        f"{kept.max_mib:g} MiB allow, and not over its restart; requests with `store: false` are not kept."
    )
