"""Owns the comparison, at the start of an engine on a GPU, of the same text's logits in several steps, to the bit.
Never proves that kernels are batch-invariant in all steps: it finds a GPU or a compiler on which they are not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from engine.config import ConfigError, ResolvedConfig
from engine.execution.device import Device
from engine.execution.gpu.model import DeviceModel
from engine.step import RowKind, RowSampling, ScheduledRequest, StepPlan

TOKENS = 1500
"""How long the text is: attention has two units of its keys, and products several tiles of its rows."""
CHUNKS = (1, 18, 83, 1024, 1100)
"""Where chunks end if the text has many: with fewer rows than each tile, with more, and at a unit's end."""
OTHERS, OTHER_TOKENS = 8, 70
"""The most texts beside it, and the most tokens of one."""
ALONE, BESIDE_DECODES, BESIDE_TEXTS = "", " beside decodes", " beside decodes and other texts"
_GREEDY = RowSampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)


@torch.inference_mode()
def check_batch_invariance(model: DeviceModel, config: ResolvedConfig, device: Device) -> None:
    """Compute a text in one step, in many, with its last token in a step of its own, alone and beside others, and
    compare the logits after it. What is captured is replayed. KV blocks are left with what that wrote.

    Raises:
        ConfigError: some have other bits than others.
    """
    texts = _Texts(model, config)
    want: Tensor | None = None
    for how, ends, beside in texts.ways():
        logits = texts.compute(ends, beside)
        want = logits if want is None else want
        if not torch.equal(_bits(logits), _bits(want)):
            apart = float((logits.float() - want.float()).abs().max())
            raise ConfigError(
                f"batch_invariant is true, but on {device.name} the logits after {texts.length} tokens differ by up to "
                f"{apart:g} when these are computed {how}{beside}. Set batch_invariant: false, and report the GPU and "
                "the versions of torch and Triton."
            )


def _bits(logits: Tensor) -> Tensor:
    return logits.view(torch.uint8)


class _Texts:
    """A text, and others that share steps with it, each in KV blocks of its own."""

    def __init__(self, model: DeviceModel, config: ResolvedConfig) -> None:
        self._model, self._vocab, self._budget = model, config.vocab_size, config.max_num_batched_tokens
        size, longest = config.block_size, config.max_model_len
        of_other = -(-min(OTHER_TOKENS, longest) // size)
        others = min(OTHERS, config.max_num_seqs - 1, self._budget - 1, (config.num_kv_blocks - 1) // of_other)
        first_block = others * of_other
        self.length = min(TOKENS, longest, (config.num_kv_blocks - first_block) * size)
        self._blocks = tuple(range(first_block, first_block + -(-self.length // size)))
        self._others = [
            (min(OTHER_TOKENS, longest) * (place + 1) // others, tuple(range(place * of_other, (place + 1) * of_other)))
            for place in range(others)
        ]
        """(tokens, blocks) of each."""

    def ways(self) -> Iterator[tuple[str, Sequence[int], str]]:
        """Yield (how, where the text's chunks end, what is beside them)."""
        last = [self.length - 1, self.length] if self.length > 1 else [1]
        many = [*(end for end in CHUNKS if end < last[0]), *last]
        for beside in (ALONE, BESIDE_DECODES, BESIDE_TEXTS):
            yield "at once", [self.length], beside
            yield "with the last in a step of its own", last, beside
            yield "in many chunks", many, beside

    def compute(self, ends: Sequence[int], beside: str) -> Tensor:
        """Return the logits after the text's last token. # [vocab]"""
        others = self._others if beside else []
        room = self._budget - len(others)
        found = torch.empty(0)
        for begin, end in pairwise([0, *ends]):
            for start in range(begin, end, room):
                rows = [self._row("text", start, min(start + room, end), self.length, self._blocks)]
                room_left = room - (rows[0].end - start)
                for place, (tokens, blocks) in enumerate(others):
                    whole = beside == BESIDE_TEXTS and place % 2 and tokens <= room_left
                    room_left -= tokens if whole else 0
                    rows.append(self._row(f"{place}", 0 if whole else tokens - 1, tokens, tokens, blocks))
                rows.sort(key=lambda row: row.kind is not RowKind.DECODE)  # kernel order
                logits = self._model.forward(StepPlan(0, tuple(rows)), {}).logits
                named = [row.request_id for row in rows if row.sampling is not None]
                found = logits[named.index("text")].clone() if "text" in named else found
        return found

    def _row(self, name: str, start: int, end: int, length: int, blocks: tuple[int, ...]) -> ScheduledRequest:
        tokens = tuple((position * 7919 + ord(name[0])) % self._vocab for position in range(start, end))
        kind = RowKind.MIDDLE if end < length else RowKind.DECODE if start and end == start + 1 else RowKind.LAST
        return ScheduledRequest(name, kind, start, tokens, blocks, _GREEDY if end == length else None)
