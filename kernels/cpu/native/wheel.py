"""Owns what a wheel has besides files of this checkout: the native library for each level of processors, and its tag.
Never runs outside a build: setuptools calls it, by pyproject.toml. Without g++ it makes a wheel of sources alone; if
g++ fails, it makes none."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import ClassVar

from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))  # a build runs outside of this checkout

from kernels.cpu.native.levels import LEVELS  # noqa: E402
from kernels.cpu.native.library import NoCompilerError, build  # noqa: E402

logger = logging.getLogger(__name__)


class BuildWithLibraries(build_py):
    """Compiles the libraries beside the copied sources. An editable installation compiles at its first start."""

    built: ClassVar[list[Path]] = []

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        directory = Path(self.build_lib) / "kernels" / "cpu" / "native" / "built"
        try:
            for level in LEVELS:
                self.built.append(build(level, directory))
        except NoCompilerError as error:
            logger.warning("this wheel has no native library: %s", error)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [*super().get_outputs(include_bytecode), *map(str, self.built)]


class PlatformWheel(bdist_wheel):
    """Names the platform, but no version of Python: the libraries are called through ctypes."""

    def finalize_options(self) -> None:
        self.distribution.has_ext_modules = lambda: True
        super().finalize_options()

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]
