"""Engines on one machine never count on the same memory, and an engine that has ended no longer reserves any."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest

from engine.host.memory import HostMemory
from engine.host.own_directory import own_directory
from engine.host.shares import Room, join_claim, shares
from loadtest.server import ROOT

GIB = 2**30
MEMORY = HostMemory(20 * GIB, 20 * GIB, "a test")

ANOTHER_ENGINE = """
import sys
from pathlib import Path
from engine.host.shares import shares
with shares(Path(sys.argv[1])) as shared:
    claim = shared.claim(int(sys.argv[2]))
taken = bytearray(b"x") * int(sys.argv[3])
print("claimed", flush=True)
sys.stdin.read()
"""


HELPER = """
import sys
from pathlib import Path
from engine.host.shares import join_claim
join_claim(Path(sys.argv[1]))
taken = bytearray(b"x") * int(sys.argv[2])
print("joined", flush=True)
sys.stdin.read()
"""


def room(directory: Path, engines: int = 1) -> Room:
    with shares(directory) as shared:
        found = shared.room(engines, MEMORY)
    assert found is not None
    return found


def test_five_percent_stay_free_and_the_rest_is_shared(tmp_path: Path) -> None:
    alone, of_two = room(tmp_path), room(tmp_path, engines=2)
    assert alone.free == alone.share == of_two.free == 19 * GIB
    assert of_two.share == 19 * GIB // 2


@pytest.fixture
def takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that this process never takes more memory. In truth it takes a page now and then."""
    monkeypatch.setattr("engine.host.shares._resident", lambda process: GIB)


@pytest.mark.usefixtures("takes_nothing")
def test_what_one_has_promised_itself_the_next_does_not_find(tmp_path: Path) -> None:
    with shares(tmp_path) as shared:
        first = shared.claim(7 * GIB)
    second = room(tmp_path)
    assert (second.free, second.promised, second.engines) == (12 * GIB, 7 * GIB, 2)
    first.release()
    first.release()
    assert room(tmp_path).free == 19 * GIB
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


@pytest.mark.usefixtures("takes_nothing")
def test_the_next_finds_what_was_given_back_also_of_a_claim_that_helpers_have_joined(tmp_path: Path) -> None:
    with shares(tmp_path) as shared:
        claim = shared.claim(12 * GIB)
    assert claim.path is not None
    join_claim(claim.path)
    claim.give_back(11 * GIB)
    assert (room(tmp_path).promised, room(tmp_path).free) == (GIB, 18 * GIB)
    claim.give_back(GIB // 2)
    assert room(tmp_path).promised == GIB // 2
    claim.release()
    claim.give_back(0)
    assert room(tmp_path).promised == 0


@pytest.mark.usefixtures("takes_nothing")
def test_two_that_start_at_once_share_alike_in_either_order(tmp_path: Path) -> None:
    with shares(tmp_path) as shared:
        first = shared.claim(room_of_two := shared.room(2, MEMORY).share)  # type: ignore[union-attr]
    second = room(tmp_path, engines=2)
    assert min(second.free, second.share) == room_of_two
    first.release()


def test_a_promise_ends_with_what_holds_it(tmp_path: Path) -> None:
    with shares(tmp_path) as shared:
        held = shared.claim(GIB)
    del held
    gc.collect()
    assert room(tmp_path).promised == 0


@pytest.mark.parametrize("size_mib", [0, 64])
def test_another_process_that_was_killed_has_promised_nothing(tmp_path: Path, size_mib: int) -> None:
    """What a living process has already taken is no longer free, so it is not deducted a second time."""
    command = [sys.executable, "-c", ANOTHER_ENGINE, str(tmp_path), str(GIB), str(size_mib * 2**20)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"claimed\n"
        found = room(tmp_path, engines=2)
        taken = GIB - found.promised
        assert size_mib * 2**20 <= taken < (size_mib + 16) * 2**20
        assert found.free == 19 * GIB - found.promised
        assert found.share == (19 * GIB + taken) // 2
        other.kill()
    assert room(tmp_path).free == 19 * GIB
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_without_a_directory_for_promises_an_engine_starts_and_a_line_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with shares(tmp_path / "file") as shared:
        found = shared.room(1, MEMORY)
        shared.claim(GIB).release()
    assert found is not None
    assert found.free == 19 * GIB
    assert "may promise themselves the same memory" in caplog.text


def test_a_directory_that_others_may_write_to_is_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    own_directory("chunkserve-memory").chmod(0o777)
    with shares() as shared:
        shared.claim(GIB).release()
    assert "is not this user's alone" in caplog.text
    with pytest.raises(PermissionError):
        own_directory("chunkserve-memory")


def test_a_promise_that_cannot_be_written_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(descriptor: int, text: bytes) -> int:
        raise OSError("No space left on device")

    with shares(tmp_path) as shared:
        monkeypatch.setattr("engine.host.shares.os.write", full)
        shared.claim(GIB).release()
    assert "may promise themselves the same memory: No space left on device" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_what_a_rank_takes_is_taken_of_its_leaders_claim(tmp_path: Path) -> None:
    """Regression: it counted as promised, too, so that a second engine of two ranks did not fit beside the first."""
    with shares(tmp_path) as shared:
        claim = shared.claim(GIB)
    command = [sys.executable, "-c", HELPER, str(claim.path), str(200 * 2**20)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as helper:
        assert helper.stdout is not None
        assert helper.stdout.readline() == b"joined\n"
        taken = GIB - room(tmp_path).promised
        assert 200 * 2**20 <= taken < 300 * 2**20
        helper.kill()
    assert GIB - room(tmp_path).promised < 100 * 2**20, "it has given back what it took"
    claim.release()


def test_a_rank_whose_leaders_claim_is_gone_makes_none(tmp_path: Path) -> None:
    with shares(tmp_path) as shared:
        claim = shared.claim(GIB)
    assert claim.path is not None
    claim.release()
    join_claim(claim.path)
    assert not claim.path.exists()
