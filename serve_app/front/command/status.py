"""Implements `chunkserve status`: a table of a running server's models, engines and load.
Never wakes an engine, and needs no key but for the names of adapters."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from serve_app.front.command.api import KEY, Api, Json, NoAnswer, Refused, harmless
from serve_app.front.command.arguments import FAILED, Parser, add_url, chosen_server

_HEAD = ("engine", "running", "queued", "KV use", "prompt tok/s", "tok/s")
_KEYS_ARE_NEEDED = 401


def main(arguments: Sequence[str], prog: str) -> int:
    """Print the table, and return 0 for a healthy server."""
    parser = _parser(prog)
    server = chosen_server(parser, parser.parse_args(arguments).url)
    try:
        health = _health(server)
        models = _models(server)
        lines = [f"{server.url} {health}", *server.get("/activity", lambda activity: [*_lines(activity, models)])]
    except (NoAnswer, Refused) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return FAILED
    print("\n".join(map(harmless, lines)))
    return 0 if health == "is healthy" else FAILED


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = Parser(
        prog,
        "Show a running server's models, engines and ingress replicas: requests that run and wait, and the share of KV "
        f"blocks in use. The exit status is 0 if the server is healthy. {KEY} is the API key, if the server has any.",
    )
    add_url(parser)
    return parser


def _health(server: Api) -> str:
    try:
        server.get("/health", lambda _: None)
    except Refused as refusal:
        return f"is not healthy ({refusal.status}): {refusal}"
    return "is healthy"


def _models(server: Api) -> list[str]:
    """Return the names of models and adapters; none without a key that the server wants."""
    try:
        return server.get("/v1/models", _names)
    except Refused as refusal:
        if refusal.status != _KEYS_ARE_NEEDED:
            raise
        return []


def _names(models: Any) -> list[str]:
    return [str(model["id"]) for model in models["data"]]


def _lines(activity: Json, models: Sequence[str]) -> Iterator[str]:
    yield f"models: {', '.join(models or [activity['model']])}"
    models_of = {name: one["model"] for one in activity.get("models", ()) for name in one["engines"]}
    rows = [_HEAD, *(_row(engine, models_of) for engine in activity["engines"])]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    for name, *numbers in rows:
        cells = (text.rjust(width) for text, width in zip(numbers, widths[1:], strict=True))
        yield "  ".join([name.ljust(widths[0]), *cells])
    if not activity["engines"]:
        yield "no engine runs; one starts at the first request"
    else:
        yield from (f"no engine of {one['model']} runs" for one in activity.get("models", ()) if not one["engines"])
    replicas = activity["ingresses"]
    live, waiting = (sum(replica[name] for replica in replicas) for name in ("num_live", "num_waiting"))
    yield f"ingress replicas: {len(replicas)}, with {live} requests, of which {waiting} wait for a place with an engine"
    if missing := activity["num_missing"]:
        yield f"{missing} replicas did not answer"


def _row(engine: Json, models_of: Mapping[str, str]) -> tuple[str, ...]:
    """`models_of`: the model of each engine, where there are several."""
    held = engine["num_held_blocks"] / max(1, engine["num_blocks"])
    speeds = (f"{engine[name]:.0f}" for name in ("prompt_tokens_per_s", "generated_tokens_per_s"))
    name = str(engine["engine"])
    shown = f"{name} of {models_of[name]}" if name in models_of else name
    return shown, str(engine["num_running"]), str(engine["num_waiting"]), f"{held:.0%}", *speeds
