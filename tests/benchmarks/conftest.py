"""Owns what all tests of the benchmarks share: a GPU that is none has no Triton."""

from tests.support.no_triton import without_triton

__all__ = ["without_triton"]
