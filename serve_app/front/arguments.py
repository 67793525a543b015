"""Owns what our `serve` command reads of its arguments before Ray's does: the config, `--verbose`, an address.
Never refuses one: Ray's command does, and knows them all."""

from __future__ import annotations

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
"""Options of `serve run` whose next argument is theirs; a test holds them against Ray's."""
_BRING_FILES = ("--runtime-env", "--runtime-env-json", "--working-dir")
_ASKS_THE_DASHBOARD = frozenset(("config", "deploy", "shutdown", "status"))
_NOT_OURS = frozenset(("--help", "--non-blocking", "--reload", "-r"))
"""With one of these, `serve run` is Ray's alone, after our checks."""


@dataclass(frozen=True, slots=True)
class Arguments:
    """of_ray: without our own. verbose: all that Ray prints is wanted."""

    of_ray: list[str]
    verbose: bool

    @classmethod
    def read(cls, arguments: list[str], environ: MutableMapping[str, str]) -> Arguments:
        asked = arguments[:1] == ["run"] and "--verbose" in arguments
        of_ray = [argument for argument in arguments if argument != "--verbose"] if asked else arguments
        return cls(of_ray, asked or environ.get(VARIABLE) == "1")

    @property
    def config(self) -> Path | None:
        """What a `serve run` is given, where that is a YAML file, or should be."""
        if self.of_ray[:1] != ["run"] or "--help" in self.of_ray:
            return None
        rest = iter(self.of_ray[1:])
        for argument in rest:
            if argument in WITH_VALUE:
                next(rest, None)
            elif not argument.startswith("-"):
                path = Path(argument)
                return path if path.suffix in (".yaml", ".yml") or path.is_file() else None
        return None

    @property
    def brings_files(self) -> bool:
        """Whether the applications may import what is not on this machine, or not where this process looks."""
        return any(True for name in _BRING_FILES for _ in self._values(name))

    @property
    def app_dir(self) -> str:
        """Where Ray's `serve run` looks for modules first."""
        return [".", *self._values("--app-dir", "-d")][-1]

    def _values(self, *names: str) -> Iterator[str]:
        """As click reads them: `--name value`, `--name=value`, `-dvalue`."""
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
        """Whether it asks the dashboard of a running server, and does not say of which."""
        if any(argument.startswith(("-a", "--address", "--help")) for argument in self.of_ray):
            return False
        return bool(self.of_ray) and self.of_ray[0] in _ASKS_THE_DASHBOARD
