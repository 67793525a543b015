"""Owns the lines that tell a user how to call a server that `make serve` has just started.
Never starts or stops the server; it waits for it, and ends with its parent."""

from __future__ import annotations

import os
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import yaml

from serve_app.settings import AppSettings

_POLL_S = 0.5


def main(config_path: str) -> int:
    """Wait until every application of a `serve run` config answers /health, and print a call for each."""
    config = yaml.safe_load(Path(config_path).read_text())
    parent = os.getppid()
    for app in config["applications"]:
        base = _base_url(config, app)
        while not _is_ready(base):
            if os.getppid() != parent:  # the server is gone; nobody is left to read this
                return 1
            time.sleep(_POLL_S)
        print(_instructions(base, AppSettings.model_validate(app.get("args") or {}).model_id), flush=True)
    return 0


def _base_url(config: dict[str, Any], app: dict[str, Any]) -> str:
    http = config.get("http_options") or {}
    host = http.get("host", "0.0.0.0")
    prefix = (app.get("route_prefix") or "/").rstrip("/")
    return f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{http.get('port', 8000)}{prefix}"


def _is_ready(base: str) -> bool:
    try:
        with urllib.request.urlopen(f"{base}/health", timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def _instructions(base: str, model_id: str) -> str:
    messages = '[{"role": "user", "content": "What is the capital of France?"}]'
    return (
        f"\nchunkserve is ready: {base}/ is a page to try it on\n\n"
        f"  curl {base}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
        f"""    -d '{{"model": "{model_id}", "temperature": 0, "messages": {messages}}}'\n"""
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
