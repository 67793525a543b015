"""Owns the reverts of known defects, a long table, and the proof that a test catches each: `python -m tests.mutations`.
Never touches the checkout but for tests/mutations.md: every revert is applied to a copy in a temporary directory."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "tests" / "mutations.md"
TIMEOUT_S = 60

ASYNC = "tests/engine/test_async_engine.py"
BLOCKS = "tests/engine/test_block_manager.py"
CONFIG = "tests/engine/test_config.py"
CORE = "tests/engine/test_core.py"
PLANNER = "tests/engine/test_planner.py"
PROPERTIES = "tests/engine/test_core_properties.py"
SCHEDULER = "tests/engine/test_scheduler.py"


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

    def apply(self, text: str) -> str:
        if (found := text.count(self.old)) != 1:
            raise SystemExit(f"{self.name}: its text occurs {found} times in {self.file}, not once:\n{self.old}")
        return text.replace(self.old, self.new)


MUTATIONS = (
    # --- who gets in ---------------------------------------------------------------------------------------------
    Mutation(
        "S1-R1",
        "A prompt of no tokens is accepted, and wedges the queue.",
        "engine/request.py",
        "    if not prompt:\n",
        "    if prompt is None:\n",
        (CORE,),
    ),
    Mutation(
        "S1-R8 a",
        "A lifetime counts the KV of the last token, which is never written.",
        "engine/request.py",
        "return self.prompt_len + self.max_new - 1",
        "return self.prompt_len + self.max_new",
        (CORE, PLANNER),
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
        "A token budget that decode rows use up is accepted, and prefill starves.",
        "engine/config.py",
        "if self.max_num_batched_tokens < self.max_num_seqs + 1:",
        "if self.max_num_batched_tokens < self.max_num_seqs:",
        (CONFIG,),
    ),
    Mutation(
        "I-26 id reuse",
        "A second request may take the id of a live one, and gets its last events.",
        "engine/async_engine.py",
        "        if submission.request_id in self._streams:\n",
        "        if submission.request_id is None:\n",
        (ASYNC,),
    ),
    Mutation(
        "S4-R1",
        "Seats are counted without the prompts that are still being computed.",
        "engine/planner.py",
        "seats = self._config.max_num_seqs - len(view.decoding) - len(view.prefilling)",
        "seats = self._config.max_num_seqs - len(view.decoding)",
        (PLANNER,),
    ),
    # --- chunks --------------------------------------------------------------------------------------------------
    Mutation(
        "S2-R4",
        "A last chunk of one token is taken for a decode row.",
        "engine/planner.py",
        "        self._num_partial += kind is RowKind.MIDDLE\n",
        "        kind = RowKind.DECODE if kind is RowKind.LAST and count == 1 else kind\n"
        "        self._num_partial += kind is RowKind.MIDDLE\n",
        (SCHEDULER,),
    ),
    Mutation(
        "S4-R10",
        "A chunk is final once it passes the prompt, also of a preempted request that has an answer to recompute.",
        "engine/planner.py",
        "kind = RowKind.LAST if start + count == target else RowKind.MIDDLE",
        "kind = RowKind.LAST if start + count >= request.prompt_len else RowKind.MIDDLE",
        (PLANNER,),
    ),
    Mutation(
        "S4-R9 a",
        "The plan re-prefills a preempted request up to its prompt and forgets its answer.",
        "engine/planner.py",
        "start, target = len(prefix) * self._block_size, len(request.token_ids)",
        "start, target = len(prefix) * self._block_size, request.prompt_len",
        (PLANNER,),
    ),
    Mutation(
        "S4-R9 b",
        "A preempted request is re-admitted with its prompt as the target.",
        "engine/scheduler.py",
        "        request.target = len(request.token_ids)\n",
        "        request.target = request.prompt_len\n",
        (PLANNER,),
    ),
    Mutation(
        "S4-R14",
        "A preemption strips the newest token as if it were a placeholder.",
        "engine/scheduler.py",
        "        request.computed = request.scheduled = request.target = 0\n",
        "        request.computed = request.scheduled = request.target = 0\n        del request.token_ids[-1:]\n",
        (PLANNER,),
    ),
    Mutation(
        "S4-B14 sliver",
        "Alignment rounds a chunk down to nothing although the step has no other prefill, and its prompt starves.",
        "engine/planner.py",
        "return aligned if aligned > 0 else (0 if self._chunk_ends else count)",
        "return max(aligned, 0)",
        (PLANNER,),
    ),
    Mutation(
        "S5-R17",
        "Nothing is admitted beside the tail chunk of a prompt.",
        "engine/planner.py",
        "        if budget > 0 and not self._preempted:\n",
        "        if budget > 0 and not self._preempted and not self._view.prefilling:\n",
        (PLANNER,),
    ),
    Mutation(
        "S5-R3",
        "Any number of prompts may be partly computed, so that all share the budget and none gets on.",
        "engine/planner.py",
        "return bool(most) and self._num_partial >= most",
        "return False",
        (PLANNER,),
    ),
    Mutation(
        "S1-B18",
        "A request-local chunk may be longer than what decode rows leave of a step, and waits until they end.",
        "engine/planner.py",
        "        most = min(self._view.prefill_limit, beside_decodes)\n",
        "        most = min(self._view.prefill_limit, self._config.max_num_batched_tokens)\n",
        (PLANNER, PROPERTIES),
    ),
    Mutation(
        "I-2 a",
        "Prefill may use all of the step's tokens instead of max_prefill_tokens.",
        "engine/planner.py",
        "        budget = self._view.prefill_limit\n        mode",
        "        budget = self._config.max_num_batched_tokens\n        mode",
        (SCHEDULER,),
    ),
    Mutation(
        "I-2 b",
        "Decode rows are not taken off the step's token budget.",
        "engine/planner.py",
        "self._prefill(min(budget, self._config.max_num_batched_tokens - len(self._rows)))",
        "self._prefill(min(budget, self._config.max_num_batched_tokens))",
        (SCHEDULER,),
    ),
    # --- modes and their bounds ----------------------------------------------------------------------------------
    Mutation(
        "S5-R14",
        "prefill_first keeps decode rows waiting for as long as prompts arrive.",
        "engine/planner.py",
        "return (True, 0) if starved else (False, budget)",
        "return (False, budget)",
        (PLANNER,),
    ),
    Mutation(
        "S1-R9",
        "decode_first keeps prompts waiting for as long as somebody decodes.",
        "engine/planner.py",
        " and not self._prompt_starves():",
        ":",
        (PLANNER,),
    ),
    Mutation(
        "I-23",
        "bypass overtakes a request that does not fit without a bound.",
        "engine/planner.py",
        "            if passed and slack <= 0:\n",
        "            if passed and slack is None:\n",
        (PLANNER,),
    ),
    # --- reservation ---------------------------------------------------------------------------------------------
    Mutation(
        "I-15",
        "Full reservation ignores what admitted requests were promised.",
        "engine/reservation.py",
        "<= self.available - self._promised",
        "<= self.available",
        (PLANNER,),
    ),
    Mutation(
        "I-15 promises",
        "What a released request was promised is never given back, so that admission ends for good.",
        "engine/scheduler.py",
        "        self._promised -= self._still_promised(request)\n",
        "",
        (PLANNER,),
    ),
    Mutation(
        "S5-R1 a",
        "An answer counts in full for admission, whatever the clip.",
        "engine/reservation.py",
        "return min(request.max_new - request.num_output, clip)",
        "return request.max_new - request.num_output",
        (PLANNER,),
    ),
    Mutation(
        "S5-R1 b",
        "The answers admitted in one step are clipped a second time, together.",
        "engine/reservation.py",
        "        self._answer_tokens += reserved_tokens(request, self._clip)\n",
        "        more = reserved_tokens(request, self._clip)\n"
        "        self._answer_tokens = min(self._answer_tokens + more, self._clip)\n",
        (PLANNER,),
    ),
    Mutation(
        "S5-R11",
        "A request that is alone must find its reservation free too, and waits for ever for nobody.",
        "engine/reservation.py",
        "        if alone:\n",
        "        if alone and not needed:\n",
        (PLANNER,),
    ),
    Mutation(
        "S5-R12",
        "A preempted request reserves its whole answer again, not what is left of it.",
        "engine/reservation.py",
        "return min(request.max_new - request.num_output, clip)",
        "return min(request.max_new, clip)",
        (PLANNER,),
    ),
    Mutation(
        "S5-R2",
        "The ratio does not fall while requests wait, and so the queue never drains.",
        "engine/scheduler.py",
        "        else:\n            kinds = ",
        "        elif not self.waiting:\n            kinds = ",
        (PLANNER,),
    ),
    Mutation(
        "S5-R8",
        "A ratio that a preemption left below its least value stays there.",
        "engine/reservation.py",
        "        if decoded and (not prefilled",
        "        if self.value > self._config.ratio_min and decoded and (not prefilled",
        (PLANNER,),
    ),
    Mutation(
        "S5-R9",
        "An idle engine keeps the ratio of its last burst.",
        "engine/scheduler.py",
        "            self._ratio.reset()\n",
        "            pass\n",
        (PLANNER,),
    ),
    Mutation(
        "S5-R10",
        "retract_steps is read nowhere.",
        "engine/reservation.py",
        "self._config.retract_steps * len(remaining)",
        "20 * len(remaining)",
        (PLANNER,),
    ),
    # --- preemption ----------------------------------------------------------------------------------------------
    Mutation(
        "S5-R6, R7",
        "A victim keeps the decode row that it had in the step that takes its memory.",
        "engine/planner.py",
        "RowKind.DECODE, request.scheduled, 1) for request in decoding]",
        "RowKind.DECODE, request.scheduled, 1) for request in self._view.decoding.values()]",
        (PLANNER,),
    ),
    Mutation(
        "S5-R13 a",
        "The oldest request may be a victim, again and again.",
        "engine/planner.py",
        "candidates = [request for request in decoding if request is not self._elder]",
        "candidates = list(decoding)",
        (PLANNER,),
    ),
    Mutation(
        "S5-R13 b",
        "A preempted request waits behind all others by default.",
        "engine/scheduler.py",
        '        elif self._config.scheduler.requeue == "back":\n',
        '        elif self._config.scheduler.requeue != "front":\n',
        (PLANNER,),
    ),
    Mutation(
        "I-18",
        "Retraction takes the longest answer, which loses most.",
        "engine/planner.py",
        "key=lambda request: (request.num_output, -request.prompt_len, -request.ticket))",
        "key=lambda request: (-request.num_output, -request.prompt_len, -request.ticket))",
        (PLANNER,),
    ),
    Mutation(
        "I-24",
        "A step that has just preempted somebody admits somebody else.",
        "engine/planner.py",
        "        if budget > 0 and not self._preempted:\n",
        "        if budget > 0:\n",
        (PLANNER,),
    ),
    Mutation(
        "I-21",
        "Younger answers take the last block from the oldest request's prompt.",
        "engine/planner.py",
        "while self._growth(decoding) + self._elder_chunk() > self._available():",
        "while self._growth(decoding) > self._available():",
        (PLANNER, PROPERTIES),
    ),
    Mutation(
        "I-10 victims",
        "A block that a victim shares counts as freed although others still hold it.",
        "engine/block_manager.py",
        "return sum(count == self._holders[block_id] for block_id, count in releases.items())",
        "return len(releases)",
        (BLOCKS, PLANNER, PROPERTIES),
    ),
    # --- the prefix cache ----------------------------------------------------------------------------------------
    Mutation(
        "S4-R11 a",
        "A prompt's blocks are all allocated and published when it is admitted, before they are computed.",
        "engine/scheduler.py",
        "        self._promised += self._still_promised(request)\n",
        "        self._promised += self._still_promised(request)\n"
        "        self._grow(request, request.prompt_len)\n"
        "        for block, digest in zip(request.block_ids, request.block_hashes):\n"
        "            self._blocks.publish(block, digest)\n",
        (CORE,),
    ),
    Mutation(
        "S4-R11 b",
        "A chunk's blocks are published when it is scheduled, and stay so if its step fails.",
        "engine/scheduler.py",
        "        request.was_scheduled = True\n",
        "        request.was_scheduled = True\n"
        "        for i in range(min(end, request.prompt_len) // self._blocks.block_size):\n"
        "            self._blocks.publish(request.block_ids[i], request.block_hashes[i])\n",
        (CORE,),
    ),
    Mutation(
        "S4-R12",
        "The last block of a prompt counts as a hit, so that no token is left to compute.",
        "engine/planner.py",
        "most = (len(request.token_ids) - 1) // self._block_size",
        "most = len(request.token_ids) // self._block_size",
        (CORE,),
    ),
    Mutation(
        "S5-R18",
        "A request that waits looks its prefix up in every step.",
        "engine/planner.py",
        "        if epoch != self._view.blocks.epoch:\n",
        "        if epoch is not None:\n",
        (SCHEDULER,),
    ),
    Mutation(
        "I-10 claims",
        "A row's allocation may evict the cached prefix that a later row of the step starts from.",
        "engine/scheduler.py",
        """        for row in plan.rows:
            if row.prefix_blocks is not None:  # all claims first: an allocation below must not evict them
                self._admit(row.request, row.prefix_blocks)
        self._keep_ratio(plan)
        step = StepPlan(self._next_step_id, tuple(self._schedule(row, now) for row in plan.rows))
""",
        """        self._keep_ratio(plan)
        scheduled = []
        for row in plan.rows:
            if row.prefix_blocks is not None:
                self._admit(row.request, row.prefix_blocks)
            scheduled.append(self._schedule(row, now))
        step = StepPlan(self._next_step_id, tuple(scheduled))
""",
        (CORE, PLANNER, PROPERTIES),
    ),
    Mutation(
        "I-10 hits",
        "A hit that nobody holds costs nothing at admission, although it is then no longer there to evict.",
        "engine/planner.py",
        "shared = sum(view.blocks.is_held(block) or block in taken for block in prefix)",
        "shared = len(prefix)",
        (CORE, PLANNER, PROPERTIES),
    ),
    Mutation(
        "S1-R13",
        "Each request that shares a held prefix is charged for it again.",
        "engine/planner.py",
        "shared = sum(view.blocks.is_held(block) or block in taken for block in prefix)",
        "shared = 0",
        (CORE,),
    ),
    Mutation(
        "I-11",
        "A block's hash does not cover what comes before it.",
        "engine/request.py",
        'parent = self.block_hashes[-1] if self.block_hashes else b""',
        'parent = b""',
        (CORE, PROPERTIES),
    ),
    Mutation(
        "S4-R12 eviction",
        "The tail of a released prefix outlives its head, without which it is of no use.",
        "engine/block_manager.py",
        "for block_id in reversed(block_ids):",
        "for block_id in block_ids:",
        (BLOCKS,),
    ),
    Mutation(
        "I-11 eviction",
        "The prefix released last is evicted first.",
        "engine/block_manager.py",
        "self._evictable.popitem(last=False)",
        "self._evictable.popitem(last=True)",
        (BLOCKS,),
    ),
    Mutation(
        "I-10 release",
        "Releasing a block twice passes in silence.",
        "engine/block_manager.py",
        'raise RuntimeError(f"block {block_id} was released twice")',
        "continue",
        (BLOCKS,),
    ),
    # --- ends and failures ---------------------------------------------------------------------------------------
    Mutation(
        "S1-R2, S4-R17",
        "An abort is ignored in the middle of a prompt.",
        "engine/core.py",
        "        if request is None:\n            return []\n",
        "        if request is None or request_id in self._scheduler.prefilling:\n            return []\n",
        (CORE,),
    ),
    Mutation(
        "S5-R21",
        "An abort is ignored while its request waits.",
        "engine/scheduler.py",
        "for queue in (self.waiting, self.prefilling, self.decoding):",
        "for queue in (self.prefilling, self.decoding):",
        (CORE,),
    ),
    Mutation(
        "S5-R22",
        "What ends in the middle of its prompt keeps its blocks.",
        "engine/scheduler.py",
        "        self._blocks.release(request.block_ids)\n",
        "        if request.computed >= request.target:\n            self._blocks.release(request.block_ids)\n",
        (CORE,),
    ),
    Mutation(
        "S3-R1 a",
        "A failed step fails every live request, also those that it did not carry.",
        "engine/core.py",
        "return events + [self._fail(row.request, ErrorCode.STEP_FAILED, str(output)) for row in plan.rows]",
        "live = [*self._scheduler.waiting.values(), *self._scheduler.prefilling.values(), "
        "*self._scheduler.decoding.values()]\n"
        "            return events + [self._fail(request, ErrorCode.STEP_FAILED, str(output)) for request in live]",
        (CORE,),
    ),
    Mutation(
        "S3-R1 b",
        "A request that fails is told so, and keeps its blocks and its seat.",
        "engine/core.py",
        "        self._release(request)\n        return Failed(",
        "        return Failed(",
        (CORE,),
    ),
    Mutation(
        "S1-R14 a",
        "A fatal executor error is taken for the failure of one step.",
        "engine/core.py",
        "        except ExecutorFatalError:\n            raise\n",
        "",
        (CORE,),
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
        "engine/core.py",
        "retry = not self._retrying and any(",
        "retry = any(",
        (CORE,),
    ),
    Mutation(
        "S1-R7 b",
        "A step that ran out of memory is tried again as large as it was.",
        "engine/scheduler.py",
        "self._prefill_limit = max(prefill // 2,",
        "self._prefill_limit = max(prefill,",
        (CORE,),
    ),
    Mutation(
        "S5-R16",
        "Blocks that a request holds beyond its progress count as negative demand.",
        "engine/planner.py",
        "return max(-(-num_tokens // self._block_size) - len(request.block_ids), 0)",
        "return -(-num_tokens // self._block_size) - len(request.block_ids)",
        (CORE, PLANNER, PROPERTIES),
    ),
    # --- events and answers --------------------------------------------------------------------------------------
    Mutation(
        "S1-B20",
        "Scheduled is sent again after a preemption.",
        "engine/core.py",
        "if not row.request.was_scheduled]",
        "if row.prefix_blocks is not None]",
        (PLANNER,),
    ),
    Mutation(
        "S1-R10 a",
        "One random seed is drawn a step, so that a sample depends on who else was there before.",
        "engine/scheduler.py",
        "sampling=None if row.kind is RowKind.MIDDLE else request.next_sampling(),",
        "sampling=None if row.kind is RowKind.MIDDLE else "
        "__import__('dataclasses').replace(request.next_sampling(), seed=self._next_step_id),",
        (CORE,),
    ),
    Mutation(
        "S1-R10 b",
        "The random number of a sample does not depend on its position.",
        "engine/request.py",
        "            position=len(self.token_ids),\n",
        "            position=self.prompt_len,\n",
        (CORE,),
    ),
    Mutation(
        "S1-R11",
        "A stop token is counted in usage unless it is the first token.",
        "engine/request.py",
        "self.num_output + stop_token, self.cached",
        "self.num_output + (stop_token and self.num_output > 0), self.cached",
        (CORE,),
    ),
    Mutation(
        "S2-R5",
        "A chunk that leaves part of its prompt asks for a sample.",
        "engine/scheduler.py",
        "sampling=None if row.kind is RowKind.MIDDLE else request.next_sampling(),",
        "sampling=request.next_sampling(),",
        (CORE,),
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
    phases = (Phase.explicit, Phase.generate)  # shrinking takes minutes, and who failed is all that is asked
    settings.register_profile("mutations", derandomize=True, database=None, phases=phases, deadline=None)
    settings.load_profile("mutations")


# --- outside: the copy, the runs, the table --------------------------------------------------------------------------


@contextmanager
def copied_checkout() -> Iterator[Path]:
    """The files that git knows or would add, as they are now, in a directory that goes away."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        for name in filter(None, names):
            if (ROOT / name).is_file():
                (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, Path(folder) / name)
        yield Path(folder)


def first_failure(copy: Path, tests: Iterable[str]) -> str | None:
    """The first test that fails in the copy, or None if all pass."""
    # Two reverts of one file within a second would share a .pyc, which is checked by size and second.
    env = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "tests.mutations", "--tb=no"]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    try:
        done = subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"hangs for {TIMEOUT_S} s"
    if done.returncode == 0:
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    if done.returncode != 1 or not failed:  # a revert that cannot even be imported proves nothing
        raise SystemExit(f"pytest ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return failed[1].removeprefix("tests/engine/")


def try_mutation(copy: Path, mutation: Mutation) -> str | None:
    """Apply a revert, run its tests, take it back; return what caught it."""
    path = copy / mutation.file
    original = path.read_text(encoding="utf-8")
    path.write_text(mutation.apply(original), encoding="utf-8")
    try:
        return first_failure(copy, mutation.tests)
    finally:
        path.write_text(original, encoding="utf-8")


def write_table(caught: dict[str, str | None]) -> None:
    lines = [
        "# Known defects, put back one at a time",
        "",
        "Written by `python -m tests.mutations`. Names are those of the specification: Sx-Rn a defect, Sx-Bn a",
        "behaviour, I-n an invariant. The test named is the first that fails; others may fail too.",
        "",
        "| name | what the revert does | caught by |",
        "| --- | --- | --- |",
    ]
    for mutation in MUTATIONS:
        catcher = caught[mutation.name]
        lines.append(f"| {mutation.name} | {mutation.defect} | {f'`{catcher}`' if catcher else '**SURVIVED**'} |")
    TABLE.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main(wanted: list[str]) -> int:
    """Run all reverts and write the table, or only those whose name starts with one of `wanted`."""
    chosen = [m for m in MUTATIONS if not wanted or m.name.startswith(tuple(wanted))]
    started = time.monotonic()
    caught: dict[str, str | None] = {}
    with copied_checkout() as copy:
        for mutation in MUTATIONS:  # all of them, before minutes are spent on the first
            mutation.apply((copy / mutation.file).read_text(encoding="utf-8"))
        if broken := first_failure(copy, dict.fromkeys(test for m in chosen for test in m.tests)):
            raise SystemExit(f"without any revert, {broken} fails already")
        for mutation in chosen:
            catcher = caught[mutation.name] = try_mutation(copy, mutation)
            print(f"{mutation.name:18} {catcher or 'SURVIVED'}", flush=True)
    if not wanted:
        write_table(caught)
    survivors = [name for name, catcher in caught.items() if catcher is None]
    print(f"{len(caught) - len(survivors)} of {len(caught)} caught in {time.monotonic() - started:.0f} s")
    return 1 if survivors else 0


if __name__ == "__main__":
    assert len({m.name for m in MUTATIONS}) == len(MUTATIONS), "two mutations share a name"
    sys.exit(main(sys.argv[1:]))
