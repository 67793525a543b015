"""Owns what a step queues on a device: nothing is read back, and captured steps give what others do. Long: each kind.
Never needs a GPU: captures are made on the CPU, where a replay does the captured work again on the same tensors."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch.inputs import build_inputs
from engine.build.executor import create_executor
from engine.build.gpu import start_on_device
from engine.config import ConfigError, EngineConfig
from engine.core.core import EngineCore
from engine.execution.gpu.cuda_graph_buckets import Bucket, plan_buckets
from engine.execution.gpu.executor import DeviceExecutor
from engine.execution.gpu.inputs import bucket_layout, layout_of, pack
from engine.execution.gpu.model import DeviceModel
from engine.models.config import read_model_config
from engine.models.decoder import Decoder
from engine.models.kv_cache import KVCache
from engine.models.parameters import allocate
from engine.protocol import SamplingParams, Submission
from engine.scheduling.request import create_request
from engine.scheduling.step_time import work_of
from engine.step import (
    PENDING_TOKEN,
    GraphUse,
    LogitControls,
    RowKind,
    RowSampling,
    ScheduledRequest,
    StepPlan,
)
from kernels.choice import TRITON_TABLE
from kernels.eager.ops import TORCH, Ops
from kernels.flash.attention import flash_ops
from kernels.flash.packages import PACKAGES, Package
from tests.support.fake_device import FakeDevice, MetaDevice, MetaFlash, write_model
from tests.support.fake_flash import FakeFlash
from tests.support.plans import chunk, decode, forced_logits, greedy_text, run, scored

TOKENS = torch.randint(0, 256, (90,), generator=torch.Generator().manual_seed(5)).tolist()
BLOCKS, OTHER_BLOCKS = (9, 3, 11, 0, 7, 12), (1, 2, 4, 5, 6, 13)
BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> FakeFlash:
    """Accept float32, so that padding can be told from data."""
    fake = FakeFlash(any_dtype=True)
    monkeypatch.setitem(sys.modules, "vllm_flash_attn", fake)  # type: ignore[arg-type]
    monkeypatch.setattr("kernels.flash.packages.DTYPES", (torch.float32, torch.bfloat16))
    return fake


def make(model: Path, **options: Any) -> DeviceExecutor:
    engine = {"load_format": "dummy", "dtype": "float32", "num_kv_blocks": 20, "num_threads": 1}
    config = EngineConfig(**engine | {"max_num_seqs": 6, "max_num_batched_tokens": 96} | options)
    return start_on_device(model, config, FakeDevice(), "a test").build()[0]


@pytest.fixture
def captured(model: Path, flash: FakeFlash) -> Iterator[DeviceExecutor]:
    executor = make(model)
    yield executor
    executor.shutdown()


@pytest.fixture
def eager(model: Path, flash: FakeFlash) -> Iterator[DeviceExecutor]:
    executor = make(model, cuda_graphs="none")
    yield executor
    executor.shutdown()


@torch.inference_mode()
def poison(executor: DeviceExecutor) -> None:
    """Fill what no row owns with NaN: KV blocks, the block of padding, and what earlier steps left. Leftover block
    tables name such a block."""
    executor.model._hidden.fill_(torch.nan)
    executor.model._tables.fill_(len(executor.model.cache.layers[0][0]) - 2)
    for tensors in executor.model.cache.layers:
        for tensor in tensors:
            tensor.fill_(torch.nan)


# --- captured steps --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("flash")
@pytest.mark.parametrize("size", [1, 5, 16, 17, 63, 64, 65, None])
def test_captured_and_padded_steps_give_the_logits_of_plain_ones(
    captured: DeviceExecutor, eager: DeviceExecutor, size: int | None
) -> None:
    poison(captured)
    want = forced_logits(eager, TOKENS, BLOCKS, size)
    torch.testing.assert_close(forced_logits(captured, TOKENS, BLOCKS, size), want, atol=2e-5, rtol=1e-5)


@pytest.mark.usefixtures("flash")
@pytest.mark.parametrize(
    "fields",
    [
        {"architectures": ["MistralForCausalLM"], "sliding_window": 24},
        {"architectures": ["Gemma3ForCausalLM"], "sliding_window": 24, "sliding_window_pattern": 2},
        {"architectures": ["SmolLM3ForCausalLM"], "no_rope_layer_interval": 2},
        {"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 0.75, "sliding_window": 40},
    ],
    ids=lambda fields: fields["architectures"][0],
)
def test_captured_steps_of_every_family_give_the_logits_of_the_cpu(tmp_path: Path, fields: dict[str, Any]) -> None:
    directory = write_model(tmp_path, **fields)
    config = EngineConfig(device="cpu", load_format="dummy", dtype="float32", num_kv_blocks=20, num_threads=1)
    want = forced_logits(create_executor(directory, config)[0], TOKENS, BLOCKS, 16)
    executor = make(directory)
    poison(executor)
    for size in (1, 17, None):
        torch.testing.assert_close(forced_logits(executor, TOKENS, BLOCKS, size), want, atol=2e-4, rtol=1e-4)


@pytest.mark.usefixtures("flash")
def test_attention_is_told_of_the_rows_of_a_step_that_is_not_captured(
    captured: DeviceExecutor, eager: DeviceExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It launches what they need; a captured step is replayed for rows that nobody knows yet."""
    plan = StepPlan(0, (decode("a", 3, 5, BLOCKS), chunk("b", TOKENS, 17, 40, OTHER_BLOCKS)))
    for executor, known in ((eager, ((5, 17), (1, 23))), (captured, ((), ()))):
        told: list[Any] = []
        model, prepare = executor.model, executor.model.ops.prepare_attention

        def noted(rows: Any, *shape: Any, prepare: Any = prepare, told: list[Any] = told) -> Any:
            told.append(rows)
            return prepare(rows, *shape)

        monkeypatch.setattr(model, "ops", replace(model.ops, prepare_attention=noted))
        if executor is captured:
            model.warm_up(model._buckets)
        else:
            executor.logits(plan)
        assert {(rows.contexts, rows.counts) for rows in told} == {known}


EXPERTS = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4}


def on_cpu(directory: Path, **options: Any) -> tuple[EngineConfig, torch.Tensor]:
    """Return a config, and the logits of TOKENS with it."""
    config = EngineConfig(device="cpu", load_format="dummy", dtype="float32", num_kv_blocks=20, num_threads=1)
    return config, forced_logits(create_executor(directory, config)[0], TOKENS, BLOCKS, 16)


@pytest.mark.usefixtures("flash")
def test_experts_by_torch_are_not_captured_and_compute_what_the_cpu_computes(tmp_path: Path) -> None:
    directory = write_model(tmp_path, **EXPERTS)
    why = "without Triton, mixtures of experts synchronize with the GPU, which CUDA graphs cannot capture"
    config, want = on_cpu(directory)
    executor, resolved = start_on_device(directory, replace(config, device="auto"), FakeDevice(), "a test").build()
    assert resolved.reasons["cuda_graphs"] == f"none: {why}; 0 sizes"
    torch.testing.assert_close(forced_logits(executor, TOKENS, BLOCKS, 17), want, atol=2e-4, rtol=1e-4)
    with pytest.raises(ConfigError, match=f"cuda_graphs is all, but .* compute the experts: {why}"):
        start_on_device(directory, replace(config, device="auto", cuda_graphs="all"), FakeDevice(), "a test").build()


@pytest.mark.usefixtures("flash")
def test_captured_and_padded_steps_with_experts_by_triton_give_the_logits_of_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only these of Triton's kernels run, in its interpreter.
    Padding holds NaN, and is routed to experts, too."""
    pytest.importorskip(
        "kernels.triton.shared.launch", reason="no Triton that the kernels run on", exc_type=ImportError
    )
    triton: Ops = import_module(TRITON_TABLE).TRITON
    assert triton.experts_capturable
    assert triton.experts is not TORCH.experts
    table = replace(TORCH, experts=triton.experts, experts_capturable=True)
    monkeypatch.setattr("kernels.choice.TORCH", table)
    directory = write_model(tmp_path, **EXPERTS, num_hidden_layers=1)
    _, want = on_cpu(directory)  # [len(TOKENS), vocab]
    limits: dict[str, Any] = {"max_num_seqs": 2, "max_num_batched_tokens": 12}
    sizes: dict[str, Any] = {"cuda_graph_decode_rows": (2,), "cuda_graph_mixed_tokens": (12,)}
    executor = make(directory, cuda_graphs="all", cuda_graph_mixed_rows=(2,), **limits, **sizes)
    poison(executor)
    for size in (7, None):
        got = forced_logits(executor, TOKENS[:10], BLOCKS, size)
        torch.testing.assert_close(got, want[:10], atol=2e-4, rtol=1e-4)
    executor.launch(StepPlan(0, (decode("a", 1, 0, OTHER_BLOCKS),)))
    assert executor.collect().graph == GraphUse(True, "decode 2")


def test_a_mixed_captured_step_gives_every_row_what_it_gets_alone(captured: DeviceExecutor) -> None:
    alone, other = (greedy_text(captured, TOKENS[at : at + 20], OTHER_BLOCKS, 3) for at in (0, 30))
    poison(captured)
    first = run(captured, chunk("a", TOKENS[:20], 0, 20, BLOCKS))[0]
    rows = decode("a", first[0], 20, BLOCKS), chunk("b", TOKENS[30:50], 0, 19, OTHER_BLOCKS)
    second = run(captured, *rows)[0]
    rows = decode("a", second[0], 21, BLOCKS), chunk("b", TOKENS[30:50], 19, 20, OTHER_BLOCKS)
    third, last = run(captured, *rows)  # a last chunk of one token beside a decode row
    assert [*first, *second, *third] == alone
    assert last[0] == other[0]


@pytest.mark.parametrize("block_size", [16, 32])
@given(
    st.lists(st.tuples(st.integers(0, 100), st.integers(1, 30)), min_size=1, max_size=6),
    st.booleans(),
    st.one_of(st.none(), st.lists(st.integers(-1, 2), min_size=6, max_size=6)),
)
@settings(max_examples=80)
def test_padding_has_a_block_of_its_own_and_takes_nothing_from_the_step(
    block_size: int, spans: list[tuple[int, int]], decode_only: bool, slots: list[int] | None
) -> None:
    """In the packed integers of a step, its own are unchanged, and all others point to the block of padding."""
    spans = [(start, 1) for start, _ in spans] if decode_only else spans
    blocks, rows = iter(range(1000)), []
    for number, (start, count) in enumerate(spans):
        own = tuple(next(blocks) for _ in range(-(-(start + count) // block_size)))
        kind = RowKind.DECODE if decode_only else RowKind.MIDDLE
        sampling = RowSampling(0.0, 0, 1.0, 0.0, 0) if decode_only else None
        rows.append(ScheduledRequest(f"r{number}", kind, start, (number + 1,) * count, own, sampling))
    inputs = build_inputs(StepPlan(0, tuple(rows)), block_size)
    inputs = replace(inputs, adapter_slots=tuple(slots[: len(rows)]) if slots else ())
    buckets = plan_buckets("all", max_num_seqs=8, max_num_batched_tokens=200, adapters=True)
    found = buckets.find(
        num_tokens=len(inputs.token_ids), num_rows=len(rows), decode=decode_only, adapters=slots is not None
    )
    assert isinstance(found, Bucket)
    layout = bucket_layout(found, block_size, 160, adapter_slots=3)
    packed = pack(inputs, layout, decode=decode_only, padding_block=5000)
    assert len(packed) == layout.size
    views, num_tokens = layout.split(packed), len(inputs.token_ids)
    for name in ("token_ids", "positions", "slots"):
        assert getattr(views, name)[:num_tokens].tolist() == getattr(inputs, name).tolist()
    assert set((views.slots[num_tokens:] // block_size).tolist()) <= {5000}
    adapters = layout.adapter_tokens(views)
    assert (adapters is None) is (slots is None)
    if adapters is not None and slots is not None:
        of_token = [slot for slot, (_, count) in zip(slots, spans, strict=False) for _ in range(count)]
        tokens = [token for token, slot in enumerate(of_token) if slot >= 0]
        assert sorted(adapters.order.tolist()) == [-1] * (found.num_tokens - len(tokens)) + tokens
    padded = layout.rows(
        views,
        block_size,
        num_decode=found.num_rows,
        num_chunks=layout.num_rows,
        max_count=found.num_tokens,
        max_length=layout.width * block_size,
    )
    counts, lengths = padded.first_tokens.diff(), padded.lengths
    assert counts.sum() == found.num_tokens
    assert padded.first_keys.diff().tolist() == lengths.tolist()
    assert padded.decodes.tolist() == [found.num_rows if decode_only else 0]
    assert counts[: len(rows)].tolist() == [count for _, count in spans]
    assert lengths[: len(rows)].tolist() == [start + count for start, count in spans]
    assert lengths[len(rows) :].tolist() == counts[len(rows) :].tolist(), "padding attends to padding"
    assert int(lengths.max()) <= padded.max_length
    assert padded.tables[len(rows) :].unique().tolist() in ([5000], [])
    for row, table in zip(rows, padded.tables.tolist(), strict=False):
        used = len(row.block_ids)
        assert table[:used] == list(row.block_ids)
        assert set(table[used:]) <= {5000, row.block_ids[0]}


def test_without_padding_a_packed_step_is_the_step() -> None:
    plan = StepPlan(0, (decode("a", 3, 5, BLOCKS), chunk("b", TOKENS, 17, 40, OTHER_BLOCKS)))
    inputs = build_inputs(plan, BLOCK_SIZE)
    layout = layout_of(inputs)
    views = layout.split(pack(inputs, layout))
    rows = layout.rows(views, BLOCK_SIZE, num_decode=1, num_chunks=1, max_count=23, max_length=40)
    assert (rows.first_tokens.tolist(), rows.lengths.tolist(), rows.first_keys.tolist()) == (
        [0, 1, 24],
        [6, 40],
        [0, 6, 46],
    )
    assert rows.decodes.tolist() == [1]
    assert rows.tables.tolist() == inputs.rows.block_tables.tolist()
    assert rows.tables.dtype == torch.int32


@pytest.mark.usefixtures("flash")
def test_a_captured_step_copies_block_tables_as_long_as_its_longest_row(tmp_path: Path) -> None:
    """Regression: in every step they were as long as the longest row that there may be."""
    executor = make(write_model(tmp_path, max_position_embeddings=65_536), cuda_graphs="decode")
    device: Any = executor._device
    assert executor.model._tables.shape == (6, 4096)

    def copied(*lengths: int) -> int:
        device.uploaded.clear()
        rows = [decode(f"r{n}", 1, length - 1, (n,) * -(-length // 16)) for n, length in enumerate(lengths)]
        executor.launch(StepPlan(0, tuple(rows)))
        graph = executor.collect().graph
        assert graph is not None
        assert graph.hit
        return sum(device.uploaded)

    few = copied(16, 5)
    assert few < 50
    assert copied(16, 1600) == few + 2 * 99
    assert copied(16, 5) == few


@pytest.mark.parametrize("size", [None, 17])
def test_block_tables_of_longer_steps_before_do_not_reach_shorter_ones(
    captured: DeviceExecutor, eager: DeviceExecutor, size: int | None
) -> None:
    """All captured sizes share the tables. A kernel may look up a block beyond a row's end,
    so each entry has to be a valid block."""
    want = forced_logits(eager, TOKENS[:20], OTHER_BLOCKS, size)
    forced_logits(captured, TOKENS, BLOCKS)
    run(captured, decode("a", 1, 90, BLOCKS), decode("b", 1, 90, BLOCKS))
    model = captured.model
    for tensors in model.cache.layers:
        for tensor in tensors:
            tensor[list(BLOCKS)] = torch.nan
    torch.testing.assert_close(forced_logits(captured, TOKENS[:20], OTHER_BLOCKS, size), want, atol=2e-5, rtol=1e-5)
    assert int(model._tables.min()) >= 0
    assert int(model._tables.max()) < len(model.cache.layers[0][0])


def test_each_step_says_which_capture_it_was_or_why_none(model: Path, captured: DeviceExecutor) -> None:
    def use(executor: DeviceExecutor, *rows: ScheduledRequest) -> Any:
        executor.launch(StepPlan(0, rows))
        return executor.collect().graph

    prompt = chunk("a", TOKENS[:20], 0, 20, BLOCKS)
    hit = use(captured, prompt)
    assert (hit.hit, hit.name) == (True, "mixed 64x6")
    hit = use(captured, decode("a", 1, 20, BLOCKS), decode("b", 1, 0, OTHER_BLOCKS))
    assert (hit.hit, hit.name) == (True, "decode 2")
    hit = use(captured, chunk("c", TOKENS[:1], 0, 1, BLOCKS))
    assert (hit.hit, hit.name) == (True, "mixed 64x6"), "a last chunk of one token is no decode row"
    miss = use(make(model, cuda_graphs="decode"), prompt)
    assert (miss.hit, miss.name) == (False, "prefill rows or drafts")
    assert use(make(model, cuda_graphs="none"), prompt) is None


def test_a_step_is_padded_to_the_size_that_the_executor_names_for_its_work(captured: DeviceExecutor) -> None:
    """The prediction of its time counts the tokens of that size."""
    drafting = decode("a", 1, 20, BLOCKS)._replace(token_ids=(1, 2, 3))
    for rows in (
        (chunk("a", TOKENS[:20], 0, 20, BLOCKS),),
        (chunk("b", TOKENS[:1], 0, 1, OTHER_BLOCKS),),
        (decode("a", 1, 20, BLOCKS),),
        (decode("a", 1, 20, BLOCKS), decode("b", 1, 1, OTHER_BLOCKS)),
        (drafting,),
        (decode("a", 1, 20, BLOCKS), chunk("c", TOKENS[:70], 0, 70, OTHER_BLOCKS)),
    ):
        plan = StepPlan(0, rows)
        captured.launch(plan)
        use, work = captured.collect().graph, work_of(plan)
        assert use is not None
        assert use.hit
        named = captured.capabilities.sizes.padded(work.tokens, mixed=work.mixed > 0)
        assert use.name.split()[1].partition("x")[0] == str(named)


def test_hits_and_misses_of_captures_add_up_to_the_steps(captured: DeviceExecutor, model: Path) -> None:
    engine = {"load_format": "dummy", "dtype": "float32", "num_kv_blocks": 20, "num_threads": 1}
    config = EngineConfig(**engine, max_num_seqs=6, max_num_batched_tokens=96, cuda_graphs="decode")
    executor, resolved = start_on_device(model, config, FakeDevice(), "a test").build()
    core = EngineCore(executor, resolved)
    for number in range(3):
        sampling = SamplingParams(max_tokens=5, ignore_eos=True, temperature=0.0)
        submission = Submission(f"r{number}", tuple(TOKENS[: 10 + number]), sampling)
        core.submit(create_request(submission, resolved, number))
        core.step()
    while core.has_work:
        core.step()
    load = core.load()
    assert sum(load.graph_hits.values()) + sum(load.graph_misses.values()) == load.num_steps
    assert load.graph_misses == {"prefill rows or drafts": 3}
    assert all(name.startswith("decode ") for name in load.graph_hits)


def test_a_row_longer_than_any_that_was_captured_runs_uncaptured(captured: DeviceExecutor) -> None:
    """No request has such a row: max_model_len bounds them all. But it must not read beyond a captured block table."""
    captured.model._max_model_len = 256
    blocks = tuple(range(17))
    captured.launch(StepPlan(0, (decode("a", 1, 16 * 16 + 3, blocks),)))
    graph = captured.collect().graph
    assert graph is not None
    assert (graph.hit, graph.name) == (False, "a row of more than 256 positions")


def test_captures_share_what_they_read_and_write(captured: DeviceExecutor, model: Path, flash: FakeFlash) -> None:
    """Decode rows of one bucket follow those of another, with prompts between them:
    each replay reads its own numbers."""
    texts = {name: greedy_text(captured, TOKENS[at : at + 9], BLOCKS, 6) for name, at in (("a", 0), ("b", 40))}
    tokens = {}
    for name, at, blocks in (("a", 0, BLOCKS), ("b", 40, OTHER_BLOCKS)):
        tokens[name] = list(run(captured, chunk(name, TOKENS[at : at + 9], 0, 9, blocks))[0])
    for step in range(5):
        rows = [decode("a", tokens["a"][-1], 9 + step, BLOCKS), decode("b", tokens["b"][-1], 9 + step, OTHER_BLOCKS)]
        got = [run(captured, row)[0] for row in rows] if step % 2 else list(run(captured, *rows))
        for name, new in zip("ab", got, strict=True):
            tokens[name] += new
    assert tokens == texts


# --- nothing is waited for -------------------------------------------------------------------------------------------


def on_meta(model: Path, package: Package, *, capture: bool) -> DeviceExecutor:
    device = MetaDevice()
    config = read_model_config(model)
    weights = allocate(config, torch.bfloat16, device.torch_device)
    cache = KVCache.allocate(config, 40, BLOCK_SIZE, torch.bfloat16, device.torch_device)
    ops = flash_ops(package, MetaFlash(whole=package.whole), TORCH)
    made = DeviceModel(Decoder(config, weights, 256), ops, cache, device, block_size=BLOCK_SIZE, max_model_len=256)
    if capture:
        made.capture(plan_buckets("all", max_num_seqs=8, max_num_batched_tokens=96))
    return DeviceExecutor(made, device, num_threads=1)


@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.module)
def test_a_launch_reads_nothing_back_from_the_device(model: Path, package: Package, capture: bool) -> None:
    executor = on_meta(model, package, capture=capture)
    drawn = RowSampling(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, seed=3, num_logprobs=2)
    controls = LogitControls(
        allowed_token_ids=(1, 2, 3),
        logit_bias=((1, 2.0),),
        repetition_penalty=1.2,
        prompt_token_ids=(5, 7),
        frequency_penalty=0.3,
        bad_words=((4,), (2, 3)),
    )
    controlled = replace(drawn, banned_token_ids=(6,), controls=controls, num_logprobs=None)
    pooled = chunk("d", TOKENS[:10], 0, 9, (16,))._replace(pool_from=0)
    executor.launch(
        StepPlan(
            0,
            (
                chunk("a", TOKENS[:20], 0, 20, BLOCKS)._replace(sampling=drawn),
                chunk("b", TOKENS[:9], 0, 9, OTHER_BLOCKS)._replace(sampling=controlled),
                scored("c", TOKENS[:12], 0, 12, (14, 15), 1),
                pooled,
            ),
        )
    )
    other = decode("b", PENDING_TOKEN, 9, OTHER_BLOCKS)
    looking_back = other._replace(sampling=controlled, answer=(PENDING_TOKEN,))
    executor.launch(StepPlan(1, (decode("a", PENDING_TOKEN, 20, BLOCKS), looking_back)))
    for position in (21, 22):
        rows = decode("a", PENDING_TOKEN, position, BLOCKS), other._replace(start=position - 11)
        executor.launch(StepPlan(position, rows))
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        executor.collect()
