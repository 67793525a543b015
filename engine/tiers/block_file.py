"""Owns the format of a file with one block's KV: header, payload, and what proves that both are as they were written.
Never opens or names a file, and never accepts one in part: each bit of it is checked."""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from itertools import accumulate

from engine.tiers.cipher import MAX_DIGEST_BYTES, SALT_BYTES, Seal

FORMAT_VERSION = 2
"""Rises with any change of the header, of a seal or of names. Files of another version are not read."""

_MAGIC = b"CHUNKKV\n"
_NAME_BYTES = MAX_DIGEST_BYTES + 16
_HEADER = struct.Struct(f"<8sHHIQ16s{_NAME_BYTES}s{SALT_BYTES}s12x")
"""Magic, version, seal, length of the name, length of the payload, space, name, salt; 128 bytes."""


class BadFile(Exception):
    """A file is not what its name says. The message says why, without the file's name."""


class BlockFormat:
    """Reads and writes the blocks of one model. Usable on any number of threads at once."""

    def __init__(self, *, block_bytes: int, space: bytes, seal: Seal) -> None:
        """block_bytes: length of each payload. space: 16 bytes that stand for the model and the key."""
        self._block_bytes, self._space, self._seal = block_bytes, space, seal
        self.file_bytes = _HEADER.size + block_bytes + seal.tail_bytes
        """Length of each file."""

    def encode(self, name: bytes, payload: memoryview) -> list[bytes | memoryview]:
        """Return the parts of a block's file. payload: block_bytes bytes."""
        assert payload.nbytes == self._block_bytes, (payload.nbytes, self._block_bytes)
        salt = self._seal.salt()
        header = self._header(name, salt)
        return [header, *self._seal.close(header, salt, payload)]

    def read(self, descriptor: int, name: bytes, into: memoryview) -> None:
        """Read an open file's payload into `into`, block_bytes bytes, which is undefined after an error.

        Raises:
            BadFile: it is not the whole and unchanged file of this name, model and version.
            OSError: it cannot be read.
        """
        assert into.nbytes == self._block_bytes, (into.nbytes, self._block_bytes)
        size = os.fstat(descriptor).st_size
        if size != self.file_bytes:
            raise BadFile(f"it has {size} bytes, expected {self.file_bytes}")
        header, buffers = bytearray(_HEADER.size), self._seal.buffers(into)
        found = read_all(descriptor, [memoryview(header), *buffers])
        if found != self.file_bytes:
            raise BadFile(f"it ended after {found} bytes, expected {self.file_bytes}")
        salt = self._checked_salt(bytes(header), name)
        if not self._seal.open(bytes(header), salt, buffers, into):
            raise BadFile("its content is not as it was written")

    def _header(self, name: bytes, salt: bytes) -> bytes:
        return _HEADER.pack(
            _MAGIC, FORMAT_VERSION, self._seal.kind, len(name), self._block_bytes, self._space, name, salt
        )

    def _checked_salt(self, header: bytes, name: bytes) -> bytes:
        """Return the salt of a header that is this block's."""
        magic, version, kind, _, _, space, _, salt = _HEADER.unpack(header)
        if magic != _MAGIC:
            raise BadFile("it is no file of KV")
        if version != FORMAT_VERSION:
            raise BadFile(f"it has version {version}, expected {FORMAT_VERSION}")
        if kind != self._seal.kind:
            raise BadFile(f"it has seal {kind}, expected {self._seal.kind}")
        if space != self._space:
            raise BadFile("it is of another model, or was written with another key")
        if header != self._header(name, salt):
            raise BadFile("its header is not this block's")
        return bytes(salt)


def read_all(descriptor: int, buffers: Sequence[memoryview]) -> int:
    """Fill buffers from a file's start; return the number of bytes, less than asked for only at the file's end.

    Raises:
        OSError: from the system.
    """
    done = 0
    while left := _rest(buffers, done):
        count = os.preadv(descriptor, left, done)
        if count == 0:
            break
        done += count
    return done


def write_all(descriptor: int, parts: Sequence[bytes | memoryview]) -> None:
    """Write all parts to a new file.

    Raises:
        OSError: from the system; some of the bytes may be in the file.
    """
    views = [memoryview(part) for part in parts]
    done = 0
    while left := _rest(views, done):
        done += os.writev(descriptor, left)


def _rest(views: Sequence[memoryview], done: int) -> list[memoryview]:
    """Return what follows the first `done` bytes of all views together."""
    ends = accumulate(view.nbytes for view in views)
    return [view[max(0, done - end + view.nbytes) :] for view, end in zip(views, ends, strict=True) if end > done]
