"""Owns one model on one device: runs the steps that a plan describes, in order.
Never schedules, and keeps of a request between steps only its newest token, and K and V in the blocks of the plan."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from engine.config import EngineConfig, ResolvedConfig
from engine.inputs import StepInputs, answer_tokens, build_inputs, is_lost
from engine.kv_cache import KVCache
from engine.logprobs import prompt_logprobs, sampled_logprobs
from engine.models.config import read_model_config
from engine.models.decoder import Decoder
from engine.protocol import TokenLogprobs
from engine.resolve import resolve, torch_dtype
from engine.sampler import sample
from engine.step import Capabilities, ExecutorOutOfMemoryError, StepOutput, StepPlan
from engine.weights import dummy_weights, load_weights
from kernels.ops import select_ops

NO_LOGIT = "The model gave no finite logit."
LOST_TOKEN = "The token to go on from was not sampled: its row failed in the step before."

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # from glibc's malloc.h


class TorchExecutor:
    """An engine.step.Executor for the CPU, where a step is done when `launch` returns."""

    def __init__(self, model: Decoder, cache: KVCache, *, block_size: int, num_threads: int) -> None:
        self._model = model
        self._cache = cache
        self._block_size = block_size
        self._num_threads = num_threads
        self._thread: int | None = None
        self._outputs: deque[StepOutput] = deque()
        self._newest: dict[str, int] = {}  # request id -> the token it sampled last

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(mixed_rows=True, overlap=True)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> None:
        """Run the step. A failure is an ordinary exception: rows of other plans are not affected.

        Raises:
            ValueError: the plan breaks the seam's contract.
            ExecutorOutOfMemoryError: there is no memory for the activations of so many tokens.
        """
        with _out_of_memory():
            self._outputs.append(self._run(plan))

    def _run(self, plan: StepPlan) -> StepOutput:
        inputs, hidden = self._forward(plan)
        scores = prompt_logprobs(plan.rows, hidden, self._model.logits)
        tokens, logprobs = self._sample(plan, hidden[inputs.sampled_tokens])
        lost = [number for number, row in enumerate(plan.rows) if is_lost(row, self._newest)]
        output = _output(plan, tokens, logprobs, scores, lost)
        self._keep_newest(plan, output)
        return output

    def _sample(self, plan: StepPlan, hidden: Tensor) -> tuple[dict[int, int | None], dict[int, TokenLogprobs | None]]:
        """Tokens, and log-probabilities of those that were asked for, by row. hidden: [sampling rows, hidden]"""
        numbers = [number for number, row in enumerate(plan.rows) if row.sampling is not None]
        if not numbers:
            return {}, {}
        wanted = [row.sampling for row in plan.rows if row.sampling is not None]
        logits = self._model.logits(hidden)  # [sampling rows, vocab]
        rows = [plan.rows[number] for number in numbers]
        answers = [answer_tokens(row, self._newest) for row in rows]
        tokens = sample(logits, wanted, [row.end for row in rows], answers)
        logprobs = sampled_logprobs(logits, wanted, tokens)
        return dict(zip(numbers, tokens, strict=True)), {numbers[i]: found for i, found in logprobs.items()}

    def _keep_newest(self, plan: StepPlan, output: StepOutput) -> None:
        """What PENDING_TOKEN stands for in the next step: nothing where this one failed, lest it be an older token."""
        for number, _ in output.failed:
            self._newest.pop(plan.rows[number].request_id, None)
        for row, tokens in zip(plan.rows, output.sampled, strict=True):
            if tokens:
                self._newest[row.request_id] = tokens[-1]

    def collect(self) -> StepOutput:
        return self._outputs.popleft()

    def forget(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._newest.pop(request_id, None)

    def shutdown(self) -> None:
        """Drop weights and cache. No step can run afterwards; a second call finds nothing to drop."""
        self._outputs.clear()
        self._newest.clear()
        with suppress(AttributeError):
            del self._model, self._cache

    @torch.inference_mode()
    def logits(self, plan: StepPlan) -> Tensor:
        """Run the step and return the logits of every token, for tests and offline scoring. # [num_tokens, vocab]"""
        return self._model.logits(self._forward(plan)[1])

    def _forward(self, plan: StepPlan) -> tuple[StepInputs, Tensor]:
        self._set_threads()
        inputs = build_inputs(plan, self._block_size, self._newest)
        return inputs, self._model.forward(inputs, self._cache)

    def _set_threads(self) -> None:
        """OpenMP keeps its thread count per calling thread, so it is set in the one that runs the steps."""
        if self._thread != threading.get_ident():
            torch.set_num_threads(self._num_threads)
            self._thread = threading.get_ident()


@contextmanager
def _out_of_memory() -> Iterator[None]:
    """Translate torch's ways of saying that an allocation failed; the CPU allocator has no type of its own."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, torch.cuda.OutOfMemoryError) or "can't allocate memory" in str(error):
            raise ExecutorOutOfMemoryError(str(error)) from error
        raise


def _output(
    plan: StepPlan,
    tokens: Mapping[int, int | None],
    logprobs: Mapping[int, TokenLogprobs | None],
    scores: Mapping[int, tuple[TokenLogprobs, ...] | None],
    lost: Sequence[int],
) -> StepOutput:
    """What each row asked for, by row; a row that lacks any of it has failed, and returns nothing else."""
    found = chain(tokens.items(), logprobs.items(), scores.items())
    failed = {number: NO_LOGIT for number, value in found if value is None} | dict.fromkeys(lost, LOST_TOKEN)
    good = {number: token for number, token in tokens.items() if token is not None and number not in failed}
    return StepOutput(
        plan.step_id,
        sampled=tuple((good[number],) if number in good else () for number in range(len(plan.rows))),
        failed=tuple(sorted(failed.items())),
        logprobs={number: (of,) for number, of in logprobs.items() if of is not None and number not in failed},
        prompt_logprobs={number: of for number, of in scores.items() if of is not None and number not in failed},
    )


def _keep_freed_memory() -> None:
    """Ask glibc to keep large freed buffers: each layer frees and allocates the same few megabytes again.

    Handing them back costs a page fault per 4 KiB and layer; 16 streams of 1,000 tokens spent a third of their step on
    that (1,147 faults and 206 ms a step against 2 and 140, two busy virtual cores). Other C libraries lack mallopt.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # the largest that glibc accepts
        mallopt(_M_TRIM_THRESHOLD, 1 << 30)


def create_executor(model_dir: Path, config: EngineConfig) -> tuple[TorchExecutor, ResolvedConfig]:
    """Load the checkpoint of `model_dir` (only its config.json with load_format `dummy`) and make it ready to run.

    Raises:
        CheckpointError: the checkpoint is broken or not supported.
        ConfigError: the config asks for more than the checkpoint or the memory can give.
    """
    model_config = read_model_config(model_dir)
    _keep_freed_memory()
    ops = select_ops()
    resolved = resolve(model_dir, model_config, config, ops)
    dtype = torch_dtype(resolved.dtype)
    dummy = config.load_format == "dummy"
    weights = dummy_weights(model_config, dtype) if dummy else load_weights(model_dir, model_config, dtype)
    model = Decoder(model_config, weights, ops, resolved.max_model_len)
    cache = KVCache.allocate(model_config, resolved.num_kv_blocks, resolved.block_size, dtype)
    executor = TorchExecutor(model, cache, block_size=resolved.block_size, num_threads=resolved.num_threads)
    return executor, resolved
