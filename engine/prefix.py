"""Owns the digests that name prefixes: a chain with one digest for each full block of a prompt.
Never knows which blocks are cached or where: a block manager does, and a router estimates it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from engine.multimodal_inputs import SpanInput

ROOT = b""
"""The parent of the first block."""


def root_of(salt: str, adapter: str = "") -> bytes:
    """Return the parent of the first block for a salt and an adapter's digest, which gives them a separate cache."""
    if not salt and not adapter:
        return ROOT
    return blake2b(salt.encode(), digest_size=16, key=adapter.encode()).digest()


def hash_block(parent: bytes, token_ids: Sequence[int], contents: bytes = b"") -> bytes:
    """Return the digest of a full block, given the digest of everything before it (`parent`; a salt for the first
    block). `contents` names the inputs besides text in the block.

    A cryptographic digest and not Python's `hash`: a prompt chosen to collide would read another user's KV.
    """
    return blake2b(array("q", token_ids).tobytes() + contents, digest_size=16, key=parent).digest()


def extend_chain(
    chain: list[bytes],
    token_ids: Sequence[int],
    num_blocks: int,
    block_size: int,
    root: bytes = ROOT,
    inputs: Sequence[SpanInput] = (),
) -> None:
    """Append the digests of the blocks up to `num_blocks` that `chain` lacks. `token_ids` start at the first block;
    `inputs` are the contents behind some of them."""
    for i in range(len(chain), num_blocks):
        parent = chain[-1] if chain else root
        begin, end = i * block_size, (i + 1) * block_size
        contents = _contents(inputs, begin, end) if inputs else b""
        chain.append(hash_block(parent, token_ids[begin:end], contents))


def _contents(inputs: Sequence[SpanInput], begin: int, end: int) -> bytes:
    """Return the digests of the inputs with tokens in a block, and the offset of the block in each."""
    within = [span for span in inputs if span.start < end and begin < span.end]
    return b"".join(span.digest + (begin - span.start).to_bytes(8, "little", signed=True) for span in within)
