"""Owns the contract of tokenizers made from GGUF vocabularies.
Never checks a vocabulary's quality: only how text is split, kept whole and put together again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from engine.checkpoints.gguf_file import GGUFFile
from engine.checkpoints.gguf_tokenizer import special_token_ids, write_tokenizer
from engine.checkpoints.model_cache import ModelError
from tests.support.tiny_gguf import CONTROL, NORMAL, TEMPLATE, TOKENS, TYPES, write_gguf


def tokenizer_for(directory: Path, **changes: Any) -> Tokenizer:
    write_tokenizer(GGUFFile(write_gguf(directory / "tiny.gguf", **changes)), directory)
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


@pytest.mark.parametrize(
    ("pre", "digits"),
    [
        ("smollm", ["1", "2", "3", "4"]),
        ("qwen2", ["1", "2", "3", "4"]),
        ("llama-bpe", ["123", "4"]),
        ("gpt-2", ["123", "4"]),
    ],
)
def test_digits_are_split_as_the_pre_tokenizer_says(pre: str, digits: list[str], tmp_path: Path) -> None:
    assert tokenizer_for(tmp_path, tokenizer__ggml__pre=pre).encode("1234").tokens == digits


@pytest.mark.parametrize("pre", ["smollm", "qwen2", "llama-bpe", "gpt-2"])
@pytest.mark.parametrize("text", ["the  thé\n\n 12 and 3:\tHello, world's 日本語 🙂 ", "", " ", "\x00\x7f"])
def test_decoding_gives_back_the_text(pre: str, text: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_for(tmp_path, tokenizer__ggml__pre=pre)
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_control_tokens_stay_whole_and_are_skipped_when_decoding(tmp_path: Path) -> None:
    tokenizer = tokenizer_for(tmp_path)
    encoding = tokenizer.encode("<|im_start|>the<|im_end|>")
    assert encoding.tokens == ["<|im_start|>", "the", "<|im_end|>"]
    assert encoding.ids[0] == 1
    assert encoding.ids[2] == 2
    assert tokenizer.decode(encoding.ids) == "the"


def test_user_defined_tokens_stay_whole_and_are_decoded(tmp_path: Path) -> None:
    tokenizer = tokenizer_for(tmp_path)
    encoding = tokenizer.encode("<think>the")
    assert encoding.tokens == ["<think>", "the"]
    assert tokenizer.decode(encoding.ids) == "<think>the"


def test_qwen2_normalises_to_nfc_and_smollm_does_not(tmp_path: Path) -> None:
    decomposed, composed = "e\u0301", "\u00e9"
    qwen2, smollm = tmp_path / "qwen2", tmp_path / "smollm"
    qwen2.mkdir()
    smollm.mkdir()
    tokenizer = tokenizer_for(qwen2, tokenizer__ggml__pre="qwen2")
    assert tokenizer.encode(decomposed).ids == tokenizer.encode(composed).ids
    tokenizer = tokenizer_for(smollm, tokenizer__ggml__pre="smollm")
    assert tokenizer.encode(decomposed).ids != tokenizer.encode(composed).ids


def test_llama3_takes_a_word_of_the_vocabulary_whole_even_where_no_merge_leads_to_it(tmp_path: Path) -> None:
    words = {"tokenizer__ggml__tokens": [*TOKENS, "xyz"], "tokenizer__ggml__token_type": [*TYPES, 1]}
    assert tokenizer_for(tmp_path, tokenizer__ggml__pre="llama-bpe", **words).encode("xyz").tokens == ["xyz"]


def test_the_first_token_is_added_where_the_file_says_so(tmp_path: Path) -> None:
    assert tokenizer_for(tmp_path).encode("the").tokens == ["the"]
    tokenizer = tokenizer_for(tmp_path, tokenizer__ggml__add_bos_token=True)
    assert tokenizer.encode("the").tokens == ["<|im_start|>", "the"]
    assert tokenizer.encode("the", add_special_tokens=False).tokens == ["the"]


@pytest.mark.parametrize(
    ("pre", "said", "adds"),
    [
        *((pre, None, True) for pre in ("llama-bpe", "llama3", "llama-v3")),
        ("llama-bpe", False, False),
        ("qwen2", None, False),
        ("smollm", None, False),
    ],
)
def test_llama3_adds_its_first_token_unless_the_file_says_otherwise(
    pre: str, said: bool | None, adds: bool, tmp_path: Path
) -> None:
    """Files of Llama 3 that were written before the key existed lost it in raw prompts."""
    tokenizer = tokenizer_for(tmp_path, tokenizer__ggml__pre=pre, tokenizer__ggml__add_bos_token=said)
    assert tokenizer.encode("the").tokens == ["<|im_start|>"] * adds + ["the"]


def test_control_tokens_that_end_an_answer_by_their_texts_are_end_tokens_after_those_that_the_file_names(
    tmp_path: Path,
) -> None:
    """A file of Llama 3.1 names <|end_of_text|> alone, and chats ended at no <|eot_id|>."""
    ends = ["<|eom_id|>", "<|eot_id|>", "<|end_of_text|>", "<end_of_turn>"]
    tokens, kinds = [*TOKENS, *ends, "<|start|>", "<EOT>"], [*TYPES, *[CONTROL] * 5, NORMAL]
    changes = {"tokenizer__ggml__tokens": tokens, "tokenizer__ggml__token_type": kinds}
    path = write_gguf(tmp_path / "tiny.gguf", tokenizer__ggml__eos_token_id=tokens.index("<|end_of_text|>"), **changes)
    found = [tokens[i] for i in special_token_ids(GGUFFile(path))["eos_token_id"]]
    others = ["<|endoftext|>", "<|im_end|>", "<|eom_id|>", "<|eot_id|>", "<end_of_turn>"]
    assert found == ["<|end_of_text|>", *others], "and no text that is a normal token's"


def test_a_template_for_conversations_with_tools_is_kept_beside_the_default(tmp_path: Path) -> None:
    tokenizer_for(tmp_path, **{"tokenizer__chat_template.tool_use": "with tools"})
    found = json.loads((tmp_path / "tokenizer_config.json").read_text())["chat_template"]
    assert {one["name"]: one["template"] for one in found} == {"default": TEMPLATE, "tool_use": "with tools"}


def test_the_chat_template_and_special_tokens_are_kept(tmp_path: Path) -> None:
    tokenizer_for(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config["chat_template"] == TEMPLATE
    assert (config["bos_token"], config["eos_token"]) == ("<|im_start|>", "<|im_end|>")


def test_a_model_without_a_chat_template_has_none(tmp_path: Path) -> None:
    tokenizer_for(tmp_path, tokenizer__chat_template=None)
    assert "chat_template" not in json.loads((tmp_path / "tokenizer_config.json").read_text())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer__ggml__pre": "chameleon"}, "pre is 'chameleon'; expected one of smollm, gpt-2, qwen2"),
        ({"tokenizer__ggml__pre": None}, "pre is missing"),
        ({"tokenizer__ggml__model": "bert"}, "model is 'bert'; expected gpt2 or llama"),
        ({"tokenizer__ggml__token_type": TYPES[:-1]}, "265 token types for 266 tokens"),
        ({"tokenizer__ggml__merges": ["q q"]}, "tokens and merges do not fit together"),
    ],
)
def test_a_vocabulary_that_is_not_understood_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        tokenizer_for(tmp_path, **changes)


def sentencepiece_tokenizer(directory: Path, **changes: Any) -> Tokenizer:
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    return tokenizer_for(
        directory,
        tokenizer__ggml__model="llama",
        tokenizer__ggml__pre=None,
        tokenizer__ggml__merges=None,
        tokenizer__ggml__add_bos_token=None,
        tokenizer__ggml__tokens=["<unk>", "<s>", "</s>", *bytes_, "▁", "t", "h", "e", "th", "the", "▁the"],
        tokenizer__ggml__token_type=[2, 3, 3] + [6] * 256 + [1] * 7,
        tokenizer__ggml__scores=[0.0] * 259 + [-7.0, -6.0, -5.0, -4.0, -1.0, -2.0, -3.0],
        **changes,
    )


def test_a_sentencepiece_vocabulary_is_converted_and_adds_its_first_token(tmp_path: Path) -> None:
    tokenizer = sentencepiece_tokenizer(tmp_path)
    encoding = tokenizer.encode("the é")
    assert encoding.tokens == ["<s>", "▁the", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(encoding.ids) == "the é"


def test_a_sentencepiece_vocabulary_puts_no_space_before_a_text_if_the_file_says_so(tmp_path: Path) -> None:
    tokenizer = sentencepiece_tokenizer(tmp_path, tokenizer__ggml__add_space_prefix=False)
    assert tokenizer.encode("the the").tokens == ["<s>", "the", "▁the"]
    for text in ("the the é", " the", "  the "):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
