"""Owns what may stand in a prompt besides text: spans of it, each with its content, and where they are in a step.
Never knows what a kind of input is: a model declares its kinds, and whoever makes a submission their contents."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from math import prod

Grid = tuple[int, int, int]
"""How many frames, rows and columns of tokens an input is; an image has one frame."""
BYTES_PER_PIXEL = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class InputKind:
    """A kind of input that a model takes, as the model declares it."""

    name: str
    token_id: int
    """What stands in the prompt for each token of such an input."""
    side: int
    """Pixels along a side of what becomes one token: an input is [frames, rows * side, columns * side, 3] of uint8."""
    min_pixels: int
    max_pixels: int
    """Of a frame: smaller and larger ones are scaled to these, at most to whole tokens."""
    chunkable: bool
    """Whether a chunk of the prompt, or a prefix hit, may end inside of one."""

    @property
    def max_tokens(self) -> int:
        """Of a frame."""
        return self.max_pixels // self.side**2

    def num_bytes(self, grid: Grid) -> int:
        """Of the content of an input of that size."""
        return prod(grid) * self.side**2 * BYTES_PER_PIXEL


@dataclass(frozen=True, slots=True)
class SpanInput:
    """A span of the prompt, [start, end), and what it stands for. Equal contents have equal digests."""

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
    """A cryptographic name of a content: one that was made to collide would show another user's image."""
    return blake2b(f"{kind} {grid} ".encode() + data, digest_size=32, key=salt).digest()


@dataclass(frozen=True, slots=True)
class PlacedInput:
    """Where an input is, in the prompt and in the positions by which the model rotates.

    Positions follow each other from token to token, but an input takes as many as the longest side of its grid, and
    its tokens are at (position + frame, position + row, position + column): M-RoPE (arXiv 2409.12191).
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
        """A later token's position, less its index in the prompt."""
        return self.position + max(self.grid) - self.end


@dataclass(frozen=True, slots=True)
class EncodeJob:
    """Work of a step besides its rows: have a content's embeddings ready, before the rows run."""

    digest: bytes
    grid: Grid
    data: bytes = field(repr=False)


def place_inputs(inputs: Iterable[SpanInput], salt: bytes = b"") -> tuple[PlacedInput, ...]:
    """With their positions, and names of the salt: what is encoded is shared as prefixes are. inputs: in order."""
    placed: list[PlacedInput] = []
    for given in inputs:
        shift = placed[-1].shift_after if placed else 0
        name = digest_of(given.kind, given.grid, given.digest, salt) if salt else given.digest
        placed.append(PlacedInput(name, given.start, given.grid, given.start + shift))
    return tuple(placed)


def overlapping(inputs: Sequence[PlacedInput], start: int, end: int) -> tuple[PlacedInput, ...]:
    """Those that have tokens among [start, end)."""
    return tuple(one for one in inputs if one.start < end and start < one.end)


def shift_at(inputs: Sequence[PlacedInput], start: int) -> int:
    """A token's position less its index, at `start`, unless an input covers it."""
    return next((one.shift_after for one in reversed(inputs) if one.end <= start), 0)
