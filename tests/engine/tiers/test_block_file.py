"""A block's file is read whole and unchanged, or not at all."""

from __future__ import annotations

import os
from hashlib import sha256, shake_256

import pytest

from engine.tiers import block_file
from engine.tiers.block_file import BadFile, BlockFormat, write_all
from engine.tiers.cipher import SALT_BYTES, Aes256Gcm, Checksum, Seal

PAYLOAD = shake_256(b"payload").digest(100)
NAME, OTHER_NAME = b"n" * 32, b"m" * 32
SEALS: list[Seal] = [Checksum(), Aes256Gcm(b"k" * 32)]
HEADER_BYTES = 128


@pytest.fixture(params=SEALS, ids=["plain", "encrypted"])
def seal(request: pytest.FixtureRequest) -> Seal:
    found: Seal = request.param
    return found


def form(seal: Seal, *, block_bytes: int = len(PAYLOAD), space: bytes = b"s" * 16) -> BlockFormat:
    return BlockFormat(block_bytes=block_bytes, space=space, seal=seal)


def encoded(format: BlockFormat, name: bytes = NAME, payload: bytes = PAYLOAD) -> bytes:
    return b"".join(format.encode(name, memoryview(payload)))


def decoded(format: BlockFormat, data: bytes, name: bytes = NAME) -> bytes:
    into = bytearray(len(PAYLOAD))
    descriptor = os.memfd_create("block")
    try:
        os.write(descriptor, data)
        format.read(descriptor, name, memoryview(into))
    finally:
        os.close(descriptor)
    return bytes(into)


def test_what_was_written_is_read_and_the_file_has_the_length_it_is_expected_to_have(seal: Seal) -> None:
    data = encoded(form(seal))
    assert len(data) == form(seal).file_bytes == HEADER_BYTES + len(PAYLOAD) + seal.tail_bytes
    assert decoded(form(seal), data) == PAYLOAD


@pytest.mark.parametrize("bit", [0, 7])
def test_a_file_with_any_byte_flipped_is_refused(seal: Seal, bit: int) -> None:
    data = encoded(form(seal))
    for position in range(len(data)):
        flipped = bytearray(data)
        flipped[position] ^= 1 << bit
        with pytest.raises(BadFile):
            decoded(form(seal), bytes(flipped))


def test_a_file_of_any_other_length_is_refused(seal: Seal) -> None:
    data = encoded(form(seal))
    for length in range(len(data)):
        with pytest.raises(BadFile, match=f"it has {length} bytes, expected {len(data)}"):
            decoded(form(seal), data[:length])
    with pytest.raises(BadFile):
        decoded(form(seal), data + b"\0")


def test_a_file_that_is_cut_while_it_is_read_is_refused(seal: Seal, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its length was right when it was opened."""
    data = encoded(form(seal))
    monkeypatch.setattr(block_file.os, "fstat", lambda _: os.stat_result((0,) * 6 + (len(data),) + (0,) * 3))
    for length in (0, 1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 1, len(data) - 1):
        with pytest.raises(BadFile, match=f"it ended after {length} bytes"):
            decoded(form(seal), data[:length])


def test_reads_and_writes_that_the_system_does_in_pieces_are_whole_in_the_end(
    seal: Seal, monkeypatch: pytest.MonkeyPatch
) -> None:
    def piece(views: list[memoryview]) -> list[memoryview]:
        return [views[0][:7]]

    writev, preadv = os.writev, os.preadv
    monkeypatch.setattr(block_file.os, "writev", lambda to, views: writev(to, piece(views)))
    monkeypatch.setattr(block_file.os, "preadv", lambda of, views, at: preadv(of, piece(views), at))
    descriptor = os.memfd_create("block")
    write_all(descriptor, form(seal).encode(NAME, memoryview(PAYLOAD)))
    written = os.pread(descriptor, 1000, 0)
    os.close(descriptor)
    assert decoded(form(seal), written) == PAYLOAD


def test_a_file_of_another_version_is_refused_and_both_versions_are_named(
    seal: Seal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_file, "FORMAT_VERSION", 3)
    data = encoded(form(seal))
    monkeypatch.undo()
    with pytest.raises(BadFile, match="it has version 3, expected 2"):
        decoded(form(seal), data)


def test_a_file_of_another_block_is_refused(seal: Seal) -> None:
    with pytest.raises(BadFile, match="its header is not this block's"):
        decoded(form(seal), encoded(form(seal), OTHER_NAME))


def test_a_file_of_another_model_is_refused(seal: Seal) -> None:
    with pytest.raises(BadFile, match="of another model"):
        decoded(form(seal), encoded(form(seal, space=b"t" * 16)))


def test_an_encrypted_file_is_not_read_as_a_plain_one_nor_the_other_way_round() -> None:
    for wrote, reads in ((SEALS[0], SEALS[1]), (SEALS[1], SEALS[0])):
        with pytest.raises(BadFile, match=f"it has seal {wrote.kind}, expected {reads.kind}"):
            decoded(form(reads), encoded(form(wrote)))


def test_a_file_of_another_key_is_refused() -> None:
    data = encoded(form(SEALS[1]))
    with pytest.raises(BadFile, match="its content is not as it was written"):
        decoded(form(Aes256Gcm(b"l" * 32)), data)


def test_a_payload_that_another_files_proof_follows_is_refused(seal: Seal) -> None:
    """As of two writes that a disk mixed up."""
    data, other = encoded(form(seal)), encoded(form(seal), NAME, PAYLOAD[::-1])
    tail = -seal.tail_bytes
    with pytest.raises(BadFile):
        decoded(form(seal), data[:tail] + other[tail:])


def test_encrypted_files_of_one_block_have_nothing_in_common_but_the_header() -> None:
    first, second = encoded(form(SEALS[1])), encoded(form(SEALS[1]))
    head = HEADER_BYTES - SALT_BYTES - 12
    assert first[:head] == second[:head]
    pieces = {first[at : at + 8] for at in range(head, len(first) - 8)} - {b"\0" * 8}
    pieces = {piece for piece in pieces if piece.count(0) < 5}  # zeros end the header
    assert not any(piece in second for piece in pieces)
    assert not any(PAYLOAD[at : at + 8] in first for at in range(len(PAYLOAD) - 8))
    assert decoded(form(SEALS[1]), first) == decoded(form(SEALS[1]), second) == PAYLOAD


def test_the_format_is_what_it_was_when_its_version_was_given(seal: Seal, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever changes a file's form gives it another version, and then these digests."""
    monkeypatch.setattr(type(seal), "salt", lambda _: bytes(range(SALT_BYTES)))
    known = {
        0: "7e48d635aab3cca7b067c37cfe5df5239cd0089005641361c149edb16b56ef90",
        1: "5561826e0b8bfac4016183a8e124af17adfe4e5ea2ad56dca5b468a7bc937485",
    }
    assert block_file.FORMAT_VERSION == 2
    assert sha256(encoded(form(seal))).hexdigest() == known[seal.kind]
