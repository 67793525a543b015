"""Owns the promise that what is answered to images is what transformers answers, however it was scheduled.
Never uses bfloat16 where two orders of addition may flip a near tie."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.config import ResolvedConfig, SchedulerConfig
from engine.core.core import EngineCore
from engine.execution.executor import TorchExecutor
from engine.models.encoding import EncodingModel
from engine.models.native_encoding import NativeEncodingModel
from engine.protocol import Finished, PromptLogprobs, SamplingParams, Submission, Token
from engine.scheduling.request import create_request
from tests.golden.models import make_executor
from tests.golden.scoring import check, compare
from tests.golden.vision import VISION, forced_logits, logits_of_transformers, scored_prompts, vision_prompts
from tests.support.compiler import needs_compiler
from tests.support.tiny_vision import Shown, save_vision_model

NEW_TOKENS = 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
SCORED = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=0)
PROMPTS = vision_prompts()


class VisionBench:
    """One checkpoint used by many cores, and what transformers answers."""

    def __init__(self, directory: Path, kernels: str) -> None:
        self.directory, self.kernels = directory, kernels
        self.model = save_vision_model(directory)
        self.executor: TorchExecutor
        self.resolved: ResolvedConfig
        self.executor, self.resolved = make_executor(directory, "float32", num_threads=1, kernels=kernels)
        self.want = [self._answer(prompt) for prompt in PROMPTS]
        self.preemptions = self.drafted = 0
        self.logprobs: list[list[float]] = []
        self.cached: dict[str, int] = {}
        self.scores: dict[str, list[float]] = {}

    def _answer(self, prompt: Shown) -> list[int]:
        given = prompt.for_transformers()
        answer = self.model.generate(
            **given, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        found: list[int] = answer[0, len(prompt.token_ids) :].tolist()
        return found

    def serve(
        self,
        prompts: list[Shown],
        params: SamplingParams = GREEDY,
        *,
        rounds: int = 1,
        num_answer_tokens: int = 0,
        **overrides: Any,
    ) -> list[list[int]]:
        """Submit all prompts at once in each round; return the texts of the last one."""
        core = EngineCore(self.executor, dataclasses.replace(self.resolved, **overrides))
        for _ in range(rounds):
            texts: dict[str, list[int]] = {str(number): [] for number in range(len(prompts))}
            logprobs: dict[str, list[float]] = {name: [] for name in texts}
            for number, prompt in enumerate(prompts):
                submission = Submission(
                    str(number),
                    tuple(prompt.token_ids),
                    params,
                    inputs=prompt.inputs,
                    num_answer_tokens=num_answer_tokens,
                )
                core.submit(create_request(submission, core.config, number))
            while core.has_work:
                events = core.step()
                self.drafted += sum(verified.num_drafted for verified in core.last_step.verified)
                for event in events:
                    if isinstance(event, Token):
                        texts[event.request_id].append(event.token_id)
                        logprobs[event.request_id] += [event.logprobs.logprob] if event.logprobs else []
                    elif isinstance(event, PromptLogprobs):
                        self.scores[event.request_id] = [score.logprob for score in event.logprobs]
                    else:
                        assert not hasattr(event, "code"), event
                        if isinstance(event, Finished):
                            self.cached[event.request_id] = event.usage.cached_tokens
        self.preemptions = core.load().num_preemptions
        self.logprobs = list(logprobs.values())
        return list(texts.values())


@pytest.fixture(scope="module", params=[pytest.param("native", marks=needs_compiler), "torch_cpu"])
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> VisionBench:
    return VisionBench(tmp_path_factory.mktemp("vision"), request.param)


def budget(prefill: int) -> dict[str, Any]:
    """Return settings with this budget. If an image is larger than the budget,
    a step exceeds it for that image only."""
    policy = SchedulerConfig(atomic_policy="extend", chunk_align=1)
    return {"max_num_batched_tokens": 128, "max_prefill_tokens": prefill, "max_num_seqs": 4, "scheduler": policy}


WHOLE = {"max_num_batched_tokens": 512, "max_prefill_tokens": 512, "max_num_seqs": 4}


def test_the_encoder_gives_what_transformers_gives(bench: VisionBench) -> None:
    """The difference is as small as that between transformers' two ways of attention."""
    model = bench.executor.model
    assert isinstance(model, EncodingModel | NativeEncodingModel)

    def embeddings(attention: str) -> Tensor:
        bench.model.set_attn_implementation(attention)
        visual = bench.model.model.visual
        return torch.cat([visual(prompt.pixel_values, grid_thw=prompt.grids).pooler_output for prompt in PROMPTS])

    with torch.inference_mode():
        floor = (embeddings("eager") - (want := embeddings("sdpa"))).abs()
        inputs = [given for prompt in PROMPTS for given in prompt.inputs]
        got = torch.cat([model.contents.encoder.encode(given.grid, given.data) for given in inputs])
    off = (got - want).abs()
    assert off.mean() <= 4 * floor.mean()
    assert off.flatten().quantile(0.99) <= 4 * floor.flatten().quantile(0.99)


@pytest.mark.parametrize("chunk_size", [4, 64, None])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_log_probabilities_are_close_to_those_of_transformers(
    bench: VisionBench, dtype: str, chunk_size: int | None
) -> None:
    """Chunks also end inside of images: the forced logits here know no spans."""
    executor = bench.executor
    if dtype != "float32":
        executor, _ = make_executor(bench.directory, dtype, num_threads=1, kernels=bench.kernels)
    prompts = scored_prompts()
    got = [forced_logits(executor, prompt, chunk_size) for prompt in prompts]
    want = logits_of_transformers(bench.model, prompts)
    check(f"{VISION}.{dtype}", compare(got, want, [prompt.token_ids for prompt in prompts]))


@pytest.mark.parametrize("settings", [budget(3), budget(16)], ids=["3", "16"])
def test_the_log_probabilities_of_a_prompt_do_not_depend_on_its_chunks(
    bench: VisionBench, settings: dict[str, Any]
) -> None:
    bench.serve(PROMPTS, SCORED, **WHOLE, enable_prefix_caching=False)
    whole = dict(bench.scores)
    bench.serve(PROMPTS, SCORED, **settings)
    for name, scores in bench.scores.items():
        assert scores == pytest.approx(whole[name], abs=1e-4)


@pytest.mark.parametrize("settings", [budget(3), budget(16), WHOLE], ids=["3", "16", "whole"])
def test_greedy_text_is_that_of_transformers_for_every_chunk_budget_beside_any_neighbours(
    bench: VisionBench, settings: dict[str, Any]
) -> None:
    assert bench.serve(PROMPTS, enable_prefix_caching=False, **settings) == bench.want
    alone = [bench.serve([prompt], enable_prefix_caching=False, **settings)[0] for prompt in PROMPTS]
    assert alone == bench.want


@pytest.mark.parametrize("settings", [budget(16), WHOLE], ids=["16", "whole"])
def test_greedy_text_is_the_same_after_a_prefix_cache_hit(bench: VisionBench, settings: dict[str, Any]) -> None:
    assert bench.serve(PROMPTS, rounds=2, **settings) == bench.want
    assert bench.cached["2"] >= 96, "of text before an image"
    assert bench.cached["0"] >= 64, "with the image"


@pytest.mark.parametrize("how", ["lifo", "retract"])
def test_greedy_text_is_the_same_after_a_preemption_computes_it_again(bench: VisionBench, how: str) -> None:
    policy = SchedulerConfig(reserve_mode="prompt", preempt_policy=how, watermark_blocks=0)
    blocks = sum(-(-len(PROMPTS[number].token_ids) // 16) for number in (0, 1))
    prompts = [PROMPTS[0], PROMPTS[1]]
    got = bench.serve(prompts, **WHOLE | {"scheduler": policy}, num_kv_blocks=blocks, enable_prefix_caching=False)
    assert bench.preemptions > 0
    assert got == bench.want[:2]


@pytest.mark.parametrize("settings", [budget(3), budget(16), WHOLE], ids=["3", "16", "whole"])
def test_greedy_text_is_the_same_where_steps_overlap(bench: VisionBench, settings: dict[str, Any]) -> None:
    """A step is planned, and its images are encoded, before the tokens of the one before are known."""
    got = bench.serve(PROMPTS, overlap=True, num_speculative_tokens=0, enable_prefix_caching=False, **settings)
    assert got == bench.want


def test_greedy_text_goes_on_at_another_engine_that_is_shown_the_images_again(bench: VisionBench) -> None:
    for cut in (1, 7):
        rest = dataclasses.replace(GREEDY, max_tokens=NEW_TOKENS - cut)
        resumed = [
            dataclasses.replace(prompt, token_ids=prompt.token_ids + text[:cut])
            for prompt, text in zip(PROMPTS, bench.want, strict=True)
        ]
        got = bench.serve(resumed, rest, num_answer_tokens=cut, enable_prefix_caching=False, **WHOLE)
        assert got == [text[cut:] for text in bench.want]


def test_log_probabilities_are_the_same_with_drafts(bench: VisionBench) -> None:
    """A decode row of several tokens, which a grammar forces here, has its positions behind the images, too."""
    forced = dataclasses.replace(GREEDY, ignore_eos=False, logprobs=0, grammar='start: "abcdefgh"')
    scores = []
    for count in (0, 4):
        texts = bench.serve(PROMPTS, forced, **WHOLE, num_speculative_tokens=count)
        assert [bytes(tokens) for tokens in texts] == [bytes(texts[0])] * len(PROMPTS)
        scores.append(bench.logprobs)
    assert bench.drafted > 0
    for one, other in zip(*scores, strict=True):
        assert one == pytest.approx(other, abs=1e-4)


@needs_compiler
def test_in_bfloat16_the_native_kernels_give_the_same_bits_whatever_happens(tmp_path: Path) -> None:
    bench = VisionBench(tmp_path, "native")
    bench.executor, bench.resolved = make_executor(tmp_path, "bfloat16", num_threads=1, batch_invariant=True)
    scored = dataclasses.replace(GREEDY, logprobs=0)
    texts, logprobs = [], []
    for prompt in PROMPTS:
        texts += bench.serve([prompt], scored, enable_prefix_caching=False, **WHOLE)
        logprobs += bench.logprobs
    for settings, rounds in ((budget(16), 1), (budget(16), 2), (WHOLE, 2)):
        assert (bench.serve(PROMPTS, scored, rounds=rounds, **settings), bench.logprobs) == (texts, logprobs)
    assert bench.cached["0"] >= 64, "with the image"
    policy = SchedulerConfig(reserve_mode="prompt", preempt_policy="lifo", watermark_blocks=0)
    blocks = sum(-(-len(prompt.token_ids) // 16) for prompt in PROMPTS[:2])
    tight = WHOLE | {"scheduler": policy, "num_kv_blocks": blocks, "enable_prefix_caching": False}
    assert (bench.serve(PROMPTS[:2], scored, **tight), bench.logprobs) == (texts[:2], logprobs[:2])
    assert bench.preemptions > 0


def test_the_reference_kernels_give_the_same(bench: VisionBench) -> None:
    executor, _ = make_executor(bench.directory, "float32", num_threads=1, kernels="reference")
    for prompt in PROMPTS:
        got, want = forced_logits(executor, prompt, None), forced_logits(bench.executor, prompt, None)
        torch.testing.assert_close(got.log_softmax(-1), want.log_softmax(-1), atol=1e-4, rtol=0)
