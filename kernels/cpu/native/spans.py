"""Owns the inputs besides text of a step, as the library reads them: spans of tokens with embeddings and places.
Never makes an embedding or a position: whoever runs a step does."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
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
        """shifts: by row, the position of the tokens before its first span, minus their index in the request.

        Raises:
            ValueError: a span is not within its grid, or has not one embedding for each of its tokens, contiguous.
        """
        for span in spans:
            tokens = span.end - span.begin
            if not 0 <= span.first <= prod(span.grid) - tokens:
                raise ValueError(f"a span has tokens {span.first} to {span.first + tokens} of a grid of {span.grid}")
            if len(span.embeddings) != tokens or not span.embeddings.is_contiguous():
                raise ValueError(f"a span of {tokens} tokens has embeddings {list(span.embeddings.shape)}, or strided")
        self._spans = spans  # the library has only addresses
        self._shifts = array("q", shifts)
        self._structs = (_Span * len(spans))(*map(_struct, spans))

    def check(self, num_rows: int, hidden: int | None, dtype: torch.dtype) -> None:
        """Compare with what the library will read. hidden: the size of an embedding; None: it reads none.

        Raises:
            ValueError: there is not one shift for each row, or an embedding is not of this size and type.
        """
        if len(self._shifts) != num_rows:
            raise ValueError(f"a step of {num_rows} rows has {len(self._shifts)} shifts")
        for span in self._spans if hidden is not None else ():
            if span.embeddings.shape[1:] != (hidden,) or span.embeddings.dtype != dtype:
                found = f"{list(span.embeddings.shape)} {span.embeddings.dtype}"
                raise ValueError(f"a span's embeddings are {found}: expected [tokens, {hidden}] {dtype}")

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
