"""Owns the assembly of an engine from a config: the one place where the core meets torch, and only if torch is needed.
Never runs on import: nothing heavy is loaded until `build_engine` is called."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, MutableSequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.async_engine import AsyncEngine
from engine.batch.grammar import Grammars, MaskLimits
from engine.build.step_times import fake_step_times, measured_step_times
from engine.checkpoints.gguf_form import gguf_form
from engine.checkpoints.prepare import prepare_model
from engine.config import EngineConfig, ResolvedConfig, refuse_conflicts
from engine.core.capabilities import check_capabilities
from engine.core.core import EngineCore
from engine.fake.adapters import FakeAdapters
from engine.fake.draft_model import FakeDraftModel
from engine.fake.executor import FakeExecutor
from engine.fake.kv_mover import BLOCK_BYTES as FAKE_BLOCK_BYTES
from engine.fake.kv_mover import FakeMover
from engine.features import FAKE, TEXT, turned_on
from engine.multimodal_inputs import InputKind
from engine.scheduling.step_prediction import StepTimeModel
from engine.step import Executor

if TYPE_CHECKING:
    from engine.parallel.processes import RankLauncher

logger = logging.getLogger(__name__)

# The fake executor's vocabulary: one token per byte, then the byte-level tokenizer's special tokens.
FAKE_EOS_TOKEN_ID = 256
FAKE_VOCAB_SIZE = 272
FAKE_MAX_MODEL_LEN = 4096
FAKE_NUM_KV_BLOCKS = 4096
FAKE_IMAGES = InputKind(
    name="image", token_id=262, side=28, min_pixels=28 * 28, max_pixels=28 * 28 * 64, chunkable=False
)
FAKE_MODEL_COST = 0.1
"""The draft model's cost, as a share of a step: about what small models cost relative to those they draft for."""
FAKE_EMBEDDING_BYTES = 1024
"""Assumed memory of an encoded token, in bytes."""
_FAKE_ALPHABET = tuple(b"abcdefghijklmnopqrstuvwxyz ")


def build_engine(
    model: str,
    config: EngineConfig,
    engines: int = 1,
    *,
    progress: bool = True,
    launcher: RankLauncher | None = None,
) -> AsyncEngine:
    """Start an engine for `model`, a name or directory that `prepare_model` takes; the fake executor ignores it.
    engines: how many share this machine's memory; see engine.host.shares. progress: show on standard error how the
    model is prepared. launcher: starts the engine's other ranks, if it has several; None: as children of this process.

    Raises:
        ModelError: the model cannot be found, read or run.
        ConfigError: the settings do not fit the model or the machine.
    """
    if config.executor != "fake" and config.expert_parallel_size > 1:
        return _build_lockstep(model, config, engines, progress, launcher)
    if config.executor == "fake":
        executor, resolved = _build_fake(config)
        step_times = fake_step_times(config) if resolved.targets.any else None
    else:
        executor, resolved, step_times = _build_torch(model, config, engines, progress, launcher)
    _log(resolved)
    try:
        return AsyncEngine(EngineCore(executor, resolved, step_times=step_times))
    except BaseException:
        executor.shutdown()
        raise


def _log(resolved: ResolvedConfig) -> None:
    logger.info("engine resolved: %s", resolved)
    for setting, reason in resolved.reasons.items():
        logger.info("%s: %s", setting, reason)


def check_engine(model: str, config: EngineConfig, engines: int = 1, *, ranks_apart: bool = False) -> ResolvedConfig:
    """Run all checks that build_engine makes before it reads a weight, and return the config that it would serve.
    ranks_apart: the engine's ranks may be on several machines. Then rank 0 alone is checked by this one: which ranks
    will be beside it, and what their machines have, is only known at the start.

    Raises: as build_engine.
    """
    if config.executor == "fake":
        executor, resolved = _build_fake(config)
        check_capabilities(resolved, executor.capabilities)
        return resolved
    from engine.build.executor import check_executor
    from engine.parallel.processes import RanksApart

    model_dir = _prepared(model, config, progress=False)
    if ranks_apart:
        return check_executor(model_dir, config, engines, RanksApart())
    sharing = engines * config.expert_parallel_size  # each of these ranks takes what an engine does
    return check_executor(model_dir, config, sharing)


def _build_torch(
    model: str, config: EngineConfig, engines: int, progress: bool, launcher: RankLauncher | None
) -> tuple[Executor, ResolvedConfig, StepTimeModel | None]:
    # torch reads this once, when it is loaded. By default its threads spin while they wait, which takes cores from the
    # server and the proxy: on two busy cores a step of 16 streams took 900 to 2,500 ms, and 400 ms without spinning.
    # The native kernels have threads of their own.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from engine.build.executor import create_executor

    model_dir = _prepared(model, config, progress=progress)
    executor, resolved = create_executor(model_dir, config, engines, launcher)
    try:
        step_times = measured_step_times(executor, model_dir, config, resolved) if resolved.targets.any else None
    except BaseException:
        executor.shutdown()
        raise
    return executor, resolved, step_times


def _build_lockstep(
    model: str, config: EngineConfig, engines: int, progress: bool, launcher: RankLauncher | None
) -> AsyncEngine:
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as above
    from engine.build.lockstep import start_lockstep

    engine = start_lockstep(_prepared(model, config, progress=progress), config, engines, launcher)
    _log(engine.config)
    return engine


def _prepared(model: str, config: EngineConfig, *, progress: bool) -> Path:
    """Return the model's directory. A GGUF file has two forms; with `quantize: auto` the device decides."""
    from engine.execution.device import choose_device

    on_gpu = config.quantize == "auto" and choose_device(config)[0].capability is not None
    form = gguf_form(config, on_gpu=on_gpu)
    return prepare_model(model, weights=config.load_format != "dummy", progress=progress, **form)


def _build_fake(config: EngineConfig) -> tuple[Executor, ResolvedConfig]:
    text = {} if config.fake.images else {TEXT: "the fake executor takes text alone unless fake.images is true"}
    refuse_conflicts({**turned_on(config), FAKE: "executor is fake", **text})
    resolved = ResolvedConfig.of(
        config,
        drafts=True,
        model_cost=FAKE_MODEL_COST,
        max_model_len=config.max_model_len or FAKE_MAX_MODEL_LEN,
        num_kv_blocks=config.num_kv_blocks or FAKE_NUM_KV_BLOCKS,
        vocab_size=FAKE_VOCAB_SIZE,
        eos_token_ids=(FAKE_EOS_TOKEN_ID,),
        dtype="none",
        device="none",
        kernels="fake",
        num_threads=1,
        recurrent_state=config.fake.recurrent_state,
        inputs=(FAKE_IMAGES,) if config.fake.images else (),
        encoder_cache_tokens=int(config.encoder_cache_memory_gib * 2**30) // FAKE_EMBEDDING_BYTES,
        reasons={"kernels": "executor is fake: tokens are scripted, no model is loaded."},
    )
    reply = config.fake.reply
    executor = FakeExecutor(
        resolved.num_kv_blocks,
        resolved.block_size,
        _FAKE_ALPHABET,
        reply=None if reply is None else reply.encode(),
        eos_token_id=FAKE_EOS_TOKEN_ID,
        config=config.fake,
        num_drafts=0 if resolved.speculates else config.num_speculative_tokens or 0,
        grammars=Grammars.of_bytes(
            FAKE_VOCAB_SIZE,
            FAKE_EOS_TOKEN_ID,
            limits=MaskLimits(config.grammar_mask_timeout_s, config.grammar_mask_average_s),
        ),
        adapters=FakeAdapters() if config.max_loras else None,
        draft_model=FakeDraftModel(resolved.num_kv_blocks, resolved.block_size) if resolved.has_draft_model else None,
        mover=_fake_mover(config),
    )
    return executor, resolved


def _fake_mover(config: EngineConfig) -> Callable[[MutableSequence[Any], int], FakeMover] | None:
    """Return what makes the tiers of the scripted executor, whose disk is memory; None if there are none."""
    host_blocks = int(config.kv_tiers.host_memory_gib * 2**30) // FAKE_BLOCK_BYTES
    disk = None if config.kv_tiers.disk_path is None else dict[bytes, list[Any]]()
    return partial(FakeMover, host_blocks=host_blocks, disk=disk) if config.kv_tiers.any else None
