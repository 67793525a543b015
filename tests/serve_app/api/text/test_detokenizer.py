"""Owns the contract of incremental decoding.
Never needs a model's files: the tokenizers are built here."""

from __future__ import annotations

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from serve_app.api.text.detokenizer import MAX_PENDING_TOKENS, Detokenizer
from serve_app.api.text.tokenizer import Tokenizer

BYTE_LEVEL = Tokenizer.byte_level()


def byte_fallback() -> tokenizers.Tokenizer:
    """Make a tokenizer that works as SentencePiece does: ids 0-255 are bytes, 256 is "▁a", 257 "b"; a run of byte
    tokens is decoded as a whole."""
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
    for detokenizer in (BYTE_LEVEL.detokenizer(), Detokenizer(byte_fallback())):
        decode(detokenizer, list(data))
        detokenizer.finish()


def test_a_character_of_four_bytes_comes_out_once_with_its_last_byte() -> None:
    assert decode(BYTE_LEVEL.detokenizer(), list("a🦜".encode())) == ["a", "", "", "", "🦜"]


def test_invalid_bytes_between_text_show_as_replacement_characters() -> None:
    assert "".join(decode(BYTE_LEVEL.detokenizer(), [*b"a", 0xFF, *b"b"])) == "a\ufffdb"


def test_an_incomplete_character_at_the_end_is_shown_as_a_decode_of_all_tokens_shows_it() -> None:
    detokenizer = BYTE_LEVEL.detokenizer()
    assert "".join(decode(detokenizer, list("aé".encode())[:-1])) == "a"
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


@settings(deadline=None)
@given(st.lists(st.sampled_from([*range(262), *b"\xf0\x9f\x92\xe2\x82\xc3\xff"] * 2), max_size=60), st.booleans())
def test_the_pieces_of_any_tokens_make_the_text_that_decoding_all_of_them_makes(ids: list[int], skip: bool) -> None:
    """This also holds where a long run of invalid bytes is shown before it ends:
    no sequence of bytes is cut in two there."""
    detokenizer = BYTE_LEVEL.detokenizer(skip_special_tokens=skip)
    text = "".join(decode(detokenizer, ids)) + detokenizer.finish()
    assert text == BYTE_LEVEL._core.decode(ids, skip_special_tokens=skip)


def test_a_long_run_of_invalid_bytes_is_not_shown_from_the_middle_of_a_character() -> None:
    ids = [*b"\xff" * 12, *b"\xf0\x9f\x92\xff", *b"\xff" * 20]
    detokenizer = BYTE_LEVEL.detokenizer()
    assert "".join(decode(detokenizer, ids)) + detokenizer.finish() == bytes(ids).decode(errors="replace")


@pytest.mark.parametrize("data", [b"\xe4\xb8", b"\xf0\x9f\xa6", b"\xff"])
def test_sentencepieces_byte_tokens_that_are_no_character_are_shown_at_the_end(data: bytes) -> None:
    core = byte_fallback()
    detokenizer = Detokenizer(core)
    ids = [256, 258, *data]
    assert "".join(decode(detokenizer, ids)) + detokenizer.finish() == core.decode(ids)


def test_a_token_that_is_shown_all_the_same_completes_what_waited_before_it() -> None:
    detokenizer = BYTE_LEVEL.detokenizer(shown=["<eos>"])
    assert decode(detokenizer, [0xC3, 256, *b"b"]) == ["", "\ufffd<eos>", "b"]


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


@pytest.mark.parametrize("between", [[260], [261] * 20, [0xFF] * 20], ids=["a tag", "special tokens", "invalid bytes"])
def test_a_word_keeps_its_space_wherever_decoding_starts_again(between: list[int]) -> None:
    """The decoder strips the first space of a text, and each new start was taken for one."""
    core = byte_fallback()
    core.add_special_tokens(["<tag>", "<s>"])
    detokenizer = Detokenizer(core, shown={260: "<tag>"})
    ids = [256, 257, *between, 256, 257]
    text = "".join(decode(detokenizer, ids)) + detokenizer.finish()
    assert text == core.decode([token for token in ids if token != 261], skip_special_tokens=False)
    assert text.endswith(" ab")


@pytest.mark.parametrize("text", ["é", "ሰ", "🦜", "ሰ🦜é", "bሰ🦜"])
def test_a_word_keeps_its_space_behind_a_prompt_of_byte_tokens_of_any_length(text: str) -> None:
    """Regression: only a prompt's last tokens are read. Where they began inside a character, the whole run of bytes was
    invalid, so that the next word was taken for the first of a text."""
    core = byte_fallback()
    for count in range(1, 12):
        detokenizer = Detokenizer(core)
        detokenizer.follow([256, *(257 if byte == 0x62 else byte for byte in (text * count).encode())])
        assert detokenizer.push(256) == " a", count


def test_decoding_goes_on_after_a_token_that_changes_text_already_returned() -> None:
    """DecodeStream raises there, and then for every token that follows:
    "A" + an invalid byte is decoded as "��", for example."""
    assert decode(Detokenizer(byte_fallback()), [0x41, 0xFF, 257, 257]) == ["A", "", "\ufffdb", "b"]


@settings(deadline=None)
@given(st.lists(st.integers(0, 259), max_size=40), st.lists(st.integers(0, 259), max_size=20), st.booleans())
def test_a_copy_goes_on_as_the_first_would_have_and_leaves_it_as_it_was(
    read: list[int], rest: list[int], skip: bool
) -> None:
    for core in (BYTE_LEVEL._core, byte_fallback()):
        first, alone = (Detokenizer(core, skip_special_tokens=skip) for _ in range(2))
        decode(first, read)
        decode(alone, read)
        copy = first.copy()
        expected = [*decode(alone, rest), alone.finish()]
        assert [*decode(copy, rest), copy.finish()] == expected
        assert [*decode(first, rest), first.finish()] == expected
