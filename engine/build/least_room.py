"""Owns what ranks plan with once each has said how many KV blocks it has room for: with the least of these.
Never asks a rank, and never gives memory back: whoever claimed it does."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from engine.config import ResolvedConfig
from kernels.collectives.group import LEADER

logger = logging.getLogger(__name__)


def with_least(resolved: ResolvedConfig, room: Sequence[int], own: int = LEADER) -> ResolvedConfig:
    """Plan with no more KV blocks than any rank has room for, and say why. The leader warns if that shortens requests.

    resolved: of this rank. room: of each rank, in KV blocks. own: this rank.
    """
    least, planned = min(room), resolved.num_kv_blocks
    if least == planned:
        return resolved
    why = f"rank {room.index(least)} has room for no more on its machine, and rank {own}'s has for {planned}"
    lower = replace(resolved, num_kv_blocks=least)
    if lower.max_request_tokens < resolved.max_request_tokens:
        longest = lower.max_request_tokens
        why += f"; a request may have {longest} tokens, although max_model_len is {resolved.max_model_len}"
        if own == LEADER:
            logger.warning("num_kv_blocks is %d: %s", least, why)
    return replace(lower, reasons=lower.reasons | {"num_kv_blocks": f"{why}; {resolved.reasons['num_kv_blocks']}"})
