"""Owns what all tests of the benchmarks share: where the GPU is only pretended, Triton does not count as installed."""

from tests.support.no_triton import without_triton

__all__ = ["without_triton"]
