"""Owns the contract of `echo`, `logprobs` and `max_tokens: 0` in completions; long: a rule of the legacy object each.
Never depends on a real engine: every event, and every log-probability, is scripted."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import Completion
from tokenizers import decoders, models, processors

from engine.protocol import Event, Finished, FinishReason, PromptLogprobs, SamplingParams, Token, TokenLogprobs, Usage
from serve_app.api.generation.logprobs import ScoredToken, TokenQueue, logprobs_json
from serve_app.api.ingress import create_app
from serve_app.api.text.chat_template import ChatTemplate
from serve_app.api.text.detokenizer import Detokenizer
from serve_app.api.text.echo import read_ids, read_text
from serve_app.api.text.tokenizer import Tokenizer
from tests.serve_app.harness import (
    CHAT,
    EOS,
    MODEL,
    PROMPT,
    TIMEOUT_S,
    UNASKED,
    Answer,
    Exchange,
    ScriptedClient,
    app_for,
    complete,
    finished,
    joined_choice,
    post,
    scheduled,
    tokens,
)

pytestmark = pytest.mark.anyio

BYTE_LEVEL = Tokenizer.byte_level()
PARROT = "🦜".encode()


def scores(token_id: int, top: Sequence[tuple[int, float]] = ()) -> TokenLogprobs:
    """Make a log-probability that differs from token to token."""
    return TokenLogprobs(token_id, -1 - token_id / 1000, tuple(top))


def scored(text: str | bytes | Sequence[int], top: Sequence[tuple[int, float]] = ()) -> list[Event]:
    data = text.encode() if isinstance(text, str) else text
    return [Token("r", byte, scores(byte, top)) for byte in data]


def prompt_scored(text: str | bytes) -> list[Event]:
    data = text.encode() if isinstance(text, str) else text
    return [PromptLogprobs("r", tuple(scores(byte) for byte in data[1:]))]


def whole(answer: Answer) -> dict[str, Any]:
    choice: dict[str, Any] = answer.json["choices"][0]
    return choice


async def both(client: ScriptedClient, **fields: Any) -> dict[str, Any]:
    """Return the choice of the answer, which is the same whole and streamed."""
    choice = whole(await complete(client, **fields))
    assert joined_choice(await complete(client, **fields, stream=True)) == choice
    return choice


def chunks(answer: Answer) -> list[tuple[str, list[str]]]:
    """Return the text and the tokens of each chunk."""
    choices = [frame["choices"][0] for frame in answer.frames]
    return [(choice["text"], choice["logprobs"]["tokens"]) for choice in choices]


# --- what is asked of the engine -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"logprobs": 3}, SamplingParams(max_tokens=16, logprobs=3)),
        ({"logprobs": 0}, SamplingParams(max_tokens=16, logprobs=0)),
        ({"echo": True}, SamplingParams(max_tokens=16)),
        ({"echo": True, "max_tokens": 0}, SamplingParams(max_tokens=0)),
        ({"echo": True, "logprobs": 20}, SamplingParams(max_tokens=16, logprobs=20, prompt_logprobs=20)),
        ({"echo": False, "logprobs": None}, SamplingParams(max_tokens=16)),
        ({"echo": None, "logprobs": 1}, SamplingParams(max_tokens=16, logprobs=1)),
    ],
    ids=str,
)
async def test_the_engine_is_asked_for_the_prompts_scores_exactly_where_they_are_echoed(
    fields: dict[str, Any], expected: SamplingParams
) -> None:
    prompt_scores = [] if expected.prompt_logprobs is None else prompt_scored("hi")
    client = ScriptedClient([scheduled(), *prompt_scores, finished()])
    assert (await complete(client, **fields)).status == 200
    assert client.submissions[0].sampling == expected


@pytest.mark.parametrize(
    ("fields", "param", "told"),
    [
        ({"logprobs": 21}, "logprobs", ["20", "21"]),
        ({"logprobs": -1}, "logprobs", ["0", "-1"]),
        ({"logprobs": True}, "logprobs", ["integer"]),
        ({"logprobs": 1.0}, "logprobs", ["integer"]),
        ({"logprobs": "1"}, "logprobs", ["integer"]),
        ({"logprobs": 10**3000}, "logprobs", ["20"]),
        ({"echo": 1}, "echo", ["boolean"]),
        ({"echo": "true"}, "echo", ["boolean"]),
        ({"max_tokens": 0}, "max_tokens", ["1", "echo", "it is 0"]),
        ({"max_tokens": 0, "logprobs": 1}, "max_tokens", ["1", "echo", "it is 0"]),
        ({"max_tokens": 0, "echo": False}, "max_tokens", ["1", "echo", "it is 0"]),
        ({"max_tokens": -1, "echo": True}, "max_tokens", ["0", "-1"]),
        ({"max_tokens": 0, "min_tokens": 1, "echo": True}, "min_tokens", ["max_tokens (0)", "it is 1"]),
        ({"prompt_logprobs": 21}, "prompt_logprobs", ["20", "21"]),
        ({"prompt_logprobs": -1}, "prompt_logprobs", ["0 to 20", "-1", "whole vocabulary"]),
        ({"prompt_logprobs": -2}, "prompt_logprobs", ["0", "-2"]),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_a_value_out_of_range_is_a_400_that_names_field_limit_and_value_before_any_byte_of_a_stream(
    fields: dict[str, Any], param: str, told: list[str]
) -> None:
    client = ScriptedClient()
    for stream in (False, True):
        answer = await complete(client, **fields, stream=stream)
        assert (answer.status, answer.error["param"]) == (400, param)
        assert [part for part in (param, *told) if part not in answer.error["message"]] == []
        assert len(answer.error["message"]) < 300
    assert not client.submissions


@pytest.mark.parametrize(("name", "value"), [("logprobs", 1), ("echo", True), ("max_tokens", 0)])
async def test_chat_refuses_what_only_completions_take(name: str, value: Any) -> None:
    answer = await post(app_for(ScriptedClient()), "/v1/chat/completions", CHAT | {name: value})
    assert (answer.status, answer.error["param"]) == (400, name)


async def test_a_prompt_that_fills_the_context_can_be_scored_and_one_token_more_cannot() -> None:
    text = "x" * MODEL.max_model_len
    client = ScriptedClient([scheduled(), *prompt_scored(text), finished(FinishReason.LENGTH)])
    fields: dict[str, Any] = {"echo": True, "logprobs": 0, "max_tokens": 0}
    assert (await both(client, prompt=text, **fields))["text"] == text
    for too_long in ({"prompt": text + "x", **fields}, {"prompt": text, "echo": True, "max_tokens": 1}):
        answer = await complete(client, **too_long)
        assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
        assert answer.error["n_prompt_tokens"] == len(too_long["prompt"])
        assert "needs one more" not in answer.error["message"] or too_long["max_tokens"] == 1


# --- whole answers, each equal to its stream -------------------------------------------------------------------------


async def test_echo_and_logprobs_come_only_where_they_are_asked_for() -> None:
    client = ScriptedClient([scheduled()], tokens("Hello"), [finished()])
    choice = await both(client)
    assert choice == {"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "stop"} | EOS | UNASKED


async def test_each_token_of_the_answer_has_its_text_its_score_its_alternatives_and_its_place() -> None:
    top = ((ord("o"), -0.25), (ord("k"), -1.5))
    length = finished(FinishReason.LENGTH, completion=2)
    client = ScriptedClient([scheduled()], scored("o", top), scored("k", top), [length])
    choice = await both(client, logprobs=2)
    Completion.model_validate((await complete(client, logprobs=2)).json, strict=True)
    assert (choice["text"], choice["finish_reason"]) == ("ok", "length")
    assert choice["logprobs"] == {
        "tokens": ["o", "k"],
        "token_logprobs": [-1.111, -1.107],
        "top_logprobs": [{"o": -1.111, "k": -1.5}, {"o": -0.25, "k": -1.107}],
        "text_offset": [0, 1],
    }


async def test_no_alternatives_still_names_the_chosen_token() -> None:
    client = ScriptedClient([scheduled()], scored("ok"), [finished(FinishReason.LENGTH)])
    assert (await both(client, logprobs=0))["logprobs"]["top_logprobs"] == [{"o": -1.111}, {"k": -1.107}]


async def test_echo_puts_the_prompts_text_before_the_answer() -> None:
    client = ScriptedClient([scheduled(3)], tokens(" there"), [finished(cached=3)])
    choice = await both(client, prompt="Hi", echo=True)
    assert (choice["text"], choice["logprobs"]) == ("Hi there", None)
    plain = await complete(client, prompt="Hi")
    assert (await complete(client, prompt="Hi", echo=True)).json["usage"] == plain.json["usage"]


async def test_echo_with_scores_covers_prompt_and_answer_and_the_first_token_has_none() -> None:
    client = ScriptedClient([scheduled()], prompt_scored("Hé"), scored("ok"), [finished(FinishReason.LENGTH)])
    choice = await both(client, prompt="Hé", echo=True, logprobs=0)
    assert choice["text"] == "Héok"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["H", r"bytes:\xc3", r"bytes:\xa9", "o", "k"]
    assert logprobs["token_logprobs"] == [None, -1.195, -1.169, -1.111, -1.107]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][1] == {r"bytes:\xc3": -1.195}
    assert logprobs["text_offset"] == [0, 1, 1, 2, 3]


@pytest.mark.parametrize("logprobs", [None, 0, 2])
async def test_a_prompt_alone_is_echoed_without_an_answer(logprobs: int | None) -> None:
    end = finished(FinishReason.LENGTH, prompt=3, completion=0, cached=1)
    client = ScriptedClient([scheduled(1)], *([prompt_scored("abc")] if logprobs is not None else []), [end])
    fields: dict[str, Any] = {"prompt": "abc", "echo": True, "max_tokens": 0, "logprobs": logprobs}
    choice = await both(client, **fields)
    assert (choice["text"], choice["finish_reason"]) == ("abc", "length")
    if logprobs is not None:
        assert choice["logprobs"]["token_logprobs"] == [None, -1.098, -1.099]
    usage = (await complete(client, **fields)).json["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (3, 0, 3)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 1}


async def test_a_prompt_of_one_token_has_one_entry_without_a_score() -> None:
    client = ScriptedClient([scheduled()], prompt_scored("a"), [finished(FinishReason.LENGTH)])
    logprobs = (await both(client, prompt="a", echo=True, max_tokens=0, logprobs=1))["logprobs"]
    assert logprobs == {"tokens": ["a"], "token_logprobs": [None], "top_logprobs": [None], "text_offset": [0]}


async def test_a_prompt_of_special_tokens_has_their_texts_and_scores() -> None:
    ids = [257, 256]
    prompt_scores = PromptLogprobs("r", (scores(256),))
    client = ScriptedClient([scheduled()], [prompt_scores], scored("a"), [finished(FinishReason.LENGTH)])
    assert chunks(await complete(client, prompt=ids, echo=True, logprobs=0, stream=True)) == [
        ("<|system|><eos>", ["<|system|>", "<eos>"]),
        ("a", ["a"]),
        ("", []),
    ]
    assert (await both(client, prompt=ids, echo=True, logprobs=0))["logprobs"]["text_offset"] == [0, 10, 15]


async def test_an_impossible_token_has_openais_smallest_number_because_json_has_no_infinity() -> None:
    event = Token("r", ord("a"), TokenLogprobs(ord("a"), -math.inf, ((ord("b"), 0.0), (ord("c"), -math.inf))))
    client = ScriptedClient([scheduled()], [event], [finished(FinishReason.LENGTH)])
    logprobs = (await both(client, logprobs=2))["logprobs"]
    assert logprobs["token_logprobs"] == [-9999.0]
    assert logprobs["top_logprobs"] == [{"b": 0.0, "c": -9999.0, "a": -9999.0}]


async def test_the_stop_token_has_an_entry_so_that_entries_and_usage_agree() -> None:
    """lm-evaluation-harness asks for one token and cuts the last entry off. Without an entry for the stop token it
    would cut off the score of the prompt's last token, and silently evaluate wrongly."""
    end = Finished("r", FinishReason.STOP, Usage(2, 1, 0), stop_token_id=256, stop_logprobs=scores(256))
    client = ScriptedClient([scheduled()], prompt_scored("hi"), [end])
    choice = await both(client, echo=True, logprobs=1, max_tokens=1)
    assert (choice["text"], choice["finish_reason"]) == ("hi", "stop")
    assert choice["logprobs"]["tokens"] == ["h", "i", "<eos>"]
    assert choice["logprobs"]["token_logprobs"] == [None, -1.105, scores(256).logprob]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]


# --- which chunk carries what ----------------------------------------------------------------------------------------


async def test_with_echo_the_first_chunk_is_the_prompt_at_once_and_with_scores_when_they_arrive() -> None:
    gate = asyncio.Event()
    client = ScriptedClient([scheduled()], gate, prompt_scored("hi"), scored("a"), [finished()])
    for fields, early in (({}, True), ({"logprobs": 0}, False)):
        gate.clear()
        body = json.dumps(PROMPT | {"echo": True, "stream": True} | fields).encode()
        exchange = Exchange(app_for(client), "POST", "/v1/completions", body)
        assert (await exchange.next())["status"] == 200
        if early:
            assert b'"text":"hi"' in (await exchange.next())["body"]
        for _ in range(50):
            await asyncio.sleep(0)
        assert exchange.silent
        gate.set()
        if not early:
            assert b'"text":"hi","logprobs":{"tokens":["h","i"]' in (await exchange.next())["body"]
        await asyncio.wait_for(exchange.task, TIMEOUT_S)


async def test_each_chunk_carries_the_scores_of_its_text() -> None:
    client = ScriptedClient([scheduled()], prompt_scored("hi"), scored("ab"), scored("c"), [finished()])
    answer = await complete(client, echo=True, logprobs=0, stream=True)
    assert chunks(answer) == [("hi", ["h", "i"]), ("ab", ["a", "b"]), ("c", ["c"]), ("", ["<eos>"])]


async def test_the_scores_of_an_incomplete_character_come_with_the_character() -> None:
    items = [scored("n"), *(scored(PARROT[at : at + 1]) for at in range(4)), scored("!"), [finished()]]
    client = ScriptedClient([scheduled()], *items)
    bytes_of_it = [rf"bytes:\x{byte:02x}" for byte in PARROT]
    answer = await complete(client, logprobs=0, stream=True)
    assert chunks(answer) == [("n", ["n"]), ("🦜", bytes_of_it), ("!", ["!"]), ("", ["<eos>"])]
    assert (await both(client, logprobs=0))["logprobs"]["text_offset"] == [0, 1, 1, 1, 1, 2, 3]


async def test_the_scores_of_a_character_that_is_never_complete_come_at_the_end() -> None:
    client = ScriptedClient([scheduled()], scored(b"a" + PARROT[:3]), [finished(FinishReason.STOP)])
    choice = await both(client, logprobs=0)
    assert choice["text"] == "a\ufffd"
    assert choice["logprobs"]["tokens"] == ["a", r"bytes:\xf0", r"bytes:\x9f", r"bytes:\xa6", "<eos>"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 1, 2]


async def test_the_scores_of_text_that_might_be_a_stop_string_come_with_the_text() -> None:
    items = [scored("a"), scored("xS"), scored("T"), scored("y"), scored("S"), [finished(FinishReason.LENGTH)]]
    client = ScriptedClient([scheduled()], *items)
    answer = await complete(client, logprobs=0, stop="STOP", stream=True)
    assert chunks(answer) == [("a", ["a"]), ("x", ["x"]), ("STy", ["S", "T", "y"]), ("S", ["S"])]


@pytest.mark.parametrize("items", [["one STOP"], ["one S", "TO", "P more"], list("one STOP")], ids=str)
async def test_a_stop_string_cuts_the_text_and_its_tokens_stay_in_the_scores(items: list[str]) -> None:
    """As with vLLM, there is an entry for each token that was generated, up to the one that completed the match."""
    client = ScriptedClient([scheduled()], *map(scored, items), asyncio.Event())
    choice = await both(client, logprobs=0, stop="STOP")
    assert (choice["text"], choice["finish_reason"]) == ("one ", "stop")
    assert "".join(choice["logprobs"]["tokens"]) == "one STOP"
    assert choice["logprobs"]["text_offset"] == list(range(8))


async def test_a_stop_string_in_the_prompt_does_not_end_the_answer() -> None:
    client = ScriptedClient([scheduled()], prompt_scored("a STOP"), scored("b"), [finished(FinishReason.LENGTH)])
    choice = await both(client, prompt="a STOP", echo=True, logprobs=0, stop="STOP")
    assert (choice["text"], choice["finish_reason"]) == ("a STOPb", "length")


async def test_everything_in_one_item_is_the_same_answer() -> None:
    events = [scheduled(), *prompt_scored("hi"), *scored("ok 🦜"), finished()]
    together = await both(ScriptedClient(events), echo=True, logprobs=0)
    assert together == await both(ScriptedClient(*([event] for event in events)), echo=True, logprobs=0)
    assert together["text"] == "hiok 🦜"


@settings(deadline=None, max_examples=60)
@given(st.binary(max_size=24), st.lists(st.integers(0, 24), max_size=6), st.sampled_from(["ab", "\x01", "é"]))
async def test_however_tokens_arrive_each_is_reported_once_in_order_and_the_text_is_the_same(
    data: bytes, cuts: list[int], stop: str
) -> None:
    ends = sorted({*(cut for cut in cuts if cut < len(data)), len(data)})
    items = [scored(data[start:end]) for start, end in zip([0, *ends], ends, strict=False)]
    end = finished(FinishReason.LENGTH)
    client = ScriptedClient([scheduled()], *items, [end])
    choice = await both(client, logprobs=0, stop=stop)
    answer = (await complete(ScriptedClient([scheduled(), *tokens(data), end]), stop=stop)).json
    plain = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (plain["text"], plain["finish_reason"])
    generated = data if plain["finish_reason"] == "length" else data[: answer["usage"]["completion_tokens"]]
    assert choice["logprobs"]["token_logprobs"] == [scores(byte).logprob for byte in generated]
    offsets = choice["logprobs"]["text_offset"]
    assert offsets == sorted(offsets)


async def test_a_large_answer_is_written_in_a_thread_to_the_same_json() -> None:
    top = [(token_id, -float(token_id)) for token_id in range(97, 117)]
    client = ScriptedClient([scheduled()], scored("abc" * 500, top), [finished(FinishReason.LENGTH)])
    logprobs = (await both(client, logprobs=20))["logprobs"]
    assert len(logprobs["tokens"]) == 1500
    assert logprobs["top_logprobs"][3] == logprobs["top_logprobs"][0]
    assert len(logprobs["top_logprobs"][0]) == 20


# --- the echo's text and places --------------------------------------------------------------------------------------


async def test_a_prompt_of_token_ids_is_decoded_with_its_special_tokens_and_the_answer_without() -> None:
    client = ScriptedClient([scheduled()], tokens("!"), [Token("r", 257)], tokens("?"), [finished(FinishReason.LENGTH)])
    choice = await both(client, prompt=[*"né".encode(), 257, *b"b"], echo=True)
    assert choice["text"] == "né<|system|>b!?"


@pytest.mark.parametrize("ids", [[259, 0xC3, 256, 98], [0xF0, 0x9F, 257], [256], [0xFF, 0xC3]], ids=str)
async def test_the_text_of_token_ids_is_that_of_detokenize_where_the_answer_adds_nothing(ids: list[int]) -> None:
    """Nor does the answer complete a character that a special token cut off."""
    client = ScriptedClient([scheduled()], [finished(FinishReason.LENGTH, completion=0)])
    choice = await both(client, prompt=ids, echo=True, max_tokens=0)
    assert choice["text"] == (await post(app_for(client), "/detokenize", {"tokens": ids})).json["prompt"]
    client = ScriptedClient([scheduled()], tokens(b"\xa9"), [finished(FinishReason.LENGTH)])
    choice = await both(client, prompt=[0xC3, 256], echo=True)
    assert choice["text"] == "\ufffd<eos>\ufffd"


@pytest.mark.parametrize("prompt", ["né 🦜", "<|user|>hi<eos>", " a  b \n", "\ufffd", "x" * 150], ids=repr)
async def test_a_prompt_of_text_is_given_back_exactly(prompt: str) -> None:
    client = ScriptedClient([scheduled()], tokens("!"), [finished(FinishReason.LENGTH)])
    assert (await both(client, prompt=prompt, echo=True))["text"] == prompt + "!"


async def test_special_tokens_in_a_prompt_count_in_the_offsets_of_text_and_of_token_ids() -> None:
    ids = [258 + 1, *b"hi", 256, *b"x"]  # <|user|>hi<eos>x
    prompt_scores = PromptLogprobs("r", tuple(map(scores, ids[1:])))
    client = ScriptedClient([scheduled()], [prompt_scores], scored("y"), [finished(FinishReason.LENGTH)])
    text = "<|user|>hi<eos>x"
    of_text = await both(client, prompt=text, echo=True, logprobs=0)
    assert of_text["text"] == text + "y"
    assert of_text["logprobs"]["tokens"] == ["<|user|>", "h", "i", "<eos>", "x", "y"]
    assert of_text["logprobs"]["text_offset"] == [0, 8, 9, 10, 15, 16]
    of_ids = await both(client, prompt=ids, echo=True, logprobs=0)
    assert (of_ids["text"], of_ids["logprobs"]) == (of_text["text"], of_text["logprobs"])


async def test_a_character_that_begins_in_the_prompt_and_ends_in_the_answer_is_shown_once() -> None:
    client = ScriptedClient([scheduled()], prompt_scored(PARROT[:2]), scored(PARROT[2:]), [finished()])
    choice = await both(client, prompt=list(b"a" + PARROT[:2])[1:], echo=True, logprobs=0)
    assert choice["text"] == "🦜"
    assert choice["logprobs"]["text_offset"] == [0, 0, 0, 0, 1]


def sentencepiece() -> tokenizers.Tokenizer:
    """Make a tokenizer with the ids <s>, ▁a, b, ▁, a, then the bytes of é and of ሰ. Encoding adds <s>."""
    pieces = ["<s>", "▁a", "b", "▁", "a", "<0xC3>", "<0xA9>", "<0xE1>", "<0x88>", "<0xB0>"]
    core = tokenizers.Tokenizer(models.BPE(vocab={piece: at for at, piece in enumerate(pieces)}, merges=[("▁", "a")]))
    core.add_special_tokens(["<s>"])
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return core


def test_sentencepieces_tokens_keep_the_space_that_their_decoder_strips_from_a_first_word() -> None:
    tokenizer = Tokenizer(sentencepiece(), None, None)
    assert [tokenizer.token_text(token_id) for token_id in range(7)] == [
        *("<s>", " a", "b", " ", "a"),
        *(r"bytes:\xc3", r"bytes:\xa9"),
    ]


def test_a_beginning_token_that_the_text_does_not_hold_takes_no_place_and_the_answer_keeps_its_space() -> None:
    tokenizer = Tokenizer(sentencepiece(), None, None)
    detokenizer = tokenizer.detokenizer()
    echo = read_text([0, 1, 2, 1], "ab a", detokenizer, tokenizer.special_texts)
    assert (echo.text, echo.offsets) == ("ab a", (0, 0, 1, 2))
    assert detokenizer.push(1) == " a"


def test_an_answer_after_a_special_token_keeps_its_space_too() -> None:
    tokenizer = Tokenizer(sentencepiece(), None, None)
    detokenizer = tokenizer.detokenizer()
    assert read_text([0, 1, 0], "a<s>", detokenizer, tokenizer.special_texts).offsets == (0, 0, 1)
    assert detokenizer.push(1) == " a"


def test_token_ids_of_words_have_the_text_that_decoding_them_gives_and_the_answer_keeps_its_space() -> None:
    tokenizer = Tokenizer(sentencepiece(), None, None)
    detokenizer = tokenizer.detokenizer()
    reader = tokenizer.detokenizer(skip_special_tokens=False)
    echo = read_ids([0, 1, 2, 1], detokenizer, reader, tokenizer.special_texts)
    assert (echo.text, echo.offsets) == ("<s> ab a", (0, 3, 5, 6))
    assert echo.text == tokenizer.decode([0, 1, 2, 1])
    assert detokenizer.push(1) == " a"


SAID: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}]}


@pytest.mark.parametrize(
    ("path", "fields", "text"),
    [
        ("/v1/completions", {"prompt": "a"}, " a"),
        ("/v1/completions", {"prompt": [0, 1]}, " a"),
        ("/v1/completions", {"prompt": [0, 1] + [7, 8, 9] * 6}, " a"),
        ("/v1/completions", {"prompt": "a", "echo": True}, "a a"),
        ("/v1/completions", {"prompt": ["a", "a"], "n": 2, "stop": " b"}, " a"),
        ("/v1/completions", {"prompt": "a", "stop": " a"}, ""),
        ("/v1/completions", {"prompt": [0]}, "a"),
        ("/v1/chat/completions", SAID | {"continue_final_message": True}, " a"),
        ("/v1/chat/completions", SAID, "a"),
    ],
    ids=str,
)
async def test_the_first_word_of_an_answer_that_continues_a_text_keeps_its_space(
    path: str, fields: dict[str, Any], text: str
) -> None:
    """Words ran together where a client put the answer behind its prompt: a decoder strips the first space of a text,
    and only an echo had the answer's text begin with the prompt's."""
    template = ChatTemplate("{% for message in messages %}{{ message.content }}{% endfor %}", {})
    app = create_app(
        ScriptedClient([scheduled()], scored([1]), [finished()]), Tokenizer(sentencepiece(), template, None), MODEL
    )
    for choice in (await post(app, path, {"model": MODEL.id} | fields)).json["choices"]:
        assert (choice["text"] if "text" in choice else choice["message"]["content"]) == text


async def test_a_part_of_a_character_that_ends_a_prompt_is_not_repeated_in_an_answer_without_echo() -> None:
    client = ScriptedClient([scheduled()], tokens("b"), [finished()])
    for prompt in (list(b"a" + PARROT[:2]), "a\ufffd"):
        assert (await complete(client, prompt=prompt)).json["choices"][0]["text"] == "b"


def test_offsets_stay_inside_a_text_that_the_tokenizer_changes() -> None:
    """A tokenizer that lower-cases or normalises gives other text back; its tokens still have places in order."""
    echo = read_text(list(b"abcdef"), "ABC", BYTE_LEVEL.detokenizer(), {})
    assert (echo.text, echo.offsets) == ("ABC", (0, 1, 2, 3, 3, 3))


async def test_the_answer_of_a_large_echo_is_read_in_a_thread_to_the_same_places() -> None:
    model = type(MODEL)(id=MODEL.id, max_model_len=10_000, created=0)
    text = "né" * 1500
    client = ScriptedClient([scheduled()], prompt_scored(text), scored("!"), [finished(FinishReason.LENGTH)])
    body = PROMPT | {"prompt": text, "echo": True, "logprobs": 0}
    choice = whole(await post(create_app(client, BYTE_LEVEL, model), "/v1/completions", body))
    assert choice["text"] == text + "!"
    assert choice["logprobs"]["text_offset"][-5:] == [2997, 2998, 2999, 2999, 3000]


async def test_a_prompt_is_read_once_however_many_answers_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: 24 kB of token ids with `echo` and `n` of 128 were decoded 128 times on the event loop, which stood
    still for two seconds."""
    num_read = 0
    push = Detokenizer.push

    def counted(self: Detokenizer, token_id: int) -> str:
        nonlocal num_read
        num_read += 1
        return push(self, token_id)

    monkeypatch.setattr(Detokenizer, "push", counted)
    prompt = [*b"a prompt that ends in the middle of ", 0xC3]
    script = [scheduled()], [Token("r", 0xA9)], [finished(FinishReason.LENGTH)]
    answer = await complete(ScriptedClient(*script), prompt=prompt, echo=True, n=50)
    texts = {choice["text"] for choice in answer.json["choices"]}
    assert texts == {"a prompt that ends in the middle of é"}
    assert num_read <= 2 * len(prompt) + 3 * 50  # by the reader and the answer's own; then a token of each answer


# --- the object ------------------------------------------------------------------------------------------------------


def test_tokens_of_one_text_are_told_apart_and_the_chosen_one_keeps_its_text() -> None:
    texts = {1: "a", 2: "a", 3: "a", 4: "b"}
    top = ((1, -0.5), (2, -1.0), (4, -2.0))
    told = logprobs_json([ScoredToken(2, 0, TokenLogprobs(2, -1.0, top))], texts.__getitem__)["top_logprobs"]
    assert told == [{"token_id:1": -0.5, "a": -1.0, "b": -2.0}]
    told = logprobs_json([ScoredToken(3, 0, TokenLogprobs(3, -9.0, top))], texts.__getitem__)["top_logprobs"]
    assert told == [{"token_id:1": -0.5, "token_id:2": -1.0, "b": -2.0, "a": -9.0}]
    told = logprobs_json([ScoredToken(4, 0, TokenLogprobs(4, -2.0, top))], texts.__getitem__)["top_logprobs"]
    assert told == [{"a": -0.5, "token_id:2": -1.0, "b": -2.0}]


def test_the_chosen_tokens_two_numbers_are_one_number_for_clients_that_compare_them() -> None:
    """lm-evaluation-harness calls a token greedy if its number equals the largest of the alternatives."""
    token = ScoredToken(1, 0, TokenLogprobs(1, -0.5, ((1, -0.5000001),)))
    told = logprobs_json([token], str)
    assert told["top_logprobs"] == [{"1": told["token_logprobs"][0]}]


@pytest.mark.parametrize(
    ("data", "text"),
    [(b"a", "a"), (b" ", " "), (b"\n", "\n"), (b"\xf0", r"bytes:\xf0"), (b"\x00", "\x00")],
    ids=repr,
)
def test_a_token_that_is_no_text_alone_is_written_as_its_bytes(data: bytes, text: str) -> None:
    assert BYTE_LEVEL.token_text(data[0]) == text


def test_a_token_of_text_and_part_of_a_character_is_written_as_bytes_with_its_readable_part() -> None:
    """SmolLM2 has such tokens: a space and the first two bytes of most emoji."""
    core = tokenizers.Tokenizer(models.BPE(vocab={"ĠðŁ": 0, "ï¿½": 1, "\\ð": 2}, merges=[]))
    core.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(core, None, None)
    assert tokenizer.token_text(0) == r"bytes: \xf0\x9f"
    assert tokenizer.token_text(1) == "\ufffd"  # the character itself, as a whole
    assert tokenizer.token_text(2) == r"bytes:\x5c\xf0"


def test_special_and_unknown_tokens_have_a_text() -> None:
    assert (BYTE_LEVEL.token_text(256), BYTE_LEVEL.token_text(99_999)) == ("<eos>", "")


def test_a_queue_gives_every_token_once_with_the_piece_that_completes_its_text() -> None:
    queue = TokenQueue()
    queue.add(1, None, 2)
    queue.add(2, None, 0)
    queue.add(3, None, 1)
    queue.add(4, None, 0)
    taken = [queue.take(1), queue.take(1), queue.take(0), queue.take(1), queue.take_all(), queue.take_all()]
    assert [[token.token_id for token in tokens] for tokens in taken] == [[], [1], [], [2, 3], [4], []]


async def test_token_ids_leave_with_their_text_and_not_before_it_where_the_prompt_is_echoed() -> None:
    client = ScriptedClient([scheduled()], *(tokens(letter) for letter in "hello?"), [finished()])
    fields = {"echo": True, "return_token_ids": True, "stop": ["lo!"], "stream": True}
    answer = await complete(client, **fields)
    parts = [(frame["choices"][0]["text"], frame["choices"][0]["token_ids"]) for frame in answer.frames]
    shown = "".join(text for text, _ in parts)
    assert shown == f"{PROMPT['prompt']}hello?"
    num_chars, num_ids = -len(PROMPT["prompt"]), 0
    for text, token_ids in parts[:-1]:
        num_chars, num_ids = num_chars + len(text), num_ids + len(token_ids or ())
        assert num_ids == max(num_chars, 0)
