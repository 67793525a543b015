"""Owns the promise that a draft model changes no token of any answer. Long: each way to ask, and each refusal at start.
Never trusts a draft model: one is the model itself, one nearly so, and one has nothing to do with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import WordLevel

from engine.build.executor import create_executor
from engine.checkpoints.model_cache import ModelError
from engine.config import ConfigError, EngineConfig, ResolvedConfig, SchedulerConfig, SpeculativeConfig
from engine.core.core import EngineCore
from engine.execution.executor import TorchExecutor
from engine.observer import Verified
from engine.protocol import Failed, Finished, SamplingParams, Submission, Token
from engine.scheduling.request import create_request
from engine.step import DRAFT_TOKEN, DraftContext, RowSampling, ScheduledRequest, StepPlan
from tests.golden.test_speculation import CONTEXT, KEPT, MOST_CHI_SQUARE, ROWS, SEEDS, chi_square, distribution
from tests.support.compiler import needs_compiler
from tests.support.fake_device import FakeDevice
from tests.support.plans import chunk, decode
from tests.support.tiny_models import VOCAB, edit_config, edit_tensors, save_model
from tests.support.tiny_vision import save_vision_model

NEW_TOKENS = 40
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
SAMPLED = dataclasses.replace(GREEDY, temperature=0.9, top_p=0.95, seed=5)
SCORED = dataclasses.replace(SAMPLED, logprobs=2, seed=9)
CONTROLLED = dataclasses.replace(SAMPLED, presence_penalty=0.6, repetition_penalty=1.2, logit_bias=((17, 4.0),))
NONE = SpeculativeConfig(method="none")
FEW_BLOCKS = SchedulerConfig(reserve_mode="prompt", preempt_policy="lifo", watermark_blocks=0)
GENERATOR = torch.Generator().manual_seed(4)
TEXTS = [torch.randint(3, VOCAB, (length,), generator=GENERATOR).tolist() for length in (5, 16, 33, 70)]
PROMPTS = [*TEXTS, [*TEXTS[3][:48], 7, 8]]
ASKED: dict[str, Any] = {"dtype": "float32", "num_kv_blocks": 200, "num_threads": 1, "max_num_batched_tokens": 128}


def save_tokenizer(directory: Path, **changes: int) -> None:
    """Save a tokenizer of VOCAB tokens. `changes` gives some of them other ids."""
    vocabulary = {f"t{number}": number for number in range(VOCAB)} | changes
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="t0"))
    tokenizer.decoder = ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))


def save_noisy(directory: Path) -> None:
    """Save the model's weights with noise, so that its drafts are right about as often as not."""
    save_model("llama", directory)
    generator = torch.Generator().manual_seed(1)
    tensors = load_file(directory / "model.safetensors")
    noisy = {
        name.replace(".", "__"): tensor + 0.05 * tensor.std() * torch.randn(tensor.shape, generator=generator)
        for name, tensor in tensors.items()
        if tensor.dim() == 2
    }
    edit_tensors(directory, **noisy)


DRAFTS: dict[str, Callable[[Path], object]] = {
    "itself": lambda directory: save_model("llama", directory),
    "noisy": save_noisy,
    "unrelated": lambda directory: save_model("qwen2", directory),
}
WAYS = [
    pytest.param((kernels, name), marks=[needs_compiler] if kernels == "native" else [], id=f"{kernels}-{name}")
    for kernels in ("torch_cpu", "native")
    for name in DRAFTS
]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: tmp_path_factory.mktemp(name) for name in DRAFTS}
    for name, save in DRAFTS.items():
        save(made[name])
        save_tokenizer(made[name])
    return made


def only(*names: str) -> pytest.MarkDecorator:
    """Parametrize with these draft models only."""
    ways = [way for way in WAYS if way.values[0][1] in names]  # type: ignore[index]
    return pytest.mark.parametrize("bench", ways, indirect=True)


def drafted_by(directory: Path, **settings: Any) -> SpeculativeConfig:
    return SpeculativeConfig(**{"method": "draft_model", "model": str(directory), "adaptive": False, **settings})


class DraftBench:
    """One pair of models used by many cores."""

    def __init__(self, name: str, executor: TorchExecutor, resolved: ResolvedConfig) -> None:
        self.name, self.executor, self.resolved = name, executor, resolved
        self.verified: list[Verified] = []
        self.cached: dict[str, int] = {}
        self.steps = self.preemptions = 0

    def serve(
        self,
        params: SamplingParams,
        *,
        prompts: Sequence[Sequence[int]] = PROMPTS,
        rounds: int = 1,
        cancelled: Mapping[str, int] | None = None,
        num_answer_tokens: int = 0,
        **overrides: Any,
    ) -> list[list[Any]]:
        """Submit all prompts at once in each round; return the answers of the last one, as tokens or with their
        log-probabilities. `cancelled`: after how many tokens a request is cancelled."""
        core = EngineCore(self.executor, dataclasses.replace(self.resolved, **overrides))
        self.verified, texts = [], dict[str, list[Any]]()
        for _ in range(rounds):
            texts = {str(number): [] for number in range(len(prompts))}
            for number, prompt in enumerate(prompts):
                submission = Submission(str(number), tuple(prompt), params, num_answer_tokens=num_answer_tokens)
                core.submit(create_request(submission, core.config, number))
            while core.has_work:
                for event in core.step():
                    if isinstance(event, Token):
                        got = event.token_id if event.logprobs is None else (event.token_id, event.logprobs)
                        texts[event.request_id].append(got)
                    elif isinstance(event, Finished):
                        self.cached[event.request_id] = event.usage.cached_tokens
                    elif isinstance(event, Failed):
                        raise AssertionError(event)
                self.verified += core.last_step.verified
                for name, after in (cancelled or {}).items():
                    if len(texts[name]) >= after:
                        core.abort(name)
            assert core.load().num_held_blocks == 0, "blocks leak"
        self.steps, self.preemptions = core.load().num_steps, core.load().num_preemptions
        return list(texts.values())

    @property
    def accepted(self) -> float:
        """Return the share of drafted tokens that were right."""
        return sum(row.num_accepted for row in self.verified) / sum(row.num_drafted for row in self.verified)


@pytest.fixture(scope="module", params=WAYS)
def bench(request: pytest.FixtureRequest, checkpoints: dict[str, Path]) -> Iterator[DraftBench]:
    kernels, name = request.param
    asked = EngineConfig(**ASKED, kernels=kernels, speculative=drafted_by(checkpoints[name], num_tokens=4))
    bench = DraftBench(name, *create_executor(checkpoints["itself"], asked))
    yield bench
    bench.executor.shutdown()


# --- the same answer -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(bench: DraftBench) -> Callable[[SamplingParams], list[list[Any]]]:
    """Return the answers without drafts, on the same kernels."""
    return cache(lambda params: bench.serve(params, speculative=NONE, num_speculative_tokens=0))


BUDGETS: dict[int, dict[str, Any]] = {
    3: {"max_num_seqs": 1, "num_speculative_tokens": 1},
    16: {"max_num_seqs": 3, "num_speculative_tokens": 3},
    512: {},
}


@pytest.mark.parametrize("budget", BUDGETS)
def test_greedy_text_is_that_without_drafts_for_every_chunk_budget_and_any_neighbours(
    bench: DraftBench, plain: Callable[[SamplingParams], list[list[Any]]], budget: int
) -> None:
    limits = {"max_num_batched_tokens": budget, "max_prefill_tokens": budget, **BUDGETS[budget]}
    want = plain(GREEDY)
    assert bench.serve(GREEDY, **limits) == want
    assert len(bench.verified) > 10
    assert {row.method for row in bench.verified} == {"draft_model"}


@pytest.mark.parametrize("params", [SAMPLED, CONTROLLED], ids=["sampled", "controlled"])
def test_seeded_text_is_that_without_drafts(
    bench: DraftBench, plain: Callable[[SamplingParams], list[list[Any]]], params: SamplingParams
) -> None:
    want = plain(params)
    assert bench.serve(params) == want
    assert len(bench.verified) > 10


def test_log_probabilities_are_those_without_drafts(
    bench: DraftBench, plain: Callable[[SamplingParams], list[list[Any]]]
) -> None:
    for got, want in zip(bench.serve(SCORED), plain(SCORED), strict=True):
        assert [token for token, _ in got] == [token for token, _ in want]
        for (_, one), (_, other) in zip(got, want, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
            if bench.resolved.kernels == "native":
                assert one == other, "to the bit"


def test_text_is_the_same_after_prefix_hits_preemptions_and_a_migration(
    bench: DraftBench, plain: Callable[[SamplingParams], list[list[Any]]]
) -> None:
    want = plain(GREEDY)
    assert bench.serve(GREEDY, rounds=2) == want
    assert bench.cached["3"] >= 64
    assert bench.serve(GREEDY, num_kv_blocks=14, scheduler=FEW_BLOCKS, enable_prefix_caching=False) == want
    assert bench.preemptions > 0
    assert bench.verified
    for cut in (1, 9):
        rest = dataclasses.replace(GREEDY, max_tokens=NEW_TOKENS - cut)
        begun = [prompt + text[:cut] for prompt, text in zip(PROMPTS, want, strict=True)]
        assert bench.serve(rest, prompts=begun, num_answer_tokens=cut) == [text[cut:] for text in want]


def test_who_is_cancelled_leaves_its_neighbours_their_texts_and_no_block_behind(
    bench: DraftBench, plain: Callable[[SamplingParams], list[list[Any]]]
) -> None:
    want, texts = plain(GREEDY), bench.serve(GREEDY, cancelled={"0": 1, "3": 7})
    for number, (text, whole) in enumerate(zip(texts, want, strict=True)):
        assert text == whole[: len(text)]
        assert (len(text) < NEW_TOKENS) is (number in (0, 3))


def test_the_switch_gives_the_same_text_and_never_drafts_for_what_is_never_right(
    bench: DraftBench, plain: Callable[[SamplingParams], list[list[Any]]]
) -> None:
    """A draft model as expensive as the model itself never pays."""
    want, adaptive = plain(GREEDY), dataclasses.replace(bench.resolved.speculative, adaptive=True, model_cost=0.1)
    assert bench.serve(GREEDY, speculative=adaptive) == want
    cheap = sum(row.num_drafted for row in bench.verified)
    assert bench.serve(GREEDY, speculative=dataclasses.replace(adaptive, model_cost=2.0)) == want
    assert not bench.verified
    assert cheap or bench.name == "unrelated"


def test_under_load_drafting_is_switched_off(bench: DraftBench) -> None:
    crowd = [[3 + number, 5, 8, 13] for number in range(40)]
    adaptive = dataclasses.replace(bench.resolved.speculative, adaptive=True, model_cost=0.1, free_tokens=8)
    bench.serve(GREEDY, prompts=crowd, speculative=adaptive)
    assert not bench.verified, "all begin and end together"
    bench.serve(GREEDY, prompts=crowd[:2], speculative=adaptive)
    assert bench.verified


# --- how much of it is right -----------------------------------------------------------------------------------------


def test_a_model_that_drafts_for_itself_is_always_right_and_an_unrelated_one_hardly_ever(bench: DraftBench) -> None:
    bench.serve(GREEDY)
    assert sum(row.num_drafted for row in bench.verified) > 100
    if bench.name == "itself":
        assert bench.accepted > 0.99
        assert bench.steps < NEW_TOKENS / 3
    elif bench.name == "noisy":
        assert 0.2 < bench.accepted < 0.95
    else:
        assert bench.accepted < 0.1


@only("itself")
def test_a_draft_model_is_right_as_often_after_prefix_hits_preemptions_and_in_small_chunks(bench: DraftBench) -> None:
    """What it has read of a text stays usable, whichever request computed it and whatever became of the blocks."""
    tight: dict[str, Any] = {"num_kv_blocks": 14, "scheduler": FEW_BLOCKS}
    for settings in ({"rounds": 3}, tight, tight | {"rounds": 2}, {"max_num_batched_tokens": 16, "max_num_seqs": 3}):
        bench.serve(GREEDY, **settings)
        assert bench.accepted > 0.99


@only("itself", "noisy")
def test_sampled_tokens_have_the_models_distribution_whatever_is_proposed(bench: DraftBench) -> None:
    """Each row has the newest token and two that the draft model proposes.
    Each sampled token is judged given those before it."""
    executor = bench.executor
    blocks = [(2 * number + 2, 2 * number + 3) for number in range(ROWS // 2)]
    for number, table in enumerate(blocks):
        executor.launch(StepPlan(number, (chunk("c", CONTEXT, 0, len(CONTEXT), table),)))
        executor.collect()
    asked = RowSampling(temperature=1.0, top_k=KEPT, top_p=1.0, min_p=0.0, seed=0)
    whole, newest = DraftContext(0, (*CONTEXT, 5)), DraftContext(len(CONTEXT), (5,))
    counts: dict[tuple[int, ...], torch.Tensor] = {}
    for begin in range(0, SEEDS, len(blocks)):
        rows = [
            decode(str(number), 5, len(CONTEXT), table)._replace(
                token_ids=(5, DRAFT_TOKEN, DRAFT_TOKEN),
                sampling=dataclasses.replace(asked, seed=begin + number),
                draft_context=newest if begin else whole,
            )
            for number, table in enumerate(blocks)
        ]
        executor.launch(StepPlan(begin, tuple(rows)))
        for tokens in executor.collect().sampled:
            for place, token in enumerate(tokens):
                counts.setdefault(tokens[:place], torch.zeros(VOCAB, dtype=torch.float64))[token] += 1
    assert counts[()].sum() == SEEDS
    assert len(counts) == 3, "what follows is sampled where the draft was, and nowhere else"
    for before, found in counts.items():
        assert found.sum() == (SEEDS if not before else counts[before[:-1]][before[-1]]) > 100
        want = distribution(executor, [*CONTEXT, 5, *before])
        assert chi_square(found, want) < MOST_CHI_SQUARE


# --- how it starts ---------------------------------------------------------------------------------------------------


def test_the_draft_models_memory_is_part_of_the_budget_and_its_cost_is_reported(checkpoints: dict[str, Path]) -> None:
    asked: dict[str, Any] = ASKED | {"num_kv_blocks": None, "kv_cache_memory_gib": 0.01, "kernels": "torch_cpu"}
    found = {}
    for name in (None, "itself"):
        speculative = NONE if name is None else drafted_by(checkpoints[name])
        executor, resolved = create_executor(checkpoints["itself"], EngineConfig(**asked, speculative=speculative))
        found[name] = resolved
        executor.shutdown()
    assert found["itself"].num_kv_blocks == found[None].num_kv_blocks // 2
    assert "of them the draft model's" in found["itself"].reasons["num_kv_blocks"]
    assert found["itself"].speculative.model_cost == 1.0
    assert "a pass of the draft model takes 1.00 of a step" in found["itself"].reasons["speculative"]


def test_a_smaller_model_costs_less(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    save_tokenizer(tmp_path)
    edit_config(tmp_path, num_hidden_layers=1)
    asked = EngineConfig(**ASKED, load_format="dummy", speculative=drafted_by(tmp_path))
    executor, resolved = create_executor(checkpoints["itself"], asked)
    assert 0.3 < (resolved.speculative.model_cost or 0) < 0.7
    executor.shutdown()


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "another size of vocabulary": (
        lambda directory: (save_model("llama", directory), edit_config(directory, vocab_size=207)),
        r"whose vocabulary has 207 tokens, but the model's has 211",
    ),
    "another tokenizer": (
        lambda directory: (save_model("llama", directory), save_tokenizer(directory, t17=18, t18=17)),
        r"whose tokenizer differs: token 17 is 't18' in the draft model, and 't17' in the model",
    ),
    "recurrent state": (
        lambda directory: save_model("qwen3_next", directory),
        r"speculative\.model is .*, but Qwen3NextForCausalLM has a recurrent state: .* cannot be rolled back",
    ),
    "fewer positions": (
        lambda directory: (save_model("llama", directory), edit_config(directory, max_position_embeddings=64)),
        r"max_model_len is 256, but the draft model in .* supports at most 64 positions: set .* to 64 or less",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_checkpoint_that_cannot_draft_for_this_one_is_refused_by_what_differs(
    checkpoints: dict[str, Path], tmp_path: Path, what: str
) -> None:
    save, message = REFUSED[what]
    save(tmp_path)
    if not (tmp_path / "tokenizer.json").exists():
        save_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match=message):
        create_executor(checkpoints["itself"], EngineConfig(**ASKED, speculative=drafted_by(tmp_path)))


def test_a_draft_model_that_cannot_be_read_is_refused_by_the_setting_and_the_name(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """Whoever starts such a server has named two models, so the message has to say which of them is wrong."""
    asked = EngineConfig(**ASKED, speculative=drafted_by(Path("nowhere")))
    with pytest.raises(ModelError, match=r"speculative\.model is nowhere: No model 'nowhere'"):
        create_executor(checkpoints["itself"], asked)
    save_model("llama", tmp_path)
    save_tokenizer(tmp_path)
    edit_config(tmp_path, hidden_act="gelu")
    asked = EngineConfig(**ASKED, speculative=drafted_by(tmp_path))
    with pytest.raises(ModelError, match=r"speculative\.model is .*: .*config\.json: hidden_act 'gelu' is not"):
        create_executor(checkpoints["itself"], asked)


def test_models_that_take_images_have_no_draft_model(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    asked = EngineConfig(**ASKED, speculative=drafted_by(checkpoints["itself"]))
    save_vision_model(tmp_path)
    with pytest.raises(ConfigError, match="takes images: draft models cannot process images"):
        create_executor(tmp_path, asked)


@needs_compiler
def test_kernels_that_a_draft_model_cannot_have_are_refused_by_its_name_unless_only_batch_invariance_asks(
    checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This is decided before any weights are loaded.
    The bits of an answer are the model's own, whatever drafts for it."""
    save_model("llama", tmp_path)
    save_tokenizer(tmp_path)
    edit_config(tmp_path, head_dim=10)
    asked = EngineConfig(**ASKED | {"kernels": "auto"}, batch_invariant=True, speculative=drafted_by(tmp_path))
    executor, _ = create_executor(checkpoints["itself"], dataclasses.replace(asked, load_format="dummy"))
    executor.shutdown()
    monkeypatch.setattr("engine.build.model.load_weights", lambda *_, **__: pytest.fail("weights were loaded"))
    with pytest.raises(ConfigError, match=r"speculative\.model is .*, for which kernels is native.*head_dim is 10"):
        create_executor(checkpoints["itself"], dataclasses.replace(asked, kernels="native"))


def test_a_gpu_engine_has_no_draft_model(checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice()
    monkeypatch.setattr("engine.build.executor.choose_device", lambda config: (device, "a fake one"))
    asked = EngineConfig(speculative=drafted_by(checkpoints["itself"]))
    with pytest.raises(ConfigError, match="draft_model, but this engine runs on fake GPU: a draft model runs on"):
        create_executor(checkpoints["itself"], asked)


def test_a_row_whose_newest_token_is_not_read_is_refused(bench: DraftBench) -> None:
    row = decode("a", 5, 3, (0,))._replace(token_ids=(5, DRAFT_TOKEN), draft_context=DraftContext(0, (1, 2)))
    with pytest.raises(ValueError, match="drafts of a text that is read to DraftContext"):
        bench.executor.launch(StepPlan(0, (row,)))


@pytest.mark.parametrize("kernels", [pytest.param("native", marks=needs_compiler), "torch_cpu"])
def test_a_draft_model_without_a_finite_logit_for_one_row_costs_only_its_drafts(
    checkpoints: dict[str, Path], kernels: Any
) -> None:
    """The native kernels gave a token behind the vocabulary, and the next pass failed for all rows."""
    asked = EngineConfig(**ASKED, kernels=kernels, speculative=drafted_by(checkpoints["itself"], num_tokens=2))
    executor, _ = create_executor(checkpoints["itself"], asked)
    draft_model = executor._draft_model
    assert draft_model is not None
    draft_model.model.decoder.weights.embedding[7] = torch.nan

    def drafted(name: str, token: int, prompt: list[int], block: int) -> ScheduledRequest:
        row = decode(name, token, len(prompt), (block,))
        context = DraftContext(0, (*prompt, token))
        return row._replace(token_ids=(token, DRAFT_TOKEN, DRAFT_TOKEN), draft_context=context)

    prompts = [[7, 3, 5, 9], [4, 3, 5, 9]]
    executor.launch(
        StepPlan(0, tuple(chunk(n, p, 0, 4, (i,)) for i, (n, p) in enumerate(zip("ab", prompts, strict=True))))
    )
    first = executor.collect().sampled
    rows = [drafted(n, first[i][0], p, i) for i, (n, p) in enumerate(zip("ab", prompts, strict=True))]
    executor.launch(StepPlan(1, tuple(rows)))
    output = executor.collect()
    assert not output.failed
    assert len(output.sampled[1]) == 3, "both drafts of the model itself are right"
    executor.shutdown()


def test_adapters_are_drafted_for_by_the_model_as_it_is(checkpoints: dict[str, Path]) -> None:
    asked = EngineConfig(**ASKED, max_loras=1, speculative=drafted_by(checkpoints["itself"], num_tokens=4))
    bench = DraftBench("itself", *create_executor(checkpoints["itself"], asked))
    want = bench.serve(GREEDY, speculative=NONE, num_speculative_tokens=0)
    assert bench.serve(GREEDY) == want
    assert bench.accepted > 0.99
    bench.executor.shutdown()


@needs_compiler
@pytest.mark.parametrize("how", [{"kv_cache_dtype": "int8"}, {"quantize": "int8"}, {"dtype": "bfloat16"}], ids=str)
def test_both_models_are_in_fewer_bits_and_the_text_is_the_same_to_the_bit(
    checkpoints: dict[str, Path], how: dict[str, Any]
) -> None:
    asked = EngineConfig(
        **ASKED | how, batch_invariant=True, speculative=drafted_by(checkpoints["itself"], num_tokens=4)
    )
    bench = DraftBench("itself", *create_executor(checkpoints["itself"], asked))
    want = bench.serve(SCORED, speculative=NONE, num_speculative_tokens=0)
    assert bench.serve(SCORED) == want
    bench.serve(GREEDY)
    assert bench.accepted > 0.99
    bench.executor.shutdown()
