"""Names of files tell nothing without the key, and the key is read as it was written down."""

from __future__ import annotations

import sys
from hashlib import shake_256
from pathlib import Path

import pytest

from engine.config import ConfigError
from engine.tiers.cipher import KEY_BYTES, MAX_DIGEST_BYTES, Aes256Gcm, Checksum, Names, derive, read_key
from tests.support.disk_tiers import digest

KEY, OTHER_KEY = b"k" * 32, b"l" * 32
MODEL, OTHER_MODEL = b"m" * 32, b"n" * 32


@pytest.mark.parametrize("length", [1, 16, MAX_DIGEST_BYTES])
def test_a_name_gives_back_its_digest(length: int) -> None:
    names = Names(KEY, MODEL)
    for number in range(50):
        name = names.encode(digest(number) * 2 if length > 16 else digest(number)[:length])
        assert names.encode(names.decode(name) or b"") == name
        assert len(name) == length + 16


def test_without_its_key_or_its_model_a_name_gives_back_nothing() -> None:
    name = Names(KEY, MODEL).encode(digest(1))
    assert Names(KEY, MODEL).decode(name) == digest(1)
    assert Names(OTHER_KEY, MODEL).decode(name) is None
    assert Names(KEY, OTHER_MODEL).decode(name) is None


def test_a_name_that_nobody_made_is_none() -> None:
    names = Names(KEY, MODEL)
    name = names.encode(digest(1))
    for position in range(len(name)):
        changed = bytearray(name)
        changed[position] ^= 1
        assert names.decode(bytes(changed)) is None
    for wrong in (b"", name[:16], name[:-1], name + b"\0", b"x" * 49):
        assert names.decode(wrong) is None


def test_names_tell_neither_a_digest_nor_that_two_models_have_seen_the_same_prompt() -> None:
    spaces, seen = [], []
    for key, model in ((KEY, MODEL), (KEY, OTHER_MODEL), (OTHER_KEY, MODEL)):
        names = Names(key, model)
        spaces.append(names.space)
        seen.append(names.encode(digest(1)))
        seen.append(names.encode(digest(1)[:15] + bytes([digest(1)[15] ^ 1])))
    pieces = [name[at : at + 4] for name in [*seen, digest(1)] for at in range(0, len(name), 4)]
    assert len(set(pieces)) == len(pieces), "not four bytes in common"
    assert len(set(spaces)) == len(spaces)
    assert not any(key in space for key in (KEY, MODEL) for space in spaces)


def test_names_and_spaces_are_what_they_were_when_the_format_got_its_version() -> None:
    """With other names, a directory's files would lie there unread until they are the oldest."""
    names = Names(KEY, MODEL)
    assert names.space.hex() == "920011d816112d10954d1afe2d55bbab"
    assert names.encode(bytes(16)).hex() == "442fee60cd310a41b01f2db485add02cc296bab73b86b097c2b8cdf73c07e4c3"


def test_what_is_derived_for_one_purpose_tells_nothing_about_another() -> None:
    assert len({derive(KEY, b"one"), derive(KEY, b"two"), derive(OTHER_KEY, b"one"), derive(KEY, b"one", b"x")}) == 4


@pytest.mark.parametrize(
    "written",
    [
        KEY,
        b"\n" * 32,
        KEY.hex().encode(),
        KEY.hex().upper().encode() + b"\n",
        b"  " + KEY.hex().encode() + b"\r\n",
    ],
    ids=["bytes", "bytes that are white space", "digits", "a line", "white space"],
)
def test_a_key_is_32_bytes_or_64_hexadecimal_digits(tmp_path: Path, written: bytes) -> None:
    path = tmp_path / "key"
    path.write_bytes(written)
    assert read_key(path) == (written if len(written) == KEY_BYTES else KEY)


@pytest.mark.parametrize("written", [b"", b"secret" * 2, KEY + b"\n", b"g" * 64, KEY.hex().encode()[:-1], b"\xff" * 64])
def test_what_is_no_key_is_refused_without_being_shown(tmp_path: Path, written: bytes) -> None:
    path = tmp_path / "key"
    path.write_bytes(written)
    with pytest.raises(ConfigError, match=r"disk_key_file .*key has \d+ bytes .* 64 hexadecimal digits") as told:
        read_key(path)
    assert not written or written[:6].decode("latin-1") not in str(told.value).replace(str(path), "")


def test_a_key_file_that_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"kv_tiers.disk_key_file .*missing cannot be read: No such file"):
        read_key(tmp_path / "missing")


def test_files_without_their_package_are_refused_and_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    for make in (Checksum, lambda: Aes256Gcm(KEY)):
        with pytest.raises(ConfigError, match="disk_path is set, and its files need the Python package cryptography"):
            make()


def test_each_file_has_a_key_and_a_nonce_of_its_own() -> None:
    """With one key for all, nonces alone would meet after some 2**32 files of a fleet."""
    seal = Aes256Gcm(KEY)
    salts = {seal.salt() for _ in range(100)}
    assert len({salt[:16] for salt in salts}) == len({salt[16:] for salt in salts}) == 100
    payload, header = memoryview(shake_256(b"payload").digest(64)), b"header"
    same_nonce = [seal.close(header, bytes([first]) * 16 + bytes(12), payload)[0] for first in (1, 2)]
    assert same_nonce[0] != same_nonce[1]
