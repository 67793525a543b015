"""Implements `chunkserve chat`: a conversation with a running server in this terminal, over its HTTP API.
Never keeps a conversation after the end, and never loads a model."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field

from serve_app.front.command.api import KEY, Api, Json, NoAnswer, Refused
from serve_app.front.command.arguments import FAILED, Parser, add_url, chosen_url

RESET, EXIT = "/reset", "/exit"
_PROMPT = "> "
_STOPPED = "[stopped]"


def main(arguments: Sequence[str], prog: str) -> int:
    """Chat until the input ends. Returns 1 if no server answers."""
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
        type=float,
        metavar="T",
        help="how freely the model picks its words; 0: always the likeliest, for small models (1)",
    )
    options = parser.parse_args(arguments)
    server = Api(chosen_url(parser, options.url))
    try:
        model = options.model or server.get("/v1/models")["data"][0]["id"]
    except (NoAnswer, Refused) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return FAILED
    _converse(Conversation(server, model, options.system, options.temperature))
    return 0


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
            with closing(self.server.stream("/v1/chat/completions", body)) as events:
                for event in events:
                    for choice in event["choices"]:
                        answer.append(choice["delta"].get("content") or "")  # before Ctrl-C can follow its print
                        thoughts = _shown(choice["delta"], thoughts)
        except KeyboardInterrupt:
            print(f" {_STOPPED}", end="")
        finally:
            print(flush=True)
            if any(answer):
                self.said += [question, {"role": "assistant", "content": "".join(answer)}]


def _shown(delta: Json, thoughts: bool) -> bool:
    """Print what an event brings. thoughts: whether the last thing printed was one; returned anew."""
    if thought := delta.get("reasoning"):
        print(thought, end="", flush=True)
        thoughts = True
    if content := delta.get("content"):
        print("\n\n" * thoughts + content, end="", flush=True)
        thoughts = False
    return thoughts


def _converse(conversation: Conversation) -> None:
    prompt = _PROMPT if sys.stdin.isatty() else ""
    if prompt:
        with suppress(ImportError):
            import readline  # noqa: F401 - gives `input` a history and the arrow keys
        print(f"{conversation.model} at {conversation.server.url}; Ctrl-C stops an answer, {RESET} begins anew")
    while True:
        try:
            text = input(prompt).strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            print()
            return
        if text == EXIT:
            return
        if text == RESET:
            conversation.said.clear()
        elif text:
            try:
                conversation.ask(text)
            except (NoAnswer, Refused) as error:
                print(error, file=sys.stderr)
