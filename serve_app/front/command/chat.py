"""Implements `chunkserve chat`: a conversation with a running server in this terminal, over its HTTP API.
Never keeps a conversation after the end, and never loads a model."""

from __future__ import annotations

import math
import sys
from argparse import ArgumentTypeError
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from io import TextIOWrapper
from typing import Any

from serve_app.front.command.api import KEY, Api, Json, NoAnswer, Refused, harmless
from serve_app.front.command.arguments import FAILED, Parser, add_url, chosen_server

RESET, EXIT = "/reset", "/exit"
_PROMPT = "> "
_STOPPED = "[stopped]"


def main(arguments: Sequence[str], prog: str) -> int:
    """Chat until the input ends. Returns 1 if no server answers, or if a message that no person typed gets no
    answer."""
    parser = Parser(
        prog,
        f"Talk to a running server. Ctrl-C stops an answer, {RESET} begins a new conversation, and {EXIT} or Ctrl-D "
        f"ends. {KEY} is the API key, if the server has any.",
    )
    add_url(parser)
    parser.add_argument("--model", help="the model to talk to, by its name at the server (the first that it lists)")
    parser.add_argument("--system", help="text that tells the model how to behave")
    parser.add_argument(
        "--temperature",
        type=_temperature,
        metavar="T",
        help="how freely the model picks its words; 0: always the likeliest, for small models (1)",
    )
    options = parser.parse_args(arguments)
    server = chosen_server(parser, options.url)
    try:
        model = server.get("/v1/models", _first) if options.model is None else options.model
    except (NoAnswer, Refused) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return FAILED
    return _converse(Conversation(server, model, options.system, options.temperature))


def _temperature(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ArgumentTypeError(f"expected a finite number, not {text!r}")  # JSON has no other
    return number


def _first(models: Any) -> str:
    return str(models["data"][0]["id"])


@dataclass(slots=True)
class Conversation:
    """What was said so far. `system`: what the model is told before everything else. `temperature`: None leaves it to
    the server."""

    server: Api
    model: str
    system: str | None
    temperature: float | None
    said: list[dict[str, str]] = field(default_factory=list)

    def ask(self, text: str) -> None:
        """Print the answer to a message as it comes. Ctrl-C ends it: what was printed counts as the answer. A message
        that gets none is forgotten.

        Raises:
            NoAnswer, Refused
        """
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        question = {"role": "user", "content": text}
        body: Json = {"model": self.model, "stream": True, "messages": [*system, *self.said, question]}
        if self.temperature is not None:
            body = {**body, "temperature": self.temperature}
        answer: list[str] = []
        thoughts = False
        try:
            with closing(self.server.stream("/v1/chat/completions", body, _pieces)) as events:
                for pieces in events:
                    for thought, content in pieces:
                        answer.append(content)  # before Ctrl-C can follow its print
                        thoughts = _shown(thought, content, thoughts)
        except KeyboardInterrupt:
            print(f" {_STOPPED}", end="")
        finally:
            print(flush=True)
            if any(answer):
                self.said += [question, {"role": "assistant", "content": "".join(answer)}]


def _pieces(event: Any) -> list[tuple[str, str]]:
    """Return the thought and the content that each choice of an event brings; "" is none."""
    deltas = [choice["delta"] for choice in event["choices"]]
    return [("" + (delta.get("reasoning") or ""), "" + (delta.get("content") or "")) for delta in deltas]


def _shown(thought: str, content: str, thoughts: bool) -> bool:
    """Print what an event brings. thoughts: whether the last thing printed was one; returned anew."""
    if thought:
        print(harmless(thought), end="", flush=True)
        thoughts = True
    if content:
        print("\n\n" * thoughts + harmless(content), end="", flush=True)
        thoughts = False
    return thoughts


def _converse(conversation: Conversation) -> int:
    status = 0
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # a stray byte must not end the conversation
    prompt = _PROMPT if sys.stdin.isatty() else ""
    if prompt:
        with suppress(ImportError):
            import readline  # noqa: F401 - gives `input` a history and the arrow keys
        print(f"{conversation.model} at {conversation.server.url}; Ctrl-C stops an answer, {RESET} begins anew")
    while True:
        try:
            text = input(prompt).strip()
        except EOFError:
            return status
        except KeyboardInterrupt:
            print()
            return status
        if text == EXIT:
            return status
        if text == RESET:
            conversation.said.clear()
        elif text:
            try:
                conversation.ask(text)
            except (NoAnswer, Refused) as error:
                print(error, file=sys.stderr)
                status = 0 if prompt else FAILED
