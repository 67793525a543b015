"""Implements `python -m k8s.image`: builds the image without a daemon, or says what an archive is.
Never leaves anything but the archive."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from k8s.image.build import BuildFailed, build, image_name
from k8s.image.layout import Image, ImageError, read
from k8s.validate.manifests import ROOT

_ARCHIVE = ROOT / "build" / "chunkserve.oci.tar"


def describe(image: Image) -> str:
    """Return a line about an image: its size, and the user that it runs as."""
    user = image.config.get("User") or "root"
    return f"{image.archive}: {image.size / 1e6:.0f} MB compressed in {len(image.layers)} layers, runs as {user}"


def main(arguments: list[str] | None = None) -> int:
    """Returns 0, or 1 with a line on standard error if the image cannot be built or read."""
    parser = argparse.ArgumentParser(
        prog="python -m k8s.image",
        description="Build the image of k8s/Dockerfile without a daemon, as an OCI archive, which `podman load` and "
        "`skopeo copy oci-archive:...` read. It needs root, mmdebstrap and buildah.",
    )
    parser.add_argument("--out", type=Path, default=_ARCHIVE, help="the archive (build/chunkserve.oci.tar)")
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE", help="the Dockerfile's own")
    parser.add_argument(
        "--show",
        action="append",
        default=[],
        metavar="HOST:PATH",
        help="a file or directory of this machine that the steps see, and the image does not have: "
        "pip's configuration, certificates, wheels",
    )
    parser.add_argument("--read", type=Path, metavar="ARCHIVE", help="check an archive's digests, and build nothing")
    options = parser.parse_args(arguments)
    try:
        if options.read is None:
            with tempfile.TemporaryDirectory(prefix="chunkserve-image-") as scratch:
                build(
                    options.out.absolute(),
                    image_name(),
                    Path(scratch),
                    arguments=options.build_arg,
                    shown=options.show,
                )
        print(describe(read(options.read or options.out)))
    except (BuildFailed, ImageError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
