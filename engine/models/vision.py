"""Owns the image encoder of Qwen2.5-VL (arXiv 2502.13923): from an image's pixels to its tokens' embeddings.
Never keeps anything of an image, and never encodes two at once, so the result depends on the image alone."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.models.vision_config import PixelConfig, VisionConfig
from engine.models.vision_weights import VisionLayer, VisionWeights
from engine.multimodal_inputs import Grid
from kernels.eager.ops import Ops
from kernels.forward import Linear

NORM_EPS = 1e-6


def encoding_bytes(config: VisionConfig, tokens: int, dtype: torch.dtype) -> int:
    """Estimate the bytes that encoding an image of so many tokens takes at most, besides its weights: the most of what
    its pixels, an attention and an MLP take (in hidden sizes and intermediate sizes of a patch, counted on tensors that
    live at once)."""
    patch = max(
        2 * torch.float32.itemsize * config.patch_values,
        13 * config.hidden_size * dtype.itemsize,
        (2 * config.hidden_size + 4 * config.intermediate_size) * dtype.itemsize,
    )
    return tokens * config.merge_size**2 * patch


class VisionEncoder:
    """x = patches; each layer: x += attention(norm(x)); x += mlp(norm(x)); tokens = merger(x)."""

    def __init__(self, config: VisionConfig, pixels: PixelConfig, weights: VisionWeights, ops: Ops) -> None:
        self.config = config
        self._weights = weights
        self._ops = ops
        self._mean, self._std = torch.tensor(pixels.mean), torch.tensor(pixels.std)
        self._scale = pixels.scale
        half = config.head_dim // 2  # half of the pairs are rotated by the patch's row, half by its column
        self._frequencies = config.rope_theta ** (-torch.arange(0, half, 2, dtype=torch.float32) / half)

    def encode(self, grid: Grid, data: bytes) -> Tensor:
        """Encode one image. data: [rows * side, columns * side, 3] of uint8. # [rows * columns, output]"""
        _, rows, columns = grid
        order, windows = self._windows(rows, columns)
        patches = self._patches(rows, columns, data).to(self._weights.patches.dtype)
        x = F.linear(patches, self._weights.patches.flatten(1))  # [patches, hidden]
        x = self._permuted(x, order)
        rotations = tuple(self._permuted(part, order) for part in self._rotations(rows, columns))
        for number, layer in enumerate(self._weights.layers):
            spans = [len(x)] if number in self.config.full_attention else windows
            x = x + self._attention(self._norm(x, layer.attention_norm), layer, rotations, spans)
            x = x + self._mlp(self._norm(x, layer.mlp_norm), layer)
        return self._merge(x)[torch.argsort(order)]

    def _patches(self, rows: int, columns: int, data: bytes) -> Tensor:
        """Return normalised patches, ordered by token. # [patches, patch_values] float32"""
        config = self.config
        merge, size = config.merge_size, config.patch_size
        pixels = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        pixels = pixels.view(rows, merge, size, columns, merge, size, config.channels)
        values = (pixels.float() * self._scale - self._mean) / self._std
        values = values.permute(0, 3, 1, 4, 6, 2, 5)  # [rows, columns, merge, merge, channels, size, size]
        values = values.unsqueeze(5).expand(*values.shape[:5], config.temporal_patch_size, size, size)
        return values.reshape(-1, config.patch_values)

    def _windows(self, rows: int, columns: int) -> tuple[Tensor, list[int]]:
        """Return the order of tokens by window [rows * columns], and how many patches each window has."""
        side = self.config.window_size // self.config.side
        row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
        window = (row // side * -(-columns // side) + column // side).flatten()
        order = torch.argsort(window, stable=True)
        counts = torch.bincount(window) * self.config.merge_size**2
        return order, counts.tolist()

    def _permuted(self, patches: Tensor, order: Tensor) -> Tensor:
        """Reorder patches by their tokens' order. patches: [patches, size], grouped by token."""
        by_token = patches.view(len(order), -1, patches.shape[-1])
        return by_token[order].flatten(0, 1)

    def _rotations(self, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        """Return cos and sin for each patch's row and column, each [patches, head_dim / 2] float32."""
        merge = self.config.merge_size
        places = torch.meshgrid(torch.arange(rows * merge), torch.arange(columns * merge), indexing="ij")
        angles = []
        for place in places:
            by_token = place.view(rows, merge, columns, merge).transpose(1, 2).flatten()
            angles.append(by_token.unsqueeze(1) * self._frequencies)
        both = torch.cat(angles, dim=1)
        return both.cos(), both.sin()

    def _attention(self, x: Tensor, layer: VisionLayer, rotations: tuple[Tensor, ...], spans: list[int]) -> Tensor:
        """Attend within each window. spans: how many consecutive patches each window has. # [patches, hidden]"""
        cos, sin = rotations
        by_head = _linear(x, layer.qkv).view(len(x), 3 * self.config.num_heads, self.config.head_dim)
        q_and_k, v = by_head[:, : 2 * self.config.num_heads], by_head[:, 2 * self.config.num_heads :]
        q, k = self._ops.rope(q_and_k, cos, sin).chunk(2, dim=1)
        # [1, heads, patches, head_dim]: with three dimensions torch would hold every pair of patches in float32.
        parts = [
            F.scaled_dot_product_attention(*(part.transpose(0, 1).unsqueeze(0) for part in window))[0].transpose(0, 1)
            for window in zip(*(torch.split(part, spans) for part in (q, k, v)), strict=True)
        ]
        return _linear(torch.cat(parts).flatten(1), layer.output)

    def _mlp(self, x: Tensor, layer: VisionLayer) -> Tensor:
        return _linear(F.silu(_linear(x, layer.gate)) * _linear(x, layer.up), layer.down)

    def _merge(self, x: Tensor) -> Tensor:
        """Merge each token's patches into its embedding. # [tokens, output]"""
        x = self._norm(x, self._weights.merger_norm).view(-1, self._weights.merger_in.weight.shape[1])
        return _linear(F.gelu(_linear(x, self._weights.merger_in)), self._weights.merger_out)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._ops.rms_norm(x, weight, NORM_EPS)


def _linear(x: Tensor, linear: Linear) -> Tensor:
    return F.linear(x, linear.weight, linear.bias)
