"""Owns the only reason to skip tests of the native kernels: there is no compiler.
Never hides a failing compiler: what does not compile is a failure, and .ci/run demands a compiler."""

from __future__ import annotations

import os
import shlex
import shutil

import pytest

COMPILER = (shlex.split(os.environ.get("CXX", "")) or ["g++"])[0]

needs_compiler = pytest.mark.skipif(
    shutil.which(COMPILER) is None, reason=f"the native kernels need a C++ compiler, and {COMPILER} is not on the PATH"
)
