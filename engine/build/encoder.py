"""Owns the start of an engine whose model has an encoder: weights of both, and the executor over them.
Never runs on a GPU, nor on the native kernels: such a model is refused there by name."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import torch

from engine.batch.grammar import read_grammars
from engine.build.resolve import torch_dtype
from engine.config import ConfigError, EngineConfig, ResolvedConfig
from engine.execution.executor import TorchExecutor
from engine.models.config import CheckpointError, read_json
from engine.models.decoder import Decoder
from engine.models.description import ModelConfig
from engine.models.encoding import EncodingModel
from engine.models.kv_cache import KVCache, cache_dtype
from engine.models.vision import VisionEncoder
from engine.models.vision_config import PixelConfig, VisionConfig, image_kind, read_pixels
from engine.models.vision_weights import allocate_vision, vision_table
from engine.models.weights import DUMMY_SEED, dummy_weights, load_weights
from kernels.ops import TABLES

PROCESSOR_FILE = "preprocessor_config.json"


def create_with_encoder(
    model_dir: Path, model: ModelConfig, config: EngineConfig, resolved: ResolvedConfig
) -> TorchExecutor:
    """Load the checkpoint of `model_dir`, decoder and encoder. resolved: see with_inputs.

    Raises:
        CheckpointError: the checkpoint is broken or not supported.
    """
    assert model.vision is not None
    pixels = _pixels(model_dir, model.vision)
    dtype, ops = torch_dtype(resolved.dtype), TABLES[resolved.kernels]
    vision = allocate_vision(model.vision, dtype)
    table = vision_table(vision)
    if config.load_format == "dummy":
        weights = dummy_weights(model, dtype)
        _fill(table, torch.Generator().manual_seed(DUMMY_SEED))
    else:
        weights = load_weights(model_dir, model, dtype, others=table)
    decoder = Decoder(model, weights, resolved.max_model_len)
    kv_dtype = cache_dtype(config.kv_cache_dtype, dtype)
    cache = KVCache.allocate(model, resolved.num_kv_blocks, resolved.block_size, kv_dtype)
    encoder = VisionEncoder(model.vision, pixels, vision, ops)
    built = EncodingModel(decoder, encoder, ops, cache, resolved.block_size)
    grammars = read_grammars(model_dir, resolved)
    return TorchExecutor(built, num_threads=resolved.num_threads, grammars=grammars)


def _pixels(model_dir: Path, vision: VisionConfig) -> PixelConfig:
    """What the checkpoint says of images; its file may be missing."""
    path = model_dir / PROCESSOR_FILE
    try:
        return read_pixels(read_json(path) if path.exists() else {}, vision)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error


def with_inputs(model_dir: Path, model: ModelConfig, config: EngineConfig, resolved: ResolvedConfig) -> ResolvedConfig:
    """With what an image may be, and how many tokens of images are kept encoded. resolved: of the decoder alone.

    Raises:
        CheckpointError: what the checkpoint says of images cannot be read.
        ConfigError: the engine's limits leave no room for an image.
    """
    assert model.vision is not None
    pixels = _pixels(model_dir, model.vision)
    token_bytes = model.vision.output_size * torch_dtype(resolved.dtype).itemsize
    kept = int(config.encoder_cache_memory_gib * 2**30) // token_bytes
    limits = {
        "a step takes it whole (max_num_batched_tokens, max_prefill_tokens)": resolved.max_atomic_span,
        "encoder_cache_memory_gib keeps it": kept,
        "a request holds it (max_model_len, num_kv_blocks)": resolved.max_request_tokens - 1,
    }
    why = min(limits, key=limits.__getitem__)
    try:
        kind = image_kind(model.vision, pixels, limits[why])
    except ValueError as error:
        raise ConfigError(f"An image has at most {limits[why]} tokens, so that {why}: {error}.") from error
    trained = pixels.max_pixels // model.vision.side**2
    reason = f"{kind.max_tokens} tokens, so that {why}" if kind.max_tokens < trained else "as the checkpoint says"
    reasons = resolved.reasons | {"largest image": f"{reason}; larger ones are scaled down"}
    return replace(resolved, inputs=(kind,), encoder_cache_tokens=kept, reasons=reasons)


def _fill(table: dict[str, torch.Tensor], generator: torch.Generator) -> None:
    """Random numbers that keep activations near one; norms are one."""
    for name, tensor in table.items():
        if tensor.dim() == 1 and not name.endswith(".bias"):
            tensor.fill_(1.0)
        else:
            std = 0.02 if tensor.dim() == 1 else 1.0 / math.sqrt(tensor[0].numel())
            tensor.copy_(torch.empty(tensor.shape).normal_(0.0, std, generator=generator))
