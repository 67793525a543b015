"""Owns how a valid body is broken: a seeded stream of bytes that are almost what a client would send.
Never decides what a server should answer."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

Path = tuple[str | int, ...]


def nested(depth: int, value: Any = 1) -> Any:
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value


def escaped(depth: int) -> str:
    return "[" * depth + "]" * depth


_HUGE = "<huge>"  # Python itself does not write an integer of so many digits
_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 1.5, "", "x", [], {}, [[]], [{}], {"": None}, [None], "\0", "\ud800", "a\udfffb"),
    *(2**31, 2**63, -(2**63) - 1, 2**64, 10**30, 10**4298, _HUGE, 1e308, -1e308, 5e-324, -0.0),
    *(float("nan"), float("inf"), float("-inf"), "1", "null", "🦜" * 400, "e\u0301\u202e\ufeff\uffff", "{{ 1 }}"),
    *("../../etc", "'\"\\<script>", {"type": "text"}, {"a": "b"}, {"type": "text", "text": 5}, ["a", 1, None]),
    *(nested(60), nested(150), nested(400), list(range(2000)), ["x"] * 3000, {str(i): i for i in range(2000)}),
    *("y" * 70_000, {"k" * 70_000: 1}, {"🔑" * 300: 1}, escaped(500), '{"a": ' + escaped(900) + "}"),
    *('{"a": "\\ud800"}', '{"a": NaN}', '{"a": 1e999}', '{"a": ' + "9" * 4000 + "}", '{"a": ' + "9" * 5000 + "}"),
)
_KEYS = ("", "colour", "\0", "🔑" * 300, "k" * 5000, "__class__", "a.b", "\ud800", "0", "loc", "model_config", "self")


def paths_of(value: Any, here: Path = ()) -> Iterator[Path]:
    yield here
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in entries:
        yield from paths_of(entry, (*here, key))


def _at(body: Any, path: Path) -> Any:
    for key in path:
        body = body[key]
    return body


def _replaced(rng: random.Random, body: Any) -> Any:
    path = rng.choice(list(paths_of(body)))
    value = copy.deepcopy(rng.choice(_VALUES))
    if not path:
        return value
    _at(body, path[:-1])[path[-1]] = value
    return body


def _without(rng: random.Random, body: Any) -> Any:
    if path := rng.choice(list(paths_of(body))):
        del _at(body, path[:-1])[path[-1]]
    return body


def _with_more(rng: random.Random, body: Any) -> Any:
    holder = _at(body, rng.choice([path for path in paths_of(body) if isinstance(_at(body, path), dict | list)]))
    if isinstance(holder, dict):
        known = [key for path in paths_of(body) for key in path[-1:] if isinstance(key, str)]
        holder[rng.choice((*_KEYS, *known))] = copy.deepcopy(rng.choice(_VALUES))
    else:
        holder.append(copy.deepcopy(rng.choice([*_VALUES, *holder])))
    return body


def _swapped(rng: random.Random, body: Any) -> Any:
    """Return a value from elsewhere in the body."""
    places = [path for path in paths_of(body) if path]
    one, other = rng.choice(places), rng.choice(places)
    value = copy.deepcopy(_at(body, other))
    _at(body, one[:-1])[one[-1]] = value
    return body


_TOKENS = (
    b"NaN",
    b"-Infinity",
    b"1e400",
    b"-",
    b"00",
    b"tru",
    b"\xff",
    b"\xed\xa0\x80",
    b"\xc0\xaf",
    b"\0",
    b'"',
    b"}",
)
_ODD = (b"", b" ", b"null", b"\xef\xbb\xbf{}", b"{}{}", b"[" * 100_000, b'{"a":' * 20_000, b"9" * 100_000, b'"' * 9)


def _broken_bytes(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data) + 1)
    match rng.randrange(6):
        case 0:
            return data[:at]
        case 1:
            return data[:at] + rng.choice(_TOKENS) + data[at:]
        case 2:
            return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
        case 3:
            return data.decode().encode(rng.choice(["utf-16", "utf-32", "utf-8-sig"]))
        case 4:
            return data[:-1] + b"," + data[1:]  # every key twice
        case _:
            return rng.choice(_ODD)


_CHANGES: tuple[Callable[[random.Random, Any], Any], ...] = (_replaced, _replaced, _without, _with_more, _swapped)


def mutant(rng: random.Random, seeds: list[dict[str, Any]]) -> bytes:
    """Return a copy of one of the seeds with one to three changes; one in five is not even JSON."""
    body: Any = copy.deepcopy(rng.choice(seeds))
    if rng.random() < 0.2:
        return _broken_bytes(rng, json.dumps(body).encode())
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        if isinstance(body, dict) and body:
            body = rng.choice(_CHANGES)(rng, body)
    text = json.dumps(body, ensure_ascii=rng.random() < 0.9).replace(f'"{_HUGE}"', "9" * 5000)
    return text.encode(errors="surrogatepass")
