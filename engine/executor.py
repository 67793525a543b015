"""Owns one model on one device: runs the steps of plans, in order. Long: with how one is made.
Never schedules, and keeps of a request only its newest token, K and V in the plan's blocks, and state in its slots."""

from __future__ import annotations

import ctypes
import math
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from engine.config import ConfigError, EngineConfig, ResolvedConfig, refuse_encoder_settings, refuse_gpu_settings
from engine.device import choose_device, device_faults
from engine.draft_build import DraftCheckpoint, check_length, read_draft
from engine.draft_model import DraftModel
from engine.grammar import Grammars
from engine.inputs import is_lost
from engine.kv_cache import KVCache, cache_dtype
from engine.logit_controls import Within
from engine.logprobs import prompt_logprobs, sampled_logprobs
from engine.models.adapted import AdaptedModel, why_not_adapted
from engine.models.computed import Computed, Model
from engine.models.config import ModelConfig, read_model_config
from engine.models.decoder import Decoder
from engine.models.eager import EagerModel
from engine.models.native import NativeModel
from engine.protocol import TokenLogprobs
from engine.recurrent_state import RecurrentState
from engine.resolve import resolve, torch_dtype
from engine.sampler import sample
from engine.step import (
    Capabilities,
    ExecutorOutOfMemoryError,
    GrammarRow,
    RowKind,
    ScheduledRequest,
    StepOutput,
    StepPlan,
    answer_tokens,
    grammar_rows,
)
from engine.verification import Place, in_kernel_order, in_plan_order, num_accepted, sampled_places
from engine.weights import dummy_weights, load_weights
from kernels.choice import NATIVE, REFERENCE, Choice, choose_kernels
from kernels.ops import TABLES

NO_LOGIT = "The model gave no finite logit."
NO_STATE = "The model gave no finite hidden state."
LOST_STATE = "There is no memory for the step, and it cannot be run again: recurrent states may have moved on."
LOST_TOKEN = "The token to go on from was not sampled: its row failed in the step before."

_Masks = tuple[Within | None, dict[int, str]]
"""What grammars allow, and why rows have no mask, by row."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # from glibc's malloc.h


class StateLostError(Exception):
    """A step failed for want of memory, and its requests' recurrent states with it."""


class TorchExecutor:
    """An engine.step.Executor for the CPU, where a step is done when `launch` returns."""

    def __init__(
        self,
        model: Model,
        *,
        num_threads: int,
        grammars: Grammars | None = None,
        draft_model: DraftModel | None = None,
    ) -> None:
        """`num_threads`: of torch's operators. `grammars`: None where the model's directory has no tokenizer, or no
        token that ends an answer. `draft_model`: proposes what plans leave open."""
        self.model = model
        self._grammars = grammars
        self._draft_model = draft_model
        self._masker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine-masks")
        self._num_threads = num_threads
        self._thread: int | None = None
        self._outputs: deque[StepOutput] = deque()
        self._newest: dict[str, int] = {}  # request id -> the token it sampled last

    @property
    def capabilities(self) -> Capabilities:
        compile_grammar = None if self._grammars is None else self._grammars.compile
        return Capabilities(
            mixed_rows=True,
            overlap=True,
            drafts=True,
            draft_model=self._draft_model is not None,
            recurrent_state=self.model.state is not None,
            compile_grammar=compile_grammar,
            adapters=self.model if isinstance(self.model, AdaptedModel) else None,
        )

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> None:
        """Run the step. A failure is an ordinary exception: rows of other plans are not affected.

        Raises:
            ValueError: the plan breaks the seam's contract.
            ExecutorOutOfMemoryError: there is no memory for the activations of so many tokens.
            StateLostError: the same, of a model with recurrent state.
        """
        with device_faults():
            with self._advancing(plan):
                output = self._run(plan)
            self._outputs.append(output)

    @contextmanager
    def _advancing(self, plan: StepPlan) -> Iterator[None]:
        """Copies of recurrent state around a step. It cannot be tried again once states may have moved on in place, so
        that a want of memory fails its rows."""
        if (state := self.model.state) is None:
            yield
            return
        state.place(plan)
        try:
            with device_faults():
                yield
        except ExecutorOutOfMemoryError as error:
            raise StateLostError(LOST_STATE) from error
        state.save(plan)

    def _run(self, planned: StepPlan) -> StepOutput:
        if self._draft_model is not None:
            planned = self._draft_model.fill(planned)
        plan, order = in_kernel_order(planned)
        places = sampled_places(plan.rows)
        with self._masks(plan, places) as masks:
            computed = self._forward(plan)
        within, failed = masks.result()
        tokens, logprobs = self._sample(plan, places, computed, within)
        scores = prompt_logprobs(plan.rows, computed.logits_at)
        failed |= {number: LOST_TOKEN for number, row in enumerate(plan.rows) if is_lost(row, self._newest)}
        pooled, without_state = pooled_by_row(plan, sum_pooled(plan, computed.hidden))
        failed |= without_state
        output = make_output(plan, tokens, logprobs, scores, failed)
        if computed.rewind is not None:
            computed.rewind.to([len(of) for of in output.sampled])
        if within is not None:
            output = replace(output, drafts=self._forced(plan, output))
        if pooled:
            output = replace(output, pooled=pooled)
        self._keep_newest(plan, output)
        return output if order is None else in_plan_order(output, order)

    @contextmanager
    def _masks(self, plan: StepPlan, places: Sequence[Place]) -> Iterator[Future[_Masks]]:
        """What grammars allow at `places`, and rows that have no mask: found while the body runs, there at its end."""
        rows = grammar_rows(plan, self._newest)
        if not rows:
            done: Future[_Masks] = Future()
            done.set_result((None, {}))
            yield done
            return
        assert self._grammars is not None
        found = self._masker.submit(self._fill_masks, rows, places)
        try:
            yield found
        finally:
            wait([found])  # the matchers are nobody else's until then

    def _fill_masks(self, rows: Sequence[tuple[int, GrammarRow]], places: Sequence[Place]) -> _Masks:
        assert self._grammars is not None
        words, failed = self._grammars.masks([row for _, row in rows])
        numbers = {number for number, _ in rows}
        limited = torch.tensor([i for i, place in enumerate(places) if place.number in numbers])
        return Within(limited, torch.from_numpy(words)), {rows[i][0]: why for i, why in failed.items()}

    def _sample(
        self, plan: StepPlan, places: Sequence[Place], computed: Computed, within: Within | None
    ) -> tuple[dict[int, list[int | None]], dict[int, list[TokenLogprobs | None]]]:
        """Tokens, and log-probabilities of those that were asked for, by row."""
        if not places:
            return {}, {}
        rows = [plan.rows[place.number] for place in places]
        wanted = [row.sampling for row in rows if row.sampling is not None]
        logits = computed.logits.float()  # [places, vocab]
        positions = [row.start + place.offset + 1 for row, place in zip(rows, places, strict=True)]
        answers = [self._answer(row, place.offset) for row, place in zip(rows, places, strict=True)]
        sampled = sample(logits, wanted, positions, answers, within, computed.best, computed.draw)
        scored = sampled_logprobs(logits, wanted, sampled)
        tokens: dict[int, list[int | None]] = {}
        logprobs: dict[int, list[TokenLogprobs | None]] = {}
        for i, place in enumerate(places):
            tokens.setdefault(place.number, []).append(sampled[i])
            if i in scored:
                logprobs.setdefault(place.number, []).append(scored[i])
        return tokens, logprobs

    def _answer(self, row: ScheduledRequest, offset: int) -> tuple[int, ...]:
        """What the answer holds once token `offset` of the row is part of it; () where no control looks back."""
        answer = answer_tokens(row, self._newest)
        return (*answer, *row.token_ids[1 : offset + 1]) if answer and row.kind is RowKind.DECODE else answer

    def _forced(self, plan: StepPlan, output: StepOutput) -> dict[int, tuple[int, ...]]:
        """What grammars force to follow, by row."""
        assert self._grammars is not None
        return {
            number: forced
            for number, row in grammar_rows(plan, self._newest)
            if output.sampled[number] and (forced := self._grammars.forced(row.request_id, output.sampled[number]))
        }

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
            if self._grammars is not None:
                self._grammars.forget(request_id)

    def shutdown(self) -> None:
        """Drop weights and cache. No step can run afterwards; a second call finds nothing to drop."""
        self._outputs.clear()
        self._newest.clear()
        self._masker.shutdown()
        self._draft_model = None
        with suppress(AttributeError):
            del self.model

    @torch.inference_mode()
    def logits(self, plan: StepPlan) -> Tensor:
        """Run the step and return the logits of every token, for tests and offline scoring. # [num_tokens, vocab]"""
        return self._forward(plan).logits_at(torch.arange(plan.num_tokens)).clone()

    def _forward(self, plan: StepPlan) -> Computed:
        self._set_threads()
        return self.model.forward(plan, self._newest)

    def _set_threads(self) -> None:
        """OpenMP keeps its thread count per calling thread, so it is set in the one that runs the steps."""
        if self._thread != threading.get_ident():
            torch.set_num_threads(self._num_threads)
            self._thread = threading.get_ident()


def sum_pooled(plan: StepPlan, hidden: Tensor) -> Tensor | None:
    """Sums of hidden states, where they are. hidden: [num_tokens, hidden], of all rows; # [pooled rows, hidden]"""
    sums = []
    begin = 0  # the row's first token among those of the step
    for row in plan.rows:
        if row.pool_from is not None:
            sums.append(hidden[begin + row.pool_from - row.start : begin + len(row.token_ids)].float().sum(dim=0))
        begin += len(row.token_ids)
    return torch.stack(sums) if sums else None


def pooled_by_row(plan: StepPlan, sums: Tensor | None) -> tuple[dict[int, tuple[float, ...]], dict[int, str]]:
    """What `sum_pooled` found, on the host, and why rows have failed by it."""
    if sums is None:
        return {}, {}
    numbers = [number for number, row in enumerate(plan.rows) if row.pool_from is not None]
    pooled = dict(zip(numbers, map(tuple, sums.tolist()), strict=True))
    return pooled, {number: NO_STATE for number, of in pooled.items() if not all(map(math.isfinite, of))}


def make_output(
    plan: StepPlan,
    tokens: Mapping[int, Sequence[int | None]],
    logprobs: Mapping[int, Sequence[TokenLogprobs | None]],
    scores: Mapping[int, tuple[TokenLogprobs, ...] | None],
    failed: dict[int, str],
) -> StepOutput:
    """What each row asked for, by row, as far as its drafts were right; a row that lacks any of it, or is in `failed`,
    returns nothing else."""
    sampled: dict[int, tuple[int, ...]] = {}
    scored: dict[int, tuple[TokenLogprobs, ...]] = {}
    failed = {number: NO_LOGIT for number, found in scores.items() if found is None} | failed
    for number, found in tokens.items():
        row = plan.rows[number]
        count = num_accepted(row.token_ids[1:], found) if row.kind is RowKind.DECODE else 1
        sampled[number] = tuple(token for token in found[:count] if token is not None)
        scored[number] = tuple(of for of in logprobs.get(number, ())[:count] if of is not None)
        if len(sampled[number]) < count or (number in logprobs and len(scored[number]) < count):
            failed.setdefault(number, NO_LOGIT)
    return StepOutput(
        plan.step_id,
        sampled=tuple(sampled.get(number, ()) if number not in failed else () for number in range(len(plan.rows))),
        failed=tuple(sorted(failed.items())),
        logprobs={number: of for number, of in scored.items() if of and number not in failed},
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
        ModelError: the draft model cannot be found or read.
        ConfigError: the config asks for more than the checkpoint, the device or the memory can give.
    """
    device, reason = choose_device(config)
    if device.capability is not None:
        if config.speculative.method == "draft_model":
            raise ConfigError(
                f"speculative.method is draft_model, which runs on the CPU alone, and device is {device.name}: set "
                "device cpu, or another method."
            )
        from engine.device_build import create_on_device  # which builds on this file

        return create_on_device(model_dir, config, device, reason)
    refuse_gpu_settings(config, reason)
    model_config = read_model_config(model_dir)
    if config.max_loras and (why := why_not_adapted(model_config)):
        raise ConfigError(f"max_loras is {config.max_loras}, but {why}.")
    _keep_freed_memory()
    kernels = _kernels(model_config, config)
    draft = read_draft(model_dir, model_config, config)
    asked_of = None if draft is None else (draft.model, draft.cost)
    resolved = resolve(model_dir, model_config, config, kernels, (device, reason), draft=asked_of)
    if model_config.vision is not None:
        from engine.encoder_build import create_with_encoder  # which builds on this file

        return create_with_encoder(model_dir, model_config, config, resolved)
    refuse_encoder_settings(config, f"{model_config.architecture} takes text alone")
    # Adapters are the model's own, and drafts do without; nor do they change the bits of an answer.
    alone = replace(config, max_loras=0, batch_invariant=False)
    of_draft = None if draft is None else _draft_kernels(draft, alone, resolved.max_model_len)
    model = _load(model_dir, model_config, config, resolved, kernels)
    proposes, with_torch = None, kernels.name != NATIVE
    if draft is not None and of_draft is not None:
        with_torch |= of_draft.name != NATIVE
        proposes = DraftModel(_load(draft.directory, draft.model, alone, resolved, of_draft))
    # What torch does beside the native kernels is small: a second thread of its own would take a core that they need.
    num_threads = resolved.num_threads if with_torch else 1
    grammars = read_grammars(model_dir, resolved)
    return TorchExecutor(model, num_threads=num_threads, grammars=grammars, draft_model=proposes), resolved


def _load(
    model_dir: Path, model: ModelConfig, config: EngineConfig, resolved: ResolvedConfig, kernels: Choice
) -> Model:
    """A checkpoint on `kernels`, with a KV cache of its own. resolved: of the engine, which may have another model."""
    dtype, kept = torch_dtype(resolved.dtype), kernels.name == NATIVE
    dummy = config.load_format == "dummy"
    weights = dummy_weights(model, dtype) if dummy else load_weights(model_dir, model, dtype, keep_int8=kept)
    decoder = Decoder(model, weights, resolved.max_model_len)
    size, kv_dtype = resolved.block_size, cache_dtype(config.kv_cache_dtype, dtype)
    cache = KVCache.allocate(model, resolved.num_kv_blocks, size, kv_dtype)
    if kernels.name != NATIVE:
        ops = TABLES[kernels.name]
        if config.max_loras:
            return AdaptedModel(decoder, ops, cache, size, max_rank=config.max_lora_rank)
        return EagerModel(decoder, ops, cache, size, RecurrentState.allocate(model, resolved, dtype))
    return NativeModel(
        decoder,
        cache,
        block_size=size,
        num_threads=resolved.num_threads,
        num_tokens=resolved.max_num_batched_tokens,
        num_sampled=resolved.max_decode_tokens,
        quantize=config.quantize == "int8",
    )


def _unfit(model: ModelConfig, config: EngineConfig) -> str | None:
    """Why the native kernels cannot run this model, whatever its shape."""
    if config.max_loras:
        return f"max_loras is {config.max_loras}, and they compute no adapters"
    if config.kv_cache_dtype not in ("auto", "int8"):
        return f"they keep no K and V in {config.kv_cache_dtype}"
    if model.needs_linear_attention_pass:
        return "linear attention and its gates are not among them"
    return None if model.vision is None else "they have no encoder, and one position for each token"


def _kernels(model: ModelConfig, config: EngineConfig) -> Choice:
    try:
        inputs = (model.hidden_size, model.intermediate_size, *model.expert_sizes)
        choice = choose_kernels(
            config.kernels,
            head_dim=model.head_dim,
            block_size=config.block_size,
            inputs=inputs,
            unfit=_unfit(model, config),
        )
    except ValueError as error:
        raise ConfigError(f"kernels is {config.kernels}. {error}") from error
    if config.kv_cache_dtype != "auto" and choice.name == REFERENCE:
        raise ConfigError(f"kv_cache_dtype is {config.kv_cache_dtype}, and kernels reference keep K and V as they are.")
    needs_native = {"batch_invariant": config.batch_invariant, f"quantize {config.quantize}": config.quantize != "none"}
    for setting, asked in needs_native.items():
        if asked and choice.name != NATIVE:
            raise ConfigError(f"{setting} needs the native kernels, and these are chosen: {choice.reason}.")
    return choice


def _draft_kernels(draft: DraftCheckpoint, config: EngineConfig, max_model_len: int) -> Choice:
    """Of a draft model that reads as far as the model, before any weights are loaded."""
    check_length(draft, max_model_len)
    try:
        return _kernels(draft.model, config)
    except ConfigError as error:  # which names settings, and they are those of two models
        raise ConfigError(f"speculative.model is {config.speculative.model}, for which {error}") from error


def read_grammars(model_dir: Path, resolved: ResolvedConfig) -> Grammars | None:
    """None where the model's directory has no tokenizer, or no token that ends an answer."""
    tokenizer = model_dir / "tokenizer.json"
    if not tokenizer.is_file() or not resolved.eos_token_ids:
        return None
    return Grammars.of_model(tokenizer, resolved.vocab_size, resolved.eos_token_ids, resolved.num_threads)
