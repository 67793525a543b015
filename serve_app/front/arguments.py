"""Reads those arguments of the `serve` command that matter before Ray reads them: config, `--verbose`, address.
Never refuses an argument: Ray's command does, because it knows them all."""

from __future__ import annotations

import os
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from serve_app.front.console import VARIABLE

# fmt: off
WITH_VALUE = (
    "--runtime-env", "--runtime-env-json", "--working-dir", "--app-dir", "-d", "--address", "-a", "--route-prefix",
    "--name",
)
# fmt: on
"""The options of `serve run` that take a value; a test compares them with Ray's."""
_BRING_FILES = ("--runtime-env", "--runtime-env-json", "--working-dir")
_ASKS_THE_DASHBOARD = frozenset(("config", "deploy", "shutdown", "status"))
_FLAGS = ("--blocking", "--non-blocking", "--reload", "-r", "--help", "-h")
"""The options of `serve run` without a value, but for `--verbose`, which is ours."""
_NOT_OURS = frozenset(("--help", "--non-blocking", "--reload", "-r"))
"""With one of these, Ray's own command does the whole run after the checks."""


def _is_config(argument: str, *, may_lack_suffix: bool) -> bool:
    """Whether an argument is a config's path, and not an import path such as `module:attribute`."""
    path = Path(argument)
    if path.suffix in (".yaml", ".yml", ".json") or os.path.isfile(path):
        return True
    return may_lack_suffix and ":" not in argument and ("/" in argument or "." not in argument)


@dataclass(frozen=True, slots=True)
class Arguments:
    """`of_ray`: the arguments for Ray's command. `verbose`: show everything that Ray prints."""

    of_ray: list[str]
    verbose: bool

    @classmethod
    def read(cls, arguments: list[str], environ: MutableMapping[str, str]) -> Arguments:
        asked = arguments[:1] == ["run"] and "--verbose" in arguments
        of_ray = [argument for argument in arguments if argument != "--verbose"] if asked else arguments
        return cls(of_ray, asked or environ.get(VARIABLE) == "1")

    @property
    def config(self) -> Path | None:
        """The config that `serve run` is given, if it is, or should be, a file."""
        return self._path_after("run")

    @property
    def deployed(self) -> Path | None:
        """The config that `serve deploy` is given, likewise."""
        return self._path_after("deploy")

    def _path_after(self, command: str) -> Path | None:
        if self.of_ray[:1] != [command] or "--help" in self.of_ray:
            return None
        rest, all_known = iter(self.of_ray[1:]), True
        for argument in rest:
            if argument in WITH_VALUE:
                next(rest, None)
            elif argument.startswith("-"):
                name = argument.partition("=")[0]
                all_known &= name in (*WITH_VALUE, *_FLAGS) or name[:2] in WITH_VALUE
            else:  # after an option that Ray will refuse, this may be its value
                return Path(argument) if _is_config(argument, may_lack_suffix=all_known) else None
        return None

    @property
    def brings_files(self) -> bool:
        """Whether the applications may import modules that this process cannot find on this machine."""
        return any(True for name in _BRING_FILES for _ in self._values(name))

    @property
    def app_dir(self) -> str:
        """The directory in which Ray's `serve run` looks for modules first."""
        return [".", *self._values("--app-dir", "-d")][-1]

    def _values(self, *names: str) -> Iterator[str]:
        """Yield an option's values in the forms that click reads: `--name value`, `--name=value`, `-dvalue`."""
        rest = iter(self.of_ray[1:])
        for argument in rest:
            name, equals, value = argument.partition("=")
            if argument in WITH_VALUE:
                given = next(rest, "")
                if argument in names:
                    yield given
            elif equals and name in names:
                yield value
            elif argument[:2] in names and not argument.startswith("--"):
                yield argument[2:]

    @property
    def leaves_the_run_to_us(self) -> bool:
        return not _NOT_OURS & set(self.of_ray)

    @property
    def wants_a_server(self) -> bool:
        """Whether the command asks a running server's dashboard without saying which server."""
        if any(argument.startswith(("-a", "--address", "--help")) for argument in self.of_ray):
            return False
        return bool(self.of_ray) and self.of_ray[0] in _ASKS_THE_DASHBOARD
