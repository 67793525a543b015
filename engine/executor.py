"""Owns one model on one device: runs the steps that a plan describes, in order.
Never schedules, and keeps nothing of a request between steps but its K and V in the blocks that the plan names."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import Tensor

from engine.config import EngineConfig, ResolvedConfig
from engine.inputs import StepInputs, build_inputs
from engine.kv_cache import KVCache
from engine.models.config import read_model_config
from engine.models.decoder import Decoder
from engine.resolve import resolve, torch_dtype
from engine.sampler import sample
from engine.step import ExecutorOutOfMemoryError, StepOutput, StepPlan
from engine.weights import dummy_weights, load_weights
from kernels.ops import select_ops

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
        wanted = [row.sampling for row in plan.rows if row.sampling is not None]
        logits = self._model.logits(hidden[inputs.sampled_tokens]) if wanted else None  # [sampling rows, vocab]
        tokens = sample(logits, wanted) if logits is not None else []
        return _output(plan, tokens)

    def collect(self) -> StepOutput:
        return self._outputs.popleft()

    def forget(self, request_ids: Sequence[str]) -> None:
        """Nothing is kept per request: its blocks are the scheduler's, and are overwritten by their next owner."""

    def shutdown(self) -> None:
        """Drop weights and cache. No step can run afterwards; a second call finds nothing to drop."""
        self._outputs.clear()
        with suppress(AttributeError):
            del self._model, self._cache

    @torch.inference_mode()
    def logits(self, plan: StepPlan) -> Tensor:
        """Run the step and return the logits of every token, for tests and offline scoring. # [num_tokens, vocab]"""
        return self._model.logits(self._forward(plan)[1])

    def _forward(self, plan: StepPlan) -> tuple[StepInputs, Tensor]:
        self._set_threads()
        inputs = build_inputs(plan, self._block_size)
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


def _output(plan: StepPlan, tokens: Sequence[int | None]) -> StepOutput:
    """Give the sampled tokens to the rows that asked for one."""
    remaining = iter(tokens)
    sampled = [next(remaining) if row.sampling is not None else None for row in plan.rows]
    return StepOutput(
        plan.step_id,
        sampled=tuple(() if token is None else (token,) for token in sampled),
        failed=tuple(
            (number, "The model gave no finite logit.")
            for number, (row, token) in enumerate(zip(plan.rows, sampled, strict=True))
            if row.sampling is not None and token is None
        ),
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
