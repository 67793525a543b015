"""Owns models in parts: ranks that compute one together answer as the whole model does, and each has only its own part.
Never starts a process: ranks are threads, with a group of the test's own."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.config import ConfigError
from engine.models.config import CheckpointError, read_model_config
from engine.models.description import WHOLE, ModelConfig, Shard
from engine.models.narrow import Keep
from engine.models.parameters import checkpoint_table, num_bytes
from engine.models.shards import heads_of, sharded, spread, vocab_sizes
from engine.models.vision_weights import allocate_vision, vision_table
from engine.models.weights import dummy_weights, load_weights, weight_bytes
from tests.support.compiler import needs_compiler
from tests.support.distances import is_within
from tests.support.rank_threads import Make, Ranks, native
from tests.support.tiny_models import KINDS, VOCAB, edit_config, edit_tensors, save_model
from tests.support.tiny_vision import save_vision_model

TOKENS = torch.randint(0, VOCAB, (40,), generator=torch.Generator().manual_seed(3)).tolist()
BLOCKS = (9, 3, 11, 0, 7)
WHOLE_ON_EACH = (
    "norm.weight",
    "embed_tokens.weight",
    "mlp.gate.weight",
    "sparse_moe.gate.weight",
    "expert_gate.weight",
)
"""Ends of the names of what each rank has whole: embedding, norms, routers, and the gate of a shared expert."""
ADDED_ONCE = ("o_proj.bias", "down_proj.bias")


def distance(got: Tensor, want: Tensor) -> float:
    """The largest difference of log-probabilities."""
    return (got.double().log_softmax(-1) - want.double().log_softmax(-1)).abs().max().item()


def parts(directory: Path, size: int) -> list[ModelConfig]:
    return [sharded(read_model_config(directory), Shard(rank, size)) for rank in range(size)]


def table(directory: Path, config: ModelConfig) -> dict[str, Tensor]:
    return checkpoint_table(config, load_weights(directory, config, torch.float32))


def values(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors]).sort().values


# --- answers ----------------------------------------------------------------------------------------------------------


NATIVE = ("gemma3", "qwen3_moe", "mixtral", "qwen3_next", "qwen3_5", "qwen3_5_moe")
FIRST = ("llama_tied", "llama_biased", "gemma3", "phi3", "mixtral", "qwen3_next", "qwen3_5_moe")
"""Models that differ most in how they are cut."""


@pytest.mark.parametrize(
    "kind", [kind if kind in FIRST else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_ranks_together_answer_as_the_whole_model_does(kind: str, tmp_path: Path) -> None:
    """With six heads and two KV heads, four ranks share KV heads, and have unlike numbers of heads."""
    save_model(kind, tmp_path)
    whole = Ranks(tmp_path, 1)
    want, text = whole.prompt(TOKENS, BLOCKS), whole.greedy(TOKENS[:20], BLOCKS, 6)
    for size in (2, 4) if whole.configs[0].num_heads > 3 else (2, 3):
        ranks = Ranks(tmp_path, size)
        assert is_within(distance(ranks.prompt(TOKENS, BLOCKS), want), 1e-4), size
        assert ranks.greedy(TOKENS[:20], BLOCKS, 6) == text


@pytest.mark.parametrize("tied", [True, False])
def test_parts_may_differ_in_size_and_random_weights_are_those_of_one_model(tied: bool, tmp_path: Path) -> None:
    save_model("llama_biased", tmp_path)
    shape = {"num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 96, "tie_word_embeddings": tied}
    edit_config(tmp_path, **shape)
    settings: dict[str, Any] = {"settings": {"load_format": "dummy"}}
    want = Ranks(tmp_path, 1, **settings).prompt(TOKENS, BLOCKS)
    ranks = Ranks(tmp_path, 2, **settings)
    assert [(part.num_heads, part.num_kv_heads) for part in ranks.configs] == [(6, 2), (3, 1)]
    assert [part.intermediate_size for part in ranks.configs] == [48, 48]
    assert is_within(distance(ranks.prompt(TOKENS, BLOCKS), want), 1e-4)


@needs_compiler
@pytest.mark.parametrize(
    "kind", ["llama_tied", "llama_biased", *(pytest.param(kind, marks=pytest.mark.slow) for kind in NATIVE)]
)
def test_native_ranks_answer_as_the_whole_model_does(kind: str, tmp_path: Path) -> None:
    save_model(kind, tmp_path)
    want = Ranks(tmp_path, 1, make=native).prompt(TOKENS, BLOCKS)
    for size in (2, 4):
        assert is_within(distance(Ranks(tmp_path, size, make=native).prompt(TOKENS, BLOCKS), want), 1e-4), size


@needs_compiler
def test_native_ranks_that_round_to_8_bits_round_no_more_than_the_whole_model(tmp_path: Path) -> None:
    """A rank with some of the inputs has scales of its own, which are no larger."""
    save_model("llama", tmp_path)
    rounding: Make = partial(native, quantize=True)
    want = Ranks(tmp_path, 1).prompt(TOKENS, BLOCKS)
    whole, ranks = (distance(Ranks(tmp_path, size, make=rounding).prompt(TOKENS, BLOCKS), want) for size in (1, 2))
    assert 0 < ranks < 1.5 * whole


@pytest.mark.parametrize("kind", ["gemma3", "qwen3_5_moe"])
def test_a_layer_has_two_sums(kind: str, tmp_path: Path) -> None:
    save_model(kind, tmp_path)
    ranks = Ranks(tmp_path, 2)
    ranks.prompt(TOKENS[:5], BLOCKS)
    assert [group.num_calls for group in ranks.groups] == [2 * len(ranks.configs[0].layers)] * 2


# --- what each rank reads ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if kind not in ("phi3", "llama3", "yarn", "qwen2_window", "mistral", "smollm3")]
)
def test_each_number_of_the_checkpoint_is_read_by_exactly_one_rank_but_for_what_all_have(
    kind: str, tmp_path: Path
) -> None:
    save_model(kind, tmp_path)
    whole = table(tmp_path, read_model_config(tmp_path))
    ranks = [table(tmp_path, part) for part in parts(tmp_path, 2)]
    for name, want in whole.items():
        found = [own[name] for own in ranks]
        if name.endswith(WHOLE_ON_EACH):
            assert all(torch.equal(tensor, want) for tensor in found), name
        elif name.endswith(ADDED_ONCE):
            assert torch.equal(found[0], want), name
            assert not any(tensor.any() for tensor in found[1:]), name
        else:
            assert torch.equal(values(found), values([want])), name


@pytest.mark.parametrize("kind", ["qwen2", "phi3", "qwen3_next", "qwen3_5"])
def test_ranks_that_share_a_key_head_read_the_same_keys_and_values_and_their_own_queries(
    kind: str, tmp_path: Path
) -> None:
    save_model(kind, tmp_path)
    model = read_model_config(tmp_path)
    whole, size = table(tmp_path, model), 2 * model.num_kv_heads if kind != "phi3" else 3
    ranks = [table(tmp_path, part) for part in parts(tmp_path, size)]
    for name, want in whole.items():
        found, numbers = [own[name] for own in ranks], set(want.flatten().tolist())
        assert set(values(found).tolist()) == numbers, name
        if "qkv_proj" in name:
            heads = 3 + 2 * size  # three query heads, and one KV head for each rank
            assert sum(map(len, found)) == heads * model.head_dim, name
        elif "k_proj" in name or "v_proj" in name:
            assert torch.equal(values(found), values([want] * 2)), name
        elif "q_proj" in name or ("mlp" in name and not name.endswith(WHOLE_ON_EACH)):
            assert torch.equal(values(found), values([want])), name


def test_an_image_encoder_is_whole_on_each_rank_beside_a_part_of_the_decoder(tmp_path: Path) -> None:
    save_vision_model(tmp_path)
    model = read_model_config(tmp_path)
    assert model.vision is not None
    found, encoders = [], []
    for config in (model, *parts(tmp_path, 2)):
        encoders.append(vision_table(allocate_vision(model.vision, torch.float32)))
        weights = load_weights(tmp_path, config, torch.float32, others=encoders[-1])
        found.append(checkpoint_table(config, weights))
    for name, want in encoders[0].items():
        assert all(torch.equal(encoder[name], want) for encoder in encoders), name
    whole, *ranks = found
    for name, want in whole.items():
        if not name.endswith(WHOLE_ON_EACH):
            assert torch.equal(values([own[name] for own in ranks]), values([want])), name


def test_the_logits_columns_of_all_ranks_are_the_vocabulary_in_order(tmp_path: Path) -> None:
    save_model("llama_tied", tmp_path)
    model = read_model_config(tmp_path)
    assert vocab_sizes(model, 4) == [53, 53, 53, 52]
    weights = [load_weights(tmp_path, part, torch.float32) for part in parts(tmp_path, 4)]
    assert torch.equal(torch.cat([each.lm_head.weight for each in weights]), weights[0].embedding)
    assert all(each.head_in_embedding and len(each.embedding) == VOCAB for each in weights)


@pytest.mark.parametrize("kind", ["llama_tied", "qwen3_moe", "qwen3_next"])
def test_memory_is_counted_as_a_rank_takes_it(kind: str, tmp_path: Path) -> None:
    save_model(kind, tmp_path)
    model = read_model_config(tmp_path)
    for part in parts(tmp_path, 2):
        weights = load_weights(tmp_path, part, torch.float32)
        said = weight_bytes(tmp_path, part, torch.float32, keep=Keep.NOTHING)
        assert said == num_bytes(part, weights)
        embedding = model.vocab_size * model.hidden_size * 4
        whole = weight_bytes(tmp_path, model, torch.float32, keep=Keep.NOTHING)
        assert said - embedding < 0.6 * (whole - embedding)


def test_a_tensor_of_another_shape_is_refused_with_the_whole_shape(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    part = parts(tmp_path, 2)[1]
    edit_tensors(tmp_path, model__layers__1__mlp__down_proj__weight=torch.zeros(48, 40))
    with pytest.raises(
        CheckpointError, match=r"down_proj.weight has shape \[48, 40\], but config.json says \[48, 80\]"
    ):
        load_weights(tmp_path, part, torch.float32)


def test_a_rounded_rank_rounds_its_own_part(tmp_path: Path) -> None:
    save_model("llama_tied", tmp_path)
    for part in parts(tmp_path, 2):
        plain, rounded = (load_weights(tmp_path, part, torch.float32, rounded=how) for how in (False, True))
        for want, got in ((plain.layers[0].down, rounded.layers[0].down), (plain.lm_head, rounded.lm_head)):
            assert got.weight.dtype == torch.int8
            torch.testing.assert_close(got.weight * got.scales.unsqueeze(1), want.weight, rtol=0, atol=0.02)


def test_random_numbers_of_a_rank_are_its_part_of_the_whole_models(tmp_path: Path) -> None:
    save_model("qwen3_5_moe", tmp_path)
    model = read_model_config(tmp_path)
    whole = checkpoint_table(model, dummy_weights(model, torch.float32))
    ranks = [checkpoint_table(part, dummy_weights(part, torch.float32)) for part in parts(tmp_path, 2)]
    for name, want in whole.items():
        if not name.endswith((*WHOLE_ON_EACH, *ADDED_ONCE)):
            assert torch.equal(values([own[name] for own in ranks]), values([want])), name


# --- what a part is ---------------------------------------------------------------------------------------------------


def test_queries_lie_in_one_part_each_beside_their_keys() -> None:
    for num_kv_heads in range(1, 9):
        for group in range(1, 6):
            num_heads = num_kv_heads * group
            for size in range(2, num_heads + 1):
                found = [heads_of(num_kv_heads, num_heads, Shard(rank, size)) for rank in range(size)]
                assert [query for _, queries in found for query in queries] == list(range(num_heads))
                for keys, queries in found:
                    assert {query // group for query in queries} == set(keys)
                    assert len(queries) % len(keys) == 0
                apart = [len(queries) for _, queries in found]
                assert max(apart) - min(apart) <= group, "no rank has a whole group more than it must"


def test_whole_units_are_spread_in_order_and_the_last_part_has_the_rest() -> None:
    assert [spread(80, number, 2, 32) for number in range(2)] == [range(32), range(32, 80)]
    assert [len(spread(11, number, 4)) for number in range(4)] == [3, 3, 3, 2]


@pytest.mark.parametrize(
    ("kind", "changes", "size", "reason"),
    [
        (
            "llama",
            {},
            7,
            r"tensor_parallel_size is 7, but LlamaForCausalLM has 6 attention heads.*: set it to 6 or",
        ),
        (
            "llama",
            {"intermediate_size": 6},
            4,
            r"tensor_parallel_size is 4, but .* MLP is 6, .*: set it to 3 or less",
        ),
        (
            "qwen3_moe",
            {"moe_intermediate_size": 4},
            3,
            r"MoeForCausalLM's experts is 4, .* 2 of it: set it to 2 or",
        ),
        ("qwen3_next", {"linear_num_value_heads": 2}, 3, r"2 value heads of linear attention.*: set it to 2 or less"),
        ("qwen3_next", {"shared_expert_intermediate_size": 4}, 3, r"shared expert is 4, .*: set it to 2 or less"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_the_limit(
    kind: str, changes: dict[str, int], size: int, reason: str, tmp_path: Path
) -> None:
    save_model(kind, tmp_path)
    edit_config(tmp_path, **changes)
    with pytest.raises(ConfigError, match=reason):
        parts(tmp_path, size)


def test_one_rank_has_the_model_itself(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    model = read_model_config(tmp_path)
    assert sharded(model, WHOLE) is model
