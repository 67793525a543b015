"""Owns grammars that answers follow: compiled, a matcher a live request, the masks of a step. Long: each way to fail.
Never sees a logit, and keeps no state that it could not make anew: what an answer holds comes with each row."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from time import thread_time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.batch.mask_workers import Job, MaskWorkers, Outcome
from engine.batch.regex_size import check_regexes
from engine.config import ResolvedConfig
from engine.protocol import ErrorCode
from engine.step import GrammarError, GrammarRow, RowFailure

if TYPE_CHECKING:  # imported where it is used: an engine without a tokenizer, as benchmarks have it, runs without
    import llguidance

EXCESS_MASKS = 10
"""An answer may be above its average by as much as so many masks of the longest time."""
MAX_COMPILED = 128
"""Grammars that are kept, the latest used. Another one that a step needs is compiled in that step."""
MAX_COMPILED_CHARS = 2**25
"""Longest total text of the grammars that are kept. One of 1,000 tools has half a million characters, and takes some
30 MiB when it is compiled."""
NOT_FILLED, ANY_TOKEN = 0, -1
"""Words of a mask before it is filled, and of one that nothing depends on. No mask of the library is empty."""
MAX_LEXER_STATES = 20_000
"""A state takes up to 2 kB; llguidance's own limit would let one grammar take 500 MB."""
MOVE_TOKENS = 32
"""An answer may move from one shared lexer to the next after so many tokens. Sooner, it gets a lexer of its own: the
others would fill the next one, too."""


def _parser_limits() -> llguidance.LLParserLimits:
    """llguidance's other limits bound a compilation to about 50 ms and a mask to 20 ms, but for long regexes, which
    `regex_size` bounds. Verbose errors would show the whole state to a client."""
    import llguidance

    return llguidance.LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)


class MaskLimits(NamedTuple):
    """Processor time. The defaults are those of the config's settings."""

    timeout_s: float = 0.1
    """The most that one mask may take: grammar_mask_timeout_s."""
    average_s: float = 0.01
    """The most that an answer's grammar may take a token, on average: grammar_mask_average_s."""


DEFAULT_LIMITS = MaskLimits()


@dataclass(slots=True, eq=False)
class _Template:
    """A compiled grammar. Its copies share a lexer: its states, which are limited and never dropped, its first error,
    which ends all copies, and its lock, which a mask holds while it is computed."""

    matcher: llguidance.LLMatcher
    num_copies: int = 0
    """All that were ever made."""
    is_late: bool = False
    """A mask is no longer waited for, and may still be computed: no copy can be touched without a wait."""


@dataclass(slots=True)
class _Match:
    """A request's matcher, which has consumed the first `count` tokens of its answer."""

    template: _Template
    matcher: llguidance.LLMatcher
    count: int = 0
    excess_s: float = 0.0
    """By how much the processor time of its recent tokens is above the average that they may take."""
    moved_at: int = -MOVE_TOKENS
    """How long the answer was when it moved to this lexer from another one."""


class _LateError(Exception):
    """A mask of the answer's grammar took too long, in this answer or in another."""


class _LeftGrammarError(Exception):
    """An answer has a token that its masks do not allow: a fault of the engine."""


@contextmanager
def _panics_told() -> Iterator[None]:
    """A panic of the library is no Exception, and would end the thread that runs everybody's steps."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise GrammarError("the grammar cannot be worked with") from error


class Grammars:
    """The grammars of one vocabulary. Any thread may call `is_compiled` and `compile`; all else is for the one
    that runs the steps."""

    def __init__(
        self,
        tokenizer: llguidance.LLTokenizer,
        *,
        num_threads: int = 1,
        limits: MaskLimits = DEFAULT_LIMITS,
        workers: MaskWorkers | None = None,
    ) -> None:
        """`workers`: a test's own, instead of `num_threads`."""
        import llguidance

        self._tokenizer = tokenizer
        self._limits = limits
        self._workers = workers or MaskWorkers(num_threads)
        self._alone = llguidance.LLExecutor(num_threads=1)  # one mask is computed by the thread that asks for it
        self._compiled: OrderedDict[str, _Template] = OrderedDict()
        self._lock = threading.Lock()
        self._matches: dict[str, _Match] = {}  # by request id

    @classmethod
    def of_model(
        cls,
        tokenizer_json: Path,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        num_threads: int,
        limits: MaskLimits = DEFAULT_LIMITS,
    ) -> Grammars:
        """`vocab_size`: that of the logits, which may be larger than the tokenizer's."""
        import llguidance

        made = llguidance.LLTokenizer(str(tokenizer_json), n_vocab=vocab_size, eos_token=list(eos_token_ids))
        return cls(made, num_threads=num_threads, limits=limits)

    @classmethod
    def of_bytes(
        cls,
        vocab_size: int,
        eos_token_id: int,
        workers: MaskWorkers | None = None,
        limits: MaskLimits = DEFAULT_LIMITS,
    ) -> Grammars:
        """A vocabulary whose token i is the byte i; those from 256 on are special."""
        import llguidance

        wrapper = llguidance.TokenizerWrapper(_ByteTokens(vocab_size, eos_token_id))
        made = llguidance.LLTokenizer(wrapper, n_vocab=vocab_size, eos_token=eos_token_id)
        return cls(made, limits=limits, workers=workers)

    def is_compiled(self, grammar: str) -> bool:
        """See GrammarCompiler."""
        return self._kept(grammar) is not None

    def compile(self, grammar: str) -> None:
        """Have `grammar` ready before a step needs it.

        Raises:
            GrammarError: it is none, or more complex than the limits allow; the text is for whoever wrote it.
        """
        self._template(grammar)

    def _kept(self, grammar: str) -> _Template | None:
        with self._lock:
            known = self._compiled.get(grammar)
            if known is None or known.is_late:
                return None
            self._compiled.move_to_end(grammar)
            return known

    def _template(self, grammar: str) -> _Template:
        if known := self._kept(grammar):
            return known
        template = self._make(grammar)
        with self._lock:
            self._compiled[grammar] = template
            while len(self._compiled) > 1 and self._keeps_too_much():
                self._compiled.popitem(last=False)
        return template

    def _make(self, grammar: str) -> _Template:
        import llguidance

        check_regexes(grammar)
        with _panics_told():
            made = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=_parser_limits())
            if not made.is_error():
                made.compute_bitmask()  # the first step's, kept by every copy
        if made.is_error():
            raise GrammarError(_readable(made.get_error()))
        return _Template(made)

    def _keeps_too_much(self) -> bool:
        return len(self._compiled) > MAX_COMPILED or sum(map(len, self._compiled)) > MAX_COMPILED_CHARS

    def masks(self, rows: Sequence[GrammarRow]) -> tuple[NDArray[np.int32], dict[int, RowFailure]]:
        """Which tokens may come next, after the answer and after each of the drafts, as far as those may come.

        Returns:
            [sum of 1 + drafts, ceil(vocab / 32)], where bit t % 32 of word t // 32 is token t's; and, by row, why it
            has none.
        """
        from llguidance.numpy import allocate_token_bitmask

        firsts = list(accumulate((1 + len(row.drafts) for row in rows), initial=0))
        filled = allocate_token_bitmask(firsts[-1], self._tokenizer.vocab_size)
        failed: dict[int, RowFailure] = {}
        left = list(range(len(rows)))
        while left:
            filled, stuck, ended = self._fill(rows, left, firsts, filled)
            left = [number for number in stuck if self._move(rows[number])]
            failed |= ended | {number: why for number, why in stuck.items() if number not in left}
        for number in failed:
            filled[firsts[number] : firsts[number + 1]] = ANY_TOKEN
        return filled, failed

    def _fill(
        self, rows: Sequence[GrammarRow], numbers: Iterable[int], firsts: Sequence[int], filled: NDArray[np.int32]
    ) -> tuple[NDArray[np.int32], dict[int, RowFailure], dict[int, RowFailure]]:
        """Fill the masks of the rows `numbers`, each from its `firsts` on.

        Returns:
            (the masks; by row, why its matcher cannot go on, which may be the fault of other answers; by row, why its
            answer has ended)
        """
        jobs: dict[int, Job[None]] = {}
        stuck: dict[int, RowFailure] = {}
        ended: dict[int, RowFailure] = {}
        for number in numbers:
            row = rows[number]
            try:
                jobs[number] = self._job(self._caught_up(row), list(row.drafts), filled, firsts[number])
            except _LateError:
                ended[number] = self._late()
            except GrammarError as error:
                stuck[number] = _beyond_limits(str(error))
            except _LeftGrammarError as error:
                stuck[number] = RowFailure(str(error))
        outcomes = dict(zip(jobs, self._workers.run(list(jobs.values())), strict=True))
        for number, outcome in outcomes.items():
            if outcome.is_late:
                self._matches[rows[number].request_id].template.is_late = True
                ended[number] = self._late()
        if any(outcome.is_late for outcome in outcomes.values()):
            filled = filled.copy()  # what was given up may still be written
        for number, outcome in outcomes.items():
            if outcome.is_late:
                continue
            row = rows[number]
            match = self._matches[row.request_id]
            self._charge(match, outcome.took_s, num_masks=1 + len(row.drafts))
            if why := self._error(match, outcome, row.drafts, filled[firsts[number] : firsts[number + 1]]):
                stuck[number] = _beyond_limits(why)
            elif match.excess_s > EXCESS_MASKS * self._limits.timeout_s:
                ended[number] = self._slow()
        return filled, stuck, ended

    def _job(self, match: _Match, drafts: list[int], filled: NDArray[np.int32], first: int) -> Job[None]:
        """Fill the masks from `first` on: after the answer, and after each of the drafts."""
        from llguidance.numpy import fill_next_token_bitmask_par, fill_next_token_bitmask_par_with_draft_tokens

        matcher, limit_s = match.matcher, self._limits.timeout_s * (1 + len(drafts))
        filled[first + 1 : first + 1 + len(drafts)] = NOT_FILLED

        def work() -> None:
            if drafts:
                fill_next_token_bitmask_par_with_draft_tokens(self._alone, [(matcher, first, drafts)], filled)
            else:
                fill_next_token_bitmask_par(self._alone, [(matcher, first)], filled)

        return Job(work, limit_s, match.template)

    def _error(
        self, match: _Match, outcome: Outcome[None], drafts: Sequence[int], masks: NDArray[np.int32]
    ) -> str | None:
        """Return why `masks`, after the answer and after each of the drafts, are not to be trusted."""
        try:
            with _panics_told():
                if outcome.error is not None:
                    raise outcome.error
        except GrammarError as error:
            return str(error)
        if not match.template.is_late and (text := match.matcher.get_error()):
            return text
        return self._broken_off(drafts, masks)

    def _broken_off(self, drafts: Sequence[int], masks: NDArray[np.int32]) -> str | None:
        """Return why masks are missing behind a draft that may come. The library stops at a draft that it cannot take,
        and does not say whether the grammar forbids it or another thread has just filled the lexer."""
        missing = [number for number in range(len(drafts)) if not masks[number + 1].any()]
        if not missing:
            return None
        masks[np.array(missing) + 1] = ANY_TOKEN
        draft = drafts[missing[0]]
        if draft in self._tokenizer.eos_tokens or not masks[missing[0]][draft // 32] >> draft % 32 & 1:
            return None
        return f"the lexer cannot take token {draft}, which its mask allows"

    def _late(self) -> RowFailure:
        return _too_slow(f"{self._limits.timeout_s:g} s of a processor (grammar_mask_timeout_s)")

    def _slow(self) -> RowFailure:
        return _too_slow(f"{self._limits.average_s:g} s of a processor a token on average (grammar_mask_average_s)")

    def _charge(self, match: _Match, took_s: float, num_masks: int = 0) -> None:
        """Masks that are each below their limit would hold up step after step, as long as an answer is."""
        match.excess_s = max(0.0, match.excess_s + took_s - num_masks * self._limits.average_s)

    def _caught_up(self, row: GrammarRow) -> _Match:
        """The request's match, after its whole answer: new tokens are consumed, after a preemption all of them."""
        match = self._matches.get(row.request_id)
        if match is None:
            match = self._matches[row.request_id] = _match_of(self._template(row.grammar))
        if match.template.is_late:
            raise _LateError
        self._consume(match, row.answer[match.count :])
        return match

    def _move(self, row: GrammarRow) -> bool:
        """Give the answer another lexer, where it begins anew. Return False if no other answer had a part in the state
        of the last one: it would end there again."""
        match = self._matches.get(row.request_id)
        if match is None:
            return False
        with self._lock:
            if self._compiled.get(row.grammar) is match.template:
                del self._compiled[row.grammar]  # nobody is to begin with it
        if match.template.num_copies == 1:
            return False
        make = self._template if len(row.answer) - match.moved_at >= MOVE_TOKENS else self._make
        try:
            moved = _match_of(make(row.grammar))
        except GrammarError:  # a panic: it was compiled before
            return False
        moved.excess_s, moved.moved_at = match.excess_s, len(row.answer)
        self._matches[row.request_id] = moved
        return True

    def _consume(self, match: _Match, tokens: Sequence[int]) -> None:
        with _panics_told():
            count = match.matcher.try_consume_tokens(list(tokens)) if tokens else 0
        if match.matcher.is_error():
            raise GrammarError(match.matcher.get_error())
        if count < len(tokens):
            raise _LeftGrammarError(f"The grammar does not allow token {tokens[count]}, which the answer has.")
        match.count += len(tokens)

    def forced(self, request_id: str, tokens: Sequence[int]) -> tuple[int, ...]:
        """Tokens that spell what must follow the answer once `tokens` are its next ones; () where anything else may.

        They are a guess: other tokens may spell the same text.
        """
        match = self._matches[request_id]
        if match.template.is_late or any(token in self._tokenizer.eos_tokens for token in tokens):
            return ()
        began_s = thread_time()
        try:
            self._consume(match, tokens)
            with _panics_told():
                return tuple(match.matcher.compute_ff_tokens())
        except (GrammarError, _LeftGrammarError):  # the next step's mask says so
            return ()
        finally:
            self._charge(match, thread_time() - began_s)

    def forget(self, request_id: str) -> None:
        self._matches.pop(request_id, None)


def _match_of(template: _Template) -> _Match:
    template.num_copies += 1
    return _Match(template, template.matcher.deep_copy())


def _readable(error: str) -> str:
    """Put the library's message on one line, without its own markers."""
    lines = (line.strip() for line in error.splitlines())
    text = " ".join(line for line in lines if line and line != "<non-verbose/>")
    return "it allows no text at all" if text == "NoExtensionBias" else text


def _too_slow(limit: str) -> RowFailure:
    return _beyond_limits(f"it takes more than {limit} to find out what may come next")


def _beyond_limits(error: str) -> RowFailure:
    """`error`: the library's, of which the first line is for people. Its advice is for authors of grammars, and here it
    may be a schema."""
    text = "The grammar became more work than the limits allow while the answer was written"
    told = error.partition("\n")[0].partition("; consider")[0]
    return RowFailure(f"{text}: {told}", ErrorCode.GRAMMAR_LIMIT_EXCEEDED)


class _ByteTokens:
    """What llguidance asks of a tokenizer that it cannot read from a file."""

    bos_token_id = None

    def __init__(self, vocab_size: int, eos_token_id: int) -> None:
        self.eos_token_id = eos_token_id
        self.special_token_ids = list(range(256, vocab_size))
        self.tokens = [bytes([token]) if token < 256 else f"<{token}>".encode() for token in range(vocab_size)]

    def __call__(self, text: Any) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


def read_grammars(model_dir: Path, resolved: ResolvedConfig) -> Grammars | None:
    """None where the model's directory has no tokenizer, or no token that ends an answer."""
    tokenizer = model_dir / "tokenizer.json"
    if not tokenizer.is_file() or not resolved.eos_token_ids:
        return None
    return Grammars.of_model(
        tokenizer,
        resolved.vocab_size,
        resolved.eos_token_ids,
        resolved.num_threads,
        MaskLimits(resolved.grammar_mask_timeout_s, resolved.grammar_mask_average_s),
    )
