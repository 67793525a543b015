"""Owns the list of a response's input items as OpenAI returns it: each with an id, in pages.
Never finds them; `kept_routes` does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import pydantic_core

from serve_app.errors.api_error import ApiError, clip

Json = dict[str, Any]

MAX_LISTED = 100
_LIMITS = frozenset(map(str, range(1, MAX_LISTED + 1)))
ORDERS: tuple[Literal["asc", "desc"], ...] = ("asc", "desc")


@dataclass(frozen=True, slots=True)
class Page:
    NAMES: ClassVar[tuple[str, ...]] = ("limit", "order", "after")
    limit: int
    order: Literal["asc", "desc"]
    after: str | None

    @classmethod
    def from_query(cls, query: Mapping[str, str]) -> Page:
        """Raises:
        ApiError: a value is not valid.
        """
        limit, order = query.get("limit", "20"), query.get("order", "desc")
        if limit not in _LIMITS:
            raise _wrong("limit", f"should be a number from 1 to {MAX_LISTED}", limit)
        if order not in ORDERS:
            raise _wrong("order", f"should be one of {', '.join(ORDERS)}", order)
        return cls(int(limit), "asc" if order == "asc" else "desc", query.get("after"))

    def cut(self, items: Sequence[Json]) -> Json:
        """Return this page of the items, as one of OpenAI's lists."""
        ordered = items if self.order == "asc" else items[::-1]
        names = [item["id"] for item in ordered]
        if self.after is not None and self.after not in names:
            raise _wrong("after", "should be the id of an item of this list", self.after)
        start = 0 if self.after is None else names.index(self.after) + 1
        data = list(ordered[start : start + self.limit])
        first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
        has_more = start + self.limit < len(ordered)
        return {"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": has_more}


def listed(response_id: str, texts: Sequence[bytes]) -> list[Json]:
    """Read items from their JSON. One without an id, or with an earlier item's, gets an id from its position."""
    taken, items = set[str](), []
    for number, text in enumerate(texts):
        item = pydantic_core.from_json(text)
        name = item.get("id")
        if name is None or name in taken:
            name = f"item_{response_id.removeprefix('resp_')}_{number}"
        taken.add(name)
        items.append(_whole(item | {"id": name}))
    return items


def _whole(item: Json) -> Json:
    """Add what clients may leave out but find in each listed item."""
    kind = item.setdefault("type", "message")
    item.setdefault("status", "completed")
    if kind == "reasoning":
        item["summary"] = item.get("summary") or []
    if kind != "message":
        return item
    content = item["content"]
    parts = [{"type": "input_text", "text": content}] if isinstance(content, str) else content
    is_answer = item["role"] == "assistant"
    return item | {"content": [_answer_part(part) if is_answer else _input_part(part) for part in parts]}


def _answer_part(part: Json) -> Json:
    if part["type"] == "refusal":
        return part
    return {"annotations": [], "logprobs": []} | part | {"type": "output_text"}


def _input_part(part: Json) -> Json:
    return {"detail": "auto"} | part if part["type"] == "input_image" else part | {"type": "input_text"}


def _wrong(name: str, text: str, value: str) -> ApiError:
    return ApiError(400, f"{name}: {text}, but it is {clip(value, 80)!r}", param=name, code="invalid_value")
