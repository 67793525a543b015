"""The contract of an engine over several GPUs, on pretended ones. Long: starts and ends, too.
Never needs a GPU: gloo is in NCCL's place, and the followers are threads."""

from __future__ import annotations

import os
import random
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from tokenizers import Tokenizer

import engine.build.gpu
import engine.build.gpu_ranks
from engine.build.gpu import start_on_device
from engine.config import ConfigError, EngineConfig, SpeculativeConfig
from engine.core.core import EngineCore
from engine.execution.gpu.ranks import Way
from engine.parallel.messages import DeviceStep, Message
from engine.parallel.messages import decode as decode_message
from engine.parallel.processes import SubprocessLauncher
from engine.parallel.ranks import Ranks
from engine.protocol import Event, Failed, SamplingParams, Submission, Token
from engine.scheduling.request import create_request
from engine.step import PENDING_TOKEN, ExecutorFatalError, GraphUse, PromptScoring, StepPlan
from kernels.choice import TRITON_TABLE
from kernels.collectives.nccl import GLOO, Backend, NcclGroup
from tests.support.fake_device import FakeDevice
from tests.support.gpu_rank_process import StandInLauncher
from tests.support.gpu_ranks import SETTINGS, GpuRanks, gpu_ranks, pretend_gpus
from tests.support.packed_models import save_packed
from tests.support.plans import chunk, decode, forced_logits, greedy_text
from tests.support.rank_engine import saved
from tests.support.tiny_models import VOCAB, save_model

TOKENS = torch.randint(0, VOCAB, (40,), generator=torch.Generator().manual_seed(5)).tolist()
BLOCKS, OTHER_BLOCKS = (9, 3, 11, 0), (1, 2, 4, 5)
CLOSE: dict[str, Any] = {"atol": 1e-4, "rtol": 1e-4}
CAPTURED: dict[str, Any] = {"cuda_graph_decode_rows": (2, 3), "cuda_graph_mixed_tokens": (24,)}
NARROW_TABLE = "tests.support.narrow_table"
WORDS = "(alpha|beta|gamma)(-(alpha|beta|gamma)){2,3}"
GRAMMAR = f"start: /{WORDS}/"
GRAPHS = [pytest.param({"cuda_graphs": "none"}, id="eager"), pytest.param(CAPTURED, id="captured")]


@pytest.fixture(autouse=True)
def _gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    save_model("llama", directory)
    return directory


@pytest.fixture
def pair(model: Path) -> Iterator[GpuRanks]:
    with gpu_ranks(2, model, **CAPTURED) as made:
        yield made


@pytest.mark.parametrize("graphs", GRAPHS)
@pytest.mark.parametrize(
    ("kind", "ranks"), [("llama", 2), ("gemma3", 2), pytest.param("qwen3", 4, marks=pytest.mark.slow)]
)
def test_log_probabilities_and_greedy_text_are_those_of_one_gpu(
    kind: str, ranks: int, graphs: dict[str, Any], tmp_path: Path
) -> None:
    save_model(kind, tmp_path)
    found = []
    for size in (1, ranks):
        with gpu_ranks(size, tmp_path, **graphs) as made:
            logits = forced_logits(made.executor, TOKENS, BLOCKS, 16).log_softmax(-1)
            found.append((logits, greedy_text(made.executor, TOKENS[:20], OTHER_BLOCKS, 20, chunk_size=7)))
    torch.testing.assert_close(found[1][0], found[0][0], **CLOSE)
    assert found[1][1] == found[0][1]


def test_decode_steps_in_flight_go_on_from_tokens_that_no_host_has_read(pair: GpuRanks) -> None:
    """The third and the fourth step run from the inputs of the one before: followers have its tokens by then."""
    want = greedy_text(pair.executor, TOKENS[:14], BLOCKS, 6)
    executor, got, graphs = pair.executor, list[int](), list[GraphUse | None]()
    executor.launch(StepPlan(1, (chunk("b", TOKENS[:14], 0, 14, OTHER_BLOCKS),)))
    for place in range(14, 19):
        executor.launch(StepPlan(place, (decode("b", PENDING_TOKEN, place, OTHER_BLOCKS),)))
        output = executor.collect()
        got += output.sampled[0]
        graphs.append(output.graph)
    got += executor.collect().sampled[0]
    assert got == want
    assert {graph.name for graph in graphs[1:] if graph is not None} == {"decode 2"}


def test_blocks_that_followers_know_are_not_told_again(pair: GpuRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of a long context has hundreds, and the others wait for the message."""
    want, told = greedy_text(pair.executor, TOKENS[:14], BLOCKS, 8), list[Message]()
    group = pair.executor.model.ranks.group
    assert group is not None
    send = group.send
    monkeypatch.setattr(group, "send", lambda message: (told.append(decode_message(message)), send(message)))
    text = list(pair.step(chunk("b", TOKENS[:14], 0, 14, OTHER_BLOCKS)).sampled[0])
    for place in range(14, 21):  # the block ends within
        blocks = OTHER_BLOCKS if place < 17 else (*OTHER_BLOCKS[:2], 6)
        text += pair.step(decode("b", text[-1], place, blocks)).sampled[0]
    assert text == want
    steps = [message for message in told if isinstance(message, DeviceStep)]
    known = [step.plan.rows[0].block_ids for step in steps if step.way is Way.GO_ON]
    assert known == [(), (), (1, 2, 6), (1, 2, 6), (1, 2, 6), (1, 2, 6)]


def test_rows_whose_tokens_are_in_flight_from_different_steps_are_fed_on_all_ranks(model: Path) -> None:
    """Nothing is captured, so a plan names each token by the step that chose it."""
    with gpu_ranks(2, model, cuda_graphs="none") as made:
        want = [greedy_text(made.executor, TOKENS[:20], BLOCKS, 2), greedy_text(made.executor, TOKENS[5:30], BLOCKS, 2)]
        executor = made.executor
        executor.launch(StepPlan(1, (chunk("a", TOKENS[:20], 0, 20, BLOCKS),)))
        executor.launch(StepPlan(2, (chunk("b", TOKENS[5:30], 0, 25, OTHER_BLOCKS),)))
        rows = decode("b", PENDING_TOKEN, 25, OTHER_BLOCKS), decode("a", PENDING_TOKEN, 20, BLOCKS)
        executor.launch(StepPlan(3, rows))
        first, second, third = (executor.collect() for _ in range(3))
    assert [[*first.sampled[0], *third.sampled[1]], [*second.sampled[0], *third.sampled[0]]] == want


@pytest.mark.parametrize("graphs", GRAPHS)
def test_scores_of_a_prompt_and_pooled_states_are_those_of_one_gpu(graphs: dict[str, Any], model: Path) -> None:
    found = []
    for size in (1, 2):
        with gpu_ranks(size, model, **graphs) as made:
            row = chunk("a", TOKENS[:20], 0, 20, BLOCKS)
            row = row._replace(scoring=PromptScoring(0, tuple(TOKENS[1:20]), 2), pool_from=0)
            output = made.step(row)
            assert output.prompt_logprobs[0] is not None
            assert output.pooled[0] is not None
            scores = [score.logprob for score in output.prompt_logprobs[0]]
            found.append((scores, list(output.pooled[0]), made.step(decode("a", 5, 20, BLOCKS)).sampled))
    for one, several in zip(*found, strict=True):
        torch.testing.assert_close(torch.tensor(several), torch.tensor(one), **CLOSE)


def test_a_step_that_samples_nothing_has_no_tokens_to_share(pair: GpuRanks) -> None:
    assert pair.step(chunk("a", TOKENS, 0, 16, BLOCKS)).sampled == ((),)
    assert greedy_text(pair.executor, TOKENS[:20], OTHER_BLOCKS, 2) != []


def test_a_rank_has_its_part_of_the_weights_and_of_the_kv_cache_on_its_device(pair: GpuRanks, model: Path) -> None:
    with gpu_ranks(1, model) as one:
        whole, part = one.executor.model, pair.executor.model
        for name in ("qkv", "output", "gate_up", "down"):
            shapes = [getattr(own.decoder.weights.layers[0], name).weight.numel() for own in (whole, part)]
            assert shapes[0] == 2 * shapes[1], name
        assert whole.cache.layers[0][0].shape[2] == 2 * part.cache.layers[0][0].shape[2]
    assert pair.executor.capabilities.ranks is not None


@pytest.mark.parametrize("small", [0, 1])
def test_there_are_as_many_kv_blocks_as_on_the_rank_with_the_least_room(
    small: int, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room, less = (15, 12, 11.5, 10), (15, 12, 11.5, 8)
    pretend_gpus(monkeypatch, lambda rank: FakeDevice(less if rank == small else room))
    settings: dict[str, Any] = {"num_kv_blocks": None, "gpu_memory_utilization": 0.75, "cuda_graphs": "none"}
    with gpu_ranks(2, model, FakeDevice(less if small == 0 else room), **settings) as made:
        least = made.resolved
    pretend_gpus(monkeypatch, lambda rank: FakeDevice(room))
    with gpu_ranks(2, model, FakeDevice(room), **settings) as made:
        assert made.resolved.num_kv_blocks > least.num_kv_blocks
        assert "the rank with the least room" not in made.resolved.reasons["num_kv_blocks"]
    assert ("on the rank with the least room" in least.reasons["num_kv_blocks"]) == (small == 1)


def test_a_recurrent_state_moves_on_all_ranks(tmp_path: Path) -> None:
    save_model("qwen3_5", tmp_path)
    found = []
    for size in (1, 2):
        with gpu_ranks(size, tmp_path) as made:
            found.append(forced_logits(made.executor, TOKENS, BLOCKS, 16).log_softmax(-1))
    torch.testing.assert_close(found[1], found[0], **CLOSE)


def test_captured_steps_are_gone_before_the_group_ends(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL ends no communicator while a graph has its calls."""
    had_model: list[bool] = []
    with gpu_ranks(2, model, **CAPTURED) as made:
        ranks = made.executor.capabilities.ranks
        assert isinstance(ranks, Ranks)
        end = ranks.end
        monkeypatch.setattr(ranks, "end", lambda: (had_model.append(hasattr(made.executor, "model")), end()))
    assert had_model == [False]


@pytest.mark.parametrize("form", ["packed_4", "fp8_blocks_16"])
def test_a_packed_checkpoint_is_divided_as_on_one_gpu(form: str, tmp_path: Path) -> None:
    """Integers of 4 bits with a scale for each group of inputs, and fp8 with a scale for each block."""
    save_packed(tmp_path / "packed", tmp_path / "plain", form)
    found = []
    for size, directory in ((1, "packed"), (2, "packed"), (1, "plain")):
        with gpu_ranks(size, tmp_path / directory, **CAPTURED) as made:
            logits = forced_logits(made.executor, TOKENS, BLOCKS, 16).log_softmax(-1)
            found.append((logits, greedy_text(made.executor, TOKENS[:20], OTHER_BLOCKS, 8)))
    for logits, text in found[1:]:
        torch.testing.assert_close(logits, found[0][0], **CLOSE)
        assert text == found[0][1]


def test_answers_in_a_grammar_are_those_of_one_gpu(tmp_path: Path) -> None:
    """The leader alone has masks. With a step in flight, it reads a token before it plans the next mask."""
    saved(tmp_path, "llama")
    tokenizer, found = Tokenizer.from_file(str(tmp_path / "tokenizer.json")), list[dict[str, str]]()
    for size in (1, 2):
        with gpu_ranks(size, tmp_path, overlap=True, **CAPTURED) as made:
            core, tokens = EngineCore(made.executor, made.resolved), dict[str, list[int]]()
            for number, temperature in enumerate((0.0, 1.0)):
                sampling = SamplingParams(temperature=temperature, seed=number, max_tokens=80, grammar=GRAMMAR)
                prompt = tuple(TOKENS[number : number + 9])
                core.submit(create_request(Submission(f"r{number}", prompt, sampling), made.resolved, number))
            while core.has_work:
                keep(core.step(), tokens)
            found.append({name: tokenizer.decode(ids) for name, ids in tokens.items()})
    assert found[1] == found[0]
    assert all(re.fullmatch(WORDS, text) for text in found[1].values())
    assert len(found[1]) == 2


# --- failures ---------------------------------------------------------------------------------------------------------


def test_a_plan_that_is_wrong_fails_alone(pair: GpuRanks) -> None:
    with pytest.raises(ValueError, match="blocks for"):
        pair.executor.launch(StepPlan(1, (chunk("a", TOKENS, 0, 20, BLOCKS[:1]),)))
    assert len(greedy_text(pair.executor, TOKENS[:20], BLOCKS, 2)) == 2


def test_a_step_that_fails_after_the_others_were_told_ends_the_engine(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = GpuRanks(2, model)

    def fail(*_: object) -> None:
        raise RuntimeError("no tokens today")

    monkeypatch.setattr("engine.execution.gpu.executor.choose_on_device", fail)
    with pytest.raises(ExecutorFatalError, match="within a step of several ranks: no tokens today"):
        made.step(chunk("a", TOKENS[:20], 0, 20, BLOCKS))
    made.executor.shutdown()
    (follower,) = made.launcher.ranks
    assert "Rank 0 gave up: RuntimeError: no tokens today" in str(follower.error)


def test_the_results_of_a_step_in_which_a_rank_is_lost_are_not_believed(model: Path) -> None:
    """An aborted sum ends, and what the device computed from it is worth nothing."""
    made = GpuRanks(2, model)
    made.executor.launch(StepPlan(1, (chunk("a", TOKENS[:20], 0, 20, BLOCKS),)))
    group = made.executor.model.ranks.group
    assert group is not None
    group.give_up("a test")
    with pytest.raises(ExecutorFatalError, match=r"ranks cannot go on: Rank 0 gave up: a test."):
        made.executor.collect()
    made.executor.shutdown()


def test_a_rank_that_is_killed_ends_the_engine_and_is_named(model: Path) -> None:
    launcher = StandInLauncher()
    made = GpuRanks(2, model, launcher=launcher, **CAPTURED)
    try:
        assert len(greedy_text(made.executor, TOKENS[:20], BLOCKS, 4)) == 4
        os.kill(launcher.ranks[0].pid, signal.SIGKILL)
        with pytest.raises(ExecutorFatalError, match=r"ranks cannot go on: Rank 1 has died."):
            greedy_text(made.executor, TOKENS[:20], BLOCKS, 200)
    finally:
        made.executor.shutdown()


@pytest.mark.slow  # Triton's interpreter, and one process for each rank, as it is not made for threads
def test_triton_s_kernels_compute_each_rank_s_part_also_in_8_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="Triton has no wheel for this machine")
    monkeypatch.setattr("kernels.choice.TRITON_TABLE", TRITON_TABLE)
    save_model("llama", tmp_path)
    settings: dict[str, Any] = {"max_num_seqs": 2, "max_num_batched_tokens": 8, "attention": "triton"}
    settings |= {"quantize": "int8", "kv_cache_dtype": "int8", "cuda_graphs": "decode", "cuda_graph_decode_rows": (2,)}
    found = []
    for size in (1, 2):
        made = GpuRanks(size, tmp_path, launcher=StandInLauncher(TRITON_TABLE), **settings)
        found.append(forced_logits(made.executor, TOKENS[:9], BLOCKS, 8).log_softmax(-1))
        made.executor.shutdown()
    # Each rank rounds its part of a row, by the largest number in it.
    torch.testing.assert_close(found[1], found[0], atol=0.05, rtol=0.05)


@pytest.mark.slow  # as above
@pytest.mark.parametrize(("form", "kept"), [("packed_4_zeros", "4 bits"), ("fp8_blocks_16", "fp8")])
def test_triton_s_products_take_each_rank_s_part_of_a_packed_checkpoint(
    form: str, kept: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="Triton has no wheel for this machine")
    save_packed(tmp_path / "packed", tmp_path / "plain", form)
    settings: dict[str, Any] = {"max_num_seqs": 2, "max_num_batched_tokens": 8, "attention": "torch"}
    found = []
    for size, directory in ((1, "plain"), (2, "packed")):
        if size == 2:
            monkeypatch.setattr("kernels.choice.TRITON_TABLE", NARROW_TABLE)
        made = GpuRanks(size, tmp_path / directory, launcher=StandInLauncher(NARROW_TABLE), **settings)
        found.append(forced_logits(made.executor, TOKENS[:9], BLOCKS, 8).log_softmax(-1))
        summary = made.resolved.reasons.get("weights", "")
        made.executor.shutdown()
    torch.testing.assert_close(found[1], found[0], **CLOSE)
    assert f"kept in {kept}" in summary, summary


def test_a_rank_that_fails_in_a_step_ends_the_engine_with_its_reason(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = GpuRanks(2, model)

    def fail(*_: object) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr("engine.parallel.device_follower.DeviceFollower._step", fail)
    with pytest.raises(ExecutorFatalError, match=r"Rank 1 gave up: .*CUDA out of memory"):
        made.step(chunk("a", TOKENS[:20], 0, 20, BLOCKS))
    made.executor.shutdown()


def test_a_rank_that_cannot_start_is_named_with_its_reason(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, lambda rank: FakeDevice((15, 12, 11.5, 1, 0.5)))
    settings: dict[str, Any] = {"num_kv_blocks": None, "gpu_memory_utilization": 0.75, "cuda_graphs": "none"}
    with pytest.raises(ConfigError, match=r"tensor_parallel_size is 2, and not every rank could start: .*leaves -"):
        GpuRanks(2, model, **settings)


def test_a_rank_that_cannot_start_while_the_leader_waits_to_agree_is_named(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step is under way then: the leader waits for the number of KV blocks that the other has room for."""
    agreed, waits = list[int](), threading.Event()

    def least(group: NcclGroup, *numbers: Any) -> int:
        if group.rank == 0:
            agreed.append(1)
            if len(agreed) == 2:
                waits.set()
        return agree(group, *numbers)

    class Waiting(FakeDevice):
        def memory(self) -> tuple[int, int]:
            if len(self._free) == 1:
                assert waits.wait(30)
            return super().memory()

    agree = engine.build.gpu_ranks._least
    monkeypatch.setattr("engine.build.gpu_ranks._least", least)
    pretend_gpus(monkeypatch, lambda rank: Waiting((15, 12, 11.5, 0.5)))
    settings: dict[str, Any] = {"num_kv_blocks": None, "gpu_memory_utilization": 0.75, "cuda_graphs": "none"}
    with pytest.raises(ConfigError, match=r"not every rank could start: Rank 1 gave up: ConfigError: .*leaves -"):
        GpuRanks(2, model, **settings)


NO_ROOM = r"max_num_batched_tokens is 24, but the GPU has no memory for such a step .*Lower max_num_batched_tokens"


@pytest.mark.parametrize(
    ("fails", "says"),
    [
        ("engine.execution.gpu.executor.choose_on_device", f"^{NO_ROOM}"),
        (
            "engine.parallel.device_follower.DeviceFollower._choose",
            f"could start: .*Rank 1 gave up: ConfigError: {NO_ROOM}.$",
        ),
    ],
    ids=["leader", "follower"],
)
def test_a_rank_without_memory_for_the_largest_step_says_what_to_lower(
    fails: str, says: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(fails, fail)
    with pytest.raises(ConfigError, match=says):
        GpuRanks(2, model)


def test_a_step_whose_states_have_moved_on_one_rank_alone_ends_the_engine(tmp_path: Path) -> None:
    """The leader's moved before it saw that the plan is wrong, and the others were never told."""
    save_model("qwen3_5", tmp_path)
    made = GpuRanks(2, tmp_path)
    with pytest.raises(ExecutorFatalError, match="blocks for"):
        made.executor.launch(StepPlan(1, (chunk("a", TOKENS, 0, 20, BLOCKS[:1]),)))
    made.executor.shutdown()


class BlockingGloo:
    """gloo, whose end lasts as long as there are captured steps with its sums, as NCCL's does: here for ever."""

    def __init__(self, blocking: Blocking, *how: Any) -> None:
        self._gloo: Any = GLOO.make(*how)
        self._blocking = blocking

    def __getattr__(self, name: str) -> Any:
        return getattr(self._gloo, name)

    def abort(self) -> None:
        del self._gloo
        self._blocking.aborts.release()
        self._blocking.end.wait()


class Blocking:
    def __init__(self) -> None:
        self.aborts, self.end = threading.Semaphore(0), threading.Event()

    def are_aborted(self, count: int) -> bool:
        return all(self.aborts.acquire(timeout=30) for _ in range(count))


@pytest.fixture
def blocking(monkeypatch: pytest.MonkeyPatch) -> Iterator[Blocking]:
    """Let no communicator's end return before the test's."""
    found = Blocking()
    backend = Backend("a test", lambda *how: BlockingGloo(found, *how), aborts=True)
    monkeypatch.setattr("engine.build.gpu_ranks.GLOO", backend)
    yield found
    found.end.set()


def ends(work: Callable[[], object]) -> BaseException | None:
    """Do what must not wait for the end of a communicator, and return the error with which it ends."""
    found = list[BaseException | None]()

    def run() -> None:
        try:
            work()
            found.append(None)
        except Exception as error:  # noqa: BLE001 - returned to the test
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert found, "it waits for ever"
    return found[0]


def test_an_engine_ends_though_its_communicator_does_not(model: Path, blocking: Blocking) -> None:
    made = GpuRanks(2, model, **CAPTURED)
    assert ends(made.executor.shutdown) is None
    assert [rank.poll() for rank in made.launcher.ranks] == ["rank 1 ended in order"]
    assert blocking.are_aborted(2)


def test_a_step_s_failure_is_told_though_the_communicator_does_not_end(
    model: Path, blocking: Blocking, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = GpuRanks(2, model, **CAPTURED)

    def fail(*_: object) -> None:
        raise RuntimeError("no tokens today")

    monkeypatch.setattr("engine.execution.gpu.executor.choose_on_device", fail)
    error = ends(lambda: made.step(chunk("a", TOKENS[:20], 0, 20, BLOCKS)))
    assert isinstance(error, ExecutorFatalError)
    assert "no tokens today" in str(error)
    assert ends(made.executor.shutdown) is None


def test_a_start_that_fails_after_captures_ends_though_the_communicator_does_not(
    model: Path, blocking: Blocking, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ConfigError("no executor today")

    with monkeypatch.context() as patch:
        patch.setattr("engine.build.gpu.DeviceExecutor", fail)
        error = ends(lambda: GpuRanks(2, model, **CAPTURED))
    assert str(error) == "no executor today"
    assert blocking.are_aborted(2)


def test_a_rank_with_another_gpu_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(FakeDevice):
        name = "another GPU"

    pretend_gpus(monkeypatch, lambda rank: Other())
    with pytest.raises(
        ConfigError, match=r"could start: Rank 1 gave up: .*on another GPU, .*and the leader has .*on fake GPU,"
    ):
        GpuRanks(2, model)


def test_fewer_gpus_than_ranks_are_refused_by_the_checks_already(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size is 2, and each rank has a GPU of its own, .* sees 1"):
        start_on_device(model, EngineConfig(tensor_parallel_size=2), FakeDevice(), "a test")


def test_a_torch_that_cannot_sum_on_a_step_s_stream_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.build.gpu_ranks.lacks", lambda: "torch 2.4.0 does not add up on the stream of a step")
    with pytest.raises(ConfigError, match=r"^tensor_parallel_size is 2, but torch 2.4.0 does not add up"):
        start_on_device(model, EngineConfig(tensor_parallel_size=2), FakeDevice(), "a test", SubprocessLauncher())
    assert start_on_device(model, EngineConfig(**SETTINGS), FakeDevice(), "a test")


def test_ranks_that_capture_other_steps_are_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where one image has Triton and the other has not, or torch's table captures less."""
    plan, sizes = engine.build.gpu.plan_buckets, iter(((2, 3), (1, 3)))
    monkeypatch.setattr(
        "engine.build.gpu.plan_buckets", lambda *how, **given: plan(*how, **given | {"decode_rows": next(sizes)})
    )
    with pytest.raises(
        ConfigError, match=r"Rank 1 gave up: .*it has .*decode 1, 3 and .*the leader has .*decode 2, 3 and"
    ):
        GpuRanks(2, model, **CAPTURED)


def test_ranks_with_and_without_triton_are_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package for attention is the same, and what chooses tokens in a capture is not."""
    choose, drawn = engine.build.gpu.choose_attention, iter((choose_packed, None))

    def chosen(*how: Any, **given: Any) -> Any:
        choice, ops = choose(*how, **given)
        return choice, replace(ops, sample_packed=next(drawn))

    monkeypatch.setattr("engine.build.gpu.choose_attention", chosen)
    with pytest.raises(ConfigError, match=r"Rank 1 gave up: .*it has .*torch chooses.*the leader has .*kernels choose"):
        GpuRanks(2, model, cuda_graphs="none")


def choose_packed(*_: object) -> None:
    raise AssertionError("the ranks do not start")


@pytest.mark.parametrize(("size", "dtype"), [(1, torch.bfloat16), (2, torch.float32)])
def test_the_choice_of_tokens_is_tried_with_the_type_of_logits_where_tokens_are_chosen(
    size: int, dtype: torch.dtype, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks' logits are joined in float32, and a kernel is compiled for each type."""
    tried = list[torch.dtype]()
    monkeypatch.setattr("engine.build.gpu.warm_up_sampler", lambda device, ops, dtype, vocab: tried.append(dtype))
    with gpu_ranks(size, model, dtype="bfloat16", cuda_graphs="none"):
        assert tried == [dtype]


def test_ranks_may_be_as_far_apart_as_a_start_allows_when_they_agree() -> None:
    class Late:
        rank, size, device = 0, 2, torch.device("cpu")
        limits: ClassVar[list[float]] = []

        @contextmanager
        def watched(self, limit_s: float) -> Iterator[None]:
            self.limits.append(limit_s)
            yield

        def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
            assert self.limits
            x[0, 1], x[1, 1] = 3, 7
            return x

    late: Any = Late()
    assert engine.build.gpu_ranks._least(late, (3 << 24) + 9) == (3 << 24) + 7
    assert late.limits == [3600.0]


# --- whole engines ----------------------------------------------------------------------------------------------------


def serve(made: GpuRanks) -> dict[str, list[int]]:
    """Serve random requests of every kind that shares steps with others; return their tokens."""
    core, draw, found = EngineCore(made.executor, made.resolved), random.Random(3), dict[str, list[int]]()
    for number in range(12):
        controls: dict[str, Any] = draw.choice([{}, {"temperature": 0.8}, {"frequency_penalty": 0.5}, {"logprobs": 2}])
        sampling = SamplingParams(max_tokens=draw.randint(1, 9), ignore_eos=True, seed=number, **controls)
        prompt = tuple(TOKENS[number : number + draw.choice([1, 15, 16, 17, 25])])
        core.submit(create_request(Submission(f"r{number}", prompt, sampling), made.resolved, number))
        for _ in range(draw.choice([0, 1, 4])):
            keep(core.step(), found)
    while core.has_work:
        keep(core.step(), found)
    return found


def keep(events: list[Event], found: dict[str, list[int]]) -> None:
    for event in events:
        assert not isinstance(event, Failed), event
        if isinstance(event, Token):
            found.setdefault(event.request_id, []).append(event.token_id)


DRAFTED: dict[str, Any] = {
    "overlap": True,
    "num_speculative_tokens": 3,
    "speculative": SpeculativeConfig(method="suffix", min_match=1, adaptive=False),
}


@pytest.mark.parametrize("settings", [{}, {"overlap": True}, DRAFTED], ids=["alone", "overlap", "drafts"])
def test_an_engine_answers_as_on_one_gpu(settings: dict[str, Any], model: Path) -> None:
    texts = []
    for size, own in ((1, {}), (2, settings)):
        with gpu_ranks(size, model, **CAPTURED | own) as made:
            texts.append(serve(made))
    assert texts[0] == texts[1]
