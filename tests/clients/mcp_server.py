"""Owns an MCP server with one tool, over standard input and output: `shout` returns a text in capitals.
Never imports anything but the standard library: agents start it as a program of its own."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

SHOUT = {
    "name": "shout",
    "description": "Gives a text in capitals.",
    "inputSchema": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
}
NO_METHOD = -32601


def result_of(method: str, params: dict[str, Any]) -> dict[str, Any] | None:
    """Return the result of a method, or None if there is no such method."""
    match method:
        case "initialize":
            about = {"name": "shouter", "version": "1.0"}
            return {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": about}
        case "tools/list":
            return {"tools": [SHOUT]}
        case "tools/call":
            return {"content": [{"type": "text", "text": params["arguments"]["text"].upper()}]}
        case "ping":
            return {}
    return None


def main() -> None:
    argparse.ArgumentParser(
        prog="python -m tests.clients.mcp_server",
        description="Serve one tool by MCP over standard input and output: shout returns a text in capitals.",
    ).parse_args()
    for line in sys.stdin:
        asked = json.loads(line)
        if "id" not in asked:  # a notification
            continue
        answer: dict[str, Any] = {"jsonrpc": "2.0", "id": asked["id"]}
        result = result_of(asked["method"], asked.get("params") or {})
        answer |= {"error": {"code": NO_METHOD, "message": "no such method"}} if result is None else {"result": result}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
