"""Owns the names of prefixes: the chain of digests that the full blocks of a prompt give.
Never knows which blocks are cached, or where; a block manager does, and a router guesses."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

ROOT = b""
"""Stands before the first block."""


def root_of(salt: str) -> bytes:
    """What stands before the first block of the prompts of one salt: a cache of their own."""
    return blake2b(salt.encode(), digest_size=16).digest() if salt else ROOT


def hash_block(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Digest of a full block given the digest of everything before it (`parent`; a salt for the first block).

    A cryptographic digest and not Python's `hash`: a prompt chosen to collide would read another user's KV.
    """
    return blake2b(array("q", token_ids).tobytes(), digest_size=16, key=parent).digest()


def extend_chain(
    chain: list[bytes], token_ids: Sequence[int], num_blocks: int, block_size: int, root: bytes = ROOT
) -> None:
    """Append the digests of the blocks up to `num_blocks` that `chain` lacks. `token_ids` start at the first block."""
    for i in range(len(chain), num_blocks):
        parent = chain[-1] if chain else root
        chain.append(hash_block(parent, token_ids[i * block_size : (i + 1) * block_size]))
