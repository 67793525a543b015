"""Owns the requests of agents' sessions in their order: drawn ones of a given shape, and those that real agents sent.
Never knows an engine: answers become part of a prompt when they are there."""

from __future__ import annotations

import itertools
import json
import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.prefix import extend_chain, root_of

RECORDED = Path(__file__).parents[3] / "tests" / "serve_app" / "api" / "recorded"
AGENTS = (
    "claude-code", "claude-code-team", "claude-code-turns", "codex", "codex-patching", "codex-repairing",
    "codex-turns", "opencode", "opencode-anthropic", "opencode-openai", "opencode-turns",
)  # fmt: skip
"""Recorded sessions of coding agents with more than two turns."""
AWAY_SHARE, AWAY_TIMES = 0.05, 60.0
"""The share of pauses in which nobody is there, and how much longer these are than a tool's."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request."""

    at: float
    """When it is sent at the earliest, in seconds."""
    session: str
    """"": it comes once, and belongs to none."""
    tokens: tuple[int, ...]
    answer: int
    """Tokens of its answer."""
    continues: bool = True
    """Whether `tokens` follow the session's last prompt and its answer; otherwise they are the whole prompt."""
    salt: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What drawn sessions are like. Sizes are in tokens."""

    sessions: int = 6
    turns: int = 43
    first_prompt: int = 1000
    prompts: int = 142_000
    """All prompts of a session together."""
    answers: int = 444
    """All answers of a session together."""
    once: int = 43
    """Prompts that come once, between the sessions' turns."""
    once_prompt: int = 1000
    pause_s: float = 5.0
    """The median time between two turns of a session."""

    @staticmethod
    def of(sessions: int, turns: int) -> Shape:
        """Return the shape of another number of turns, whose prompts and answers are as long on average."""
        usual = Shape()
        share = turns / usual.turns
        return Shape(
            sessions=sessions,
            turns=turns,
            prompts=round(share * usual.prompts),
            answers=round(share * usual.answers),
            once=turns,
        )


def drawn(shape: Shape, vocab_size: int, seed: int) -> list[Turn]:
    """Draw sessions of random tokens that begin within a minute, in order of arrival."""
    draw = random.Random(seed)

    def some(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(vocab_size) for _ in range(count))

    turns: list[Turn] = []
    for number in range(shape.sessions):
        answers = parts(shape.answers, [draw.lognormvariate(0, 1) for _ in range(shape.turns)])
        sizes = [shape.first_prompt, *_results(shape, answers, draw)]
        at = draw.uniform(0, 60)
        for size, answer in zip(sizes, answers, strict=True):
            turns.append(Turn(at, f"session {number}", some(size), answer))
            at += _pause_s(shape, draw)
    last = max(turn.at for turn in turns)
    turns += [Turn(draw.uniform(0, last), "", some(shape.once_prompt), 16, continues=False) for _ in range(shape.once)]
    return sorted(turns, key=lambda turn: turn.at)


def _results(shape: Shape, answers: Sequence[int], draw: random.Random) -> list[int]:
    """Draw what follows each answer but the last, such as a tool's result, so that the prompts add up."""
    weights = [draw.lognormvariate(0, 1) for _ in range(shape.turns - 1)]
    # What comes before turn i is part of all turns from i on.
    others = sum(answer * (shape.turns - 1 - i) for i, answer in enumerate(answers))
    left = shape.prompts - shape.turns * shape.first_prompt - others
    each = sum(weight * (shape.turns - 1 - i) for i, weight in enumerate(weights))
    if left < 0:
        raise ValueError(f"{shape.turns} prompts of {shape.prompts} tokens do not begin with {shape.first_prompt}")
    return [max(round(weight * left / each), 1) for weight in weights]


def parts(total: int, weights: Sequence[float]) -> list[int]:
    """Divide a total into parts of at least 1, in proportion to weights apart from that."""
    spare, whole = total - len(weights), sum(weights)
    bounds = [round(spare * sum(weights[:i]) / whole) for i in range(len(weights) + 1)]
    return [1 + end - begin for begin, end in itertools.pairwise(bounds)]


def _pause_s(shape: Shape, draw: random.Random) -> float:
    times = AWAY_TIMES if draw.random() < AWAY_SHARE else 1.0
    return shape.pause_s * times * draw.lognormvariate(0, 1)


def recorded(encode: Callable[[str], Sequence[int]], users: int, seed: int, pause_s: float = 5.0) -> list[Turn]:
    """Return recorded sessions, each of which several users have: with a salt each, so that no user hits another's KV.
    The times are drawn."""
    draw, turns, shape = random.Random(seed), list[Turn](), Shape(pause_s=pause_s)
    for name in AGENTS:
        lines = (RECORDED / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        bodies = [json.loads(line)["body"] for line in lines]
        prompts = [tuple(encode(_text(body))) for body in bodies]
        for user in range(users):
            at = draw.uniform(0, 60)
            for prompt in prompts:
                turns.append(Turn(at, f"{name} {user}", prompt, 16, continues=False, salt=f"user {user}"))
                at += _pause_s(shape, draw)
    return sorted(turns, key=lambda turn: turn.at)


def _text(body: Mapping[str, Any]) -> str:
    """Return a body's tools, system text and messages in this order, a line each."""
    system = body.get("system", body.get("instructions", []))
    messages = body.get("messages", body.get("input", []))
    lists = ([part] if isinstance(part, str) else part for part in (body.get("tools", []), system, messages))
    return "\n".join(json.dumps(item, ensure_ascii=False) for part in lists for item in part)


def working_set(turns: Sequence[Turn], block_size: int) -> int:
    """Count the different full blocks of all sessions' prompts and answers."""
    chains: dict[str, tuple[int, ...]] = defaultdict(tuple)
    seen: set[bytes] = set()
    unknown = itertools.count(-1, -1)
    for turn in (turn for turn in turns if turn.session):
        prompt = chains[turn.session] + turn.tokens if turn.continues else turn.tokens
        chain = chains[turn.session] = prompt + tuple(itertools.islice(unknown, turn.answer))
        digests: list[bytes] = []
        extend_chain(digests, chain, len(chain) // block_size, block_size, root_of(turn.salt))
        seen.update(digests)
    return len(seen)


def longest(turns: Sequence[Turn]) -> int:
    """Return the tokens of the longest prompt with its answer."""
    sizes: dict[str, int] = defaultdict(int)
    most = 0
    for turn in turns:
        before = sizes[turn.session] if turn.continues else 0
        sizes[turn.session] = before + len(turn.tokens) + turn.answer
        most = max(most, sizes[turn.session])
    return most
