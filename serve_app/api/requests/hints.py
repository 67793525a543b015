"""Owns hints: what a client says in passing, and what asks for no other answer than this server gives.
Never decides what is a hint; the schemas do, and whoever finds that a model cannot do with one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from serve_app.errors.api_error import ApiError

UNSUPPORTED = "unsupported_parameter"
"""The code of a refusal, of a hint and of whatever else is not supported."""


class Hints:
    """Those of one request that had no effect. `strict`: they are refused, like all that is not supported."""

    def __init__(self, *, strict: bool = False) -> None:
        self.strict = strict
        self._names: dict[str, None] = {}

    def ignore(self, name: str) -> None:
        """`name`: a dotted path of the server's own writing. It is a metric's label, so no client may choose it."""
        self._names[name] = None

    @property
    def names(self) -> tuple[str, ...]:
        """In the order in which they were found, each once."""
        return tuple(self._names)


_current: ContextVar[Hints] = ContextVar("hints")


def hints() -> Hints:
    """Those of the request that is being read, also in its threads. Outside of one they are kept by nobody."""
    return _current.get(None) or Hints()


@contextmanager
def keeping(found: Hints) -> Iterator[None]:
    """Inside of it, `hints` returns `found`."""
    token = _current.set(found)
    try:
        yield
    finally:
        _current.reset(token)


def ignore_or_refuse(name: str, text: str, param: str | None = None) -> None:
    """Take a hint of which nothing comes. `text`: why. `param`: where it stands, if its name does not say.

    Raises:
        ApiError: the server is strict.
    """
    found = hints()
    if found.strict:
        raise ApiError(400, text, param=param or name, code=UNSUPPORTED)
    found.ignore(name)
