"""Owns the checks of tiers of KV: whether the workers have the disk, the key and the memory that the settings name.
Never judges how large they should be."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

from k8s.validate.manifests import Doc, Group, at, groups, quantity
from k8s.validate.serve_config import FIELD
from serve_app.settings.application import AppSettings

_SPARE = 1.1
"""What a volume must have above disk_gib: files are written before older ones are removed."""

_Problems = Iterator[tuple[str, str]]


def problems(doc: Doc, settings: AppSettings) -> _Problems:
    """Find what a RayService's workers lack for `engine.kv_tiers`. Any engine may start on any worker."""
    tiers = [model.engine.kv_tiers for model in settings.each_model()]
    host_gib = max(one.host_memory_gib for one in tiers)
    for group in groups(doc)[1:]:
        path = f"{group.path}.template.spec"
        if host_gib * 2**30 >= quantity(at(group.ray_container, "resources.limits.memory", "0")):
            where = f"{path}.containers[0].resources.limits.memory"
            yield where, f"must be > engine.kv_tiers.host_memory_gib ({host_gib:g}), which is a part of it"
        for one in tiers:
            for name, file in (("disk_path", one.disk_path), ("disk_key_file", one.disk_key_file)):
                if file is not None and _mount_of(group, file) is None:
                    yield f"{FIELD}: args.engine.kv_tiers.{name}", f"is {file}, below no volume of {group.name}"
        for directory in dict.fromkeys(one.disk_path for one in tiers if one.disk_path is not None):
            gib = max(one.disk_gib for one in tiers if one.disk_path == directory)
            yield from _volume(group, directory, gib)


def _volume(group: Group, directory: str, gib: float) -> _Problems:
    if (mount := _mount_of(group, directory)) is None:
        return
    if mount.get("readOnly"):
        yield f"{group.path}.template.spec.containers[0].volumeMounts", f"{mount['name']} must not be read-only"
    for i, volume in enumerate(at(group.pod, "volumes", [])):
        limit = at(volume, "emptyDir.sizeLimit")
        if volume["name"] == mount["name"] and limit is not None and quantity(limit) < _SPARE * gib * 2**30:
            where = f"{group.path}.template.spec.volumes[{i}].emptyDir.sizeLimit"
            yield where, f"must be >= {_SPARE * gib:g}Gi, or Kubernetes ends the pod when the disk is full ({limit})"


def _mount_of(group: Group, file: str) -> dict[str, Any] | None:
    """Return the mount that a file or directory is in. One that is the mount itself does not count: its mode is not the
    engine's to set."""
    mounts: list[dict[str, Any]] = at(group.ray_container, "volumeMounts", [])
    above = [mount for mount in mounts if PurePosixPath(mount["mountPath"]) in PurePosixPath(file).parents]
    return max(above, key=lambda mount: len(mount["mountPath"]), default=None)
