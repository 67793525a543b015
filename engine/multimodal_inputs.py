"""Owns inputs besides text: spans of a prompt, each with its content, and their places in a step.
Never knows what a kind of input is: a model declares its kinds, and the submitter provides the contents."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from math import prod

Grid = tuple[int, int, int]
"""The number of frames, rows and columns of tokens in an input; an image has one frame."""
BYTES_PER_PIXEL = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class InputKind:
    """A kind of input that a model takes, as the model declares it."""

    name: str
    token_id: int
    """The placeholder in the prompt for each token of such an input."""
    side: int
    """Side length in pixels of the square that becomes one token. An input is [frames, rows * side, columns * side, 3]
    of uint8."""
    min_pixels: int
    max_pixels: int
    """Bounds for a frame. Smaller and larger frames are scaled to them, rounded to whole tokens."""
    chunkable: bool
    """Whether a chunk of the prompt, or a prefix hit, may end inside such an input."""

    @property
    def max_tokens(self) -> int:
        """The maximum number of tokens of a frame."""
        return self.max_pixels // self.side**2

    def num_bytes(self, grid: Grid) -> int:
        """Return the size of the content of an input with this grid."""
        return prod(grid) * self.side**2 * BYTES_PER_PIXEL


@dataclass(frozen=True, slots=True)
class SpanInput:
    """A span of the prompt, [start, end), with its content. Equal contents have equal digests."""

    kind: str
    start: int
    grid: Grid
    data: bytes = field(repr=False)
    digest: bytes

    @classmethod
    def of(cls, kind: str, start: int, grid: Grid, data: bytes) -> SpanInput:
        return cls(kind, start, grid, data, digest_of(kind, grid, data))

    @property
    def num_tokens(self) -> int:
        return prod(self.grid)

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


def digest_of(kind: str, grid: Grid, data: bytes, salt: bytes = b"") -> bytes:
    """Return a cryptographic digest of a content: a forged collision would show another user's image."""
    return blake2b(f"{kind} {grid} ".encode() + data, digest_size=32, key=salt).digest()


@dataclass(frozen=True, slots=True)
class PlacedInput:
    """The place of an input in the prompt and among the rotary positions.

    Text tokens have consecutive positions. An input takes as many positions as the longest side of its grid, and its
    tokens are at (position + frame, position + row, position + column): M-RoPE (arXiv 2409.12191).
    """

    digest: bytes
    start: int
    grid: Grid
    position: int

    @property
    def end(self) -> int:
        return self.start + prod(self.grid)

    @property
    def shift_after(self) -> int:
        """The position of a later token minus its index in the prompt."""
        return self.position + max(self.grid) - self.end


@dataclass(frozen=True, slots=True)
class EncodeJob:
    """Work of a step before its rows: make a content's embeddings."""

    digest: bytes
    grid: Grid
    data: bytes = field(repr=False)


def place_inputs(inputs: Iterable[SpanInput], salt: bytes = b"") -> tuple[PlacedInput, ...]:
    """Give each input its position and a digest that includes the salt: embeddings are shared within a salt, like
    prefixes. `inputs` are in order."""
    placed: list[PlacedInput] = []
    for span in inputs:
        shift = placed[-1].shift_after if placed else 0
        digest = digest_of(span.kind, span.grid, span.digest, salt) if salt else span.digest
        placed.append(PlacedInput(digest, span.start, span.grid, span.start + shift))
    return tuple(placed)


def overlapping(inputs: Sequence[PlacedInput], start: int, end: int) -> tuple[PlacedInput, ...]:
    """Return the inputs with tokens among [start, end)."""
    return tuple(placed for placed in inputs if placed.start < end and start < placed.end)


def shift_at(inputs: Sequence[PlacedInput], start: int) -> int:
    """Return the position minus the index of the token at `start`, unless an input covers it."""
    return next((placed.shift_after for placed in reversed(inputs) if placed.end <= start), 0)
