"""Owns the definition of what is kept of one answer, of what a request wants of it, and of what is found.
Never reads an item: each is a text of JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

ENTRY_BYTES = 1536
"""What an entry takes besides its texts, in bytes: tuples, dictionaries and names."""
PLACE_BYTES = 200
"""The same for each item: its place in two tuples, its name, and its place among the tenant's texts."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A response. Its items are in the order in which the model reads them."""

    response_id: str
    previous: str | None
    """The id of the response that it goes on from."""
    input: tuple[bytes, ...]
    """Its own input, without the conversation before it."""
    output: Mapping[str, bytes]
    """The items by their ids."""
    fields: tuple[bytes, ...]
    """JSON objects with what the response says besides its output."""

    @property
    def conversation(self) -> Iterator[bytes]:
        yield from self.input
        yield from self.output.values()

    @property
    def texts(self) -> Iterator[bytes]:
        yield from self.conversation
        yield from self.fields


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a request refers to."""

    previous: str | None
    items: tuple[tuple[str, str], ...]
    """Ids: of the response, and of its item."""
    max_bytes: int
    """Most that the items found may have together."""


@dataclass(frozen=True, slots=True)
class Recalled:
    """What was found. `missing`: the id of the first response or item that is not there, and then nothing else is
    told. `is_too_large`: it has more than `max_bytes`, and then nothing else is told, either."""

    conversation: tuple[bytes, ...] = ()
    """All items of the earlier responses, from the first on."""
    items: Mapping[str, bytes] = field(default_factory=dict)
    missing: str | None = None
    is_too_large: bool = False
