"""Owns reading an image in an OCI archive: its parts with their digests, its configuration, and its root file system.
Never trusts what is written in it: a part whose digest differs is refused."""

from __future__ import annotations

import hashlib
import json
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

Doc = dict[str, Any]

_CHUNK = 1 << 20
_REMOVED = ".wh."
"""Begins the name of an entry in a layer that removes the file of the rest of that name below it."""


class ImageError(RuntimeError):
    """An archive is not a valid image. The message says what is wrong with which part."""


@dataclass(frozen=True, slots=True)
class Image:
    """`archive`: its file. `config`: how it is run (`User`, `Env`, `Cmd`). `layers`: digests, the lowest first.
    `size`: bytes of all layers, compressed."""

    archive: Path
    config: Doc
    layers: tuple[str, ...]
    size: int

    @property
    def environment(self) -> dict[str, str]:
        pairs = (entry.partition("=") for entry in self.config.get("Env", []))
        return {name: value for name, _, value in pairs}


def read(archive: Path) -> Image:
    """Read an OCI archive with one image, and compare every part's size and digest. Raises ImageError."""
    try:
        with tarfile.open(archive) as parts:
            (top,) = json.loads(_part(parts, "index.json"))["manifests"]
            manifest = json.loads(_blob(parts, top))
            config = json.loads(_blob(parts, manifest["config"]))
            for layer in manifest["layers"]:
                _check(parts, layer)
    except (KeyError, ValueError, tarfile.TarError) as error:
        reason = str(error).partition("\n")[0]  # tarfile lists every compression that it is not
        raise ImageError(f"{archive.name} is no OCI archive of one image: {reason}") from error
    if len(config["rootfs"]["diff_ids"]) != len(manifest["layers"]):
        raise ImageError(f"{archive.name}: the configuration does not list one digest for each layer")
    layers = tuple(layer["digest"] for layer in manifest["layers"])
    return Image(archive, config.get("config", {}), layers, sum(layer["size"] for layer in manifest["layers"]))


def unpack(image: Image, root: Path) -> None:
    """Write the root file system below `root`, which must be empty. Needs root's rights, for the files' owners.

    Raises:
        ImageError: an entry would be written outside `root`.
    """
    with tarfile.open(image.archive) as parts:
        for digest in image.layers:
            with _opened(parts, digest) as stream, tarfile.open(fileobj=stream, mode="r|*") as layer:
                for entry in layer:
                    _write(layer, entry, root)


def _write(layer: tarfile.TarFile, entry: tarfile.TarInfo, root: Path) -> None:
    path = root / entry.name
    if path.name.startswith(_REMOVED):
        raise ImageError(f"{entry.name}: a layer that removes files is not expected of an image built in one piece")
    try:
        layer.extract(entry, root, filter=_as_it_is)
    except tarfile.FilterError as error:
        raise ImageError(f"{entry.name}: {error}") from error


def _as_it_is(entry: tarfile.TarInfo, root: str) -> tarfile.TarInfo:
    """Refuse a name that leads out of the root, and keep modes and owners, which `tar_filter` would tame."""
    return entry.replace(name=tarfile.tar_filter(entry, root).name)


def _part(parts: tarfile.TarFile, name: str) -> bytes:
    for known in (name, f"./{name}"):
        try:
            file = parts.extractfile(known)
        except KeyError:
            continue
        if file is not None:
            return file.read()
    raise ImageError(f"{name} is missing")


def _blob_name(digest: str) -> str:
    kind, _, value = digest.partition(":")
    return f"blobs/{kind}/{value}"


@contextmanager
def _opened(parts: tarfile.TarFile, digest: str) -> Iterator[IO[bytes]]:
    for name in (_blob_name(digest), f"./{_blob_name(digest)}"):
        try:
            file = parts.extractfile(name)
        except KeyError:
            continue
        if file is not None:
            yield file
            return
    raise ImageError(f"{digest} is missing")


def _check(parts: tarfile.TarFile, descriptor: Doc) -> None:
    computed, size = hashlib.sha256(), 0
    with _opened(parts, descriptor["digest"]) as stream:
        while chunk := stream.read(_CHUNK):
            computed.update(chunk)
            size += len(chunk)
    if (f"sha256:{computed.hexdigest()}", size) != (descriptor["digest"], descriptor["size"]):
        raise ImageError(f"{descriptor['digest']}: its content has another digest or size")


def _blob(parts: tarfile.TarFile, descriptor: Doc) -> bytes:
    _check(parts, descriptor)
    return _part(parts, _blob_name(descriptor["digest"]))
