"""Owns the loads of the study: requests as chains of blocks, those of agents made by a seed, and those of a trace.
Never looks at a cache: a request comes and ends at the same times whatever was found for it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from random import Random

from loadtest.traces import BLOCK_TOKENS, Row

AGENT_BLOCK = 256
"""Tokens of a block in the agents' load."""
FULL_CONTEXT = 190_000
"""Tokens of a prompt from which on an agent goes on with a summary."""
TOKEN_S = 0.01
"""Seconds for a token of an answer."""
START_S = 0.5
"""Seconds until the first one."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request, with its full blocks. A number names a block and all before it, as a digest does."""

    start_s: float
    end_s: float
    chain: tuple[int, ...]
    """The blocks of prompt and answer."""
    num_prompt_blocks: int
    """How many of them are the prompt's."""
    num_prompt_tokens: int
    tenant: str = ""
    session: str = ""


@dataclass(frozen=True, slots=True)
class Load:
    name: str
    block_tokens: int
    turns: tuple[Turn, ...]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(turn.num_prompt_tokens for turn in self.turns)

    def working_set(self) -> int:
        """Return the most blocks at any time that were computed and that a later prompt has: with as many, one who
        knows the future loses nothing."""
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for number, turn in enumerate(self.turns):
            last |= dict.fromkeys(turn.chain[: turn.num_prompt_blocks], number)
            for block in turn.chain:
                first.setdefault(block, number)
        changes = [0] * (len(self.turns) + 1)
        for block, end in last.items():
            changes[first[block]] += 1
            changes[end] -= 1
        return max(accumulate(changes))


def trace_load(name: str, rows: Sequence[Row], begin_s: float, end_s: float) -> Load:
    """Make a load of a recorded trace's requests within [begin_s, end_s). It names neither tenants nor sessions."""
    turns = []
    for row in rows:
        if begin_s <= row.at_s < end_s:
            chain = row.blocks[: row.prompt_tokens // BLOCK_TOKENS]
            end = row.at_s + START_S + TOKEN_S * row.output_tokens
            turns.append(Turn(row.at_s, end, chain, len(chain), max(row.prompt_tokens, 1)))
    return Load(name, BLOCK_TOKENS, tuple(turns))


# --- agents -----------------------------------------------------------------------------------------------------------

Segment = tuple[int, int]
"""A piece of text: its name, and its tokens."""


class _Names:
    """Gives each piece of text and each block a number."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[int, tuple[Segment, ...]], int] = {}
        self._num_segments = 0

    def segment(self, num_tokens: float) -> Segment:
        """Return a new piece of text."""
        self._num_segments += 1
        return self._num_segments, max(round(num_tokens), 1)

    def chain(self, segments: Iterable[Segment]) -> tuple[int, ...]:
        """Return the full blocks of a text."""
        chain: list[int] = []
        parent, parts, room = 0, list[Segment](), AGENT_BLOCK
        for name, length in segments:
            left = length
            while left:
                taken = min(left, room)
                parts.append((name, left))
                left, room = left - taken, room - taken
                if not room:
                    key = (parent, tuple(parts))
                    parent = self._blocks.setdefault(key, len(self._blocks) + 1)
                    chain.append(parent)
                    parts, room = [], AGENT_BLOCK
        return tuple(chain)


@dataclass(frozen=True, slots=True)
class _Product:
    """An agent program, used by one tenant."""

    tenant: str
    share: float
    """Its share of the sessions."""
    system: Segment
    """The system prompt and the tools, the same in all its sessions."""
    side_system: Segment
    """The same for its agents' helpers."""
    forgets: str
    """Whose thoughts are left out of a prompt: `nobody`, `loop` (those before the user's last message), or `turn` (all
    earlier ones)."""


class _Conversation:
    """What is sent in one conversation, turn by turn."""

    def __init__(self, names: _Names, product: _Product, system: Segment) -> None:
        self._names = names
        self._forgets = product.forgets
        self._segments: list[tuple[Segment, bool]] = [(system, False)]  # and whether it is a thought

    def hear(self, num_tokens: float, *, user: bool) -> None:
        """Add a user's message or a tool's result."""
        if self._forgets == "turn" or (self._forgets == "loop" and user):
            self._segments = [(segment, False) for segment, is_thought in self._segments if not is_thought]
        self._segments.append((self._names.segment(num_tokens), False))

    def begin_anew(self) -> None:
        """Put a summary in the place of everything but the system prompt."""
        self._segments = [self._segments[0], (self._names.segment(3000), False)]

    def turn(self, start_s: float, thought: float, answer: float, tenant: str, session: str) -> Turn:
        prompt = [segment for segment, _ in self._segments]
        num_prompt = sum(length for _, length in prompt)
        said = [(self._names.segment(thought), True), (self._names.segment(answer), False)]
        self._segments += said
        chain = self._names.chain([*prompt, *(segment for segment, _ in said)])
        num_answer = sum(segment[1] for segment, _ in said)
        end = start_s + START_S + TOKEN_S * num_answer
        return Turn(start_s, end, chain, num_prompt // AGENT_BLOCK, num_prompt, tenant, session)


class _Agents:
    """Draws the sessions of agents, chats and one-shot prompts."""

    def __init__(self, seed: int, seconds: float, *, flooded: bool) -> None:
        self._random = Random(f"agents {seed}")
        self._seconds = seconds
        self._flooded = flooded
        names = self._names = _Names()
        self._products = [
            _Product("editor", 0.5, names.segment(22_000), names.segment(9_000), "nobody"),
            _Product("terminal", 0.3, names.segment(14_000), names.segment(6_000), "loop"),
            _Product("research", 0.2, names.segment(9_000), names.segment(4_000), "turn"),
        ]
        self.turns: list[Turn] = []

    def _around(self, median: float, sigma: float) -> float:
        return self._random.lognormvariate(math.log(median), sigma)

    def _arrivals(self, per_hour: float) -> Iterable[float]:
        at = self._random.expovariate(per_hour / 3600)
        while at < self._seconds:
            yield at
            at += self._random.expovariate(per_hour / 3600)

    def draw(self) -> tuple[Turn, ...]:
        for number, at in enumerate(self._arrivals(100)):
            weights = [product.share for product in self._products]
            self._session(self._random.choices(self._products, weights)[0], f"session {number}", at)
        for at in self._arrivals(150):
            self._chat(at)
        for at in self._arrivals(600):
            self._one_shot(at, "batch", "")
        if self._flooded:
            for number, at in enumerate(self._arrivals(3000)):
                self._one_shot(at, "crawler", f"page {number}")
        return tuple(sorted((turn for turn in self.turns if turn.start_s < self._seconds), key=lambda one: one.start_s))

    def _session(self, product: _Product, session: str, at: float) -> None:
        """An agent at work: tools' results after seconds, a user's word after minutes, helpers now and then."""
        random, talk = self._random, _Conversation(self._names, product, product.system)
        title = _Conversation(self._names, product, self._names.segment(700))
        self.turns.append(title.turn(at, 1, 12, product.tenant, session))
        talk.hear(self._around(3000, 1.0), user=True)
        for _ in range(max(round(self._around(43, 0.5)), 1)):
            turn = self._say(talk, at, product.tenant, session)
            at = turn.end_s
            if turn.num_prompt_tokens > FULL_CONTEXT:
                talk.begin_anew()
            if random.random() < 0.03:
                at = self._helper(product, session, at)
            if by_user := random.random() < 0.1:
                at += self._around(90, 1.3)
            else:
                at += self._around(120, 0.8) if random.random() < 0.05 else self._around(3, 1.2)
            talk.hear(self._around(1500, 1.0), user=by_user)  # 2,500 on average

    def _helper(self, product: _Product, session: str, at: float) -> float:
        """A helper with a prompt of its own under the session's name; the agent waits for it."""
        talk = _Conversation(self._names, product, product.side_system)
        talk.hear(self._around(1500, 0.8), user=True)
        for _ in range(max(round(self._around(8, 0.6)), 1)):
            turn = self._say(talk, at, product.tenant, session)
            at = turn.end_s + self._around(2, 1.0)
            talk.hear(self._around(1800, 1.0), user=False)
        return at

    def _say(self, talk: _Conversation, at: float, tenant: str, session: str, *, calls_tools: bool = False) -> Turn:
        num_tokens = self._around(340, 0.73)  # 444 on average
        turn = talk.turn(at, 0.5 * num_tokens, 0.5 * num_tokens, tenant, session)
        self.turns.append(turn)
        return turn

    def _chat(self, at: float) -> None:
        """A conversation of a program that names no session."""
        talk = _Conversation(self._names, self._products[0], self._names.segment(400))
        for _ in range(max(round(self._around(4, 0.7)), 1)):
            talk.hear(self._around(150, 1.0), user=True)
            at = self._say(talk, at, "chat", "").end_s + self._around(40, 1.1)

    def _one_shot(self, at: float, tenant: str, session: str) -> None:
        """A document that is asked about once."""
        talk = _Conversation(self._names, self._products[0], self._names.segment(self._around(7000, 0.9)))
        talk.hear(100, user=True)
        self._say(talk, at, tenant, session)


def agents_load(seed: int, seconds: float = 3600.0, *, flooded: bool = False) -> Load:
    """Make `seconds` of agents' sessions, of chats, and of one-shot prompts. `flooded`: with a tenant more, whose
    one-shot prompts have a session each, so that they look like beginnings of conversations."""
    name = "agents, one floods" if flooded else "agents"
    return Load(name, AGENT_BLOCK, _Agents(seed, seconds, flooded=flooded).draw())
