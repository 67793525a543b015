"""What glibc is asked to do with freed memory, and that nobody is asked elsewhere."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable

import pytest

from engine.host import allocator


class Library:
    """A C library that notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, ...]] = []

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*numbers: int) -> int:
            self.asked.append((name, *map(str, numbers)))
            return 1

        return call


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    found = Library()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: found)
    return found


def test_freed_buffers_are_kept_up_to_a_gibibyte(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    allocator.keep_freed_memory()
    assert library.asked == [("mallopt", "-3", str(32 << 20)), ("mallopt", "-1", str(1 << 30))]


def test_all_that_is_free_is_given_back(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    allocator.give_back_freed_memory()
    assert library.asked == [("malloc_trim", "0")]


def test_no_other_system_is_asked(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    allocator.keep_freed_memory()
    allocator.give_back_freed_memory()
    assert library.asked == []


def test_a_library_without_these_functions_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    allocator.keep_freed_memory()
    allocator.give_back_freed_memory()
