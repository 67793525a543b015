"""Owns the contract of incremental decoding.
Never needs a model's files: the tokenizers are built here."""

from __future__ import annotations

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from serve_app.api.detokenizer import MAX_PENDING_TOKENS, Detokenizer
from serve_app.api.tokenizer import Tokenizer

BYTE_LEVEL = Tokenizer.byte_level()


def byte_fallback() -> tokenizers.Tokenizer:
    """SentencePiece's way: ids 0-255 are bytes, 256 is "▁a", 257 "b"; a run of byte tokens is decoded as a whole."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁a": 256, "b": 257, "▁": 258, "a": 259}
    core = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[("▁", "a")], byte_fallback=True))
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return core


def decode(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    return [detokenizer.push(token_id) for token_id in ids]


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd"), max_size=40))
def test_the_pieces_of_any_text_make_that_text_and_no_piece_has_a_broken_character(text: str) -> None:
    pieces = decode(BYTE_LEVEL.detokenizer(), list(text.encode()))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_encoding_and_decoding_with_the_byte_level_tokenizer_gives_the_text_back(text: str) -> None:
    ids = BYTE_LEVEL.encode(text)
    if "<" not in text:
        assert ids == list(text.encode())
    assert BYTE_LEVEL._core.decode(ids, skip_special_tokens=False) == text


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_at_all_are_decoded_without_an_error(data: bytes) -> None:
    decode(BYTE_LEVEL.detokenizer(), list(data))
    decode(Detokenizer(byte_fallback()), list(data))


def test_a_character_of_four_bytes_comes_out_once_with_its_last_byte() -> None:
    assert decode(BYTE_LEVEL.detokenizer(), list("a🦜".encode())) == ["a", "", "", "", "🦜"]


def test_invalid_bytes_between_text_show_as_replacement_characters() -> None:
    assert "".join(decode(BYTE_LEVEL.detokenizer(), [*b"a", 0xFF, *b"b"])) == "a\ufffdb"


def test_an_incomplete_character_at_the_end_is_dropped() -> None:
    assert "".join(decode(BYTE_LEVEL.detokenizer(), list("aé".encode())[:-1])) == "a"


def test_special_tokens_are_not_shown_and_do_not_break_what_is_around_them() -> None:
    assert "".join(decode(BYTE_LEVEL.detokenizer(), [*b"a", 256, 257, *b"b"])) == "ab"


@pytest.mark.parametrize("token_id", [0xFF, 256, 99999], ids=["invalid bytes", "special tokens", "unknown ids"])
def test_a_long_run_that_gives_no_text_is_bounded_and_the_text_after_it_is_whole(token_id: int) -> None:
    detokenizer = BYTE_LEVEL.detokenizer()
    for _ in range(1000):
        detokenizer.push(token_id)
        assert len(detokenizer._pending) < MAX_PENDING_TOKENS
    assert "".join(decode(detokenizer, list("après 🦜".encode()))).endswith("après 🦜")


def test_sentencepiece_words_keep_their_leading_spaces_after_the_first() -> None:
    assert "".join(decode(Detokenizer(byte_fallback()), [256, 257, 256, 256])) == "ab a a"


def test_decoding_goes_on_after_a_token_that_changes_text_already_returned() -> None:
    """DecodeStream raises there, and then for every token that follows: "A" + an invalid byte is decoded as "��"."""
    pieces = decode(Detokenizer(byte_fallback()), [0x41, 0xFF, 257, 257])
    assert pieces[0] == "A"
    assert "".join(pieces).endswith("bb")
