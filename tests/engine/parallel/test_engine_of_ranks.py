"""Owns the contract of an engine over several ranks: it answers as one engine does, and a failure ends it for good.
Never starts a process: the followers are threads here, on the group and the kernels that processes have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.build.executor import create_executor
from engine.config import EngineConfig, SchedulerConfig
from engine.execution.executor import TorchExecutor
from engine.parallel.leader import _SharedAdapters
from engine.parallel.messages import Drop
from engine.step import (
    PENDING_TOKEN,
    AdapterError,
    ExecutorFatalError,
    PromptScoring,
    RowKind,
    ScheduledRequest,
    StateUse,
    StepOutput,
    StepPlan,
)
from tests.golden.vision import forced_logits as forced_logits_with_images
from tests.golden.vision import vision_prompts
from tests.support.compiler import needs_compiler
from tests.support.plans import chunk, decode, forced_logits, forced_logits_together, greedy, greedy_text, stateful
from tests.support.thread_launcher import ThreadLauncher
from tests.support.tiny_adapters import ATTENTION, MLP, save_adapter
from tests.support.tiny_models import KINDS, VOCAB, renamed_slow, save_model
from tests.support.tiny_vision import save_vision_model

TOKENS = torch.randint(0, VOCAB, (70,), generator=torch.Generator().manual_seed(5)).tolist()
BLOCKS = (9, 3, 11, 0, 7)
OTHER_BLOCKS = (1, 2, 4, 5, 6)
CLOSE = {"atol": 1e-4, "rtol": 1e-4}
KERNELS = [pytest.param("auto", marks=needs_compiler), "torch_cpu"]
"""`auto`: the native ones, for all models but one."""


class Ranks:
    """An executor whose followers are threads."""

    def __init__(self, ranks: int, directory: Path, host: str | None = None, **settings: Any) -> None:
        """host: of ranks that meet over TCP; None: in memory."""
        defaults: dict[str, Any] = {"dtype": "float32", "num_kv_blocks": 12, "num_threads": 1}
        config = EngineConfig(**defaults | settings, tensor_parallel_size=ranks)
        self.launcher = ThreadLauncher(host)
        executor, self.resolved = create_executor(directory, config, launcher=self.launcher)
        assert isinstance(executor, TorchExecutor)
        self.executor = executor

    def step(self, *rows: ScheduledRequest, **plan: Any) -> StepOutput:
        self.executor.launch(StepPlan(0, rows, **plan))
        return self.executor.collect()


@contextmanager
def engine_of(ranks: int, directory: Path, host: str | None = None, **settings: Any) -> Iterator[Ranks]:
    found = Ranks(ranks, directory, host, **settings)
    try:
        yield found
    finally:
        found.executor.shutdown()
    assert [rank.poll() for rank in found.launcher.ranks] == [f"rank {rank} ended in order" for rank in range(1, ranks)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    save_model("llama", directory)
    return directory


def log_probabilities(executor: TorchExecutor) -> list[torch.Tensor]:
    """Return those of a sequence by itself in chunks of 16, and beside a shorter one."""
    alone = forced_logits(executor, TOKENS, BLOCKS, 16)
    together = forced_logits_together(executor, [TOKENS, TOKENS[:33]], [BLOCKS, OTHER_BLOCKS], 17)
    return [logits.log_softmax(-1) for logits in (alone, *together)]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("kind", renamed_slow(KINDS))
def test_every_family_has_the_log_probabilities_of_one_engine(
    kind: str, kernels: str, ranks: int, tmp_path: Path
) -> None:
    ranks = min(ranks, save_model(kind, tmp_path).config.get_text_config().num_attention_heads)
    with engine_of(1, tmp_path, kernels=kernels) as one:
        want = log_probabilities(one.executor)
    with engine_of(ranks, tmp_path, kernels=kernels) as several:
        got = log_probabilities(several.executor)
    for own, wanted in zip(got, want, strict=True):
        torch.testing.assert_close(own, wanted, **CLOSE)


@pytest.mark.parametrize("kernels", KERNELS)
def test_images_are_encoded_on_every_rank(kernels: str, tmp_path: Path) -> None:
    save_vision_model(tmp_path)
    found = []
    for ranks in (1, 2):
        with engine_of(ranks, tmp_path, kernels=kernels, num_kv_blocks=64) as engine:
            logits = forced_logits_with_images(engine.executor, vision_prompts()[0], None)
            found.append(logits.log_softmax(-1))
    torch.testing.assert_close(found[1], found[0], **CLOSE)


@pytest.mark.parametrize("kernels", KERNELS)
def test_greedy_text_is_that_of_one_engine(kernels: str, checkpoint: Path) -> None:
    texts = []
    for ranks in (1, 2):
        with engine_of(ranks, checkpoint, kernels=kernels) as engine:
            texts.append(greedy_text(engine.executor, TOKENS[:20], BLOCKS, 30, chunk_size=7))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("kernels", KERNELS)
def test_ranks_that_share_no_memory_answer_alike(kernels: str, checkpoint: Path) -> None:
    """On the native kernels, a sum over TCP is a call of Python within the step's one call."""
    texts = []
    for host in (None, "127.0.0.1"):
        with engine_of(2, checkpoint, host, kernels=kernels) as engine:
            texts.append(greedy_text(engine.executor, TOKENS[:20], BLOCKS, 30, chunk_size=7))
    assert texts[0] == texts[1]


@needs_compiler
def test_answers_are_the_same_bits_in_any_batch_where_that_is_asked_for(checkpoint: Path) -> None:
    with engine_of(2, checkpoint, kernels="native", batch_invariant=True) as engine:
        alone = forced_logits(engine.executor, TOKENS[:33], BLOCKS)
        together = forced_logits_together(engine.executor, [TOKENS, TOKENS[:33]], [OTHER_BLOCKS, BLOCKS], 17)
    assert torch.equal(together[1], alone)


def test_ranks_divide_the_engines_threads(checkpoint: Path) -> None:
    with engine_of(2, checkpoint, num_threads=1) as engine:
        reasons = engine.resolved.reasons
    assert reasons["tensor_parallel_size"] == "asked for; of num_threads 1, each rank has 1"


def test_a_token_in_flight_is_what_the_leader_sampled(checkpoint: Path) -> None:
    """With overlap a plan has PENDING_TOKEN, and followers never see what was sampled."""
    with engine_of(2, checkpoint) as engine:
        want = greedy_text(engine.executor, TOKENS[:20], BLOCKS, 3)
        executor, got = engine.executor, []
        executor.launch(StepPlan(1, (chunk("b", TOKENS[:20], 0, 20, OTHER_BLOCKS),)))
        executor.launch(StepPlan(2, (decode("b", PENDING_TOKEN, 20, OTHER_BLOCKS),)))
        executor.launch(StepPlan(3, (decode("b", PENDING_TOKEN, 21, OTHER_BLOCKS),)))
        for _ in range(3):
            got += executor.collect().sampled[0]
    assert got == want


def test_drafts_are_verified_and_states_taken_back_on_all_ranks(tmp_path: Path) -> None:
    """A rejected draft left in a follower's state would change the next token's logits."""
    save_model("qwen3_next", tmp_path)
    with engine_of(2, tmp_path) as engine:
        want = greedy_text_with_state(engine, TOKENS[:20], 4)
        engine.step(stateful(engine.executor, chunk("b", TOKENS[:20], 0, 20, OTHER_BLOCKS), slot=1))
        wrong = (want[1] + 1) % VOCAB
        row = ScheduledRequest("b", RowKind.DECODE, 20, (want[0], wrong, 3), OTHER_BLOCKS, greedy(), state=StateUse(1))
        (first,) = engine.step(row).sampled
        assert first == (want[1],), "the draft is rejected"
        again = stateful(engine.executor, decode("b", want[1], 21, OTHER_BLOCKS), slot=1)
        assert engine.step(again).sampled == ((want[2],),)


def test_a_state_that_is_saved_after_drafts_is_the_state_after_them_on_all_ranks(tmp_path: Path) -> None:
    """Regression: a follower saved before it was told how many drafts were right; a prefix hit went on from there."""
    save_model("qwen3_next", tmp_path)
    snapshots = SchedulerConfig(state_snapshot_tokens=16, state_snapshots=2)
    with engine_of(2, tmp_path, scheduler=snapshots) as engine:
        want = greedy_text_with_state(engine, TOKENS[:20], 5)
        last = decode("a", want[4], 24, BLOCKS)._replace(sampling=greedy(0), state=StateUse(0))
        expected = engine.step(last)
        engine.step(stateful(engine.executor, chunk("b", TOKENS[:20], 0, 20, OTHER_BLOCKS), slot=1))
        drafted = decode("b", want[0], 20, OTHER_BLOCKS)._replace(token_ids=tuple(want[:4]), state=StateUse(1, None, 0))
        assert engine.step(drafted).sampled == (tuple(want[1:5]),), "all drafts are right"
        hit = ScheduledRequest("c", RowKind.LAST, 24, (want[4],), OTHER_BLOCKS, greedy(0), state=StateUse(2, 0))
        found = engine.step(hit)
    assert found.sampled == expected.sampled
    assert found.logprobs[0][0].logprob == pytest.approx(expected.logprobs[0][0].logprob, abs=1e-4)


def test_a_step_that_fails_where_states_move_ends_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model("qwen3_next", tmp_path)
    engine = Ranks(2, tmp_path)

    def fail(*_: object) -> None:
        raise RuntimeError("no tokens today")

    monkeypatch.setattr(engine.executor, "_sample", fail)
    with pytest.raises(ExecutorFatalError, match="ranks may have different states: no tokens today"):
        engine.step(stateful(engine.executor, chunk("a", TOKENS[:20], 0, 20, BLOCKS)))
    engine.executor.shutdown()


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_memory_is_that_of_all_ranks_where_several_have_the_same_heads(ranks: int, checkpoint: Path) -> None:
    with engine_of(ranks, checkpoint) as engine:
        one = engine.executor.model.cache.blocks
        assert one is not None
        share = one.nbytes // engine.resolved.num_kv_blocks
        assert engine.resolved.kv_block_bytes >= share * ranks * 0.9


def greedy_text_with_state(engine: Ranks, prompt: list[int], count: int) -> list[int]:
    row = stateful(engine.executor, chunk("a", prompt, 0, len(prompt), BLOCKS))
    text = list(engine.step(row).sampled[0])
    while len(text) < count:
        row = decode("a", text[-1], len(prompt) + len(text) - 1, BLOCKS)
        text += engine.step(stateful(engine.executor, row)).sampled[0]
    return text


@pytest.mark.parametrize("kernels", KERNELS)
def test_scores_of_a_prompt_and_pooled_states_are_those_of_one_engine(kernels: str, checkpoint: Path) -> None:
    found = []
    for ranks in (1, 2):
        with engine_of(ranks, checkpoint, kernels=kernels) as engine:
            row = chunk("a", TOKENS[:20], 0, 20, BLOCKS)
            row = row._replace(scoring=PromptScoring(0, tuple(TOKENS[1:20]), 2), pool_from=0)
            output = engine.step(row)
            scores = [score.logprob for score in output.prompt_logprobs[0]]
            found.append((scores, list(output.pooled[0]), engine.step(decode("a", 5, 20, BLOCKS)).sampled))
    for one, several in zip(*found, strict=True):
        torch.testing.assert_close(torch.tensor(several), torch.tensor(one), **CLOSE)


def test_a_step_that_samples_nothing_has_no_logits_to_join(checkpoint: Path) -> None:
    with engine_of(2, checkpoint) as engine:
        assert engine.step(chunk("a", TOKENS, 0, 16, BLOCKS)).sampled == ((),)


@pytest.mark.parametrize("kernels", KERNELS)
def test_an_adapter_adds_on_every_rank(kernels: str, tmp_path: Path) -> None:
    checkpoint = tmp_path / "model"
    save_adapter(save_model("llama", checkpoint), tmp_path / "adapter", modules=(*ATTENTION, *MLP), seed=3)
    found = []
    for ranks in (1, 2):
        with engine_of(ranks, checkpoint, kernels=kernels, max_loras=1) as engine:
            host = engine.executor.capabilities.adapters
            assert host is not None
            digest, weights = host.read(str(tmp_path / "adapter"))
            host.keep(digest, weights)
            row = chunk("a", TOKENS, 0, len(TOKENS), BLOCKS)._replace(adapter=digest)
            found.append([engine.executor.logits(StepPlan(0, (own,))) for own in (row, row._replace(adapter=""))])
            host.drop(digest)
            engine.step(chunk("b", TOKENS[:20], 0, 20, OTHER_BLOCKS))
    for one, several in zip(*found, strict=True):
        torch.testing.assert_close(several.log_softmax(-1), one.log_softmax(-1), **CLOSE)
    assert not torch.allclose(found[1][0], found[1][1]), "the adapter changes something"


@pytest.mark.parametrize("how", ["rewritten", "removed"])
def test_an_adapter_that_changes_while_it_is_read_is_refused(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Followers would find another digest, which ends the engine."""
    checkpoint, adapter = tmp_path / "model", tmp_path / "adapter"
    save_adapter(save_model("llama", checkpoint), adapter, modules=ATTENTION, seed=3)
    with engine_of(2, checkpoint, max_loras=1) as engine:
        host = engine.executor.capabilities.adapters
        assert isinstance(host, _SharedAdapters)
        read = host._own.read

        def read_and_change(path: str) -> Any:
            found, file = read(path), adapter / "adapter_config.json"
            text = file.read_text()
            file.unlink()
            if how == "rewritten":
                file.write_text(text + " ")
            return found

        monkeypatch.setattr(host._own, "read", read_and_change)
        with pytest.raises(AdapterError, match="was changed while it was read; load it again"):
            host.read(str(adapter))


def test_an_adapter_that_no_step_saw_is_not_told_to_followers(tmp_path: Path) -> None:
    """Its files would lie in memory until the next step."""
    checkpoint = tmp_path / "model"
    save_adapter(save_model("llama", checkpoint), tmp_path / "adapter", modules=ATTENTION, seed=3)
    with engine_of(2, checkpoint, max_loras=1) as engine:
        host = engine.executor.capabilities.adapters
        assert isinstance(host, _SharedAdapters)
        digest, weights = host.read(str(tmp_path / "adapter"))
        host.keep(digest, weights)
        host.drop(digest)
        assert list(host.untold()) == []
        host.keep(digest, weights)
        engine.step(chunk("a", TOKENS[:20], 0, 20, BLOCKS))
        host.drop(digest)
        assert list(host.untold()) == [Drop(digest)]


def test_a_plan_that_is_refused_leaves_the_ranks_in_step(checkpoint: Path) -> None:
    with engine_of(2, checkpoint) as engine:
        want = engine.step(chunk("a", TOKENS[:20], 0, 20, BLOCKS)).sampled
        with pytest.raises(ValueError, match="blocks"):
            engine.executor.launch(StepPlan(1, (chunk("b", TOKENS[:20], 0, 20, ()),)))
        assert engine.step(chunk("b", TOKENS[:20], 0, 20, OTHER_BLOCKS)).sampled == want


def test_a_follower_that_fails_ends_the_engine_with_its_reason(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("no memory for this rank")

    engine = Ranks(2, checkpoint)
    monkeypatch.setattr("engine.parallel.follower.Follower._give", fail)
    with pytest.raises(ExecutorFatalError, match="Rank 1 gave up: MemoryError: no memory for this rank"):
        engine.step(chunk("a", TOKENS[:20], 0, 20, BLOCKS))
    with pytest.raises(ExecutorFatalError):
        engine.step(chunk("a", TOKENS[:20], 0, 20, BLOCKS))
    engine.executor.shutdown()


def test_a_leader_that_fails_within_a_step_ends_all_ranks(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Ranks(2, checkpoint)

    def fail(*_: object) -> None:
        raise MemoryError("no memory here")

    monkeypatch.setattr("engine.parallel.leader.LeadingModel._joined", fail)
    with pytest.raises(ExecutorFatalError, match="no memory here"):
        engine.step(chunk("a", TOKENS[:20], 0, 20, BLOCKS))
    engine.executor.shutdown()
    (follower,) = engine.launcher.ranks
    assert "no memory here" in str(follower.poll())
