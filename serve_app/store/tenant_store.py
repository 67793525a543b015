"""Owns one tenant's answers in the order of their last use, and counts what they take.
Never keeps a text twice: a conversation that is sent whole with each request is kept once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import replace

from serve_app.store.entry import ENTRY_BYTES, PLACE_BYTES, Entry


class TenantStore:
    def __init__(self) -> None:
        self._entries: OrderedDict[str, tuple[float, Entry]] = OrderedDict()
        self._texts: dict[bytes, tuple[bytes, int]] = {}
        """Each text, and how often the entries have it."""
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, response_id: str) -> bool:
        return response_id in self._entries

    def put(self, entry: Entry, now: float) -> None:
        """Take a new entry, whose id no other has."""
        self.num_bytes += _overhead(entry)
        kept = replace(
            entry,
            input=self._shared(entry.input),
            output={name: self._share(item) for name, item in entry.output.items()},
            fields=self._shared(entry.fields),
        )
        self._entries[entry.response_id] = now, kept

    def use(self, response_id: str, now: float) -> Entry | None:
        """Return the entry, and make it the most recently used."""
        found = self._entries.get(response_id)
        if found is None:
            return None
        self._entries[response_id] = now, found[1]
        self._entries.move_to_end(response_id)
        return found[1]

    def remove(self, response_id: str) -> bool:
        found = self._entries.pop(response_id, None)
        if found is None:
            return False
        for text in found[1].texts:
            self._drop(text)
        self.num_bytes -= _overhead(found[1])
        return True

    def remove_oldest(self) -> None:
        self.remove(next(iter(self._entries)))

    @property
    def oldest_use(self) -> float:
        """Return when the least recently used entry was used. There has to be one."""
        return next(iter(self._entries.values()))[0]

    def _shared(self, texts: Iterable[bytes]) -> tuple[bytes, ...]:
        return tuple(map(self._share, texts))

    def _share(self, text: bytes) -> bytes:
        kept, count = self._texts.get(text, (text, 0))
        self._texts[kept] = kept, count + 1
        if not count:
            self.num_bytes += len(text)
        return kept

    def _drop(self, text: bytes) -> None:
        kept, count = self._texts[text]
        if count > 1:
            self._texts[kept] = kept, count - 1
        else:
            del self._texts[text]
            self.num_bytes -= len(text)


def _overhead(entry: Entry) -> int:
    places = len(entry.input) + len(entry.output) + len(entry.fields)
    return ENTRY_BYTES + PLACE_BYTES * places


def size_of(entry: Entry) -> int:
    """Return the bytes that an entry takes if it shares no text."""
    return _overhead(entry) + sum(map(len, set(entry.texts)))
