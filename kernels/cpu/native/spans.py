"""Owns the inputs besides text of a step, as the library reads them: spans of tokens with embeddings and places.
Never makes an embedding or a position: whoever runs a step does."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class Span(NamedTuple):
    """Tokens [begin, end) of a step, all of one row, that belong to a grid of tokens, such as an image's."""

    begin: int
    end: int
    first: int
    """`begin` is this token of the grid."""
    grid: tuple[int, int, int]
    """Frames, rows and columns."""
    position: int
    """A token is rotated by its frame, row and column in the grid, plus this."""
    shift_after: int
    """The position of the row's tokens after the grid, minus their index in the request."""
    embeddings: Tensor
    """[end - begin, hidden] in the type of activations"""


class _Span(ctypes.Structure):
    """Mirrors Span of step.h."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("begin", "end", "first", "rows", "columns", "position", "shift_after")),
        ("embeddings", ctypes.c_void_p),
    ]


class Spans:
    """The spans of a step, in the order of their tokens, and the positions of its text."""

    def __init__(self, shifts: Sequence[int], spans: Sequence[Span]) -> None:
        """shifts: by row, the position of the tokens before its first span, minus their index in the request."""
        for span in spans:
            assert span.embeddings.is_contiguous()
            assert len(span.embeddings) == span.end - span.begin
        self._spans = spans  # the library has only addresses
        self._shifts = array("q", shifts)
        self._structs = (_Span * len(spans))(*map(_struct, spans))

    @property
    def fields(self) -> tuple[int | None, int | None, int]:
        """The last fields of StepRows in step.h."""
        return self._shifts.buffer_info()[0], ctypes.addressof(self._structs), len(self._spans)


def _struct(span: Span) -> _Span:
    _, rows, columns = span.grid
    place = span.begin, span.end, span.first, rows, columns, span.position, span.shift_after
    return _Span(*place, span.embeddings.data_ptr())


NO_SPANS: tuple[int | None, int | None, int] = (None, None, 0)
"""`Spans.fields` of a model of text alone."""
