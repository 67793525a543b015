"""Owns the golden gate of LoRA adapters: each is compared with transformers with the adapter merged into the weights.
Never uses bfloat16 where texts are compared: there two orders of addition may flip a near tie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.config import SchedulerConfig
from engine.core.core import EngineCore
from engine.execution.executor import TorchExecutor
from engine.protocol import AdapterRef, Finished, SamplingParams, Submission, Token
from engine.scheduling.request import create_request
from engine.step import StepPlan
from tests.golden.adapters import ADAPTERS, KIND
from tests.golden.models import family_sequences, make_executor
from tests.golden.scoring import check, compare, transformers_logits
from tests.support.compiler import needs_compiler
from tests.support.plans import chunk
from tests.support.tiny_adapters import ATTENTION, FUSED, MLP, merged, save_adapter
from tests.support.tiny_models import make_model, save_model

CHUNKS = (3, 16, None)
SEQUENCES = family_sequences()
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


class Merged:
    """A checkpoint and its adapters, each with the model that merging it gives; number 0 is the model itself."""

    def __init__(self, kind: str, directory: Path, adapters: Sequence[dict[str, Any]]) -> None:
        self.directory = directory / "model"
        model = save_model(kind, self.directory)
        self.paths = [save_adapter(model, directory / str(n), **options) for n, options in enumerate(adapters)]
        self.models: list[PreTrainedModel] = [model, *(merged(model, path) for path in self.paths)]
        self._logits: dict[int, list[Tensor]] = {}

    def want(self, number: int) -> list[Tensor]:
        """Return the logits of SEQUENCES, computed once."""
        if number not in self._logits:
            self._logits[number] = transformers_logits(self.models[number], SEQUENCES)
        return self._logits[number]

    def greedy(self, number: int, prompt: Sequence[int]) -> list[int]:
        ids = torch.tensor([list(prompt)])
        answer = self.models[number].generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, eos_token_id=None
        )
        return answer[0, len(prompt) :].tolist()


class Adapted:
    """An executor with the adapters of `merged`; number 0 is none."""

    def __init__(self, merged: Merged, dtype: str = "float32", kernels: str = "torch_cpu") -> None:
        self.merged = merged
        settings = {"dtype": dtype, "num_threads": 1, "max_loras": 8, "kernels": kernels}
        self.executor, self.resolved = make_executor(merged.directory, **settings)
        host = self.executor.model.adapters
        assert host is not None
        self.refs: list[AdapterRef | None] = [None]
        for number, path in enumerate(merged.paths):
            digest, weights = host.read(str(path))
            host.keep(digest, weights)
            self.refs.append(AdapterRef(str(number), str(path), digest))

    def digest(self, number: int) -> str:
        ref = self.refs[number]
        return "" if ref is None else ref.digest

    def serve(self, asked: Sequence[tuple[int, Sequence[int]]], *, rounds: int = 1, **overrides: Any) -> Served:
        """Submit all of `asked`, (adapter, prompt) each, at once; return the results of the last round."""
        core = EngineCore(self.executor, replace(self.resolved, **overrides))
        served = Served([], [])
        for _ in range(rounds):
            served = Served([[] for _ in asked], [0] * len(asked))
            for number, (adapter, prompt) in enumerate(asked):
                submission = Submission(str(number), tuple(prompt), GREEDY, adapter=self.refs[adapter])
                core.submit(create_request(submission, core.config, number))
            while core.has_work:
                for event in core.step():
                    if isinstance(event, Token):
                        served.texts[int(event.request_id)].append(event.token_id)
                    elif isinstance(event, Finished):
                        served.cached[int(event.request_id)] = event.usage.cached_tokens
        served.preemptions = core.load().num_preemptions
        return served


class Served:
    def __init__(self, texts: list[list[int]], cached: list[int]) -> None:
        self.texts, self.cached, self.preemptions = texts, cached, 0


KERNELS = [pytest.param("native", marks=needs_compiler), "torch_cpu"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Merged:
    return Merged(KIND, tmp_path_factory.mktemp("adapted"), ADAPTERS)


@pytest.fixture(scope="module", params=KERNELS)
def adapted(request: pytest.FixtureRequest, models: Merged) -> Adapted:
    return Adapted(models, kernels=request.param)


def step_logits(executor: TorchExecutor, adapters: Sequence[str], chunk_size: int | None) -> list[Tensor]:
    """Return teacher-forced logits of all sequences side by side in each step, each with its adapter."""
    tables = [range(number, 12 * len(SEQUENCES), len(SEQUENCES)) for number in range(len(SEQUENCES))]
    parts: list[list[Tensor]] = [[] for _ in SEQUENCES]
    size = chunk_size or max(map(len, SEQUENCES))
    for start in range(0, max(map(len, SEQUENCES)), size):
        live = [number for number, tokens in enumerate(SEQUENCES) if start < len(tokens)]
        rows = [
            chunk(str(n), SEQUENCES[n], start, min(start + size, len(SEQUENCES[n])), tables[n])._replace(
                adapter=adapters[n]
            )
            for n in live
        ]
        logits = executor.logits(StepPlan(start, tuple(rows))).float()
        for number, part in zip(live, logits.split([len(row.token_ids) for row in rows]), strict=True):
            parts[number].append(part)
    return [torch.cat(part) for part in parts]


def hold(adapted: Adapted, chunk_size: int | None, floor: str) -> None:
    """Check steps whose neighbouring rows have all adapters in turn, and none."""
    numbers = [i % len(adapted.refs) for i in range(len(SEQUENCES))]
    got = step_logits(adapted.executor, [adapted.digest(number) for number in numbers], chunk_size)
    want = [adapted.merged.want(number)[i] for i, number in enumerate(numbers)]
    check(floor, compare(got, want, SEQUENCES))


@pytest.mark.parametrize("chunk_size", CHUNKS)
def test_rows_of_several_adapters_in_one_step_are_those_of_the_merged_models(
    adapted: Adapted, chunk_size: int | None
) -> None:
    hold(adapted, chunk_size, "adapters.float32")


# The checkpoint of phi3 is stacked, and its heads are rotated in part; experts cannot be adapted.
@pytest.mark.parametrize(
    ("kind", "modules"),
    [
        ("llama3", ATTENTION + MLP),
        ("yarn", ATTENTION + MLP),
        ("qwen2", ATTENTION + MLP),
        ("qwen3", ATTENTION + MLP),
        ("mistral", ATTENTION + MLP),
        ("gemma3", ATTENTION + MLP),
        ("smollm3", ATTENTION + MLP),
        ("phi3", FUSED),
        ("qwen3_moe", ATTENTION),
        ("mixtral", ATTENTION),
    ],
)
@pytest.mark.parametrize("kernels", [KERNELS[0], pytest.param("torch_cpu", marks=pytest.mark.slow)])
def test_a_family_with_an_adapter_is_as_close_to_transformers_as_without(
    kind: str, modules: tuple[str, ...], kernels: str, tmp_path: Path
) -> None:
    if (kind, kernels) == ("yarn", "native"):
        pytest.skip("its heads of 8 are too small for the native kernels")
    adapters = [{"seed": 5, "modules": modules}, {"seed": 6, "modules": modules}]
    adapted = Adapted(Merged(kind, tmp_path, adapters), kernels=kernels)
    hold(adapted, 16, f"{kind}.float32")


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("chunk_size", CHUNKS)
def test_adapters_in_bfloat16_are_as_close_as_those_of_transformers(
    models: Merged, chunk_size: int | None, kernels: str
) -> None:
    hold(Adapted(models, "bfloat16", kernels), chunk_size, "adapters.bfloat16")


def test_a_row_without_an_adapter_is_the_same_to_the_bit_as_at_a_server_without_any(
    adapted: Adapted, tmp_path: Path
) -> None:
    make_model(KIND).save_pretrained(tmp_path)
    plain, _ = make_executor(tmp_path, "float32", num_threads=1, kernels=adapted.resolved.kernels)
    want = step_logits(plain, [""] * len(SEQUENCES), 16)
    numbers = [i % 2 * 3 for i in range(len(SEQUENCES))]
    got = step_logits(adapted.executor, [adapted.digest(number) for number in numbers], 16)
    for i, number in enumerate(numbers):
        assert torch.equal(got[i], want[i]) is (number == 0)


ASKED = [(number, SEQUENCES[i]) for i in (2, 4) for number in range(5)]
"""The same two prompts, with each adapter and with none."""


@pytest.fixture(scope="module")
def texts(models: Merged) -> list[list[int]]:
    return [models.greedy(number, prompt) for number, prompt in ASKED]


@pytest.mark.parametrize("budget", [3, 16, 512])
def test_greedy_text_of_each_adapter_is_that_of_its_merged_model_for_every_chunk_budget(
    adapted: Adapted, texts: list[list[int]], budget: int
) -> None:
    assert len({tuple(text) for text in texts[:5]}) == 5, "the adapters make a difference"
    settings = {"max_num_batched_tokens": budget, "max_prefill_tokens": budget, "max_num_seqs": min(10, budget - 1)}
    assert adapted.serve(ASKED, enable_prefix_caching=False, **settings).texts == texts


def test_prefixes_are_shared_within_an_adapter_and_never_across(adapted: Adapted, texts: list[list[int]]) -> None:
    prompt = SEQUENCES[4]
    one_by_one = [adapted.serve([(number, prompt)]) for number in range(5)]
    assert [served.cached for served in one_by_one] == [[0]] * 5, "each bench has a cache of its own"
    first = adapted.serve(ASKED[5:], max_num_seqs=1)
    assert (first.texts, first.cached) == (texts[5:], [0] * 5)
    again = adapted.serve(ASKED[5:], rounds=2)
    assert again.texts == texts[5:]
    assert set(again.cached) == {len(prompt) // 16 * 16 - 16 * (len(prompt) % 16 == 0)}


def test_text_of_an_adapter_is_the_same_after_a_preemption(adapted: Adapted, texts: list[list[int]]) -> None:
    policy = SchedulerConfig(reserve_mode="prompt", preempt_policy="lifo", watermark_blocks=0)
    settings = {"num_kv_blocks": 9, "scheduler": policy, "enable_prefix_caching": False, "max_num_seqs": 5}
    served = adapted.serve(ASKED[:5], **settings)
    assert served.texts == texts[:5]
    assert served.preemptions > 0
