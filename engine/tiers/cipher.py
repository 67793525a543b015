"""Owns what a key does for files of KV: their names, which tell nothing, and AES-256-GCM for what is in them.
Never keeps a nonce or a counter: each file has a key of its own, so that a fleet may share one key for years."""

from __future__ import annotations

import os
from collections.abc import Callable
from hashlib import blake2b
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from engine.config import ConfigError

KEY_BYTES = 32
MAX_DIGEST_BYTES = 32
"""The longest name of a block that a header has room for."""
SALT_BYTES = 28
"""Random bytes in a header: 16 choose the file's key, 12 are its nonce."""

_TAG_BYTES, _NONCE_BYTES = 16, 12
_CIPHERS = "hazmat.primitives.ciphers.aead"


def read_key(path: Path) -> bytes:
    """Read the key of kv_tiers.disk_key_file: 32 bytes as they are, or 64 hexadecimal digits with white space around.

    Raises:
        ConfigError: the file cannot be read, or has something else in it. The message never shows any of it.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"kv_tiers.disk_key_file {path} cannot be read: {error.strerror}.") from error
    if len(data) == KEY_BYTES:
        return data
    text = data.strip()
    try:
        if len(text) == 2 * KEY_BYTES:
            return bytes.fromhex(text.decode("ascii"))
    except ValueError:
        pass  # not hexadecimal digits
    raise ConfigError(
        f"kv_tiers.disk_key_file {path} has {len(data)} bytes that are no key: expected {KEY_BYTES} bytes, or "
        f"{2 * KEY_BYTES} hexadecimal digits."
    )


def derive(key: bytes, purpose: bytes, data: bytes = b"") -> bytes:
    """Return 32 bytes for one purpose. They tell nothing about the key or about those of another purpose."""
    return blake2b(data, key=key, person=purpose, digest_size=KEY_BYTES).digest()


class Names:
    """The names of one model's files. With the key, a name gives back the block's digest, so that listing a directory
    is enough to know what is in it. Without the key it is noise.

    A name is the digest, encrypted with a synthetic nonce (Rogaway and Shrimpton 2006): a keyed tag of the digest, and
    the digest under a mask made from the tag. So equal digests have equal names, and nobody can make up another one.
    """

    def __init__(self, key: bytes, fingerprint: bytes) -> None:
        """key: KEY_BYTES. fingerprint: of the model; blocks of another model have unrelated names."""
        self._tag_key = derive(key, b"kv file tag", fingerprint)
        self._mask_key = derive(key, b"kv file mask", fingerprint)
        self.space = derive(key, b"kv space", fingerprint)[:16]
        """Names the directory of the model's files. Two keys never share one."""

    def encode(self, digest: bytes) -> bytes:
        """Return the name of a block's file; 16 bytes longer than the digest, which has at most MAX_DIGEST_BYTES."""
        tag = blake2b(digest, key=self._tag_key, digest_size=_TAG_BYTES).digest()
        return tag + self._masked(tag, digest)

    def decode(self, name: bytes) -> bytes | None:
        """Return the digest; None if it is no name that this key makes for this model."""
        tag = name[:_TAG_BYTES]
        if not _TAG_BYTES < len(name) <= _TAG_BYTES + MAX_DIGEST_BYTES:
            return None
        digest = self._masked(tag, name[_TAG_BYTES:])
        return digest if self.encode(digest) == name else None

    def _masked(self, tag: bytes, data: bytes) -> bytes:
        mask = blake2b(tag, key=self._mask_key, digest_size=len(data)).digest()
        return (int.from_bytes(data, "big") ^ int.from_bytes(mask, "big")).to_bytes(len(data), "big")


class Seal(Protocol):
    """Protects a file's payload, and its header with it."""

    @property
    def kind(self) -> int:
        """The number in the header."""
        ...

    @property
    def tail_bytes(self) -> int:
        """Bytes after the payload."""
        ...

    def salt(self) -> bytes:
        """Return SALT_BYTES for a new file's header."""
        ...

    def close(self, header: bytes, salt: bytes, payload: memoryview) -> list[bytes | memoryview]:
        """Return what follows the header in the file."""
        ...

    def buffers(self, into: memoryview) -> list[memoryview]:
        """Return the memory into which to read what follows the header."""
        ...

    def open(self, header: bytes, salt: bytes, buffers: list[memoryview], into: memoryview) -> bool:
        """Write the payload to `into`. False if a bit of the file is not as it was written; `into` is then
        undefined."""
        ...


class Checksum:
    """A seal without a secret: the tag that AES-GCM makes of header and payload under a key that everybody knows. It is
    for faults of a disk and mixed-up files, and no defence against those who may write to the directory.

    A random fault goes unnoticed once in 2**128 / blocks. Processors have instructions for it: 22 GB/s on the two-core
    machine where SHA-256 did 1.8 GB/s, and its time was that of the file's write.
    """

    kind = 0
    tail_bytes = 16

    def __init__(self) -> None:
        """
        Raises:
            ConfigError: the package `cryptography` is not installed.
        """
        self._tag = _package(_CIPHERS).AESGCM(bytes(KEY_BYTES)).encrypt

    def salt(self) -> bytes:
        return bytes(SALT_BYTES)

    def close(self, header: bytes, salt: bytes, payload: memoryview) -> list[bytes | memoryview]:
        return [payload, self._check(header, payload)]

    def buffers(self, into: memoryview) -> list[memoryview]:
        return [into, memoryview(bytearray(self.tail_bytes))]

    def open(self, header: bytes, salt: bytes, buffers: list[memoryview], into: memoryview) -> bool:
        return self._check(header, into) == bytes(buffers[1])

    def _check(self, header: bytes, payload: memoryview) -> bytes:
        """Return the tag alone: the header is what is encrypted, since the payload is not to be copied."""
        tag: bytes = self._tag(bytes(_NONCE_BYTES), header, payload)[-self.tail_bytes :]
        return tag


class Aes256Gcm:
    """AES-256-GCM with the header as associated data. Each file has a random key, derived from the deployment's, and a
    random nonce: with one key for all files, nonces alone would allow some 2**32 of them, which a fleet writes in
    days."""

    kind = 1
    tail_bytes = 16

    def __init__(self, key: bytes) -> None:
        """key: KEY_BYTES.

        Raises:
            ConfigError: the package `cryptography` is not installed.
        """
        self._aead: Callable[[bytes], Any] = _package(_CIPHERS).AESGCM
        self._no_tag: type[Exception] = _package("exceptions").InvalidTag
        self._key = key

    def salt(self) -> bytes:
        return os.urandom(SALT_BYTES)

    def close(self, header: bytes, salt: bytes, payload: memoryview) -> list[bytes | memoryview]:
        return [self._cipher(salt).encrypt(salt[16:], payload, header)]

    def buffers(self, into: memoryview) -> list[memoryview]:
        return [memoryview(bytearray(len(into) + self.tail_bytes))]

    def open(self, header: bytes, salt: bytes, buffers: list[memoryview], into: memoryview) -> bool:
        try:
            into[:] = self._cipher(salt).decrypt(salt[16:], buffers[0], header)
        except self._no_tag:
            return False
        return True

    def _cipher(self, salt: bytes) -> Any:
        return self._aead(derive(self._key, b"kv file key", salt[:16]))


def _package(module: str) -> Any:
    """Import a module of `cryptography`, which an engine without files does not need.

    Raises:
        ConfigError: it cannot be imported.
    """
    try:
        return import_module(f"cryptography.{module}")
    except ImportError as error:
        raise ConfigError(
            f"kv_tiers.disk_path is set, and its files need the Python package cryptography: {error}."
        ) from error
