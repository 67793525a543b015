"""Owns what is said when a command's output or file cannot be written: a full disk is a line, and not a traceback.
Never hides another error: one of our own keeps its traceback."""

from __future__ import annotations

import argparse
import os
import sys
from errno import EDQUOT, EFBIG, EIO, ENOSPC, EROFS
from pathlib import Path
from typing import Any

BY_SIGNAL = 128
"""Added to a signal's number, as a shell does, for the exit status of a command that it ended."""
_OF_THE_DISK = (ENOSPC, EDQUOT, EFBIG, EIO, EROFS)


class OutputLost(Exception):
    """The terminal, pipe or file that a command prints to takes no more."""

    def __init__(self, cause: OSError) -> None:
        super().__init__(f"write error: {cause.strerror}")
        self.has_left = isinstance(cause, BrokenPipeError)
        """Whether it is a pipe whose reader has left, which is no failure."""


class CannotWrite(Exception):
    """A file that an option names was not written. The message is one line that begins with the option."""


class OutputParser(argparse.ArgumentParser):
    """Raises OSError for a help that cannot be written, which argparse's own parser counts as shown."""

    def _print_message(self, message: str, file: Any = None) -> None:
        if message and file is sys.stdout:
            file.write(message)
        else:
            super()._print_message(message, file)


def disk_problem(error: Exception) -> str | None:
    """Say in a line what could not be written because of its disk; None if the error is another."""
    if not isinstance(error, OSError) or error.errno not in _OF_THE_DISK:
        return None
    return ": ".join(map(str, filter(None, ("write error", error.filename, error.strerror))))


def write_file(option: str, path: Path, text: str, *, new: bool = False) -> None:
    """Write the file that an option names. `new`: refuse one that is there already, and leave nothing of one that could
    not be written whole.

    Raises:
        CannotWrite
    """
    made = False
    try:
        with path.open("x" if new else "w", encoding="utf-8") as file:
            made = new
            file.write(text)
    except FileExistsError:
        raise CannotWrite(f"{option}: {path} is there already: choose another name, or remove it") from None
    except OSError as error:
        if made:
            path.unlink(missing_ok=True)
        raise CannotWrite(f"{option}: {path}: {error.strerror}") from None


def discard_output(*, errors: bool = False) -> None:
    """Let what is still in the buffer of standard output go nowhere: Python writes it when it ends, and would say that
    it cannot. errors: that of standard error, too."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2) if errors else (1,):
        os.dup2(nowhere, descriptor)
