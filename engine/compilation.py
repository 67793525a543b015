"""Owns the wait for a grammar to be compiled, before its request is queued: beside the steps, and bounded.
Never compiles on an event loop or on the step thread, and knows nothing of what a grammar says."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from engine.config import ResolvedConfig
from engine.protocol import ErrorCode, RequestRejected
from engine.step import GrammarCompiler, GrammarError


class Compilation:
    """Compiles the grammars of one engine, one at a time: while many come at once, steps keep the other cores. One
    that is compiled already waits for none of them."""

    def __init__(self, grammars: GrammarCompiler | None, config: ResolvedConfig) -> None:
        """`grammars`: those of the executor's capabilities."""
        self._grammars = grammars
        self._config = config
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine-grammars")

    async def compile(self, grammar: str) -> None:
        """Return when steps can use the grammar.

        Raises:
            RequestRejected: they cannot, or not within `grammar_timeout_s`.
        """
        if self._grammars is None:
            raise _rejected("This model's executor cannot keep to a grammar.")
        size, most = len(grammar.encode()), self._config.max_grammar_bytes
        if size > most:
            raise _rejected(f"The grammar may have {most} bytes (max_grammar_bytes), but it has {size}.", most, size)
        if self._grammars.is_compiled(grammar):
            return
        # What has begun cannot be interrupted; compiled too late, it is ready for the next request.
        work = asyncio.get_running_loop().run_in_executor(self._thread, self._grammars.compile, grammar)
        try:
            await asyncio.wait_for(work, self._config.grammar_timeout_s)
        except TimeoutError as error:
            limit = self._config.grammar_timeout_s
            raise _rejected(f"The grammar was not compiled within {limit:g} s (grammar_timeout_s).", limit) from error
        except GrammarError as error:
            raise _rejected(f"The grammar is refused: {error}") from error

    def shutdown(self) -> None:
        """Whoever waits is left waiting no longer; what runs ends by itself."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def _rejected(text: str, limit: float | None = None, value: float | None = None) -> RequestRejected:
    return RequestRejected(ErrorCode.INVALID_PARAMETER, text, "grammar", limit, value)
