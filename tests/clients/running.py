"""Owns how a program does a task against the scripted model: where it runs, in which environment, and with what
outcome.
Never knows a program; programs.py and libraries.py do."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.clients.client_docs import settings_of
from tests.clients.parts import AFTER, BEFORE, FILE
from tests.clients.scripted_model import Part
from tests.clients.scripted_server import MODEL, Recorded, scripted_server

ROOT = Path(__file__).parents[2]
PYTHON_ENV = ROOT / os.environ.get("CLIENTS_VENV", ".venv-clients")
NPM_ENV = ROOT / os.environ.get("CLIENTS_NPM", ".clients-npm")
TIMEOUT_S = 180

NO_NETWORK = {
    # Requests to anything but the server fail at once, on a machine with a network, too.
    **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), "http://127.0.0.1:9"),
    **dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost"),
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    command: tuple[str, ...]
    """The command, in which {url}, {model}, {project} and {home} are filled in."""
    part: Callable[[Path], Part]
    """Makes the model's script, from the project's directory."""
    section: str | None = None
    """The section of docs/how-to/agents.md with whose settings the program runs."""
    package: str | None = None
    """What that section has to name, with the version that is pinned."""
    environment: Mapping[str, str] = field(default_factory=dict)
    leaves: str = AFTER
    """What the edited file says in the end."""
    refused: str = ""
    """What the program asks for and does without once it is refused. Each refusal says this, and no other is
    expected."""
    is_recorded: bool = True
    """Whether its requests can be replayed by themselves."""
    grows: bool = True
    """Whether each of the program's prompts begins with the one before."""
    prepare: Callable[[Path, Path], None] | None = None
    """Prepares what else the program needs, in its home and in the project."""
    then: tuple[tuple[str, ...], ...] = ()
    """Commands that follow, in the same directories."""


@dataclass(frozen=True, slots=True)
class Outcome:
    returncode: int
    stdout: str
    stderr: str
    file: str
    """The edited file's content."""
    requests: list[Recorded]
    refused: list[str]
    prompts: list[str]
    """The prompts that offer tools, in order."""
    thinks: bool
    """Whether the model's script has thoughts."""
    places: dict[str, str]
    """Paths and addresses of the run, and what a recording has in their place."""

    @property
    def story(self) -> str:
        """Return what is shown with a failure."""
        asked = [f"{one.method} {one.path} {one.status} {one.ignored}" for one in self.requests]
        return "\n".join([*self.refused, *asked, self.stdout[-3000:], self.stderr[-3000:]])


def perform(program: Program, directory: Path) -> Outcome:
    """Have a program do the task in a new home and a new project below `directory`."""
    home, project = directory / "home", directory / "project"
    home.mkdir()
    project.mkdir()
    (project / FILE).write_text(BEFORE)
    with scripted_server(program.part(project)) as server:
        exports = ""
        if program.section is not None:
            settings = settings_of(program.section).at(server.url, MODEL)
            exports = settings.exports
            for path, text in settings.files.items():
                (home / path).parent.mkdir(parents=True, exist_ok=True)
                (home / path).write_text(text)
        if program.prepare is not None:
            program.prepare(home, project)
        names = {"url": server.url, "model": MODEL, "project": str(project), "home": str(home)}
        commands = [[part.format(**names) for part in command] for command in (program.command, *program.then)]
        done = [
            subprocess.run(
                ["bash", "-c", f'{exports}\nexec "$@"', "bash", *command],
                cwd=project,
                env=environment(home) | program.environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
            )
            for command in commands
        ]
        places = {str(project): "/project", str(home): "/home/user", server.url: "http://server", str(ROOT): "/code"}
        return Outcome(
            returncode=max(one.returncode for one in done),
            stdout="".join(one.stdout for one in done),
            stderr="".join(one.stderr for one in done),
            file=(project / FILE).read_text(),
            requests=server.requests,
            refused=[line for line in server.refused if not program.refused or program.refused not in line],
            thinks=getattr(server.model.part, "thinks", False),
            prompts=[prompt for prompt in server.model.prompts if "</tools>" in prompt],
            places=places,
        )


def environment(home: Path) -> dict[str, str]:
    """Return an environment with nothing of the caller's own: neither keys nor settings."""
    paths = [str(NPM_ENV / "node_modules" / ".bin"), str(PYTHON_ENV / "aider" / "bin"), os.environ["PATH"]]
    own = {"PATH": os.pathsep.join(paths), "HOME": str(home), "LANG": "C.UTF-8", "TERM": "dumb", "NO_COLOR": "1"}
    return own | NO_NETWORK | {"CLIENTS_NPM": str(NPM_ENV)}
