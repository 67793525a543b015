"""Collects the hints of a request that had no effect. A hint is a field that does not require a different answer.
Never decides what is a hint: the schemas do, and the code that finds a hint useless for the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from serve_app.errors.api_error import ApiError

UNSUPPORTED = "unsupported_parameter"
"""The code of refusals of hints and of everything else that is not supported."""


class Hints:
    """Collects one request's hints without effect. `strict`: refuse them, like everything that is not supported."""

    def __init__(self, *, strict: bool = False) -> None:
        self.strict = strict
        self.count: Callable[[Iterable[str]], None] | None = None
        """Called at the request's end; set once it is known which model is asked for."""
        self._names: dict[str, None] = {}

    def ignore(self, name: str) -> None:
        """`name`: a dotted path from the server's own code. It becomes a metric's label, so clients must not choose
        it."""
        self._names[name] = None

    @property
    def names(self) -> tuple[str, ...]:
        """The hints in the order in which they were found, each once."""
        return tuple(self._names)


_current: ContextVar[Hints] = ContextVar("hints")


def hints() -> Hints:
    """Return the collection of the current request, also in its threads; outside of a request, one that is
    discarded."""
    return _current.get(None) or Hints()


@contextmanager
def keeping(collection: Hints) -> Iterator[None]:
    """Let `hints` return `collection` within the block."""
    token = _current.set(collection)
    try:
        yield
    finally:
        _current.reset(token)


def ignore_or_refuse(name: str, text: str, param: str | None = None) -> None:
    """Note a hint without effect. `text`: the reason. `param`: the field's path, if it differs from the name.

    Raises:
        ApiError: the server is strict.
    """
    current = hints()
    if current.strict:
        raise ApiError(400, text, param=param or name, code=UNSUPPORTED)
    current.ignore(name)
