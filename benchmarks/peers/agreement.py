"""Owns the comparison of log-probabilities, ours and llama.cpp's, with those of the same GGUF file in float32.
Never measures time."""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.run import READY_TIMEOUT_S, end_with_sigterm
from benchmarks.peers.servers import SERVERS, NotInstalled, Setup, served_model
from benchmarks.results import write_whole
from loadtest.server import ROOT, Server, machine

LLAMA_CPP = "llama-cpp"
DEFINITION = "chunkserve-float32"
"""The file's weights as they are, and everything else in float32."""
COMPARED = (LLAMA_CPP, "chunkserve-stored", "chunkserve-no-drafts", "chunkserve-rounded")
TOP = 20
TEXT_CHARS = (40, 600)
"""Shortest and longest text."""

Alternatives = dict[int, float]
"""The log-probabilities of the likeliest tokens, by id."""


@dataclasses.dataclass(frozen=True, slots=True)
class Agreement:
    """How far one server is from the definition, over all texts."""

    num_texts: int
    same_first: float
    """Share of texts for which the likeliest token is the same."""
    mean: float
    """Mean distance of the log-probabilities of the tokens that both name."""
    p99: float
    largest: float
    shared: float
    """Share of the alternatives that both name."""


def texts(count: int, draw: random.Random) -> list[str]:
    """Return pieces of this project's documents."""
    whole = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").rglob("*.md")))
    starts = [draw.randrange(len(whole) - TEXT_CHARS[1]) for _ in range(count)]
    return [whole[start : start + draw.randint(*TEXT_CHARS)] for start in starts]


def agreement(found: Sequence[Alternatives], definition: Sequence[Alternatives]) -> Agreement:
    pairs = list(zip(found, definition, strict=True))
    distances = [abs(own[token] - true[token]) for own, true in pairs for token in own.keys() & true]
    return Agreement(
        len(pairs),
        statistics.mean(max(own, key=own.__getitem__) == max(true, key=true.__getitem__) for own, true in pairs),
        statistics.mean(distances),
        statistics.quantiles(distances, n=100, method="inclusive")[98],
        max(distances),
        len(distances) / sum(map(len, definition)),
    )


def asked(name: str, setup: Setup, prompts: Sequence[Any]) -> list[Any]:
    """Start a server and return, for each prompt, its tokens if it is text (llama.cpp), or its alternatives."""
    with SERVERS[name].start(setup) as server:
        server.wait_until_ready(SERVERS[name].ready_path, READY_TIMEOUT_S)
        if name == LLAMA_CPP:
            return [_of_llama_cpp(server, prompt) for prompt in prompts]
        model = served_model(server)
        return [_of_ours(server, model, prompt) for prompt in prompts]


def _of_llama_cpp(server: Server, text: str) -> tuple[list[int], Alternatives]:
    tokens = _post(server, "/tokenize", {"content": text})["tokens"]
    body = {"prompt": tokens, "n_predict": 1, "temperature": 0, "n_probs": TOP, "cache_prompt": False}
    (token,) = _post(server, "/completion", body)["completion_probabilities"]
    return tokens, {one["id"]: one["logprob"] for one in token["top_logprobs"]}


def _of_ours(server: Server, model: str, tokens: Sequence[int]) -> Alternatives:
    asked = {"max_tokens": 1, "temperature": 0, "logprobs": TOP, "return_tokens_as_token_ids": True}
    answer = _post(server, "/v1/completions", {"model": model, "prompt": list(tokens), **asked})
    (found,) = answer["choices"][0]["logprobs"]["top_logprobs"]
    return {int(name.removeprefix("token_id:")): logprob for name, logprob in found.items()}


def _post(server: Server, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{server.url}{path}", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as response:
        found: dict[str, Any] = json.load(response)
    return found


def table(document: Mapping[str, Any]) -> str:
    """Render the second table of docs/benchmarks/llama-cpp.md."""
    lines = ["| | same likeliest token | distance, mean | 99 of 100 within | largest |", "|---|--:|--:|--:|--:|"]
    for name, found in document["servers"].items():
        share = f"{found['same_first']:.1%}".replace("%", " %")
        figures = " | ".join(f"{found[figure]:.3f}" for figure in ("mean", "p99", "largest"))
        lines.append(f"| {SERVERS[name].title} | {share} | {figures} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, then the document as the last line. Returns 1 if a server is not installed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers.agreement",
        description="Compare the log-probabilities of next tokens, ours and those of llama.cpp's server, with those of "
        "the default model's file in float32. benchmarks/peers/llama_cpp.sh builds llama.cpp.",
    )
    parser.add_argument("--texts", type=int, default=200, help="number of texts (%(default)s)")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000, help="of the texts")
    parser.add_argument(
        "--peers-venv", type=Path, default=ROOT / ".venv-peers", help="virtual environment with llama-server"
    )
    parser.add_argument("--out", type=Path, help="write the document to this file")
    options = parser.parse_args(arguments)
    setup = Setup.of_this_repository(options.peers_venv)
    try:
        theirs = asked(LLAMA_CPP, setup, texts(options.texts, random.Random(options.seed)))
    except NotInstalled as error:
        print(f"llama.cpp cannot be compared with: {error}", file=sys.stderr)
        return 1
    tokens = [one for one, _ in theirs]
    definition = asked(DEFINITION, setup, tokens)
    answers = {LLAMA_CPP: [alternatives for _, alternatives in theirs]}
    answers |= {name: asked(name, setup, tokens) for name in COMPARED if name != LLAMA_CPP}
    document = {
        "benchmark": "agreement",
        **machine(),
        "seed": options.seed,
        "servers": {name: dataclasses.asdict(agreement(found, definition)) for name, found in answers.items()},
    }
    if options.out:
        write_whole(options.out, document)
    print(table(document))
    print(json.dumps(document))
    return 0


if __name__ == "__main__":
    end_with_sigterm()
    sys.exit(main())
