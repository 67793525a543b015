"""An OCI archive is read back part by part, and one whose parts are not what their digests say is refused."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from k8s.image import layout
from k8s.image.__main__ import main


def packed(files: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return stream.getvalue()


def made(tmp_path: Path, layer: bytes, *, spoiled: str = "") -> Path:
    """Write an archive of an image with one layer. `spoiled`: the part whose content is another than its digest's."""
    blobs: dict[str, bytes] = {}

    def blob(name: str, content: bytes) -> dict[str, Any]:
        digest = hashlib.sha256(content).hexdigest()
        blobs[f"blobs/sha256/{digest}"] = content + (b" " if name == spoiled else b"")
        return {"digest": f"sha256:{digest}", "size": len(content)}

    config = {"config": {"User": "1000:1000", "Env": ["A=b=c"]}, "rootfs": {"diff_ids": ["sha256:0"]}}
    manifest = {
        "config": blob("config", json.dumps(config).encode()),
        "layers": [blob("layer", layer)],
    }
    index = {"manifests": [blob("manifest", json.dumps(manifest).encode())]}
    path = tmp_path / "image.tar"
    path.write_bytes(packed({"index.json": json.dumps(index).encode(), **blobs}))
    return path


def test_an_image_is_read_with_its_user_environment_and_files(tmp_path: Path) -> None:
    image = layout.read(made(tmp_path, packed({"etc/name": b"x"})))
    assert image.config["User"] == "1000:1000"
    assert image.environment == {"A": "b=c"}
    (tmp_path / "root").mkdir()
    layout.unpack(image, tmp_path / "root")
    assert (tmp_path / "root" / "etc" / "name").read_bytes() == b"x"


@pytest.mark.parametrize("part", ["config", "layer", "manifest"])
def test_a_part_that_is_not_what_its_digest_says_is_refused(part: str, tmp_path: Path) -> None:
    with pytest.raises(layout.ImageError, match="its content has another digest or size"):
        layout.read(made(tmp_path, packed({"a": b"x"}), spoiled=part))


def test_what_is_no_archive_of_an_image_is_refused_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "no.tar").write_bytes(packed({"a": b"x"}))
    (tmp_path / "none.tar").write_bytes(b"no tar")
    assert main(["--read", str(tmp_path / "no.tar")]) == 1
    assert main(["--read", str(tmp_path / "none.tar")]) == 1
    assert main(["--read", str(tmp_path / "missing.tar")]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert "index.json is missing" in lines[0]


@pytest.mark.parametrize("name", ["../outside", "a/../../outside"])
def test_an_entry_that_leads_out_of_the_root_is_refused(name: str, tmp_path: Path) -> None:
    image = layout.read(made(tmp_path, packed({name: b"x"})))
    (tmp_path / "root").mkdir()
    with pytest.raises(layout.ImageError):
        layout.unpack(image, tmp_path / "root")
    assert not (tmp_path / "outside").exists()


def test_a_layer_that_removes_files_is_refused_rather_than_unpacked_wrongly(tmp_path: Path) -> None:
    image = layout.read(made(tmp_path, packed({"etc/.wh.name": b""})))
    with pytest.raises(layout.ImageError, match=r"\.wh\.name: a layer that removes files"):
        layout.unpack(image, tmp_path)


def test_building_without_its_programs_says_what_installs_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["--out", str(tmp_path / "image.tar")]) == 1
    assert "missing: mmdebstrap, buildah: `apt-get install" in capsys.readouterr().err
