"""Owns models that are in Hugging Face's format already: local directories and hub repositories.
Never converts anything, and never returns a directory without checking its contents."""

from __future__ import annotations

import errno
import glob
import json
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from engine.checkpoints.model_cache import FilesMissingError, ModelError, NotMadeError

_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer*"]
# Files in subdirectories are the same weights in other formats (onnx/, original/), and so are Mistral's consolidated
# files beside the usual ones: gigabytes that nothing reads.
_CONSOLIDATED = "consolidated*.safetensors"
_USUAL_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
_TOOL_TEMPLATE = "additional_chat_templates/tool_use.jinja"
# Faults of the cache's file system, which another try or another repository would meet again.
_LOCAL_FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS)
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit, so that a garbage file is not read into memory


def check_shape_directory(directory: Path) -> Path:
    """Return `directory` if it has a config.json, which is all that random weights need.

    Raises:
        ModelError: it has none. The message names the files that were found.
    """
    if not (directory / "config.json").is_file():
        found = sorted(path.name for path in directory.iterdir())
        raise ModelError(f"{directory} has no config.json; found {', '.join(found[:12]) or 'nothing'}.")
    return directory


def check_model_directory(directory: Path) -> Path:
    """Return `directory` if it can be served: config.json, tokenizer.json, and whole safetensors weights.

    Raises:
        ModelError: a file is missing, or a weights file is truncated. The message names the file, what was found and
            what was expected.
    """
    found = sorted(path.name for path in directory.iterdir())
    weights = [name for name in found if name.endswith(".safetensors")]
    missing = [name for name in ("config.json", "tokenizer.json") if name not in found]
    if not weights:
        missing.append("*.safetensors")
    if missing:
        raise FilesMissingError(
            f"{directory} is not a model directory: it has no {', '.join(missing)}. Expected config.json, "
            f"tokenizer.json and *.safetensors; found {', '.join(found[:12]) or 'nothing'}."
        )
    for name in sorted({*weights, *_indexed_shards(directory)}):
        _check_safetensors(directory / name)
    return directory


def _indexed_shards(directory: Path) -> set[str]:
    """Names of the weight files that model.safetensors.index.json lists; empty without an index."""
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        return set()
    try:
        names = json.loads(index.read_text())["weight_map"].values()
        if not all(isinstance(name, str) for name in names):
            raise TypeError("a file's name is no string")
        return set(names)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} is not a safetensors index: expected JSON with a weight_map.") from error


def _check_safetensors(path: Path) -> None:
    """Compare the file's size with its header. Finds truncated downloads and Git LFS pointers without reading the
    file."""
    if not path.is_file():
        raise FilesMissingError(f"{path} is missing: model.safetensors.index.json lists it.")
    found_bytes = path.stat().st_size
    try:
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(header_bytes, _MAX_HEADER_BYTES)))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ModelError(
            f"{path} ({found_bytes} bytes) is not a safetensors file: its header is unreadable."
        ) from error
    expected_bytes = 8 + header_bytes + max(ends, default=0)
    if found_bytes != expected_bytes:
        raise ModelError(f"{path} has {found_bytes} bytes, but its header describes {expected_bytes}.")


def download_from_hub(repo: str, revision: str | None, progress: bool) -> Path:
    """Download a hub repository's weights, configuration and tokenizer into Hugging Face's own cache.

    The hub's list of files is checked before gigabytes are fetched. If the hub cannot be reached, a cached snapshot is
    used if it is whole.

    Raises:
        NotMadeError: the hub's cache cannot be written.
        ModelError: the hub cannot be reached or refuses the id, or the repository holds nothing that can be served.
    """
    from huggingface_hub import HfApi  # takes 0.2 s, and is needed only here
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not progress:
        disable_progress_bars()
    wanted: list[str] = []
    try:
        siblings = HfApi().model_info(repo, revision=revision).siblings or []
        names = [sibling.rfilename for sibling in siblings]
        _check_hub_files(repo, names)
        wanted = _wanted(names)
        return check_model_directory(_snapshot(repo, revision, wanted))
    except ModelError:
        raise
    except (HfHubHTTPError, ValueError) as error:
        raise ModelError(f"The hub refused {repo} at revision {revision or 'main'}: {error}") from error
    except Exception as error:  # noqa: BLE001 - a failed connection has another type in each release (httpx, httpx2)
        return _cached_snapshot(repo, revision, wanted, error)


def snapshot_in_cache(repo: str, revision: str | None) -> Path | None:
    """Return what an earlier download of a hub repository left, without asking the hub. None: there is nothing,
    or only a part of the files.

    Raises:
        ModelError: the hub's library does not take the id, or what is there cannot be served.
    """
    try:
        directory = _snapshot(repo, revision)
    except OSError:
        return None
    except ValueError as error:
        raise ModelError(f"{repo} at revision {revision or 'main'} is no hub id: {error}") from error
    try:
        return check_model_directory(directory)
    except FilesMissingError:
        return None


def _wanted(names: Sequence[str]) -> list[str]:
    """Return which of a repository's files are downloaded."""
    usual = any(name in names for name in _USUAL_WEIGHTS)

    def takes(name: str) -> bool:
        if "/" in name or (usual and fnmatchcase(name, _CONSOLIDATED)):
            return name == _TOOL_TEMPLATE
        return any(fnmatchcase(name, pattern) for pattern in _HUB_FILES)

    return [name for name in names if takes(name)]


def _snapshot(repo: str, revision: str | None, wanted: Sequence[str] | None = None) -> Path:
    """Download files, or with None look for an earlier download. Raises OSError and what the hub's library raises."""
    from huggingface_hub import snapshot_download

    if wanted is not None:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=[glob.escape(name) for name in wanted]))
    return Path(
        snapshot_download(
            repo,
            revision=revision,
            allow_patterns=_HUB_FILES,
            ignore_patterns=["*/*", _CONSOLIDATED],
            local_files_only=True,
        )
    )


def _cached_snapshot(repo: str, revision: str | None, wanted: Sequence[str], cause: Exception) -> Path:
    """Return an earlier download, if it is whole: an interrupted one leaves some of its files. wanted: their names, if
    the hub has told them."""
    try:
        directory = _snapshot(repo, revision)
        absent = [name for name in wanted if not (directory / name).is_file()]
        if not absent:
            return check_model_directory(directory)
        left = f"{directory} lacks {', '.join(absent[:12])}."
    except ModelError as error:
        left = f"what is cached cannot be served: {error}"
    except OSError:
        left = "no earlier download is cached whole."
    what = f"{repo} at revision {revision or 'main'}"
    if isinstance(cause, OSError) and cause.errno in _LOCAL_FAULTS:
        from huggingface_hub.constants import HF_HUB_CACHE

        raise NotMadeError(
            f"Cannot download {what} into the hub's cache {HF_HUB_CACHE}: {cause}. "
            "Expected a writable directory with space for the model; set HF_HOME to one."
        ) from cause
    if wanted:
        raise ModelError(f"The download of {what} failed ({cause}), and {left}") from cause
    raise ModelError(
        f"The hub cannot be reached for {what} ({cause}), and {left} If a local directory was meant: there is none at "
        f"{Path(repo).absolute()}."
    ) from cause


def _check_hub_files(repo: str, names: list[str]) -> None:
    """Refuse a repository before its weights are fetched. Raises ModelError."""
    if not any(name.endswith(".safetensors") and "/" not in name for name in names):
        if any(name.endswith(".gguf") for name in names):
            raise ModelError(
                f"{repo} holds GGUF files and no safetensors: download one and pass the .gguf file's path."
            )
        raise ModelError(f"{repo} has no *.safetensors; found {', '.join(names[:12]) or 'nothing'}.")
    missing = [name for name in ("config.json", "tokenizer.json") if name not in names]
    if missing:
        raise ModelError(f"{repo} has no {' and no '.join(missing)}; found {', '.join(names[:12])}.")
