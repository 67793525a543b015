"""Contracts of how a device's memory is divided: each measured use gets its part, and KV blocks get the rest, to the
byte.
Needs no device: the figures are made up."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config import ConfigError
from engine.execution.gpu.memory import GIB, MemoryUse, check_adapters_fit, check_blocks_fit, kv_blocks_that_fit

USE = MemoryUse(total=80 * GIB, others=1 * GIB, weights=16 * GIB, activations=3 * GIB, graphs=2 * GIB)
BLOCK = 2 * 2**20


def test_blocks_have_what_the_rest_leaves_of_the_share() -> None:
    assert kv_blocks_that_fit(USE, 0.9, BLOCK) == (72 - 22) * 512
    assert kv_blocks_that_fit(USE, 0.9, BLOCK, spare_blocks=1) == (72 - 22) * 512 - 1


@pytest.mark.parametrize("part", ["others", "weights", "activations", "adapters", "graphs"])
def test_each_part_takes_its_bytes_from_the_blocks(part: str) -> None:
    more = replace(USE, **{part: getattr(USE, part) + 10 * BLOCK})
    assert kv_blocks_that_fit(more, 0.9, BLOCK) == kv_blocks_that_fit(USE, 0.9, BLOCK) - 10


@given(
    st.integers(1, 200 * GIB),
    st.floats(0.01, 1.0),
    st.lists(st.integers(0, 40 * GIB), min_size=4, max_size=4),
    st.integers(1, 2**24),
    st.integers(0, 2),
)
def test_what_is_given_out_never_exceeds_the_share_and_leaves_less_than_a_block(
    total: int, utilization: float, parts: list[int], block: int, spare: int
) -> None:
    use = MemoryUse(total=total, others=parts[0], weights=parts[1], activations=parts[2], graphs=parts[3])
    try:
        blocks = kv_blocks_that_fit(use, utilization, block, spare_blocks=spare)
    except ConfigError:
        assert sum(parts) + (1 + spare) * block > int(total * utilization)
        return
    used = sum(parts) + (blocks + spare) * block
    assert used <= int(total * utilization) < used + block


def test_a_device_without_room_for_a_block_is_refused_with_what_takes_it() -> None:
    with pytest.raises(ConfigError, match=r"utilization 0.25 leaves -2.00 GiB .* at least 2 .*weights 16.00, activ"):
        kv_blocks_that_fit(USE, 0.25, BLOCK, spare_blocks=1)


def test_blocks_that_were_asked_for_are_refused_where_they_do_not_fit() -> None:
    fits = 58 * 512
    check_blocks_fit(USE, BLOCK, fits - 1, spare_blocks=1)
    with pytest.raises(ConfigError, match=rf"num_kv_blocks {fits} takes 58.00 GiB, but 58.00 GiB are left"):
        check_blocks_fit(USE, BLOCK, fits, spare_blocks=1)


def test_slots_of_adapters_are_refused_by_their_settings_where_they_do_not_fit() -> None:
    check_adapters_fit(replace(USE, adapters=58 * GIB), 4, 16)
    why = r"max_loras 4 adapters of max_lora_rank 16 take 58.00 GiB, but 58.00 GiB are left.*: others 1.00.*adapters 58"
    with pytest.raises(ConfigError, match=why):
        check_adapters_fit(replace(USE, adapters=58 * GIB + 1), 4, 16)
