"""Owns what tests know of the image without building it: its Dockerfile, and the hook's files in their places.
Never reads them from the checkout by way of the import path: a pod has no checkout."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from k8s.validate.manifests import K8S, ROOT

DOCKERFILE = (K8S / "Dockerfile").read_text()


def hook_files(root: Path) -> Path:
    """Copy the files of the drain hook under `root`, as the Dockerfile does under /.
    Return the PYTHONPATH that the image then has."""
    (path,) = re.findall(r"PYTHONPATH=(\S+)", DOCKERFILE)
    (line,) = re.findall(rf"^COPY (k8s/.+) {path}/k8s/$", DOCKERFILE, re.MULTILINE)
    directory = root / path.lstrip("/")
    (directory / "k8s").mkdir(parents=True)
    for source in line.split():
        shutil.copy(ROOT / source, directory / "k8s")
    return directory
