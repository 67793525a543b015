"""Owns what a task needs besides a program's settings: catalogues, providers, a picture, an MCP server.
Never says what a user has to set; docs/how-to/agents.md does."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from pathlib import Path

from tests.clients.client_docs import settings_of
from tests.clients.parts import PICTURE_FILE
from tests.clients.pixels import PIXELS
from tests.clients.running import environment
from tests.clients.scripted_server import MODEL


def describe_to_codex(home: Path, project: Path) -> None:
    """Make Codex take the model for one like those it knows, which patch without JSON."""
    _run_codex_script(home, settings_of("Codex").at("", MODEL).script)


def _run_codex_script(home: Path, script: str) -> None:
    subprocess.run([sys.executable, "-c", script], env=environment(home), check=True)


def speak_by(npm: str, home: Path, project: Path) -> None:
    """Have opencode use another of the AI SDK's providers."""
    path = home / ".config" / "opencode" / "opencode.json"
    path.write_text(path.read_text().replace("@ai-sdk/openai-compatible", f"@ai-sdk/{npm}"))


def draw(home: Path, project: Path) -> None:
    """Put a picture into the project, and the address of the MCP server into the home directory."""
    (project / PICTURE_FILE).write_bytes(base64.b64decode(PIXELS))
    command, script = sys.executable, str(Path(__file__).parent / "mcp_server.py")
    server = {"type": "stdio", "command": command, "args": [script]}
    (home / "mcp.json").write_text(json.dumps({"mcpServers": {"shouter": server}}))
    if (config := home / ".codex" / "config.toml").exists():
        table = f"[mcp_servers.shouter]\ncommand = {json.dumps(command)}\nargs = [{json.dumps(script)}]\n"
        config.write_text(f"{config.read_text()}\n{table}")


def describe_to_codex_and_draw(home: Path, project: Path) -> None:
    script = settings_of("Codex").at("", MODEL).script
    _run_codex_script(home, script.replace('["text"]', '["text", "image"]'))
    draw(home, project)
