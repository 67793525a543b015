"""Owns reverts of known fixes, a long table, and the proof that a test catches each: `python -m tests.mutations`.
Never touches the checkout except tests/mutations.md: every revert is applied to a copy in a temporary directory."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

import pytest

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "tests" / "mutations.md"
TIMEOUT_S = 900
WORKERS = min(os.cpu_count() or 1, 4)
"""The number of copies of the checkout, each of which tries one revert at a time."""

Item = TypeVar("Item")
_CODE = re.compile(r"\b(?:S\d-R\d+|I-\d+|R\d+)\b")

ANSWER_LENGTHS = "tests/engine/scheduling/test_answer_lengths.py"
ASYNC = "tests/engine/test_async_engine.py"
BATCH_MODES = "tests/engine/scheduling/test_batch_modes.py"
BESIDE_OVERLAP = "tests/engine/core/test_drafts_beside_overlap.py"
BLOCKS = "tests/engine/scheduling/test_block_manager.py"
CHUNK_POLICY = "tests/engine/scheduling/test_chunk_policy.py"
CHUNK_OWNER = "tests/engine/core/test_engine_chunking.py"
COALESCING = "tests/engine/core/test_coalescing.py"
CONFIG = "tests/engine/test_config.py"
CONTROLS = "tests/engine/batch/test_logit_controls.py"
CORE = "tests/engine/core/test_core.py"
DECODE_LOOP = "tests/engine/execution/gpu/test_decode_loop.py"
DIVIDED_EXPERTS = "tests/kernels/collectives/test_experts.py"
DRAFTS = "tests/engine/core/test_drafts.py"
DRY_RUN = "tests/engine/scheduling/test_dry_run.py"
EXCHANGE = "tests/kernels/collectives/test_exchange.py"
EXECUTOR = "tests/engine/execution/test_executor.py"
LOGITS = f"{EXECUTOR}::test_logits_equal_transformers_for_every_family_and_chunk_size"
FORECAST = "tests/engine/scheduling/test_forecast.py"
GAPS = "tests/engine/core/test_mutation_gaps.py"
GROUP_RANKS = "tests/engine/parallel/test_group_ranks.py"
INVARIANT_ENGINE = "tests/engine/execution/gpu/test_batch_invariance.py"
INVARIANT_KERNELS = "tests/kernels/triton/test_batch_invariance.py"
GROUPED_EXPERTS = "tests/kernels/cpu/native/test_grouped_experts.py"
GRAMMAR = "tests/engine/batch/test_grammar.py"
LOAD = "tests/engine/test_load_snapshot.py"
LOCKSTEP_LIVES = "tests/engine/test_lockstep_lives.py"
LOGPROBS = "tests/engine/batch/test_logprobs.py"
MIXTURES = "tests/engine/lockstep/test_mixtures.py"
LATE_FAILURE = f"{MIXTURES}::test_a_rank_that_fails_once_others_have_its_rows_ends_all_and_nobody_gets_a_wrong_token"
MODEL_DRAFTS = "tests/engine/speculation/test_draft_model_policy.py"
NATIVE = "tests/kernels/cpu/native/test_program.py"
LOW_RANK = "tests/kernels/cpu/native/test_low_rank.py"
NATIVE_HYBRIDS = "tests/engine/models/test_native_hybrids.py"
NATIVE_IMAGES = "tests/kernels/cpu/native/test_multimodal.py"
NATIVE_IMAGE_MODELS = "tests/engine/models/test_native_encoding.py"
NATIVE_LINEAR = "tests/kernels/cpu/native/test_linear_attention.py"
OVERLAP = "tests/engine/core/test_overlap.py"
PADDING = "tests/engine/lockstep/test_padding.py"
PLANNER = "tests/engine/scheduling/test_planner.py"
PREEMPTION = "tests/engine/scheduling/test_preemption.py"
NARROW_BLOCKS = "tests/kernels/cpu/test_narrow_blocks.py"
NARROW_TIERS = "tests/engine/execution/test_narrow_tiers.py"
NATIVE_BLOCKS = "tests/kernels/cpu/native/test_blocks.py"
TIERS = "tests/engine/core/test_kv_tiers.py"
PREPARING = "tests/engine/scheduling/test_preparing.py"
SERVED_RANK = "tests/engine/parallel/test_served_rank.py"
RESERVATION = "tests/engine/scheduling/test_reservation.py"
PREFILL_RATE = "tests/engine/scheduling/test_prefill_rate.py"
RANKS = "tests/engine/lockstep/test_ranks.py"
RECURRENT = "tests/engine/models/test_recurrent_state.py"
RANKS_ENGINE = "tests/engine/parallel/test_engine_of_ranks.py"
RANKS_WHOLE = "tests/engine/parallel/test_whole_engine.py"
RANKS_START = "tests/engine/parallel/test_processes.py"
RANKS_FIT = "tests/engine/parallel/test_rank_fit.py"
LOCKSTEP_PROCESSES = "tests/engine/lockstep/test_processes.py"
LOCKSTEP_PLACES = "tests/engine/parallel/test_places.py"
RANKS_TCP = "tests/kernels/collectives/test_gloo.py"
RANKS_GROUP = "tests/kernels/collectives/test_group.py"
RANKS_MEMORY = "tests/kernels/collectives/test_shared_memory.py"
PREFILL_LIMIT = "tests/engine/scheduling/test_prefill_limit.py"
SPECULATION = "tests/engine/speculation/test_speculation.py"
SCORING = "tests/engine/execution/test_prompt_scoring.py"
SKIPPED = "tests/engine/scheduling/test_skipped_prompts.py"
SPANS = "tests/engine/scheduling/test_atomic_spans.py"
INPUTS = "tests/engine/test_multimodal_inputs.py"
STATES = "tests/engine/scheduling/test_state_slots.py"
WALL_TIMES = "tests/engine/core/test_wall_times.py"
TIMING = "tests/serve_app/api/timing/test_split.py"
TOKEN_COUNTS = "tests/engine/execution/gpu/test_token_counts.py"
TARGETS = "tests/engine/scheduling/test_targets.py"
SERVICE = "tests/engine/scheduling/test_service.py"
SHARDS = "tests/engine/models/test_shards.py"
STEP_PREDICTION = "tests/engine/scheduling/test_step_prediction.py"
TIME_BUDGET = "tests/engine/scheduling/test_time_budget.py"
WAITING = "tests/engine/scheduling/test_waiting.py"
WAITING_ORDER = "tests/engine/scheduling/test_waiting_order.py"


@dataclass(frozen=True)
class Mutation:
    """The revert of one fix: `old`, which occurs once in `file`, becomes `new`, and one of `tests` must fail."""

    name: str
    defect: str
    """What the revert does, as a sentence."""
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def codes(self) -> list[str]:
        """Return the defects and invariants of the specification that the name contains."""
        return [code if "-" in code else f"{self.name.split('-')[0]}-{code}" for code in _CODE.findall(self.name)]

    def named_tests(self) -> list[str]:
        """Return the tests that the specification's index names for its codes; they should catch it."""
        from tests.engine.test_specification import INDEX, named_by  # pytest has to rewrite it first

        named = [f"tests/{test}" for code in self.codes if code in INDEX for test in named_by(code)]
        return [*dict.fromkeys(test for test in named if test.startswith("tests/engine/"))]

    def apply(self, text: str) -> str:
        """
        Raises:
            StaleMutationError: `old` does not occur once.
        """
        if (count := text.count(self.old)) != 1:
            raise StaleMutationError(f"its text occurs {count} times in {self.file}, not once:\n{self.old}")
        return text.replace(self.old, self.new)


class StaleMutationError(Exception):
    """The code that a mutation replaces has changed since, so the mutation has to be written anew."""


MUTATIONS = (
    # --- who gets in ---------------------------------------------------------------------------------------------
    Mutation(
        "S1-R1",
        "A prompt of no tokens is accepted, and blocks the queue.",
        "engine/scheduling/request.py",
        "    if not prompt:\n",
        "    if prompt is None:\n",
        (CORE,),
    ),
    Mutation(
        "S1-R8 a",
        "A request's lifetime counts KV of its last token, which is never written.",
        "engine/scheduling/request.py",
        "return self.prompt_len + max(self.max_tokens, 1) - 1",
        "return self.prompt_len + max(self.max_tokens, 1)",
        (CORE, RESERVATION),
    ),
    Mutation(
        "S1-R8 b",
        "The KV cache refuses the request that fills it exactly.",
        "engine/config.py",
        "self.num_kv_blocks * self.block_size + 1)",
        "self.num_kv_blocks * self.block_size)",
        (CONFIG,),
    ),
    Mutation(
        "S2-R14",
        "A token budget that decode rows can use up is accepted, and prefill starves.",
        "engine/config.py",
        "least = self.max_num_seqs * (1 + (self.num_speculative_tokens or 0)) + 1",
        "least = self.max_num_seqs * (1 + (self.num_speculative_tokens or 0))",
        (CONFIG,),
    ),
    Mutation(
        "I-26 id reuse",
        "A second request may take the id of a live one, and gets that one's last events.",
        "engine/async_engine.py",
        "        if submission.request_id in self._streams:\n",
        "        if submission.request_id is None:\n",
        (ASYNC,),
    ),
    Mutation(
        "S4-R1",
        "Seats are counted without the prompts that are still being computed.",
        "engine/scheduling/planner.py",
        "seats = self._config.max_num_seqs - len(view.decoding) - len(view.prefilling)",
        "seats = self._config.max_num_seqs - len(view.decoding)",
        (CHUNK_POLICY,),
    ),
    # --- chunks --------------------------------------------------------------------------------------------------
    Mutation(
        "S2-R4",
        "A last chunk of one token is taken for a decode row.",
        "engine/scheduling/planner.py",
        "        self._num_partial[request.priority] += kind is RowKind.MIDDLE\n",
        "        kind = RowKind.DECODE if kind is RowKind.LAST and count == 1 else kind\n"
        "        self._num_partial[request.priority] += kind is RowKind.MIDDLE\n",
        (PLANNER,),
    ),
    Mutation(
        "S4-R10",
        "A chunk is final once it passes the prompt, even if an answer has to be recomputed after a preemption.",
        "engine/scheduling/planner.py",
        "kind = RowKind.LAST if end == target else RowKind.MIDDLE",
        "kind = RowKind.LAST if end >= request.prompt_len else RowKind.MIDDLE",
        (PREEMPTION,),
    ),
    Mutation(
        "S4-R9 a",
        "The plan re-prefills a preempted request up to its prompt and forgets its answer.",
        "engine/scheduling/planner.py",
        "start, target = len(prefix) * self._block_size, len(request.token_ids)",
        "start, target = len(prefix) * self._block_size, request.prompt_len",
        (PREEMPTION,),
    ),
    Mutation(
        "S4-R9 b",
        "A preempted request is re-admitted with its prompt as the target.",
        "engine/scheduling/scheduler.py",
        "        request.target = len(request.token_ids)\n",
        "        request.target = request.prompt_len\n",
        (PREEMPTION,),
    ),
    Mutation(
        "S4-R14",
        "A preemption strips the newest token as if it were a placeholder.",
        "engine/scheduling/scheduler.py",
        "        request.computed = request.scheduled = request.target = request.num_pending = 0\n",
        "        request.computed = request.scheduled = request.target = request.num_pending = 0\n"
        "        del request.token_ids[-1:]\n",
        (PREEMPTION,),
    ),
    Mutation(
        "S4-B14 sliver",
        "Alignment rounds a chunk down to nothing although the step has no other prefill, so its prompt starves.",
        "engine/scheduling/chunk_policy.py",
        "count = aligned if aligned > 0 else (0 if room.has_prefill else count)",
        "count = max(aligned, 0)",
        (CHUNK_POLICY,),
    ),
    Mutation(
        "S5-R17",
        "Nothing is admitted beside the tail chunk of a prompt.",
        "engine/scheduling/planner.py",
        "        if not self._has_taken_back:\n            self._admit(budget)\n",
        "        if not self._preempted and not self._view.prefilling:\n            self._admit(budget)\n",
        (CHUNK_POLICY,),
    ),
    Mutation(
        "S5-R3",
        "Any number of prompts may be partly computed, so that all share the budget and none makes progress.",
        "engine/scheduling/planner.py",
        "too_many = bool(most) and count < remaining and self._num_partial[request.priority] >= most",
        "too_many = False",
        (CHUNK_POLICY,),
    ),
    Mutation(
        "S5-R17 b",
        "A second long prompt holds up the short ones behind it, and the rest of the step is unused.",
        "engine/scheduling/planner.py",
        "return bool(self._skipped) or reason is not DeferReason.TOKENS or not may_be_cut",
        "return False",
        (SKIPPED,),
    ),
    Mutation(
        "S2-R12 e",
        "A prompt that goes around a span may be left partly computed, and is then first in the next step, too.",
        "engine/scheduling/planner.py",
        "too_many or (self._skipped and count < remaining)",
        "too_many",
        (SKIPPED,),
    ),
    Mutation(
        "S5-R17 c",
        "A step looks at all prompts behind one that cannot use the rest of the step.",
        "engine/scheduling/planner.py",
        " or len(self._skipped) >= MAX_PASSED:",
        ":",
        (SKIPPED,),
    ),
    Mutation(
        "S1-B18",
        "A request-local chunk may be longer than decode rows leave room for, and waits until they end.",
        "engine/scheduling/chunk_policy.py",
        "        budget = min(self._limit, beside_decodes)\n",
        "        budget = min(self._limit, self._config.max_num_batched_tokens)\n",
        (CHUNK_POLICY,),
    ),
    Mutation(
        "S1-B18 b",
        "A late chunk is charged for its tokens only, and what it costs beyond them is given to the next prompt.",
        "engine/scheduling/chunk_policy.py",
        "return count + -(-count * start // self._halving) if self._halving else count",
        "return count",
        (CHUNK_POLICY,),
    ),
    Mutation(
        "I-2 a",
        "Prefill may use all of the step's tokens instead of max_prefill_tokens.",
        "engine/scheduling/planner.py",
        "        budget = self._view.prefill_limit\n        if not",
        "        budget = self._config.max_num_batched_tokens\n        if not",
        (PLANNER,),
    ),
    Mutation(
        "I-2 b",
        "Decode rows are not deducted from the step's token budget.",
        "engine/scheduling/planner.py",
        "        budget = min(budget, self._tokens_left)\n        self._time",
        "        self._time",
        (PLANNER,),
    ),
    # --- modes and their bounds ----------------------------------------------------------------------------------
    Mutation(
        "S5-R14",
        "prefill_first keeps decode rows waiting for as long as prompts arrive.",
        "engine/scheduling/planner.py",
        "return (True, 0) if starved else (False, budget)",
        "return (False, budget)",
        (BATCH_MODES,),
    ),
    Mutation(
        "S1-R9",
        "decode_first keeps prompts waiting for as long as any request decodes.",
        "engine/scheduling/planner.py",
        "if (decode_first and not self._prompt_starves()) or",
        "if decode_first or",
        (BATCH_MODES,),
    ),
    Mutation(
        "I-23",
        "bypass lets others overtake a request that does not fit without a bound.",
        "engine/scheduling/planner.py",
        "            if self._passed and self._slack <= 0:\n",
        "            if self._passed and self._slack is None:\n",
        (PLANNER,),
    ),
    # --- reservation ---------------------------------------------------------------------------------------------
    Mutation(
        "I-15",
        "Full reservation ignores what admitted requests were promised.",
        "engine/scheduling/reservation.py",
        "<= self.available - self._promised",
        "<= self.available",
        (RESERVATION,),
    ),
    Mutation(
        "I-15 promises",
        "What was promised to a request is not given back when it is released, so that admission ends for good.",
        "engine/scheduling/scheduler.py",
        "        self._promised -= self._still_promised(request)\n",
        "",
        (RESERVATION,),
    ),
    Mutation(
        "S5-R1 a",
        "An answer counts in full for admission, whatever `reserve_clip` says.",
        "engine/scheduling/reservation.py",
        "return min(request.max_tokens - request.num_output, clip)",
        "return request.max_tokens - request.num_output",
        (RESERVATION,),
    ),
    Mutation(
        "S5-R1 b",
        "The answers admitted in one step are clipped a second time, as a sum.",
        "engine/scheduling/reservation.py",
        "        self._answer_tokens += reserved_tokens(request, self._clip)\n",
        "        more = reserved_tokens(request, self._clip)\n"
        "        self._answer_tokens = min(self._answer_tokens + more, self._clip)\n",
        (CHUNK_POLICY,),
    ),
    Mutation(
        "S5-R11",
        "A request that is alone must find its reservation free, too, and waits for ever although nobody can free it.",
        "engine/scheduling/reservation.py",
        "        if alone:\n",
        "        if alone and not needed:\n",
        (RESERVATION,),
    ),
    Mutation(
        "S5-R12",
        "A preempted request reserves its whole answer again instead of what is left of it.",
        "engine/scheduling/reservation.py",
        "return min(request.max_tokens - request.num_output, clip)",
        "return min(request.max_tokens, clip)",
        (RESERVATION,),
    ),
    Mutation(
        "S5-R2",
        "The ratio does not fall while requests wait, and so the queue never drains.",
        "engine/scheduling/scheduler.py",
        "        else:\n            kinds = ",
        "        elif not self.waiting:\n            kinds = ",
        (RESERVATION,),
    ),
    Mutation(
        "S5-R8",
        "A ratio that a preemption left below its least value stays there.",
        "engine/scheduling/reservation.py",
        "        if decoded and (not prefilled",
        "        if self.value > self._config.ratio_min and decoded and (not prefilled",
        (RESERVATION,),
    ),
    Mutation(
        "S5-R9",
        "An idle engine keeps the ratio of its last burst.",
        "engine/scheduling/scheduler.py",
        "            self._ratio.reset()\n",
        "            pass\n",
        (RESERVATION,),
    ),
    Mutation(
        "S5-R10",
        "retract_steps is read nowhere.",
        "engine/scheduling/reservation.py",
        "self._config.retract_steps * len(remaining)",
        "20 * len(remaining)",
        (RESERVATION,),
    ),
    Mutation(
        "reserve a",
        "An answer that was cut off is taken for one that ended there.",
        "engine/scheduling/answer_lengths.py",
        "        if by_itself:\n            self._ended[number] += 1\n",
        "        if number >= 0:\n            self._ended[number] += 1\n",
        (ANSWER_LENGTHS,),
    ),
    Mutation(
        "reserve b",
        "Nothing is learned from running answers before they end: on a fresh engine all answers seem short.",
        "engine/scheduling/forecast.py",
        "        if _ends_by_itself(request) and interval > entry.interval:\n",
        "        if _ends_by_itself(request) and interval < entry.interval:\n",
        (FORECAST,),
    ),
    Mutation(
        "reserve c",
        "An answer is counted again each time it loses its memory.",
        "engine/scheduling/forecast.py",
        "        if _ends_by_itself(request) and not request.was_scheduled:\n",
        "        if _ends_by_itself(request):\n",
        (FORECAST,),
    ),
    Mutation(
        "reserve d",
        "The expected rest of an answer does not depend on how long it already is.",
        "engine/scheduling/forecast.py",
        "table.row(self._lengths.interval(answered)) if mortal else",
        "table.row(0) if mortal else",
        (FORECAST,),
    ),
    Mutation(
        "reserve e",
        "An answer is expected to go on beyond its max_tokens.",
        "engine/scheduling/forecast.py",
        "        if left < clip:\n",
        "        if left < 0:\n",
        (FORECAST,),
    ),
    Mutation(
        "reserve f",
        "Running out of memory teaches nothing.",
        "engine/scheduling/scheduler.py",
        "self._forecast.after_step(preempted=len(plan.preempted))",
        "self._forecast.after_step(preempted=0)",
        (FORECAST,),
    ),
    Mutation(
        "reserve g",
        "Blocks that others also hold are expected to be free when a request ends.",
        "engine/scheduling/forecast.py",
        "        own = len(request.token_ids) - shared_blocks * self._block_size - _answered(request)\n",
        "        own = len(request.token_ids) - _answered(request)\n",
        (FORECAST,),
    ),
    # --- preemption ----------------------------------------------------------------------------------------------
    Mutation(
        "S5-R6, R7",
        "A victim keeps its decode row in the very step that takes its memory.",
        "engine/scheduling/planner.py",
        "            for request, count in zip(decoding, counts, strict=True)\n            if count\n",
        "            for request in self._view.decoding.values()\n"
        "            if (count := request.num_decode_tokens)\n",
        (RESERVATION,),
    ),
    Mutation(
        "S5-R13 a",
        "The oldest request may be a victim, again and again.",
        "engine/scheduling/planner.py",
        "candidates = [request for request in decoding if request is not self._elder]",
        "candidates = list(decoding)",
        (PREEMPTION,),
    ),
    Mutation(
        "S5-R13 b",
        "A preempted request waits behind all others by default.",
        "engine/scheduling/waiting.py",
        '            case "back":\n',
        '            case "back" | "arrival":\n',
        (PREEMPTION,),
    ),
    Mutation(
        "I-18",
        "Retraction takes the longest answer, which loses most.",
        "engine/scheduling/planner.py",
        "lambda request: (request.num_output, -request.prompt_len, -request.arrival_index)",
        "lambda request: (-request.num_output, -request.prompt_len, -request.arrival_index)",
        (PREEMPTION,),
    ),
    Mutation(
        "I-24",
        "A step that preempts one request admits another.",
        "engine/scheduling/planner.py",
        "        if not self._has_taken_back:\n            self._admit(budget)\n",
        "        self._admit(budget)\n",
        (PREEMPTION,),
    ),
    Mutation(
        "I-21",
        "Younger answers take the last block from the oldest request's prompt.",
        "engine/scheduling/planner.py",
        "while growth + self._elder_chunk() > self._available():",
        "while growth > self._available():",
        (PREEMPTION,),
    ),
    Mutation(
        "I-10 victims",
        "A block that a victim shares counts as freed although others still hold it.",
        "engine/scheduling/block_manager.py",
        "freed += gone[block_id] == self._holders[block_id]",
        "freed += gone[block_id] == 1",
        (GAPS,),
    ),
    # --- the prefix cache ----------------------------------------------------------------------------------------
    Mutation(
        "S4-R11 a",
        "All blocks of a prompt are allocated and published when it is admitted, before they are computed.",
        "engine/scheduling/scheduler.py",
        "        self._promised += self._still_promised(request)\n",
        "        self._promised += self._still_promised(request)\n"
        "        self._grow(request, request.prompt_len)\n"
        "        for block, digest in zip(request.block_ids, request.block_hashes):\n"
        "            self._blocks.publish(block, digest)\n",
        (CORE,),
    ),
    Mutation(
        "S4-R11 b",
        "A chunk's blocks are published when it is scheduled, and stay published if its step fails.",
        "engine/scheduling/scheduler.py",
        "        request.was_scheduled = True\n",
        "        request.was_scheduled = True\n"
        "        for i in range(min(end, request.prompt_len) // self._blocks.block_size):\n"
        "            self._blocks.publish(request.block_ids[i], request.block_hashes[i])\n",
        (CORE,),
    ),
    Mutation(
        "S4-R12",
        "The last block of a prompt counts as a hit, so that no token is left to compute.",
        "engine/scheduling/request.py",
        "count = len(self.token_ids) - 1",
        "count = len(self.token_ids)",
        (CORE,),
    ),
    Mutation(
        "S5-R18",
        "A waiting request looks its prefix up in every step.",
        "engine/scheduling/planner.py",
        "        if epoch != self._cache_epoch:\n",
        "        if epoch is not None:\n",
        (PLANNER,),
    ),
    Mutation(
        "I-10 claims",
        "A row's allocation may evict the cached prefix that a later row of the step starts from.",
        "engine/scheduling/scheduler.py",
        """        for row in plan.rows:
            if row.prefix_blocks is not None:  # all claims first, so that an allocation below cannot evict them
                self._admit(row.request, row.prefix_blocks, now)
        if self.loads is not None:
            self.loads.fetch(plan.loads, claimed, now)
        self._keep_ratio(plan)
        rows = tuple(self._schedule(row, now) for row in plan.rows)
""",
        """        if self.loads is not None:
            self.loads.fetch(plan.loads, claimed, now)
        self._keep_ratio(plan)
        scheduled = []
        for row in plan.rows:
            if row.prefix_blocks is not None:
                self._admit(row.request, row.prefix_blocks, now)
            scheduled.append(self._schedule(row, now))
        rows = tuple(scheduled)
""",
        (GAPS,),
    ),
    Mutation(
        "I-10 hits",
        "A cached prefix that nobody holds costs nothing at admission, although it can then no longer be evicted.",
        "engine/scheduling/planner.py",
        "shared = sum(view.blocks.is_held(block) or block in self._taken for block in prefix)",
        "shared = len(prefix)",
        (GAPS,),
    ),
    Mutation(
        "S1-R13",
        "Each request that shares a held prefix is charged for it again.",
        "engine/scheduling/planner.py",
        "shared = sum(view.blocks.is_held(block) or block in self._taken for block in prefix)",
        "shared = 0",
        (CORE,),
    ),
    Mutation(
        "I-11",
        "A block's hash does not cover what comes before it.",
        "engine/prefix.py",
        "parent = chain[-1] if chain else root",
        "parent = root",
        (CORE,),
    ),
    Mutation(
        "S4-R12 eviction",
        "The tail of a released prefix is kept longer than its head, without which it is useless.",
        "engine/scheduling/block_manager.py",
        "for block_id in reversed(block_ids):",
        "for block_id in block_ids:",
        (BLOCKS,),
    ),
    Mutation(
        "I-11 eviction",
        "The prefix released last is evicted first.",
        "engine/scheduling/block_manager.py",
        "self._evictable.popitem(last=False)",
        "self._evictable.popitem(last=True)",
        (BLOCKS,),
    ),
    Mutation(
        "I-10 release",
        "Releasing a block twice goes unnoticed.",
        "engine/scheduling/block_manager.py",
        'raise RuntimeError(f"block {block_id} was released twice")',
        "continue",
        (BLOCKS,),
    ),
    # --- ends and failures ---------------------------------------------------------------------------------------
    Mutation(
        "S1-R2, S4-R17",
        "An abort is ignored in the middle of a prompt.",
        "engine/core/core.py",
        "        if request is None:\n            return []\n        return self._end(self._applier.finish(",
        "        if request is None or request_id in self._scheduler.prefilling:\n            return []\n"
        "        return self._end(self._applier.finish(",
        (CORE,),
    ),
    Mutation(
        "S5-R21",
        "An abort is ignored while its request waits.",
        "engine/scheduling/scheduler.py",
        "return self.waiting.find(request_id)",
        "return None",
        (CORE,),
    ),
    Mutation(
        "S5-R22",
        "A request that ends in the middle of its prompt keeps its blocks.",
        "engine/scheduling/scheduler.py",
        "        self._blocks.release(request.block_ids)\n",
        "        if request.computed >= request.target:\n            self._blocks.release(request.block_ids)\n",
        (CORE,),
    ),
    Mutation(
        "S3-R1 a",
        "A failed step fails every live request, even those that had no row in it.",
        "engine/core/core.py",
        "                events.append(self._applier.fail(row.request, failed[number].code, failed[number].message))\n",
        "                live = [*self._scheduler.waiting, *self._scheduler.prefilling.values()]\n"
        "                live += self._scheduler.decoding.values()\n"
        "                why = failed[number]\n"
        "                events += [self._applier.fail(r, why.code, why.message) for r in live]\n",
        (CORE,),
    ),
    Mutation(
        "S3-R1 b",
        "A request that fails is told so, but keeps its blocks and its seat.",
        "engine/core/applier.py",
        "        self._release(request)\n        return Failed(",
        "        return Failed(",
        (CORE,),
    ),
    Mutation(
        "S1-R14 a",
        "A fatal executor error is taken for the failure of one step.",
        "engine/core/core.py",
        "            raise\n        except ExecutorOutOfMemoryError as error:\n",
        "            output = ExecutorFatalError()\n        except ExecutorOutOfMemoryError as error:\n",
        (CORE,),
    ),
    Mutation(
        "S1-R14 c",
        "A fatal executor error is taken for the failure of one step where its results are read.",
        "engine/core/core.py",
        "            output = self._executor.collect() if output is None else output\n"
        "        except ExecutorFatalError:\n            raise\n",
        "            output = self._executor.collect() if output is None else output\n",
        (CORE, OVERLAP),
    ),
    Mutation(
        "S1-R14 b",
        "An engine whose thread has died still says that it is healthy.",
        "engine/async_engine.py",
        "        self._fault = message\n",
        "",
        (ASYNC,),
    ),
    Mutation(
        "S1-R7 a",
        "A step that runs out of memory is tried again for ever.",
        "engine/core/core.py",
        "retry = not self._retrying and has_prefill",
        "retry = has_prefill",
        (CORE,),
    ),
    Mutation(
        "S1-R7 b",
        "A step that ran out of memory is tried again at the same size.",
        "engine/scheduling/prefill_limit.py",
        "self._retry = self._at_least(prefill // 2)",
        "self._retry = self._at_least(prefill)",
        (CORE,),
    ),
    Mutation(
        "S5-R16",
        "Blocks that a request holds beyond its progress count as negative demand.",
        "engine/scheduling/planner.py",
        "return max(self._view.blocks.blocks_for(num_tokens) - len(request.block_ids), 0)",
        "return self._view.blocks.blocks_for(num_tokens) - len(request.block_ids)",
        (GAPS,),
    ),
    # --- events and answers --------------------------------------------------------------------------------------
    Mutation(
        "S1-B20",
        "Scheduled is sent again after a preemption.",
        "engine/core/core.py",
        "if not row.request.was_scheduled]",
        "if row.prefix_blocks is not None]",
        (PREEMPTION,),
    ),
    Mutation(
        "S1-R10 a",
        "One random seed is drawn per step, so that a sample depends on earlier requests.",
        "engine/scheduling/scheduler.py",
        "sampling = None if kind is RowKind.MIDDLE else request.next_sampling()\n",
        "sampling = None if kind is RowKind.MIDDLE else request.next_sampling()\n"
        "        sampling = sampling and __import__('dataclasses').replace(sampling, seed=self._next_step_id)\n",
        (CORE,),
    ),
    Mutation(
        "S1-R10 b",
        "The random number of a sample does not depend on its position.",
        "engine/execution/answers.py",
        "row.start + place.offset + 1 for row",
        "row.start + 1 for row",
        (f"{EXECUTOR}::test_the_random_number_of_a_sample_is_that_of_the_position_it_fills",),
    ),
    Mutation(
        "Penalties a",
        "Penalties treat what another engine sampled as prompt, so that a stream changes when it moves.",
        "engine/scheduling/request.py",
        "self.token_ids[self.answer_start :]",
        "self.token_ids[self.prompt_len :]",
        (f"{CONTROLS}::test_an_answer_that_another_engine_began_goes_on_from_there",),
    ),
    Mutation(
        "Penalties b",
        "With overlap, penalties miss the token in flight.",
        "engine/scheduling/request.py",
        "*(PENDING_TOKEN,) * self.num_pending)",
        ")",
        (f"{CONTROLS}::test_a_row_whose_penalties_look_back_carries_the_answer_so_far",),
    ),
    Mutation(
        "Salt",
        "Prompts with different cache salts share their blocks.",
        "engine/scheduling/request.py",
        "root = root_of(submission.cache_salt, adapter)",
        'root = root_of("", adapter)',
        ("tests/engine/test_prefix_index.py",),
    ),
    Mutation(
        "Adapter in the hash",
        "Prompts with different adapters share their blocks.",
        "engine/scheduling/request.py",
        "root = root_of(submission.cache_salt, adapter)",
        "root = root_of(submission.cache_salt)",
        ("tests/engine/test_adapter_cache.py",),
    ),
    Mutation(
        "Adapter in use",
        "An adapter that a running request uses is evicted for another.",
        "engine/adapter_cache.py",
        "if digest not in in_use), None)",
        "if digest), None)",
        ("tests/engine/test_adapter_cache.py",),
    ),
    Mutation(
        "S1-R11",
        "A stop token is counted in usage unless it is the first token.",
        "engine/scheduling/request.py",
        "self.num_output + stop_token, self.cached",
        "self.num_output + (stop_token and self.num_output > 0), self.cached",
        (CORE,),
    ),
    Mutation(
        "S2-R5",
        "A chunk that does not complete its prompt asks for a sample.",
        "engine/scheduling/scheduler.py",
        "sampling = None if kind is RowKind.MIDDLE else request.next_sampling()",
        "sampling = request.next_sampling()",
        (CORE,),
    ),
    # --- spans that must not be cut -----------------------------------------------------------------------------------
    Mutation(
        "S2-R8 a",
        "A chunk ends inside a span that must not be cut.",
        "engine/scheduling/chunk_policy.py",
        "        if cut is None:\n            return end\n",
        "        if cut is None or cut:\n            return end\n",
        (SPANS,),
    ),
    Mutation(
        "S2-R8 b",
        "A chunk that is cut short by lack of memory ends inside a span.",
        "engine/scheduling/planner.py",
        "self._chunks.outside_spans(request, start, start + room, most=room) - start",
        "room",
        (GAPS,),
    ),
    Mutation(
        "I-13 hit",
        "A prefix hit ends inside a span.",
        "engine/scheduling/planner.py",
        "request.spans.cut_at(num_blocks * self._block_size)",
        "request.spans.cut_at(-1)",
        (SPANS,),
    ),
    Mutation(
        "S2-R12 a",
        "A span that no step could take is accepted, and waits for ever.",
        "engine/scheduling/request.py",
        "    if spans and longest > config.max_atomic_span:\n",
        "    if spans and longest > config.max_model_len:\n",
        (SPANS,),
    ),
    Mutation(
        "S2-R12 b",
        "A prefill limit that was halved by lack of memory starves a longer span.",
        "engine/scheduling/chunk_policy.py",
        "return room.tokens if self._extends or not room.has_prefill else room.budget",
        "return room.tokens if self._extends else room.budget",
        (SPANS,),
    ),
    Mutation(
        "S2-R12 c",
        "The longest span is computed without the decode rows beside it.",
        "engine/config.py",
        "        beside_decodes = self.max_num_batched_tokens - self.max_decode_tokens\n",
        "        beside_decodes = self.max_num_batched_tokens\n",
        (SPANS,),
    ),
    Mutation(
        "S2-R12 d",
        "A chunk that is extended for a span exceeds the tokens that the step has left.",
        "engine/scheduling/chunk_policy.py",
        "return room.tokens if self._extends or not room.has_prefill else room.budget",
        "return self._config.max_num_batched_tokens if extends or not room.has_prefill else room.budget",
        (SPANS,),
    ),
    Mutation(
        "I-27 spans a",
        "Spans may overlap or be empty.",
        "engine/protocol.py",
        "        _require(low <= start < end, ",
        "        _require(low is not None, ",
        (SPANS,),
    ),
    Mutation(
        "I-27 spans b",
        "A span may reach beyond its prompt.",
        "engine/protocol.py",
        '    _require(low <= num_tokens, name, "inside the prompt", low)\n',
        "",
        (SPANS,),
    ),
    # --- inputs in prompts besides text -------------------------------------------------------------------------------
    Mutation(
        "I-11 contents a",
        "Two images of one size share their blocks.",
        "engine/prefix.py",
        'contents = _contents(inputs, begin, end) if inputs else b""',
        'contents = b""',
        (INPUTS,),
    ),
    Mutation(
        "I-11 contents b",
        "A block's hash does not depend on which part of an image is in the block.",
        "engine/prefix.py",
        'span.digest + (begin - span.start).to_bytes(8, "little", signed=True)',
        "span.digest",
        (INPUTS,),
    ),
    Mutation(
        "I-11 contents c",
        "A tenant gets the encoded image that another tenant has shown.",
        "engine/scheduling/request.py",
        "place_inputs(inputs, root)",
        "place_inputs(inputs)",
        (INPUTS,),
    ),
    Mutation(
        "S2-B16",
        "Positions continue after an image as if each of its tokens took one.",
        "engine/scheduling/request_parts.py",
        "overlapping(self.placed, start, end), shift_at(self.placed, start))",
        "overlapping(self.placed, start, end), 0)",
        (INPUTS,),
    ),
    Mutation(
        "encoder a",
        "One step encodes all that its rows need.",
        "engine/scheduling/encoder_cache.py",
        "if cost and cost + size > self._budget:",
        "if False:",
        (INPUTS,),
    ),
    Mutation(
        "encoder b",
        "A step encodes more than the cache can keep.",
        "engine/scheduling/encoder_cache.py",
        "if not self._cache.has_room(needed, gone):",
        "if False:",
        (INPUTS,),
    ),
    Mutation(
        "encoder c",
        "What a failed step was to encode counts as encoded.",
        "engine/core/core.py",
        "            self._scheduler.lose(launched.step)\n",
        "",
        (INPUTS,),
    ),
    Mutation(
        "encoder d",
        "A request that ends before its images are computed holds them for ever.",
        "engine/scheduling/encoder_cache.py",
        "    def release(self, request: Request) -> None:\n        for placed in _placed(request):\n",
        "    def release(self, request: Request) -> None:\n        for placed in ():\n",
        (INPUTS,),
    ),
    Mutation(
        "encoder e",
        "A content that a request holds is dropped for others.",
        "engine/scheduling/encoder_cache.py",
        "(other for other in self._sizes if other not in self._holders)",
        "(other for other in self._sizes)",
        ("tests/engine/scheduling/test_encoder_cache.py",),
    ),
    # --- prompts that the engine cuts, and steps for scored prompts ---------------------------------------------------
    Mutation(
        "S2-R11 a",
        "If the engine cuts a prompt, only the last chunk's log-probabilities are kept.",
        "engine/core/engine_chunking.py",
        "        scores += output.prompt_logprobs.get(0, ())\n",
        "        scores = [*output.prompt_logprobs.get(0, ())]\n",
        (CHUNK_OWNER,),
    ),
    Mutation(
        "S2-R11 b",
        "A row that failed in one of its chunks continues with the next.",
        "engine/core/engine_chunking.py",
        "        if output.failed:\n            break\n",
        "",
        (CHUNK_OWNER,),
    ),
    Mutation(
        "S2-R11 c",
        "The engine's chunks score one position too few at each seam.",
        "engine/core/engine_chunking.py",
        "max(end - scoring.first, 0)",
        "max(end - scoring.first - 1, 0)",
        (CHUNK_OWNER,),
    ),
    Mutation(
        "S2-B1 starved",
        "A prompt that is too long to share a step with decode rows waits until they end.",
        "engine/scheduling/planner.py",
        "> min(self._view.prefill_limit, beside_decodes)",
        "> self._view.prefill_limit",
        (CHUNK_OWNER,),
    ),
    Mutation(
        "S3-B6 a",
        "Steps that should be dedicated to scored prompts carry decode rows.",
        "engine/scheduling/planner.py",
        "return self._is_dedicated(first) or self._is_cut_by_engine(first)",
        "return self._is_cut_by_engine(first)",
        (CHUNK_OWNER,),
    ),
    Mutation(
        "S3-B6 b",
        "A begun scored prompt behind another slips into a mixed step.",
        "engine/scheduling/planner.py",
        "if budget > 0 and not (self._num_decodes and self._is_dedicated(request)):",
        "if budget > 0:",
        (CHUNK_OWNER,),
    ),
    Mutation(
        "S3-B6 c",
        "A new scored prompt behind another slips into a mixed step.",
        "engine/scheduling/planner.py",
        "        if self._num_decodes and self._is_dedicated(request):\n            return DeferReason.MODE\n",
        "",
        (CHUNK_OWNER,),
    ),
    # --- log-probabilities of prompts ---------------------------------------------------------------------------------
    Mutation(
        "S3-R2 a",
        "The last position of each chunk is not scored: the seam loses a token.",
        "engine/scheduling/request_parts.py",
        "min(end + 1, prompt_len)",
        "min(end, prompt_len)",
        (SCORING,),
    ),
    Mutation(
        "S3-R2 b",
        "A position is scored for its own token instead of the next one.",
        "engine/scheduling/request_parts.py",
        "tuple(token_ids[first + 1 :",
        "tuple(token_ids[first:",
        (SCORING,),
    ),
    Mutation(
        "S3-R2 c",
        "The executor scores a row from its first position on, wherever scoring should begin.",
        "engine/batch/logprobs.py",
        "index = begin + scoring.first - row.start\n",
        "index = begin\n",
        (f"{LOGPROBS}::test_a_chunk_may_score_from_any_of_its_positions_on",),
    ),
    Mutation(
        "S3-R3 a",
        "Log-probabilities of the prompt are sent again after a preemption.",
        "engine/core/applier.py",
        "        request.scoring = None\n",
        "",
        (SCORING,),
    ),
    Mutation(
        "S3-R3 b",
        "A preempted prompt scores its positions again, and appends to what it has.",
        "engine/scheduling/request_parts.py",
        "first = max(start, len(self.logprobs))",
        "first = start",
        (SCORING,),
    ),
    Mutation(
        "S3-R7",
        "A prefix hit covers positions that must be scored.",
        "engine/scheduling/request.py",
        "        if self.scoring is not None:\n            count",
        "        if self.scoring == ():\n            count",
        (SCORING,),
    ),
    Mutation(
        "I-14",
        "Log-probabilities of the prompt are sent chunk by chunk instead of in one event.",
        "engine/core/applier.py",
        "        if row.kind is not RowKind.LAST:\n            return []\n        assert len(",
        "        assert len(",
        (SCORING,),
    ),
    # --- overlap: results that come late ------------------------------------------------------------------------------
    Mutation(
        "I-33 a",
        "The late result of a preempted or ended request is applied.",
        "engine/core/core.py",
        "if row.request.epoch == epoch and number not in failed:",
        "if number not in failed:",
        (OVERLAP,),
    ),
    Mutation(
        "I-33 b",
        "The late failure of a request that has ended fails it a second time.",
        "engine/core/core.py",
        "            if row.request.epoch == epoch:\n                events.append(",
        "            if epoch is not None:\n                events.append(",
        (OVERLAP,),
    ),
    Mutation(
        "I-33 c",
        "A request that loses its memory keeps its epoch, so that late results count as current.",
        "engine/scheduling/scheduler.py",
        "        request.epoch += 1\n",
        "",
        (OVERLAP,),
    ),
    Mutation(
        "S4-R8 a",
        "A request is launched beyond the end of its answer, whose last token is in flight.",
        "engine/scheduling/request.py",
        "        if left <= 0:\n            return 0\n",
        "",
        (OVERLAP,),
    ),
    Mutation(
        "S4-R8 b",
        "A token in flight does not count towards min_tokens.",
        "engine/scheduling/request.py",
        "early = self.num_output + self.num_pending < self",
        "early = self.num_output < self",
        (OVERLAP,),
    ),
    Mutation(
        "S4-R8 c",
        "A preempted request keeps counting its token in flight.",
        "engine/scheduling/scheduler.py",
        "request.target = request.num_pending = 0",
        "request.target = 0",
        (OVERLAP,),
    ),
    Mutation(
        "S4-R8 d",
        "A step is planned on top of one whose launch failed.",
        "engine/core/core.py",
        "if launched is not None and launched.output is not None:",
        "if launched is not None and launched.output is launched:",
        (OVERLAP,),
    ),
    Mutation(
        "S4-R8 e",
        "With overlap the engine reports no work while the last step is in flight, so nobody reads it.",
        "engine/core/core.py",
        "waits or self._in_flight or stores)",
        "waits or stores)",
        (OVERLAP,),
    ),
    Mutation(
        "S4-R6 a",
        "A rank tells the others how much of a prompt is left, and not how much the step computes of it.",
        "engine/scheduling/dry_run.py",
        "StepShape(1, sum(row.num_tokens for row in plan.rows), ",
        "StepShape(1, sum(len(row.request.token_ids) - row.start for row in plan.rows), ",
        (DRY_RUN,),
    ),
    Mutation(
        "I-32 a",
        "A pass that fails leaves out the others of its step.",
        "engine/core/padded_executor.py",
        "        self._executor.launch(replace(plan, joint=self._joint))\n",
        "        try:\n            self._executor.launch(replace(plan, joint=self._joint))\n"
        "        except Exception:\n            self._num_left = 0\n            raise\n",
        (PADDING, LOCKSTEP_LIVES),
    ),
    Mutation(
        "I-32 b",
        "A rank makes as many passes as it has rows for, and no more.",
        "engine/core/padded_executor.py",
        "        while self._num_left > 0:\n",
        "        while self._num_left == self._joint.forwards > 0:\n",
        (PADDING, LOCKSTEP_LIVES),
    ),
    Mutation(
        "I-32 c",
        "The draft model's passes are not in a step's shape, so ranks without drafts make none.",
        "engine/core/core.py",
        "shape_of(plan, draft_passes=passes, draft_tokens=tokens)",
        "shape_of(plan, draft_passes=0 * passes, draft_tokens=tokens)",
        (DRY_RUN, LOCKSTEP_LIVES),
    ),
    Mutation(
        "S4-R8 f",
        "A rank that launches nothing makes none of the exchanges of a step that others launch.",
        "engine/core/core.py",
        "        if self._padded is not None:\n            self._padded.pad()\n",
        "        if self._padded is not None and launched is not None:\n            self._padded.pad()\n",
        (PADDING, LOCKSTEP_LIVES),
    ),
    Mutation(
        "lockstep result",
        "A rank that takes the result of a round after another has left raises, and that one waits for its exchanges.",
        "engine/lockstep/threads.py",
        "            if self._num_rounds > mine:\n                return self._result\n",
        "            if self._num_rounds > mine and self._ended is None:\n                return self._result\n",
        (RANKS,),
    ),
    Mutation(
        "lockstep rest",
        "A rank without work opens a round, which wakes all others for nothing.",
        "engine/lockstep/lockstep.py",
        "        if not shape.forwards and not self.is_due:\n            return NO_STEP\n",
        "",
        (RANKS,),
    ),
    Mutation(
        "lockstep padding pass",
        "A rank without rows, or whose step failed, leaves out the exchanges of experts that the others wait for.",
        "engine/execution/lockstep.py",
        "            self.model.finish_pass()\n",
        "",
        (MIXTURES,),
    ),
    Mutation(
        "lockstep exchange without rows",
        "A rank that has no rows for anybody skips the exchange.",
        "kernels/collectives/shared_memory.py",
        "        given, received = ((ctypes.c_int64 * self._size)(*numbers) for numbers in (counts, ()))\n",
        "        if not len(rows):\n            return rows, [0] * self._size\n"
        "        given, received = ((ctypes.c_int64 * self._size)(*numbers) for numbers in (counts, ()))\n",
        (EXCHANGE,),
    ),
    Mutation(
        "lockstep order of sums",
        "What experts make of rows is summed in the order in which it comes back, sorted by expert.",
        "kernels/collectives/experts.py",
        "    by_token[order] = back\n",
        "    by_token = back\n",
        (DIVIDED_EXPERTS,),
    ),
    Mutation(
        "lockstep word",
        "A rank opens a round and does not say so, and one that sleeps is never woken for it.",
        "engine/parallel/group_ranks.py",
        "        if opens:\n            self._tell(Opened(self._begun))\n",
        "",
        (GROUP_RANKS,),
    ),
    Mutation(
        "lockstep end: layer",
        "A rank that fails once others have its rows exchanges the layer again, and meets them in their next one.",
        "engine/models/expert_ranks.py",
        '        with given_up(self, "exchange rows"):',
        "        if True:",
        (LATE_FAILURE,),
    ),
    Mutation(
        "lockstep end: pass",
        "A recorded pass whose exchange fails is run a second time as one without rows.",
        "kernels/collectives/reduction.py",
        '            with given_up(group, "exchange rows"):',
        "            if True:",
        (LATE_FAILURE,),
    ),
    Mutation(
        "lockstep end: memory",
        "A rank that has no memory for the rows of others fails alone.",
        "kernels/collectives/shared_memory.py",
        "        with given_up(self, TAKE_ROWS):",
        "        if True:",
        (f"{EXCHANGE}::test_a_rank_without_memory_for_its_rows_ends_all_because_others_may_have_theirs",),
    ),
    Mutation(
        "lockstep drain",
        "A rank that is told to drain refuses requests that its leader accepted before, while their grammars compile.",
        "engine/parallel/served_rank.py",
        "        await self._none_gets_ready.wait()\n",
        "",
        (SERVED_RANK,),
    ),
    Mutation(
        "lockstep seats",
        "The gate sends an engine as many requests as one of its ranks runs.",
        "serve_app/settings/application.py",
        "model.engine.num_seats + backlog",
        "model.engine.max_num_seqs + backlog",
        ("tests/serve_app/settings/test_rank_settings.py",),
    ),
    Mutation(
        "lockstep load",
        "Requests that were only sent to a rank are in nobody's load.",
        "engine/parallel/leading_engine.py",
        "with_unseen(load, given[rank])",
        "load",
        (
            "tests/engine/lockstep/test_processes.py::"
            "test_the_load_is_that_of_all_ranks_from_the_start_with_requests_that_have_only_been_sent",
        ),
    ),
    Mutation(
        "I-33 lost token",
        "A row whose token was never sampled continues from another one.",
        "engine/execution/answers.py",
        "if is_lost(row, self.newest)}",
        "if False}",
        (f"{EXECUTOR}::test_a_row_that_goes_on_from_a_failed_one_fails_alone",),
    ),
    # --- drafts beside overlap ----------------------------------------------------------------------------------------
    Mutation(
        "I-33 d",
        "With overlap, a row is planned on top of drafts in flight, as if all of them were right.",
        "engine/scheduling/request.py",
        "return 0 if self.stands_aside else 1",
        "return 1",
        (BESIDE_OVERLAP,),
    ),
    Mutation(
        "I-33 e",
        "What a grammar forces after a token becomes the drafts of a row that is launched already.",
        "engine/core/applier.py",
        "        if request.num_pending:  # with",
        "        if request.num_pending > 1:  # with",
        (BESIDE_OVERLAP,),
    ),
    Mutation(
        "I-33 f",
        "Rows that all have drafts part into two halves, which take turns for ever.",
        "engine/scheduling/scheduler.py",
        "return any(request.stands_aside for request in flying) and not",
        "return False and not",
        (BESIDE_OVERLAP,),
    ),
    Mutation(
        "own drafts",
        "The time in which a row stands aside for its own drafts is blamed on others.",
        "engine/core/wall_times.py",
        "stood.aside = stood.aside.plus(took)",
        "stood.aside = stood.aside.plus(Shares())",
        (WALL_TIMES,),
    ),
    # --- drafts -------------------------------------------------------------------------------------------------------
    Mutation(
        "S5-R15 a",
        "A decode row counts as one token of the step, even with drafts.",
        "engine/scheduling/planner.py",
        "self._num_decodes, self._decode_tokens = len(self._rows), sum(counts)",
        "self._num_decodes, self._decode_tokens = len(self._rows), len(counts)",
        (DRAFTS,),
    ),
    Mutation(
        "S5-R15 b",
        "A decode row grows by one block, however many blocks its drafts need.",
        "engine/scheduling/planner.py",
        "            -(-(request.scheduled + count) // size) - len(request.block_ids)\n",
        "            1\n",
        (DRAFTS,),
    ),
    Mutation(
        "S5-R15 c",
        "The config is checked for decode rows of one token, and drafts starve prefill.",
        "engine/config.py",
        "least = self.max_num_seqs * (1 + (self.num_speculative_tokens or 0)) + 1",
        "least = self.max_num_seqs + 1",
        (CONFIG, DRAFTS),
    ),
    Mutation(
        "I-35 a",
        "KV of rejected drafts counts as computed.",
        "engine/core/applier.py",
        "computed = min(row.start + len(tokens), len(request.token_ids))",
        "computed = row.start + row.num_tokens",
        (DRAFTS,),
    ),
    Mutation(
        "I-35 b",
        "The cursor is not taken back to before the rejected drafts.",
        "engine/scheduling/scheduler.py",
        "        request.scheduled = request.computed\n",
        "",
        (DRAFTS,),
    ),
    Mutation(
        "I-35 c",
        "Drafts reach beyond the last token that may be sampled.",
        "engine/scheduling/request.py",
        "return 0 if early else self.max_tokens - self.num_output - 1",
        "return 0 if early else self.max_tokens",
        (DRAFTS,),
    ),
    Mutation(
        "I-35 d",
        "A preempted request keeps its drafts.",
        "engine/scheduling/scheduler.py",
        "        request.drafts = None\n",
        "",
        (DRAFTS,),
    ),
    Mutation(
        "I-30 a",
        "A stop token among accepted drafts does not end the answer.",
        "engine/core/applier.py",
        "            if is_stop_token(request, token_id):\n",
        "            if i == len(tokens) - 1 and is_stop_token(request, token_id):\n",
        (DRAFTS,),
    ),
    Mutation(
        "I-30 b",
        "A row whose stop tokens are banned carries drafts beyond min_tokens, where the ban ends.",
        "engine/scheduling/request.py",
        "return 0 if early else self.max_tokens - self.num_output - 1",
        "return self.max_tokens - self.num_output - 1",
        (DRAFTS,),
    ),
    # --- drafts that are looked up ------------------------------------------------------------------------------------
    Mutation(
        "Lookup a",
        "A request is preempted for another's drafts.",
        "engine/scheduling/planner.py",
        "            counts = [min(count, 1) for count in counts]\n",
        "",
        (SPECULATION,),
    ),
    Mutation(
        "I-35 e",
        "A row that should give up some of its drafts keeps all.",
        "engine/scheduling/request.py",
        "(known + self.drafts.token_ids)[:count]",
        "known + self.drafts.token_ids",
        (DRAFTS,),
    ),
    Mutation(
        "I-35 f",
        "Drafts that no setting asked for take the half of a step that belongs to prefill.",
        "engine/scheduling/planner.py",
        "sum(counts) - self._config.max_drafting_tokens",
        "sum(counts) - self._tokens_left",
        (DRAFTS,),
    ),
    Mutation(
        "Lookup b",
        "Prompt lookup drafts past a token that ends the answer.",
        "engine/speculation/speculation.py",
        "if token in stops), drafts)",
        "if token < 0), drafts)",
        (SPECULATION,),
    ),
    Mutation(
        "Lookup c",
        "Drafts that were never right are never tried again.",
        "engine/speculation/speculation.py",
        "            lengths[waiting] = 1\n",
        "",
        (SPECULATION,),
    ),
    Mutation(
        "Lookup d",
        "Rows get drafts beside any number of other rows.",
        "engine/speculation/speculation.py",
        "if not decoding or (self._settings.adaptive and not may_pay(len(decoding), self._costs)):",
        "if not decoding:",
        (SPECULATION,),
    ),
    Mutation(
        "Lookup e",
        "A stream without drafts is slowed down for a stream with many.",
        "engine/speculation/draft_budget.py",
        "    for number in chosen[num_fair:]:\n        lengths[number] -= 1\n",
        "",
        ("tests/engine/speculation/test_draft_budget.py",),
    ),
    Mutation(
        "Lookup f",
        "The index of a request's text outlives the request.",
        "engine/core/applier.py",
        "            self._speculation.forget(request.request_id)\n",
        "            pass\n",
        (SPECULATION,),
    ),
    Mutation(
        "Proposed a",
        "Two requests read into a block that they share, each from its own position.",
        "engine/speculation/draft_model_policy.py",
        "if block in taken or (number * size > start and self._is_read(request, number)):\n",
        "if number * size > start and self._is_read(request, number):\n",
        (MODEL_DRAFTS,),
    ),
    Mutation(
        "Proposed a2",
        "A text is read on through blocks that were read for another.",
        "engine/speculation/draft_model_policy.py",
        "if block in taken or (number * size > start and self._is_read(request, number)):\n",
        "if block in taken:\n",
        (MODEL_DRAFTS,),
    ),
    Mutation(
        "Proposed a3",
        "A step that is smaller than a block reads nothing of a long text.",
        "engine/speculation/draft_model_policy.py",
        "if end < len(request.token_ids) and self._most_read >= size:\n",
        "if end < len(request.token_ids):\n",
        (MODEL_DRAFTS,),
    ),
    Mutation(
        "Proposed b",
        "What one request has read into a shared block is read again by another, and overwritten.",
        "engine/speculation/draft_model_policy.py",
        "reader.num_read = self._read_for(request, reader.num_read)",
        "reader.num_read = reader.num_read or self._read_for(request, 0)",
        (MODEL_DRAFTS,),
    ),
    Mutation(
        "Proposed c",
        "The last proposed token counts as read although the draft model did not continue from it.",
        "engine/speculation/draft_model_policy.py",
        "len(row.token_ids) - 2)",
        "len(row.token_ids) - 1)",
        (MODEL_DRAFTS,),
    ),
    Mutation(
        "Proposed d",
        "A request that lost its memory still counts as read.",
        "engine/speculation/draft_model_policy.py",
        "        if reader.epoch != request.epoch:\n",
        "        if reader.epoch < 0:\n",
        (MODEL_DRAFTS,),
    ),
    Mutation(
        "Proposed e",
        "A block's page is found whatever text precedes it.",
        "engine/speculation/draft_model_policy.py",
        "if page is None or page.root != _root(request, number):",
        "if page is None:",
        (MODEL_DRAFTS,),
    ),
    Mutation(
        "Proposed f",
        "A request keeps the places for drafts that a step did not use, and nothing more is read for it.",
        "engine/speculation/draft_model_policy.py",
        "if r.drafts is not None and r.drafts.method == self.method),",
        "if False),",
        (MODEL_DRAFTS,),
    ),
    Mutation(
        "Proposed g",
        "The draft model runs although the engine is full.",
        "engine/speculation/draft_model_policy.py",
        "if decoding and self._pays_beside(len(decoding)):",
        "if decoding:",
        (MODEL_DRAFTS,),
    ),
    # --- recurrent state ----------------------------------------------------------------------------------------------
    Mutation(
        "I-9 a",
        "The last slot is renumbered when another is given back, but its state is not moved.",
        "engine/scheduling/state_slots.py",
        "            self._moves.append((self._slots[last], hole))\n",
        "",
        (STATES,),
    ),
    Mutation(
        "I-9 b",
        "Moves are handed to every later step instead of only the next.",
        "engine/scheduling/state_slots.py",
        "moves, self._moves = tuple(self._moves), []",
        "moves = tuple(self._moves)",
        (STATES,),
    ),
    Mutation(
        "I-9 c",
        "The snapshot that a failed row should have saved is never given back.",
        "engine/core/core.py",
        "            self._scheduler.discard(scheduled)\n",
        "",
        (STATES,),
    ),
    Mutation(
        "I-9 d",
        "The snapshot of a failed row is published.",
        "engine/core/core.py",
        "            self._scheduler.discard(scheduled)\n",
        "            alive = row.request.epoch == epoch and scheduled.state is not None\n"
        "            self._scheduler.advance(row.request, scheduled, scheduled.end) if alive else "
        "self._scheduler.discard(scheduled)\n",
        (STATES,),
    ),
    Mutation(
        "I-9 e",
        "A save takes the snapshot that a later row of the step starts from.",
        "engine/scheduling/state_slots.py",
        "        due = self._stride and end",
        "        if restore is not None:\n"
        "            restore = self.snapshots.use(request.block_hashes[start // self._block_size - 1])\n"
        "        due = self._stride and end",
        (STATES,),
    ),
    Mutation(
        "I-9 f",
        "A step that is planned again for lack of memory never gives its snapshots back.",
        "engine/scheduling/scheduler.py",
        "is not None\n            self.discard(scheduled)\n",
        "is not None\n",
        (STATES,),
    ),
    Mutation(
        "I-9 g",
        "A prefix hit of a hybrid model starts where no state was kept.",
        "engine/scheduling/state_slots.py",
        "        while num_blocks and self.snapshots.find(",
        "        while num_blocks < 0 and self.snapshots.find(",
        (STATES,),
    ),
    Mutation(
        "I-9 h",
        "Chunks run past the positions at which the state has to be kept.",
        "engine/scheduling/chunk_policy.py",
        "        count = min(count, self.to_snapshot(start, remaining))\n",
        "",
        (STATES,),
    ),
    Mutation(
        "I-9 i",
        "A waiting request does not look its prefix up again when a snapshot was overwritten.",
        "engine/scheduling/planner.py",
        "self._cache_epoch = view.blocks.epoch + sum(resource.epoch for resource in view.resources)",
        "self._cache_epoch = view.blocks.epoch",
        (GAPS,),
    ),
    Mutation(
        "I-9 j",
        "A row with drafts skips the position at which its state has to be kept.",
        "engine/scheduling/planner.py",
        "min(count, self._chunks.to_snapshot(request.scheduled, count))",
        "count",
        (STATES,),
    ),
    Mutation(
        "I-9 k",
        "The state after a rejected draft is published as the state of the text.",
        "engine/scheduling/state_slots.py",
        "        if end == row.end:\n",
        "        if end:\n",
        (STATES,),
    ),
    Mutation(
        "I-9 l",
        "A state is not taken back from rejected drafts.",
        "engine/execution/executor.py",
        "computed.rewind.to([len(row_tokens) for row_tokens in output.sampled])",
        "computed.rewind.to([len(row.token_ids) for row in plan.rows])",
        (RECURRENT,),
    ),
    Mutation(
        "I-9 m",
        "A row's accepted tokens are fed to the state after its drafts instead of the one before them.",
        "kernels/eager/rewind.py",
        "            kept.state[rows.index] = kept.before[places]\n",
        "",
        (RECURRENT,),
    ),
    # --- fairness -----------------------------------------------------------------------------------------------------
    Mutation(
        "fair lift",
        "A tenant that comes back is compensated for what others were served meanwhile.",
        "engine/scheduling/tenant_shares.py",
        "max(self.served.get(tenant, 0.0), self._least())",
        "self.served.get(tenant, 0.0)",
        (WAITING,),
    ),
    Mutation(
        "fair age",
        "More urgent requests go first, however long a request has waited.",
        "engine/scheduling/waiting.py",
        "        while young and now - young.first[0] >= self._age_s:\n",
        "        while young and now - young.first[0] >= math.inf:\n",
        (WAITING,),
    ),
    Mutation(
        "fair age head",
        "A request behind one that was just preempted does not age.",
        "engine/scheduling/waiting.py",
        "        return self.ages.first[0]",
        "        return self.requests.first[1].waiting_since",
        (WAITING,),
    ),
    Mutation(
        "fair priority",
        "The queue ignores priorities.",
        "engine/scheduling/waiting.py",
        "return (1, head.priority, served",
        "return (1, 0, served",
        (WAITING,),
    ),
    Mutation(
        "fair turn",
        "All waiting requests of one tenant are admitted before the next tenant's turn.",
        "engine/scheduling/waiting.py",
        "        self.served += self._service.prompt(taken.expected_cached, len(taken.token_ids))\n",
        "",
        (WAITING,),
    ),
    Mutation(
        "fair drafts",
        "Accepted drafts are not counted against a tenant's share.",
        "engine/scheduling/service.py",
        "self._answer_weight * (end - start if decoded else 1)",
        "self._answer_weight",
        (WAITING,),
    ),
    Mutation(
        "fair place",
        "A preempted request waits behind those that came after it.",
        "engine/scheduling/waiting.py",
        "        self._num_put_back += 1\n",
        "        self._num_put_back += 1\n        request.place = (self._newest, self._num_put_back)\n",
        (WAITING,),
    ),
    Mutation(
        "fair victims",
        "Victims are chosen regardless of priority.",
        "engine/scheduling/planner.py",
        "key=lambda request: (-request.priority, *loses(request))",
        "key=loses",
        (WAITING,),
    ),
    Mutation(
        "fair urgent",
        "A long prompt that has begun keeps urgent ones waiting.",
        "engine/scheduling/planner.py",
        "            budget = self._admit(budget, ahead_of=partial[0])\n",
        "            pass\n",
        (WAITING,),
    ),
    Mutation(
        "fair begun",
        "A begun prompt waits for ever while urgent prompts keep coming.",
        "engine/scheduling/planner.py",
        "if partial and not self._has_taken_back and not self._is_aged(partial[0]):",
        "if partial and not self._preempted:",
        (WAITING, SPANS),
    ),
    Mutation(
        "fair begun order",
        "A begun prompt that has waited for the age bound still comes after urgent begun ones.",
        "engine/scheduling/planner.py",
        "key=lambda request: (not self._is_aged(request), *self._urgency(request)))",
        "key=lambda request: self._urgency(request))",
        (WAITING,),
    ),
    Mutation(
        "fair partial",
        "A partial prompt of one priority keeps prompts of all others from beginning.",
        "engine/scheduling/planner.py",
        "count < remaining and self._num_partial[request.priority] >= most",
        "count < remaining and self._num_partial.total() >= most",
        (WAITING,),
    ),
    # --- how long prefill gathers -------------------------------------------------------------------------------------
    Mutation(
        "coalesce waiting",
        "A new prompt is held back for ever if the step does not fill.",
        "engine/scheduling/planner.py",
        "return waited_ms < policy.coalesce_waiting_ms and (",
        "return waited_ms < float('inf') and (",
        (COALESCING,),
    ),
    Mutation(
        "coalesce partial",
        "The rest of a begun prompt is held back for as long as a new prompt.",
        "engine/scheduling/planner.py",
        "not view.prefilling or (view.now - partial_since) * 1000 < policy.coalesce_partial_ms",
        "not view.prefilling or partial_since < float('inf')",
        (COALESCING,),
    ),
    Mutation(
        "coalesce ratio",
        "Prefill is held back although the queue fills the requested part of the step.",
        "engine/scheduling/planner.py",
        "if view.num_queued_tokens >= policy.prefill_fill_ratio * view.prefill_limit:",
        "if view.num_queued_tokens >= 10**9:",
        (COALESCING,),
    ),
    # --- bounds, retries and deadlines --------------------------------------------------------------------------------
    Mutation(
        "I-23 cost",
        "bypass tests the whole queue in every step.",
        "engine/scheduling/planner.py",
        "most_passed = MOST_PASSED[self._policy.admission_order]\n",
        'most_passed = 1 if self._policy.admission_order == "strict" else len(view.waiting)\n',
        (WAITING,),
    ),
    Mutation(
        "S1-R7 c",
        "A step that the engine cut raises the limit that it should halve.",
        "engine/scheduling/prefill_limit.py",
        "else min(self._retry, self._value)",
        "else self._retry",
        (CHUNK_OWNER, SPANS),
    ),
    Mutation(
        "S1-R7 g",
        "One small step that runs out of memory makes all later steps as small.",
        "engine/scheduling/prefill_limit.py",
        "        self._value = self._at_least(self._value // 2)\n",
        "        self._value = self._retry\n",
        (PREFILL_LIMIT,),
    ),
    Mutation(
        "S1-R7 h",
        "After a shortage steps stay small until the engine is idle.",
        "engine/core/core.py",
        "            self._scheduler.went_well(launched.plan)\n",
        "",
        (PREFILL_LIMIT,),
    ),
    Mutation(
        "S1-R7 i",
        "While memory stays short, a size that failed is tried again as soon as the limit reaches it.",
        "engine/scheduling/prefill_limit.py",
        "            if self._num_good < PATIENCE:\n",
        "            if self._num_good < 0:\n",
        (PREFILL_LIMIT,),
    ),
    Mutation(
        "S1-R7 j",
        "A shortage that cost a request is forgotten when the engine is idle, and costs each later lone request.",
        "engine/scheduling/prefill_limit.py",
        "        if not self._cost_requests:\n",
        "        if not None:\n",
        (PREFILL_LIMIT,),
    ),
    Mutation(
        "S1-R7 d",
        "A step gets no retry because the one before it had one, although that one's requests have gone.",
        "engine/core/core.py",
        "        self._retrying &= self._scheduler.num_running > 0",
        "        self._retrying &= self._scheduler.num_running >= 0",
        (OVERLAP, CORE),
    ),
    Mutation(
        "S1-R7 e",
        "A retry puts a prompt that the failed step would have completed behind those that came after it.",
        "engine/scheduling/scheduler.py",
        '        prompts.sort(key=attrgetter("place"))\n',
        "",
        (OVERLAP, CORE),
    ),
    Mutation(
        "S1-R7 f",
        "The prefill limit stays halved when the engine is idle.",
        "engine/scheduling/scheduler.py",
        "            self._prefill_limit.rest()\n",
        "            pass\n",
        (GAPS,),
    ),
    Mutation(
        "deadline queue",
        "The deadline for waiting ends requests that run.",
        "engine/scheduling/deadlines.py",
        "            elif not request.was_scheduled:\n",
        "            else:\n",
        (CORE, PREPARING),
    ),
    Mutation(
        "deadline heap",
        "Deadlines outlive their requests: they pile up, and end requests again that have ended.",
        "engine/scheduling/deadlines.py",
        "for deadline in self._by_arrival.pop(request.arrival_index, ()):",
        "for deadline in ():",
        (CORE, OVERLAP),
    ),
    Mutation(
        "fair past",
        "Tenants that are gone are remembered until their whole priority is idle.",
        "engine/scheduling/tenant_shares.py",
        "        while self._past and (",
        "        while not self._live and (",
        (WAITING_ORDER,),
    ),
    Mutation(
        "fair past bound",
        "The number of past tenants has no bound while the least served one gets nothing.",
        "engine/scheduling/tenant_shares.py",
        " or len(self._past) > MAX_PAST):",
        "):",
        (WAITING_ORDER,),
    ),
    Mutation(
        "fair young",
        "A lane whose oldest request was admitted still comes before more urgent lanes.",
        "engine/scheduling/waiting.py",
        "        while aged and now - aged.last[0] < self._age_s:\n",
        "        while aged and now - aged.last[0] < -math.inf:\n",
        (WAITING_ORDER,),
    ),
    Mutation(
        "burst",
        "All submissions of a burst are taken in before the next step.",
        "engine/async_engine.py",
        "for _ in range(MAX_COMMANDS):",
        "for _ in itertools.count():",
        (ASYNC,),
    ),
    Mutation(
        "S5-R18 thread",
        "Prompts are hashed on the thread that runs the steps.",
        "engine/scheduling/request.py",
        "    request.extend_hashes(len(prompt), config.block_size)\n",
        "",
        (ASYNC,),
    ),
    Mutation(
        "deadline idle",
        "A deadline that is far away ends the engine's thread.",
        "engine/async_engine.py",
        "min(max(deadline - time.monotonic(), 0.0), MAX_WAIT_S)",
        "max(deadline - time.monotonic(), 0.0)",
        (ASYNC,),
    ),
    Mutation(
        "deadline asleep",
        "An engine without work does not end requests whose deadline has passed.",
        "engine/core/core.py",
        "events = self._end_late(now)",
        "events = self._end_late(now) if self.has_work else []",
        (PREPARING,),
    ),
    # --- what the load says -------------------------------------------------------------------------------------------
    Mutation(
        "I-31 reason",
        "The reported reason for waiting is that of the last request that was tested.",
        "engine/scheduling/planner.py",
        "            self._deferred = self._deferred or reason\n",
        "            self._deferred = reason\n",
        (GAPS,),
    ),
    Mutation(
        "I-31 stale",
        "The reported reason for waiting outlives the requests that waited.",
        "engine/core/core.py",
        "if self._deferred and scheduler.waiting else None",
        "if self._deferred else None",
        (LOAD,),
    ),
    Mutation(
        "I-31 hits",
        "A step that fitted no graph counts as a hit.",
        "engine/core/core.py",
        "self._graph_uses[output.graph.hit, output.graph.name] += 1",
        "self._graph_uses[True, output.graph.name] += 1",
        (LOAD,),
    ),
    Mutation(
        "I-31 mixed",
        "The fake executor treats a mixed step as a decode step.",
        "engine/fake/executor.py",
        "if any(row.kind is not RowKind.DECODE for row in plan.rows):",
        "if all(row.kind is not RowKind.DECODE for row in plan.rows):",
        (LOAD,),
    ),
    # --- KV in lower tiers --------------------------------------------------------------------------------------------
    Mutation(
        "I-37 failed load",
        "A block whose load failed is published, and read by the next request.",
        "engine/scheduling/loading.py",
        "        if not result.error:\n            self._blocks.publish(load.move.block_id, load.move.digest)",
        "        self._blocks.publish(load.move.block_id, load.move.digest)",
        (TIERS,),
    ),
    Mutation(
        "I-37 cancel",
        "A load that was given up still writes, into a block that is another request's by then.",
        "engine/core/core.py",
        "            self._mover.cancel(step.cancelled)\n",
        "",
        (TIERS,),
    ),
    Mutation(
        "I-37 overwritten",
        "A victim's KV is stored after the rows that take its blocks.",
        "engine/core/core.py",
        "        step = self._scheduler.commit(plan, now)\n        self._move(step)\n",
        "        step = self._scheduler.commit(plan, now)\n"
        "        self._executor.launch(step)\n        self._move(step)\n",
        (TIERS,),
    ),
    Mutation(
        "I-37 memory",
        "Loads keep their memory while running requests lose theirs.",
        "engine/scheduling/planner.py",
        "            self._unload_for(growth + self._elder_chunk())\n",
        "",
        (TIERS,),
    ),
    Mutation(
        "I-37 late",
        "A request waits for a tier that never answers.",
        "engine/core/core.py",
        "(*back, *self._scheduler.loads.late(now))",
        "back",
        (TIERS,),
    ),
    Mutation(
        "I-37 asleep",
        "An engine sleeps until a load ends that its own last step has ended.",
        "engine/core/core.py",
        "self._awaits_moves = not waits_again and bool(self._scheduler.loading)",
        "self._awaits_moves = bool(self._scheduler.loading or plan.loads or plan.unloaded)",
        (TIERS,),
    ),
    Mutation(
        "I-37 queued",
        "Loads that wait for those of others are late while the tier answers.",
        "engine/scheduling/loading.py",
        "            loading.until = self._patience(loading)\n",
        "",
        (TIERS,),
    ),
    Mutation(
        "I-37 abort",
        "A request that ends while it loads keeps its blocks.",
        "engine/scheduling/scheduler.py",
        "            self.loads.give_up(request)\n            waited = True\n",
        "            waited = self.loading.pop(request.request_id) is request\n",
        (TIERS,),
    ),
    Mutation(
        "I-37 bound",
        "The host tier takes more blocks than it has room for.",
        "engine/scheduling/tier_index.py",
        "        if len(known.has) + len(known.storing) < self._host_blocks:\n            return True\n",
        "        if len(known.has) < self._host_blocks * 2:\n            return True\n",
        (TIERS,),
    ),
    Mutation(
        "I-37 shared",
        "A load ends for all that wait for it when one of them goes.",
        "engine/scheduling/loading.py",
        "            if not load.waiting:\n",
        "            if True:\n",
        (TIERS,),
    ),
    Mutation(
        "I-37 worth",
        "KV is loaded even where computing it takes less time.",
        "engine/scheduling/planner.py",
        "        if load_s >= self._prefill_s(",
        "        if False and load_s >= self._prefill_s(",
        (TIERS,),
    ),
    Mutation(
        "Narrow tier a",
        "An engine reads blocks of 8 bits from the disk as if they were whole, and the other way round.",
        "engine/build/kv_tiers.py",
        '        "kv_tiers.dtype": config.kv_tiers.dtype,\n',
        "",
        (NARROW_TIERS,),
    ),
    Mutation(
        "Narrow tier b",
        "Where two tokens' values lie beside each other, each is narrowed by the scale of the other.",
        "kernels/cpu/native/blocks.cpp",
        "sizes[token + part] = reduce(by_place[part], larger);",
        "sizes[token + PAIR - 1 - part] = reduce(by_place[part], larger);",
        (NATIVE_BLOCKS,),
    ),
    Mutation(
        "Narrow tier c",
        "A block drifts: tiny numbers shrink each time that they go to a tier of 8 bits and back.",
        "kernels/cpu/narrow_blocks.py",
        "torch.where(scales >= SMALLEST, scales, 0.0)",
        "scales",
        (NARROW_BLOCKS,),
    ),
    # --- requests that are being prepared -----------------------------------------------------------------------------
    Mutation(
        "S5-R20 a",
        "A request that is being prepared cannot be aborted.",
        "engine/scheduling/scheduler.py",
        "(self.decoding, self.prefilling, self.preparing, self.loading)",
        "(self.decoding, self.prefilling, self.loading)",
        (PREPARING,),
    ),
    Mutation(
        "S5-R20 b",
        "An aborted request stays in the map of those that are being prepared.",
        "engine/scheduling/scheduler.py",
        "self.preparing.pop(request.request_id, None) is not None",
        "request.request_id in self.preparing",
        (PREPARING,),
    ),
    Mutation(
        "S5-R21 place",
        "A request that was prepared waits behind all that came meanwhile.",
        "engine/scheduling/scheduler.py",
        "None):\n            self.waiting.add(request)\n\n",
        'None):\n            self.waiting.put_back(request, "back")\n\n',
        (PREPARING,),
    ),
    Mutation(
        "S5-R21 early",
        "A request is planned while its prompt is still being made.",
        "engine/scheduling/scheduler.py",
        "            self.waiting.remove(request)\n            self.preparing",
        "            self.preparing",
        (PREPARING,),
    ),
    # --- grammars -----------------------------------------------------------------------------------------------------
    Mutation(
        "Grammar a",
        "A matcher that is made anew is not told the tokens of the answer so far.",
        "engine/batch/grammar.py",
        "self._consume(match, row.answer[match.count :])",
        "self._consume(match, row.answer[-1:])",
        (GRAMMAR,),
    ),
    Mutation(
        "Grammar b",
        "A request fails where a ban and a grammar together allow nothing.",
        "engine/batch/logit_controls.py",
        "    if empty.any():",
        "    if False:",
        (CONTROLS,),
    ),
    Mutation(
        "Grammar c",
        "Drafts are accepted, whatever would have been sampled.",
        "engine/batch/row_order.py",
        "    return count + 1\n",
        "    return len(drafts) + 1\n",
        (EXECUTOR,),
    ),
    Mutation(
        "Grammar d",
        "Results go to the wrong requests where attention needs the rows in another order.",
        "engine/batch/row_order.py",
        "        sampled[number] = tokens\n",
        "        sampled[order.index(number)] = tokens\n",
        (EXECUTOR,),
    ),
    Mutation(
        "Grammar e",
        "The end that a grammar forces before min_tokens does not end the answer.",
        "engine/scheduling/stopping.py",
        " and request.sampling.grammar is None",
        "",
        (GRAMMAR,),
    ),
    Mutation(
        "Grammar f",
        "A request whose grammar cannot be compiled is not counted as refused.",
        "engine/async_engine.py",
        "                spent[TimeCause.ADAPTER] = time.monotonic() - begun\n"
        "        except RequestRejected as error:\n            self._tell_rejected(error)\n",
        "                spent[TimeCause.ADAPTER] = time.monotonic() - begun\n        except RequestRejected:\n",
        (GRAMMAR,),
    ),
    Mutation(
        "Native a",
        "A token does not attend to itself.",
        "kernels/cpu/native/attention.h",
        "lane <= (i32x16{} + last)",
        "lane < (i32x16{} + last)",
        (NATIVE,),
    ),
    Mutation(
        "Native b",
        "Data that a block's last owner left beyond a row's end enters its sums.",
        "kernels/cpu/native/elementwise.h",
        "        clear_after(step, token, block, offset);\n",
        "",
        (NATIVE,),
    ),
    Mutation(
        "Native c",
        "Sums over earlier keys keep their weight when a larger score follows.",
        "kernels/cpu/native/attention.h",
        "* splat(keep[r]);",
        "* splat(keep[r] > 0.0f ? 1.0f : 0.0f);",
        (NATIVE,),
    ),
    Mutation(
        "Native linear a",
        "A request begins with the convolution's inputs of the slot's last owner.",
        "kernels/cpu/native/linear_attention.h",
        "return step.contexts[row] ? state + (past + token) * channels : nullptr;",
        "return state + (past + token) * channels;",
        (NATIVE_LINEAR,),
    ),
    Mutation(
        "Native linear b",
        "Rejected drafts stay in a state.",
        "kernels/cpu/native/linear_attention.h",
        "        if (step.advances(row))\n            for",
        "        if (true)\n            for",
        (NATIVE_LINEAR,),
    ),
    Mutation(
        "Native linear c",
        "What a token writes is compared with the state before it fades.",
        "kernels/cpu/native/linear_attention.h",
        "multiply_add(-decay, of_keys[c],",
        "multiply_add(splat(-1.0f), of_keys[c],",
        (NATIVE_LINEAR,),
    ),
    Mutation(
        "Native linear d",
        "Rejected drafts stay among the convolution's past inputs.",
        "kernels/cpu/native/linear_attention.h",
        "        if (!step.advances(row)) return;\n",
        "",
        (NATIVE_LINEAR,),
    ),
    Mutation(
        "Native linear e",
        "A state advances past the accepted tokens of the first row with drafts, not of its own.",
        "engine/models/native_rewind.py",
        "[begin + offset for _, count, begin in going_on",
        "[offset for _, count, begin in going_on",
        (RECURRENT,),
    ),
    Mutation(
        "Native linear f",
        "A start counts no memory for the drafts of a model with states.",
        "engine/build/host_fit.py",
        "drafts=_draft_bytes(model, config, dtype) if native else 0",
        "drafts=0",
        (NATIVE_HYBRIDS,),
    ),
    Mutation(
        "Native linear g",
        "A step may say that rows beyond its last one have drafts.",
        "kernels/cpu/native/step.h",
        " || num_drafted > num_rows - first_drafted",
        "",
        (NATIVE_LINEAR,),
    ),
    Mutation(
        "Native d",
        "A block that the cache does not have is read.",
        "kernels/cpu/native/step.h",
        " || !within(blocks, first_blocks[num_rows], num_blocks)",
        "",
        (NATIVE,),
    ),
    Mutation(
        "Native images a",
        "Text after an image in the same chunk has the positions that it would have without the image.",
        "kernels/cpu/native/step.h",
        "            place_text(span->end, end, span->shift_after);\n",
        "",
        (NATIVE_IMAGES,),
    ),
    Mutation(
        "Native images b",
        "A chunk that begins inside of an image has the places of the image's first tokens.",
        "engine/models/native_encoding.py",
        "Span(one.begin, one.end, one.first,",
        "Span(one.begin, one.end, 0,",
        (NATIVE_IMAGE_MODELS,),
    ),
    Mutation(
        "Native images c",
        "An image's tokens may reach into the next row.",
        "kernels/cpu/native/step.h",
        "span->end > end || ",
        "",
        (NATIVE_IMAGES,),
    ),
    Mutation(
        "Native images d",
        "A decode row after an image has the position that it would have without the image.",
        "engine/models/native_encoding.py",
        "row.inputs.shift if row.inputs else 0",
        "0",
        (NATIVE_IMAGE_MODELS,),
    ),
    Mutation(
        "Native e",
        "A row's sums depend on how many other rows the step has.",
        "kernels/cpu/native/linear.h",
        "    const int64_t steps = inputs / PAIR, panel_size = inputs * PANEL;\n",
        "    const int64_t panel_size = inputs * PANEL, steps = inputs / PAIR - (ROWS == 3);\n",
        (NATIVE,),
    ),
    Mutation(
        "Native f",
        "A number that lies halfway between two of FP8 is rounded to the smaller one, not to the even one.",
        "kernels/cpu/native/e4m3.h",
        "((size + 0x7ffff + (size >> 20 & 1)) >> 20)",
        "((size + 0x7ffff) >> 20)",
        ("tests/kernels/cpu/native/test_e4m3.py",),
    ),
    Mutation(
        "Native g",
        "A part of a stacked matrix gets what an adapter has for the part before it.",
        "kernels/cpu/native/low_rank.h",
        "own.firsts[matrix.parts[2 * panel + 1]]",
        "own.firsts[matrix.parts[2 * panel]]",
        (LOW_RANK,),
    ),
    Mutation(
        "Native h",
        "A token's sums with an adapter depend on how many tokens are computed beside it.",
        "kernels/cpu/native/low_rank.h",
        "    int64_t k = 0;\n",
        "    int64_t k = TOKENS == 1 && inputs > STEP ? STEP : 0;\n",
        (LOW_RANK,),
    ),
    # --- steps that stay on the device --------------------------------------------------------------------------------
    Mutation(
        "Device a",
        "A row whose penalties look at a token in flight makes the whole step wait for it.",
        "engine/execution/gpu/executor.py",
        "in self._flying and _has_grammar(row)",
        "in self._flying and row.answer[-1:] == (-1,)",
        (TOKEN_COUNTS,),
    ),
    Mutation(
        "Device b",
        "A request that begins anew keeps the counts of tokens that it no longer has.",
        "engine/execution/gpu/token_counts.py",
        "if counted is None or anew or",
        "if counted is None or",
        (TOKEN_COUNTS,),
    ),
    Mutation(
        "Device c",
        "What the host noted for a step that failed counts as being on the device.",
        "engine/execution/gpu/token_counts.py",
        "            self.forget(list(self._counted))",
        "            pass",
        (TOKEN_COUNTS,),
    ),
    Mutation(
        "Device d",
        "Padding of a captured decode step moves on, into blocks of earlier steps.",
        "engine/execution/gpu/decode_loop.py",
        "moved = integers[3]",
        "moved = torch.ones_like(integers[3])",
        (DECODE_LOOP,),
    ),
    Mutation(
        "Device e",
        "The device never learns of a row's new block.",
        "engine/execution/gpu/decode_loop.py",
        "        if places:",
        "        if False:",
        (DECODE_LOOP,),
    ),
    Mutation(
        "Device f",
        "Rows that changed places go on from each other's tokens.",
        "engine/execution/gpu/decode_loop.py",
        "before.request_id == row.request_id",
        "before.kind is row.kind",
        (DECODE_LOOP,),
    ),
    Mutation(
        "Device g",
        "A step goes on from inputs that a step that failed has moved.",
        "engine/execution/gpu/decode_loop.py",
        "last, self._last = self._last, None",
        "last = self._last",
        (DECODE_LOOP,),
    ),
    # --- model families -----------------------------------------------------------------------------------------------
    Mutation(
        "Model a",
        "A query sees one token more than its window.",
        "kernels/cpu/native/attention.h",
        "position - of->window - first;",
        "position - of->window - first - 1;",
        (LOGITS,),
    ),
    Mutation(
        "Model b",
        "Torch's attention ignores the windows within a chunk, and only cuts off what its first query does not see.",
        "kernels/cpu/attention.py",
        "            mask += torch.full_like(",
        "            torch.full_like(",
        (f"{EXECUTOR}::test_torch_and_reference_kernels_equal_transformers_too",),
    ),
    Mutation(
        "Model c",
        "Weights are used as the checkpoint stores them, without converting them to what the block computes with.",
        "engine/models/weights.py",
        "    settle(config, weights)\n",
        "",
        (LOGITS,),
    ),
    Mutation(
        "Model d",
        "Layers without rotation are rotated.",
        "engine/models/families/smollm3.py",
        "[rope if turns else None for",
        "[rope for",
        (LOGITS,),
    ),
    Mutation(
        "Model e",
        "The shares of a token's experts are not normalised over the experts that were chosen.",
        "kernels/cpu/native/experts.h",
        "renormalize && i < to.per_token",
        "false && i < to.per_token",
        (LOGITS,),
    ),
    Mutation(
        "Model f",
        "Layers with a window are rotated like those without.",
        "engine/models/families/gemma3.py",
        "[everywhere if window is None else nearby for",
        "[everywhere for",
        (LOGITS,),
    ),
    Mutation(
        "Model g",
        "A tensor that no name refers to keeps what was in memory.",
        "engine/models/parameters.py",
        "    assert named == needed,",
        "    assert named <= needed,",
        ("tests/engine/models/test_toy_family.py",),
    ),
    # --- experts as they are stored --------------------------------------------------------------------------------
    Mutation(
        "experts: panels",
        "Every expert computes with the panels of the first.",
        "kernels/cpu/native/experts.h",
        "            found.grouped += expert * first.num_grouped;\n",
        "",
        (GROUPED_EXPERTS,),
    ),
    Mutation(
        "experts: sums of inputs",
        "An expert's minima are multiplied by the sums of inputs of another expert's rows.",
        "kernels/cpu/native/experts.h",
        "        if (first.input_sums) found.input_sums += begin * (first.inputs / BLOCK);\n",
        "",
        (GROUPED_EXPERTS,),
    ),
    Mutation(
        "experts: memory",
        "All experts of a layer are in memory twice while they are packed.",
        "kernels/cpu/native/program.py",
        "    for rows in experts:\n        made = pack_grouped(",
        "    for rows in list(experts):\n        made = pack_grouped(",
        (GROUPED_EXPERTS,),
    ),
    Mutation(
        "weights in memory: left-over rows",
        "Rows beyond the first eight, or four, are not multiplied by weights in groups (AVX-512 for bfloat16).",
        "kernels/cpu/native/grouped.cpp",
        "    while (rows >= ROWS) {",
        "    if (rows >= ROWS) {",
        ("tests/kernels/cpu/native/test_grouped.py",),
    ),
    Mutation(
        "weights in memory: small pages",
        "A CPU's weights lie on small pages, of which memory is read slower.",
        "kernels/cpu/large_pages.py",
        "return LargePages().empty if device is None",
        "return torch.empty if device is None",
        ("tests/engine/models/test_stored_matrix.py",),
    ),
    Mutation(
        "weights in memory: one storage",
        "All matrices of a region have one storage, so that an LM head of its own is taken for the embedding.",
        "kernels/cpu/large_pages.py",
        "torch.frombuffer(memory, dtype=dtype, count=count, offset=free.start).view(*shape)",
        "torch.frombuffer(memory, dtype=torch.uint8)[free.start :][:size].view(dtype).view(*shape)",
        ("tests/kernels/cpu/test_large_pages.py",),
    ),
    Mutation(
        "weights in memory: gates",
        "Gates and values are put in order elsewhere, so half of a model is in memory twice.",
        "kernels/cpu/native/program.py",
        "        fits = consume and not quantize and len(order) == outputs",
        "        fits = consume and quantize and len(order) == outputs",
        ("tests/kernels/cpu/native/test_program.py",),
    ),
    Mutation(
        "threads: unfinished parts",
        "What is shared out is taken for done while another thread still has a part of it.",
        "kernels/cpu/native/team.h",
        "        wait_while(done_, [&](uint32_t done) { return done != shared.count; });",
        "        wait_while(done_, [&](uint32_t done) { return done == 0; });",
        ("tests/kernels/cpu/native/test_team.py",),
    ),
    Mutation(
        "threads: parts taken twice",
        "Two threads may take the same part of what is shared out.",
        "kernels/cpu/native/team.h",
        "            if (!open_.compare_exchange_weak(open, open - part, std::memory_order_acq_rel, "
        "std::memory_order_acquire)) continue;",
        "            open_.store(open - part);",
        ("tests/kernels/cpu/native/test_team.py",),
    ),
    Mutation(
        "threads: nobody woken to help",
        "A thread that sleeps in a step is not woken when something is shared out.",
        "kernels/cpu/native/team.h",
        "        epoch_.wake();\n        take(epoch);",
        "        take(epoch);",
        ("tests/kernels/cpu/native/test_team.py",),
    ),
    Mutation(
        "threads: nobody woken at the end",
        "The thread that runs a step is not woken when another one has done the last part.",
        "kernels/cpu/native/team.h",
        "            if (done_.value.fetch_add(part) + part == count) done_.wake();",
        "            done_.value.fetch_add(part);",
        ("tests/kernels/cpu/native/test_team.py",),
    ),
    Mutation(
        "threads: all come first",
        "A thread that another process has put aside is waited for before anything is shared out.",
        "kernels/cpu/native/team.h",
        "        take(epoch);\n        wait_while(done_",
        "        while (size_ > 1 && uint32_t(open_.load()) == shared.count) std::this_thread::yield();\n"
        "        take(epoch);\n        wait_while(done_",
        ("tests/kernels/cpu/native/test_team.py",),
    ),
    Mutation(
        "long rows: what was weighed before",
        "Sums of a split are added to those before it as if both had the same largest score.",
        "kernels/cpu/native/attention.h",
        "keep = exponential(mine - now), take",
        "keep = splat(1.0f), take",
        (NATIVE,),
    ),
    Mutation(
        "long rows: one order",
        "Splits that several threads pass over are added up in another order than those of one thread.",
        "kernels/cpu/native/attention.h",
        "        for (int64_t i = 1; i < divided.splits; i++) all.add("
        "{num_queries, cache.head_dim, memory + divided.sums + i * size});",
        "        for (int64_t i = divided.splits - 1; i > 0; i--)\n"
        "            all.add({num_queries, cache.head_dim, memory + divided.sums + i * size});",
        (NATIVE,),
    ),
    Mutation(
        "long rows: never divided",
        "One thread passes over a KV head's keys while the others wait for it.",
        "kernels/cpu/native/attention.h",
        "            const bool divide = splits > 1 && ",
        "            const bool divide = splits > 1 && threads < 0 && ",
        (NATIVE,),
    ),
    Mutation(
        "batch-invariant attention: partial results",
        "Units in several programs are merged otherwise than in one.",
        "kernels/triton/attention/combine.py",
        "AT_A_TIME, split == UNITS, num_warps=4,",
        "AT_A_TIME, False, num_warps=4,",
        (INVARIANT_KERNELS,),
    ),
    Mutation(
        "batch-invariant attention: units",
        "A program that has several units of a row's keys sums them up as one.",
        "kernels/triton/attention/attention.py",
        'how = {"UNIT": UNIT, **NO_FUSION}',
        'how = {"UNIT": 0, **NO_FUSION}',
        (INVARIANT_KERNELS,),
    ),
    Mutation(
        "batch-invariant attention: decodes",
        "Decodes are counted as such, and no program computes them.",
        "kernels/triton/attention/plan.py",
        "decodes=torch.zeros_like(plan.decodes),",
        "decodes=plan.decodes,",
        (INVARIANT_KERNELS,),
    ),
    Mutation(
        "batch-invariant products: spans",
        "Many rows sum all inputs up at once, and few rows span by span.",
        "kernels/triton/linear/invariant.py",
        "sizes = (rows, inputs, outputs, span, span < inputs, ",
        "sizes = (rows, inputs, outputs, span, False, ",
        (INVARIANT_KERNELS,),
    ),
    Mutation(
        "batch-invariant products: narrow spans",
        "The same with weights of fewer bits.",
        "kernels/triton/linear/linear.py",
        "span_of(min(rows, SOME_ROWS) if batch_invariant else rows, packed)",
        "span_of(rows, packed)",
        (INVARIANT_KERNELS,),
    ),
    Mutation(
        "batch-invariant products: gated",
        "The fused activation sums all inputs up at once, where the product alone splits them.",
        "kernels/triton/linear/invariant.py",
        "return 0 < len(x) <= FEW_ROWS and span_of(inputs, outputs) >= inputs",
        "return 0 < len(x) <= FEW_ROWS",
        (INVARIANT_KERNELS,),
    ),
    Mutation(
        "batch-invariant start",
        "An engine starts on a GPU where the same text has other logits in other steps.",
        "engine/build/batch_invariance.py",
        "if not torch.equal(_bits(logits), _bits(want)):",
        "if not torch.equal(_bits(want), _bits(want)):",
        (INVARIANT_ENGINE,),
    ),
    Mutation(
        "rounded weights: NaN",
        "A weight that is not finite becomes a byte like others.",
        "kernels/cpu/native/linear.h",
        "largest = size > largest || size != size ? size : largest;",
        "largest = std::max(largest, size);",
        (NATIVE,),
    ),
    Mutation(
        "the likeliest token: NaN",
        "A logit that is NaN goes unnoticed unless it is among the last of a row.",
        "kernels/cpu/native/program.cpp",
        "                strange |= value != value;",
        "                strange = value != value;",
        ("tests/kernels/cpu/native/test_program.py",),
    ),
    Mutation(
        "experts: two forms",
        "An expert's gate and up may have forms of their own, which no panel can have beside each other.",
        "engine/models/narrow.py",
        "for own in found if len(own) == 1 for layout in own if",
        "for own in found for layout in list(own)[:1] if",
        ("tests/engine/models/test_narrow.py",),
    ),
    Mutation(
        "experts: GGUF",
        "The experts of a GGUF file are named from the last to the first.",
        "engine/checkpoints/gguf_convert.py",
        "    for expert in range(count):\n        yield",
        "    for expert in reversed(range(count)):\n        yield",
        ("tests/engine/checkpoints/test_gguf_convert.py",),
    ),
    # --- why a request was slow ------------------------------------------------------------------------------------
    Mutation(
        "why: own chunks",
        "The time of a prompt's own chunks is counted as that of others.",
        "engine/core/wall_times.py",
        "        self.own += (prompts + answers) * own\n",
        "        self.beside_prompts += (prompts + answers) * own\n",
        (WALL_TIMES,),
    ),
    Mutation(
        "why: preemption",
        "What a preempted request computes again counts as its prompt.",
        "engine/core/wall_times.py",
        "        if account.phase is not Phase.PREEMPTED:\n            self._turn(account, Phase.PREFILL, now)\n",
        "        self._turn(account, Phase.PREFILL, now)\n",
        (WALL_TIMES,),
    ),
    Mutation(
        "why: noise",
        "Every step that is longer than predicted counts as slow, by ordinary noise too.",
        "engine/core/wall_times.py",
        "excess = took - told if took > costs.most else 0.0",
        "excess = max(took - told, 0.0) if costs.most < math.inf else 0.0",
        (WALL_TIMES,),
    ),
    Mutation(
        "why: memory",
        "A request that waits for memory is told that it waited for its turn.",
        "engine/core/core.py",
        "for_memory = self._deferred in (DeferReason.MEMORY, DeferReason.PREEMPTION)",
        "for_memory = self._deferred is DeferReason.PREEMPTION",
        (WALL_TIMES,),
    ),
    Mutation(
        "why: idle",
        "The time in which an engine had nothing to do is part of its next step.",
        "engine/core/core.py",
        "        self._ended_at = now if self.has_work else None\n",
        "        self._ended_at = now\n",
        (WALL_TIMES,),
    ),
    Mutation(
        "why: the client",
        "What a client did not take while its engine worked counts as its fault.",
        "serve_app/api/timing/split.py",
        "    left_s -= told_s * scale\n    seconds[CLIENT] = min(unread_s, left_s)",
        "    left_s -= told_s * scale\n    seconds[CLIENT] = unread_s",
        (TIMING,),
    ),
    Mutation(
        "why: another tenant",
        "Any tenant may ask for any request's timing.",
        "serve_app/api/timing/recent.py",
        "ended = self._tenants[tenant].find(name) if tenant in self._tenants else None",
        "ended = next((one for known in self._tenants.values() if (one := known.find(name))), None)",
        (TIMING,),
    ),
    Mutation(
        "why: migration",
        "Where another engine's queue and prefill come from is not told.",
        "serve_app/api/timing/split.py",
        "        again = record.moves and cause not in _OF_ANSWERS\n",
        "        again = False\n",
        (TIMING,),
    ),
    # --- by time -------------------------------------------------------------------------------------------------
    Mutation(
        "time: the first chunk",
        "A step takes whole prompts beside streams, whatever the target: only the second chunk is limited.",
        "engine/scheduling/planner.py",
        "least = 0 if self._chunk_ends else self._time.least  # some prompt always advances",
        "least = 0 if self._chunk_ends else budget",
        (TARGETS,),
    ),
    Mutation(
        "time: padding",
        "A prompt that the target leaves no room advances by one token a step, each of which costs a whole graph.",
        "engine/scheduling/time_budget.py",
        "return self._costs.padding_beside(self._tokens)",
        "return 1",
        (TARGETS,),
    ),
    Mutation(
        "time: mixed sizes",
        "A draft or a chunk beside decode rows is predicted to be padded like decode rows alone.",
        "engine/scheduling/step_time.py",
        "return self._curve(self.sizes.padded(work.tokens, mixed=work.mixed > 0)) + self.rest_s(work)",
        "return self._curve(self.sizes.padded(work.tokens, mixed=False)) + self.rest_s(work)",
        ("tests/engine/scheduling/test_step_time.py",),
    ),
    Mutation(
        "time: no progress",
        "Where decode rows leave no time, prompts stand still.",
        "engine/scheduling/time_budget.py",
        "return max(target_s, decode_s + min(share * target_s + late, decode_s))",
        "return max(target_s, decode_s)",
        (TIME_BUDGET,),
    ),
    Mutation(
        "time: shared",
        "Each chunk of a step gets the whole step's time.",
        "engine/scheduling/planner.py",
        "            self._time.take(start, count, last=kind is RowKind.LAST)\n",
        "            pass\n",
        (TARGETS,),
    ),
    Mutation(
        "time: own target",
        "A step's limit is the longest target among its streams.",
        "engine/scheduling/planner.py",
        "target_s = least_s if usual else min(row.request.tpot_s for row in self._rows)",
        "target_s = max(row.request.tpot_s for row in self._rows)",
        (TARGETS,),
    ),
    Mutation(
        "time: learning",
        "The model never learns from the engine's steps.",
        "engine/core/core.py",
        "            self._step_times.observe(work, now - began)\n",
        "            pass\n",
        (TARGETS,),
    ),
    Mutation(
        "time: surprise",
        "A step that took a minute moves the prediction by as much as it was late.",
        "engine/scheduling/step_prediction.py",
        "seconds = min(max(seconds, predicted / MOST_SURPRISE), predicted * MOST_SURPRISE)",
        "seconds = max(seconds, predicted / MOST_SURPRISE)",
        (STEP_PREDICTION,),
    ),
    Mutation(
        "time: drift",
        "Steps of a machine that has changed count no more than others, so that it is followed in hundreds of them.",
        "engine/scheduling/step_prediction.py",
        "memory = RECENT_STEPS if abs(self._drift) > MOST_DRIFT else MEMORY_STEPS",
        "memory = MEMORY_STEPS",
        (STEP_PREDICTION,),
    ),
    Mutation(
        "time: starvation",
        "A prompt's place moves with its length without a bound, and a long one starves behind short ones.",
        "engine/scheduling/time_order.py",
        "behind = min(OVERTAKING * request.prefill_s, self.bound_s)",
        "behind = 100 * OVERTAKING * request.prefill_s",
        (TARGETS,),
    ),
    Mutation(
        "time: hopeless",
        "A request that can no longer be in time keeps others from being in time.",
        "engine/scheduling/scheduler.py",
        "            request.place = self._order.put_behind(request.place)\n",
        "",
        (TARGETS,),
    ),
    Mutation(
        "time: partial first",
        "A short prompt waits until a long one, once begun, is whole.",
        "engine/scheduling/planner.py",
        "(request.priority,) if request.ttft_s == math.inf else (request.priority, *request.place)",
        "(request.priority,)",
        (TARGETS,),
    ),
    Mutation(
        "time: cached",
        "A prompt in the prefix cache counts as long as one that is not.",
        "engine/scheduling/scheduler.py",
        "        request.expected_cached = cached * self._blocks.block_size\n",
        "        request.expected_cached = 0\n",
        (TARGETS,),
    ),
    Mutation(
        "time: rate",
        "Queued prompts are predicted to take whole steps, whatever target the streams beside them have.",
        "engine/scheduling/prefill_rate.py",
        "budget = TimeBudget(prediction, target_s, decodes) if limited else None",
        "budget = None",
        (PREFILL_RATE,),
    ),
    Mutation(
        "time: share",
        "A token after a long context counts against its tenant as one after a short context.",
        "engine/scheduling/service.py",
        "self._position_s = self._costs.key_s + self._costs.attended_s",
        "self._position_s = 0.0",
        (SERVICE,),
    ),
    Mutation(
        "time: placed",
        "What a router has sent since the last report takes no time, so that all goes to one engine until the next.",
        "serve_app/routing/fleet.py",
        "self.left_s = self.queued_s(sent.at) + self.costs.seconds(start, start + sent.num_tokens)",
        "self.left_s = self.queued_s(sent.at)",
        ("tests/serve_app/routing/test_fleet.py",),
    ),
    Mutation(
        "time: lenient",
        "A deadline is refused on a prediction that exceeds it a little.",
        "engine/protocol.py",
        "if takes_s <= SURELY_LATE * left_s:",
        "if takes_s <= left_s:",
        ("tests/serve_app/admission/test_fleet_forecast.py",),
    ),
    Mutation(
        "time: offered",
        "Replicas are counted by the tokens of prompts where engines say how long these take.",
        "serve_app/scaling/signals.py",
        "if self.offered_prefill_s_per_s is not None:",
        "if self.offered_prefill_s_per_s is False:",
        ("tests/serve_app/scaling/test_autoscaler.py",),
    ),
    # --- one model on several ranks -----------------------------------------------------------------------------------
    Mutation(
        "ranks: bias",
        "A bias of what is summed is added on every rank.",
        "engine/models/cuts.py",
        'return Cut(zero=self.rank > 0) if part == "bias"',
        'return Cut() if part == "bias"',
        (f"{SHARDS}::test_each_number_of_the_checkpoint_is_read_by_exactly_one_rank_but_for_what_all_have",),
    ),
    Mutation(
        "ranks: query heads",
        "Query heads are spread evenly, whatever KV heads a rank has.",
        "engine/models/shards.py",
        "return keys, range(keys.start * group, keys.stop * group)",
        "return keys, spread(num_heads, shard.rank, shard.size)",
        (f"{SHARDS}::test_queries_lie_in_one_part_each_beside_their_keys",),
    ),
    Mutation(
        "ranks: shared heads",
        "Ranks that share a KV head divide its query heads from the wrong one on.",
        "engine/models/shards.py",
        "own = spread(group, shard.rank - sharing.start, len(sharing))",
        "own = spread(group, shard.rank % len(sharing), len(sharing))",
        (f"{SHARDS}::test_queries_lie_in_one_part_each_beside_their_keys",),
    ),
    Mutation(
        "ranks: order",
        "Each rank adds its own numbers first, so that sums differ between ranks in their last bits.",
        "kernels/cpu/native/ranks.h",
        "f32x16 sum = load(from(0));\n        for (int rank = 1; rank < size_; rank++) sum += load(from(rank));",
        "f32x16 sum = load(from(rank_));\n"
        "        for (int rank = 1; rank < size_; rank++) sum += load(from((rank_ + rank) % size_));",
        (f"{RANKS_GROUP}::test_all_ranks_get_the_sum_in_the_order_of_ranks_rounded_once",),
    ),
    Mutation(
        "ranks: order tcp",
        "The same over TCP.",
        "kernels/collectives/gloo.py",
        "total = parts[0].to(torch.float32, copy=True)",
        "parts.sort(key=lambda part: part is not own); total = parts[0].to(torch.float32, copy=True)",
        (f"{RANKS_GROUP}::test_all_ranks_get_the_sum_in_the_order_of_ranks_rounded_once",),
    ),
    Mutation(
        "ranks: columns",
        "The leader lays the ranks' columns of the logits in the wrong order.",
        "kernels/collectives/gloo.py",
        "return torch.cat(parts, dim=1)",
        "return torch.cat(parts[::-1], dim=1)",
        (f"{RANKS_GROUP}::test_the_leader_gets_the_columns_of_all_ranks_beside_each_other",),
    ),
    Mutation(
        "ranks: messages",
        "Two messages that are sent before one is read share a place, and the first is lost.",
        "kernels/cpu/native/ranks.h",
        "int64_t(piece & 1) * message_bytes_; }",
        "int64_t(piece & 0) * message_bytes_; }",
        (f"{RANKS_GROUP}::test_a_message_does_not_wait_until_the_one_before_was_received",),
    ),
    Mutation(
        "ranks: late",
        "The seconds that ranks wait for one are charged to the leader.",
        "kernels/cpu/native/ranks.h",
        "own().late_ns.fetch_add(",
        "segment_->lines[LEADER].late_ns.fetch_add(",
        (f"{RANKS_MEMORY}::test_the_rank_that_the_others_wait_for_is_charged",),
    ),
    Mutation(
        "ranks: states",
        "A follower saves states before it takes back those of drafts that were wrong.",
        "engine/parallel/follower.py",
        "self._last.rewind.to(counts)\n                self._save()",
        "self._save()\n                self._last.rewind.to(counts)",
        (f"{RANKS_ENGINE}::test_a_state_that_is_saved_after_drafts_is_the_state_after_them_on_all_ranks",),
    ),
    Mutation(
        "ranks: digest",
        "A rank with other weights or another processor computes with the others.",
        "engine/parallel/follower.py",
        "if message.model != computes:",
        "if not message.model:",
        (f"{RANKS_START}::test_a_rank_with_other_weights_is_refused_at_the_start",),
    ),
    Mutation(
        "ranks: samples",
        "Two versions of weights are told apart by the beginnings of their files.",
        "engine/parallel/model_digest.py",
        "for sample in range(_SAMPLES):",
        "for sample in range(1):",
        (f"{RANKS_START}::test_a_digest_says_which_weights_a_directory_has_and_not_where_it_lies",),
    ),
    Mutation(
        "ranks: memory",
        "KV blocks are counted as of one rank, though several have the same KV heads.",
        "engine/build/resolve.py",
        "shapes = [*parts_on(model, config, ranks), *",
        "shapes = [model, *",
        (f"{RANKS_ENGINE}::test_memory_is_that_of_all_ranks_where_several_have_the_same_heads",),
    ),
    Mutation(
        "ranks: own node",
        "A rank on another node does not count the memory that it takes there.",
        "engine/build/follower.py",
        "if not self.is_counted:",
        "if self.is_counted is None:",
        (f"{RANKS_FIT}::test_each_rank_claims_its_memory_on_its_own_machine",),
    ),
    Mutation(
        "ranks: joined",
        "What a rank has taken counts as promised, too, so that no second engine fits on the machine.",
        "engine/host/shares.py",
        "pairs = [(process, before), *zip(others[::2], others[1::2], strict=True)]",
        "pairs = [(process, before)]",
        ("tests/engine/host/test_shares.py::test_what_a_rank_takes_is_taken_of_its_leaders_claim",),
    ),
    Mutation(
        "ranks: idle",
        "An idle engine is healthy although the process of a rank has ended.",
        "engine/async_engine.py",
        "if ranks is not None and (lost := ranks.why_lost()) is not None:",
        "if ranks is not None and (lost := ranks.why_lost()) == '':",
        (f"{RANKS_WHOLE}::test_an_idle_engine_is_unhealthy_once_the_process_of_a_rank_has_ended",),
    ),
    Mutation(
        "ranks: refused",
        "The others are told of a plan that the leader then refuses, and are a step ahead of it.",
        "engine/parallel/leader.py",
        "        check_plan(plan, self._block_size, 0 if self.state is None else self.state.num_slots)\n",
        "",
        (f"{RANKS_ENGINE}::test_a_plan_that_is_refused_leaves_the_ranks_in_step",),
    ),
    Mutation(
        "ranks: pending",
        "Followers are told of the place that a token in flight will have, and not of the token.",
        "engine/parallel/messages.py",
        "fed_tokens(row, newest),",
        "row.token_ids,",
        (f"{RANKS_ENGINE}::test_a_token_in_flight_is_what_the_leader_sampled",),
    ),
    Mutation(
        "ranks: together",
        "A leader that fails within a step leaves the others waiting for it.",
        "engine/execution/ranks.py",
        '        group.give_up(f"{type(error).__name__}: {error}")\n',
        "",
        (f"{RANKS_ENGINE}::test_a_leader_that_fails_within_a_step_ends_all_ranks",),
    ),
    Mutation(
        "ranks: least",
        "The leader plans with KV blocks that a rank on another machine does not have.",
        "engine/build/least_room.py",
        "lower = replace(resolved, num_kv_blocks=least)",
        "lower = replace(resolved)",
        (f"{RANKS_FIT}::test_the_leader_plans_with_the_kv_blocks_of_the_rank_with_the_least_room",),
    ),
    Mutation(
        "ranks: given back",
        "Blocks that another rank has no room for stay promised, so that the next engine does not find their memory.",
        "engine/build/cpu.py",
        "self.claim.give_back(count * one)",
        "self.claim.give_back(0)",
        (f"{RANKS_FIT}::test_the_leader_plans_with_the_kv_blocks_of_the_rank_with_the_least_room",),
    ),
    Mutation(
        "ranks: asked",
        "A number of KV blocks that was asked for is lowered without a word.",
        "engine/build/rank_fit.py",
        "if config.num_kv_blocks is None and config.kv_cache_memory_gib is None:",
        "if config is not None:",
        (
            f"{RANKS_FIT}::test_a_rank_without_room_for_the_blocks_that_are_asked_for_or_for_any_is_named_with_what_is_free",
        ),
    ),
    Mutation(
        "ranks: divided",
        "The first of two ranks on another machine takes all of its memory.",
        "engine/build/ranks.py",
        "engines * len(launcher.ranks_beside(shard.rank, size))",
        "engines",
        (f"{RANKS_FIT}::test_ranks_of_one_other_machine_divide_its_memory",),
    ),
    Mutation(
        "lockstep machine",
        "Ranks that are alone on a machine leave room there for those on others.",
        "engine/build/lockstep.py",
        "beside = [len(launcher.ranks_beside(rank, size)) for rank in range(size)]",
        "beside = [size] * size",
        (f"{LOCKSTEP_PROCESSES}::test_each_rank_takes_its_part_of_its_own_machine_s_memory",),
    ),
    Mutation(
        "lockstep prefix",
        "A prompt goes to any rank, wherever its beginning is cached.",
        "engine/parallel/places.py",
        "work = load + _num_new(submission, cached.get(rank, 0))",
        "work = load + _num_new(submission, 0)",
        (f"{LOCKSTEP_PLACES}::test_the_rank_with_the_longest_prefix_gets_a_prompt_also_if_it_has_a_few_more_requests",),
    ),
    Mutation(
        "lockstep hot",
        "A hot prefix draws requests to its rank as long as that saves tokens, while others are idle.",
        "engine/parallel/places.py",
        "count >= self._seats, load > limit, work",
        "count >= self._seats, False, work",
        (f"{LOCKSTEP_PLACES}::test_a_hot_prefix_fills_no_rank_while_others_are_idle",),
    ),
    Mutation(
        "lockstep full",
        "A rank gets requests for its prefixes beyond its own limit, and refuses them.",
        "engine/parallel/places.py",
        "return count >= self._most, count >= self._seats, load",
        "return False, False, load",
        (f"{LOCKSTEP_PLACES}::test_a_rank_without_a_free_seat_gets_none_while_another_has_one_and_a_full_one_never",),
    ),
    Mutation(
        "lockstep reset",
        "Prefixes that were dropped still draw requests.",
        "engine/parallel/leading_engine.py",
        "self._places.forget_prefixes()",
        "self._places.counts",
        (
            f"{LOCKSTEP_PROCESSES}::test_a_prompt_goes_to_the_rank_that_has_its_beginning_and_has_the_answer_of_an_engine_alone",
        ),
    ),
    Mutation(
        "lockstep line",
        "A message that cannot be read is told as the death of the rank that sent it.",
        "engine/parallel/line.py",
        'return f"a message could not be taken: {_told(error)}"',
        "return None",
        (f"{LOCKSTEP_PROCESSES}::test_a_message_that_one_end_cannot_read_ends_all_with_what_it_is",),
    ),
    Mutation(
        "lockstep limits",
        "A full engine of several ranks is full at the limits of one.",
        "engine/async_engine.py",
        "ranks, seats, queue = self._num_ranks,",
        "ranks, seats, queue = 1,",
        (f"{LOCKSTEP_PROCESSES}::test_more_requests_than_all_ranks_hold_are_refused_by_the_engine_s_own_limits",),
    ),
    Mutation(
        "lockstep room",
        "The leader takes a request by its own KV blocks, and a rank that has fewer refuses it.",
        "engine/build/lockstep.py",
        "return with_least(resolved, room, group.rank)",
        "return resolved",
        (
            f"{LOCKSTEP_PROCESSES}::test_all_ranks_have_the_limits_of_the_one_with_the_least_room_and_take_a_request_up_to_these",
        ),
    ),
    Mutation(
        "lockstep threads",
        "Each rank of a mixture counts the threads of all ranks on all machines as its own.",
        "engine/build/resolve.py",
        "size = config.tensor_parallel_size * config.expert_parallel_size",
        "size, num_here = config.tensor_parallel_size, None if config.expert_parallel_size > 1 else num_here",
        (f"{LOCKSTEP_PROCESSES}::test_each_rank_has_its_part_of_the_threads_on_its_own_machine",),
    ),
    Mutation(
        "lockstep start of a line",
        "A reader that cannot take its first message waits for a writer that has not started, and the line stays open.",
        "engine/parallel/line.py",
        "        self._writer.start()\n        self._reader.start()\n",
        "        self._reader.start()\n        self._writer.start()\n",
        (
            "tests/engine/parallel/test_line.py::"
            "test_a_first_message_that_cannot_be_taken_ends_the_line_also_before_the_start_has_returned",
        ),
    ),
    Mutation(
        "ranks: surplus",
        "A follower keeps the memory of KV blocks with which nobody plans.",
        "engine/parallel/follower.py",
        "self._on_least(min(blocks_of_all(self._group, self._num_blocks)))",
        "blocks_of_all(self._group, self._num_blocks)",
        (f"{RANKS_FIT}::test_each_rank_that_has_more_room_than_the_one_with_the_least_gives_it_back",),
    ),
    Mutation(
        "ranks: checked",
        "An engine that several machines could hold is refused because one cannot.",
        "engine/build/engine.py",
        "    if ranks_apart:\n",
        "    if not engines:\n",
        (f"{RANKS_FIT}::test_a_check_of_ranks_on_several_machines_counts_only_the_first_rank_here",),
    ),
    Mutation(
        "ranks: port",
        "The leader's port is only its own once it has loaded its weights.",
        "kernels/collectives/gloo.py",
        "self._port = int(self._listener.getsockname()[1])",
        "self._port = int(self._listener.getsockname()[1])\n            self._listener.close()",
        (f"{RANKS_TCP}::test_a_leader_holds_its_port_from_the_start_and_frees_it_without_having_joined",),
    ),
)


# --- inside pytest: this module is also the plugin that every run loads ----------------------------------------------


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Refuse to test anything but the copy, and let hypothesis try the same examples in every run."""
    from hypothesis import Phase, settings

    import engine

    if not Path(engine.__file__).resolve().is_relative_to(Path.cwd().resolve()):
        raise pytest.UsageError(f"imported {engine.__file__}, which is not in the copy {Path.cwd()}")
    phases = (Phase.explicit, Phase.generate)  # shrinking takes minutes, and only the failing test is wanted
    settings.register_profile("mutations", derandomize=True, database=None, phases=phases, deadline=None)
    settings.load_profile("mutations")


# --- outside: the copy, the runs, the table --------------------------------------------------------------------------


@contextmanager
def copied_checkout() -> Iterator[Path]:
    """Copy the files that git knows or would add, as they are now, to a temporary directory."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        for name in filter(None, names):
            if (ROOT / name).is_file():
                (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, Path(folder) / name)
        yield Path(folder)


def first_failure(copy: Path, tests: Iterable[str]) -> str | None:
    """Return the first test that fails in the copy, or None if all pass."""
    # Two reverts of one file within a second would share a .pyc, which is checked by size and second.
    env = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "tests.mutations", "--tb=no"]
    tests = list(tests)
    if all("::" not in test for test in tests):
        options += ["-m", "not slow"]  # a slow test is only run where it is named
    command = [sys.executable, "-m", "pytest", *options, *tests]
    try:
        done = subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"hangs for {TIMEOUT_S} s"
    if done.returncode == 0:
        return None
    if done.returncode < 0:  # native code wrote where it must not
        return f"ends by signal {-done.returncode}"
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    if done.returncode != 1 or not failed:  # a revert that cannot even be imported proves nothing
        raise SystemExit(f"pytest ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return failed[1].removeprefix("tests/engine/")


def try_mutation(copy: Path, mutation: Mutation) -> str | None:
    """Apply a revert, run its tests, take it back; return what caught it."""
    path = copy / mutation.file
    original = path.read_text(encoding="utf-8")
    path.write_text(mutation.apply(original), encoding="utf-8")
    try:
        named = mutation.named_tests()
        return (first_failure(copy, named) if named else None) or first_failure(copy, mutation.tests)
    finally:
        path.write_text(original, encoding="utf-8")


def spread(items: Iterable[Item], run: Callable[[Path, Item], str | None]) -> Iterator[tuple[Item, str | None]]:
    """Yield each item, in order, with what `run` returned for it; every call has one of the copies to itself."""
    copies: SimpleQueue[Path] = SimpleQueue()

    def work(item: Item) -> tuple[Item, str | None]:
        copy = copies.get()
        try:
            return item, run(copy, item)
        finally:
            copies.put(copy)

    with ExitStack() as stack:
        for _ in range(WORKERS):
            copies.put(stack.enter_context(copied_checkout()))
        pool = stack.enter_context(ThreadPoolExecutor(WORKERS))
        stack.callback(pool.shutdown, cancel_futures=True)
        yield from pool.map(work, items)


def why_stale(mutation: Mutation) -> str | None:
    """Return why a mutation no longer applies; None if it still finds the text that it replaces."""
    try:
        mutation.apply((ROOT / mutation.file).read_text(encoding="utf-8"))
    except StaleMutationError as error:
        return str(error)
    return None


def known_rows() -> dict[str, str]:
    """Return, by name, the table's rows of mutations that have not changed since they were run."""
    rows = {tuple(line.split(" | ")[:2]): line for line in TABLE.read_text(encoding="utf-8").splitlines()}
    found = {mutation.name: rows.get((f"| {mutation.name}", mutation.defect)) for mutation in MUTATIONS}
    return {name: row for name, row in found.items() if row}


def write_table(caught: dict[str, str | None]) -> None:
    """Write the table with these results; the other rows stay."""
    rows = known_rows()
    lines = [
        "# Known defects, put back one at a time",
        "",
        "Written by `python -m tests.mutations`. Names are those of the specification: Sx-Rn a defect, Sx-Bn a",
        "behaviour, I-n an invariant; a word stands for what has no number there. The test named is the first that",
        "fails; others may fail too.",
        "",
        "| name | what the revert does | caught by |",
        "| --- | --- | --- |",
    ]
    for mutation in MUTATIONS:
        if mutation.name in caught:
            catcher = caught[mutation.name]
            lines.append(f"| {mutation.name} | {mutation.defect} | {f'`{catcher}`' if catcher else '**SURVIVED**'} |")
        elif mutation.name in rows:
            lines.append(rows[mutation.name])
    TABLE.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main(wanted: list[str]) -> int:
    """Run all reverts and write the table. Or run only those whose name starts with one of `wanted`,
    or with `--missing` those that the table lacks, and write their rows."""
    chosen = [m for m in MUTATIONS if not wanted or m.name.startswith(tuple(wanted))]
    if wanted == ["--missing"]:
        rows = known_rows()
        chosen = [m for m in MUTATIONS if m.name not in rows]
    started = time.monotonic()
    caught: dict[str, str | None] = {}
    stale = {mutation.name: error for mutation in chosen if (error := why_stale(mutation))}
    for name, error in stale.items():
        print(f"{name:18} STALE: {error}", flush=True)
    chosen = [mutation for mutation in chosen if mutation.name not in stale]
    tests = dict.fromkeys(test for mutation in chosen for test in (*mutation.named_tests(), *mutation.tests))
    alone = [test for test in tests if "::" not in test or test.partition("::")[0] not in tests]
    for test, broken in spread(alone, lambda copy, test: first_failure(copy, [test])):
        if broken:
            raise SystemExit(f"without any revert, {test} does not pass: {broken}")
    for mutation, catcher in spread(chosen, try_mutation):
        caught[mutation.name] = catcher
        print(f"{mutation.name:18} {catcher or 'SURVIVED'}", flush=True)
    write_table(caught)
    survivors = [name for name, catcher in caught.items() if catcher is None]
    seconds = time.monotonic() - started
    print(f"{len(caught) - len(survivors)} of {len(caught)} caught, {len(stale)} stale, in {seconds:.0f} s")
    return 1 if survivors or stale else 0


if __name__ == "__main__":
    assert len({m.name for m in MUTATIONS}) == len(MUTATIONS), "two mutations share a name"
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutations",
        description="Revert the scheduler's fixes one by one, and check that a test catches each.",
    )
    parser.add_argument("names", nargs="*", help="how the names of the reverts begin; none: all")
    parser.add_argument("--missing", action="store_true", help="those that the table lacks")
    given = parser.parse_args()
    sys.exit(main(["--missing"] if given.missing else given.names))
