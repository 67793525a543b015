"""Owns the names of prefixes: the chain of digests that the full blocks of a prompt give.
Never knows which blocks are cached, or where; a block manager does, and a router guesses."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from engine.multimodal_inputs import SpanInput

ROOT = b""
"""Stands before the first block."""


def root_of(salt: str, adapter: str = "") -> bytes:
    """What stands before the first block of the prompts of one salt and one adapter's digest: a cache of their own."""
    if not salt and not adapter:
        return ROOT
    return blake2b(salt.encode(), digest_size=16, key=adapter.encode()).digest()


def hash_block(parent: bytes, token_ids: Sequence[int], contents: bytes = b"") -> bytes:
    """Digest of a full block given the digest of everything before it (`parent`; a salt for the first block).
    `contents`: names what stands in the block besides text.

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
    """Append the digests of the blocks up to `num_blocks` that `chain` lacks. `token_ids` start at the first block, and
    `inputs` say what some of them stand for."""
    for i in range(len(chain), num_blocks):
        parent = chain[-1] if chain else root
        begin, end = i * block_size, (i + 1) * block_size
        contents = _contents(inputs, begin, end) if inputs else b""
        chain.append(hash_block(parent, token_ids[begin:end], contents))


def _contents(inputs: Sequence[SpanInput], begin: int, end: int) -> bytes:
    """Of the inputs that have tokens in a block, and which of their tokens those are."""
    within = [one for one in inputs if one.start < end and begin < one.end]
    return b"".join(one.digest + (begin - one.start).to_bytes(8, "little", signed=True) for one in within)
