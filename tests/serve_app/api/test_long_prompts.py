"""Owns the contract of prompts of any length: the interpreter lock is free while they are encoded and decoded, a prompt
that cannot fit is refused before it is encoded, and the tokens are those of the library's own `encode`."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NoReturn

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from engine.checkpoints.prepare import prepare_model
from engine.config import DEFAULT_MODEL
from engine.protocol import FinishReason
from serve_app.api.ingress import create_app
from serve_app.api.text.detokenizer import Detokenizer
from serve_app.api.text.token_span import BYTE_CHARACTERS, TokenSpan, longest_span
from serve_app.api.text.tokenizer import Tokenizer, TooManyTokens
from tests.serve_app.harness import CHAT, MODEL, PROMPT, ScriptedClient, complete, finished, post, scheduled

pytestmark = pytest.mark.anyio

SCRIPTS = (
    (0x20, 0x7F),  # Latin
    (0xC0, 0x24F),  # with accents
    (0x370, 0x3FF),  # Greek
    (0x400, 0x4FF),  # Cyrillic
    (0x591, 0x5F4),  # Hebrew
    (0x600, 0x6FF),  # Arabic
    (0x900, 0x97F),  # Devanagari
    (0xE01, 0xE5B),  # Thai
    (0x1100, 0x11FF),  # Hangul's letters
    (0x3041, 0x30FF),  # Kana
    (0x4E00, 0x9FFF),  # Han
    (0xAC00, 0xD7A3),  # Hangul
    (0x300, 0x36F),  # combining marks
    (0x2000, 0x206F),  # spaces, joiners, directions
    (0xE000, 0xE0FF),  # private use
    (0xFFF0, 0xFFFD),
    (0x1F300, 0x1FAFF),  # emoji
    (0x20000, 0x2A6DF),  # Han beyond 16 bits
    (0xF0000, 0xF00FF),
    (0x10FF00, 0x10FFFF),
)
SPECIALS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<eos>", "<|user|>", "<s>", "<0x41>", "<unk>")


def corpus() -> list[str]:
    draw = random.Random(20)
    texts = ["", " ", "\n", "\0", "a", " a", "a ", "\r\n", "\ufeffa", "\u2028", "e\u0301", "\u1f82", "👩‍👩‍👧‍👦"]
    texts += ["".join(chr(draw.randint(*script)) for _ in range(200)) for script in SCRIPTS]
    texts += ["".join(chr(draw.randint(*draw.choice(SCRIPTS))) for _ in range(500)) for _ in range(20)]
    texts += [
        character * 3000 for character in ("a", " ", "\n", "\t", "0", "=", "é", "中", "👍", "\x04", "\u0301", "#")
    ]
    texts += [special + "x" + special * 2 + " " + special[:-1] for special in SPECIALS]
    texts += ["".join(map(chr, range(0x80))) * 3, "1234567890" * 300, "def f(x):\n        return x\n" * 60]
    return texts


def byte_level(*characters_left_out: str, **options: Any) -> tokenizers.Tokenizer:
    vocabulary = [character for character in BYTE_CHARACTERS if character not in characters_left_out]
    vocabulary += ["aa", "aaaa", "ĠĠ"]
    merges = [("a", "a"), ("aa", "aa"), ("Ġ", "Ġ")]
    core = tokenizers.Tokenizer(models.BPE({piece: i for i, piece in enumerate(vocabulary)}, merges, **options))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return core


def with_nfc() -> tokenizers.Tokenizer:
    core = byte_level()
    core.normalizer = normalizers.NFC()
    core.add_special_tokens(["<|im_start|>", AddedToken("<s>", special=True)])
    core.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", core.token_to_id("<s>"))]
    )
    return core


def with_byte_fallback() -> tokenizers.Tokenizer:
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    core = tokenizers.Tokenizer(
        models.BPE(vocabulary, [("▁", "a")], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return core


CORES: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "default": lambda: tokenizers.Tokenizer.from_file(
        str(prepare_model(DEFAULT_MODEL, progress=False) / "tokenizer.json")
    ),
    "byte level": byte_level,
    "byte level, some bytes missing": lambda: byte_level(
        *(character for character, byte in BYTE_CHARACTERS.items() if byte < 9)
    ),
    "NFC": with_nfc,
    "byte fallback": with_byte_fallback,
}


@pytest.fixture(scope="module", params=CORES)
def core(request: pytest.FixtureRequest) -> tokenizers.Tokenizer:
    return CORES[request.param]()


def test_tokens_are_those_of_the_librarys_own_encode(core: tokenizers.Tokenizer) -> None:
    tokenizer = Tokenizer(core, None, None)
    texts = corpus()
    for text in [*texts, "".join(texts)]:
        for special in (False, True):
            ids = tokenizer.encode(text, add_special_tokens=special)
            assert ids == core.encode(text, add_special_tokens=special).ids, text[:40]
            assert tokenizer.encode(text, add_special_tokens=special, most=len(ids)) == ids, text[:40]
        assert tokenizer.decode(ids) == core.decode(ids, skip_special_tokens=False)


def test_no_text_has_fewer_tokens_than_its_length_says(core: tokenizers.Tokenizer) -> None:
    span = longest_span(core)
    assert span is not None
    longest = max(core.get_vocab(), key=len)
    texts = [*corpus(), longest * 100, core.decode([core.get_vocab()[longest]] * 100, skip_special_tokens=False)]
    for text in texts:
        assert span.least_tokens(text) <= len(core.encode(text, add_special_tokens=False).ids), text[:40]
    assert span.least_tokens("a" * (span.num_chars + 1)) == 2


def test_characters_that_the_vocabulary_drops_count_for_nothing() -> None:
    """The default model's vocabulary has no token for some control characters:
    a megabyte of them is an empty prompt."""
    span = longest_span(byte_level("Ą"))  # the byte-level character of 0x04
    assert span == TokenSpan(4, "\x04")
    assert span.least_tokens("\x04" * 1000) == 0
    assert byte_level("Ą").encode("\x04" * 1000).ids == []


def unbounded() -> Iterator[tokenizers.Tokenizer]:
    """Yield tokenizers for which a text of a thousand characters has one or two tokens."""
    for normalizer in (normalizers.Strip(), normalizers.Replace(tokenizers.Regex(" +"), " "), normalizers.Nmt()):
        core = byte_level()
        core.normalizer = normalizer
        yield core
    core = byte_level()
    core.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace("  ", "")])
    yield core
    core = byte_level()
    core.add_special_tokens([AddedToken("<s>", rstrip=True)])
    yield core
    core = byte_level()
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(use_regex=False)]
    )
    yield core
    for pre_tokenizer in (pre_tokenizers.Whitespace(), pre_tokenizers.WhitespaceSplit()):
        core = byte_level()
        core.pre_tokenizer = pre_tokenizer
        yield core
    core = tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    yield core
    yield byte_level("Ą", unk_token="a", fuse_unk=True)
    yield byte_level(*(character for character, byte in BYTE_CHARACTERS.items() if byte == 0x81))


@pytest.mark.parametrize("option", ["end_of_word_suffix", "continuing_subword_prefix"])
def test_a_model_that_marks_where_in_a_word_a_character_is_tells_nothing_by_length(option: str) -> None:
    """The marked character may have no token, and is then left out, although the plain one has a token."""
    vocabulary = {character: i for i, character in enumerate(BYTE_CHARACTERS)}
    core = tokenizers.Tokenizer(models.BPE(vocabulary, [], **{option: "@@"}))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    assert len(core.encode(" ab" * 300).ids) < 900, "fewer than one for each character"
    assert longest_span(core) is None


@pytest.mark.parametrize("number", range(len(list(unbounded()))))
def test_a_tokenizer_that_may_leave_text_out_tells_nothing_by_length(number: int) -> None:
    assert longest_span(list(unbounded())[number]) is None


def runs_beside(work: Callable[[], object]) -> bool:
    """Return whether another thread gets the interpreter lock while `work` has the processor. Threads are not made to
    release it meanwhile, so that only `work` itself can."""
    started, ran = threading.Event(), threading.Event()

    def other() -> None:
        started.wait()
        ran.set()

    thread = threading.Thread(target=other)
    thread.start()
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        started.set()
        for _ in range(100):  # the other thread may be slow to wake
            work()
            if ran.is_set():
                break
        has_run = ran.is_set()
    finally:
        sys.setswitchinterval(before)
        thread.join()
    return has_run


def test_the_interpreter_lock_is_free_while_a_text_is_encoded_and_decoded() -> None:
    tokenizer = Tokenizer.byte_level()
    text = "long prompt " * 4000
    token_ids = tokenizer.encode(text)
    assert not runs_beside(lambda: tokenizer._core.encode(text[:4000]).ids), "the library's own, which holds it"
    assert runs_beside(lambda: tokenizer.encode(text))
    assert runs_beside(lambda: tokenizer.decode(token_ids))


class NothingIsEncoded:
    """Replaces the tokenizer once a model is loaded."""

    def __getattr__(self, name: str) -> NoReturn:
        raise AssertionError(f"{name} was called")


TOO_LONG = "x" * 2601
"""Too long to fit: the byte-level tokenizer's longest token has 13 characters, and the model takes 200 tokens."""
LONG_TURN = {"messages": [{"role": "user", "content": TOO_LONG}]}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", PROMPT | {"prompt": TOO_LONG}, "prompt"),
        ("/v1/completions", PROMPT | {"prompt": TOO_LONG * 1500}, "prompt"),
        ("/v1/completions", PROMPT | {"prompt": [TOO_LONG, "b"], "max_tokens": 0, "echo": True}, "prompt.0"),
        ("/v1/chat/completions", CHAT | LONG_TURN, "messages"),
        ("/v1/responses", {"model": MODEL.id, "input": TOO_LONG}, "input"),
        ("/v1/messages", {"model": MODEL.id, "max_tokens": 1} | LONG_TURN, None),
    ],
)
async def test_a_text_that_cannot_fit_is_refused_and_not_encoded(
    path: str, body: dict[str, Any], param: str | None
) -> None:
    tokenizer = Tokenizer.byte_level()
    tokenizer._core = NothingIsEncoded()  # type: ignore[assignment]
    answer = await post(create_app(ScriptedClient(), tokenizer, MODEL), path, body)
    error = answer.anthropic_error if param is None else answer.error
    assert answer.status == 400
    assert "maximum context length is 200 tokens" in error["message"]
    assert "your prompt contains at least " in error["message"]
    if param is not None:
        assert (error["param"], error["code"], error["n_ctx"]) == (param, "context_length_exceeded", 200)
        assert error["n_prompt_tokens"] >= 201


async def test_what_is_encoded_and_does_not_fit_is_counted() -> None:
    for prompt in ("x" * 201, [120] * 201):
        error = (await complete(ScriptedClient(), prompt=prompt)).error
        assert "your prompt contains 201 tokens, and the answer needs one more" in error["message"]
        assert (error["n_prompt_tokens"], error["n_ctx"]) == (201, 200)


async def test_a_long_text_of_which_the_end_is_kept_is_encoded() -> None:
    client = ScriptedClient([finished()])
    assert (await complete(client, prompt=TOO_LONG + "é", truncate_prompt_tokens=3)).status == 200
    assert client.submissions[0].prompt_token_ids == (120, 0xC3, 0xA9)


async def test_token_ids_that_cannot_fit_are_counted_before_they_are_looked_at() -> None:
    error = (await complete(ScriptedClient(), prompt=[2**30] * 201)).error
    assert error["code"] == "context_length_exceeded"


def test_too_many_tokens_are_never_made_a_list() -> None:
    with pytest.raises(TooManyTokens) as found:
        Tokenizer.byte_level().encode("x" * 14, most=13)
    assert (found.value.num_tokens, found.value.is_exact) == (14, True)


@pytest.mark.parametrize(
    ("path", "field", "prompt", "work"),
    [
        ("/v1/completions", "prompt", "x" * 100, (Tokenizer, "encode")),
        ("/v1/embeddings", "input", "x" * 100, (Tokenizer, "encode")),
        ("/v1/completions", "prompt", [120] * 100, (Detokenizer, "push")),
    ],
    ids=("completions", "embeddings", "echoes"),
)
@pytest.mark.parametrize(("num_prompts", "is_inline"), [(3, True), (100, False)])
async def test_many_short_prompts_leave_the_event_loop_as_a_long_one_does(
    path: str,
    field: str,
    prompt: str | list[int],
    work: tuple[type, str],
    num_prompts: int,
    is_inline: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: 128 prompts of 4,000 characters were encoded one after the other on the event loop, which stood still
    for half a second, and their echoes were read there."""
    threads: list[threading.Thread] = []
    real = getattr(*work)

    def seen(*given: Any, **named: Any) -> Any:
        threads.append(threading.current_thread())
        return real(*given, **named)

    monkeypatch.setattr(*work, seen)
    client = ScriptedClient([scheduled()], [finished(FinishReason.LENGTH)])
    app = create_app(client, Tokenizer.byte_level(), replace(MODEL, pooling="mean"))
    body = {"model": MODEL.id, field: [prompt] * num_prompts} | ({"echo": True} if field == "prompt" else {})
    answer = await post(app, path, body)
    assert (answer.status, len(client.submissions)) == (200, num_prompts)
    assert (threads[-1] is threading.current_thread()) is is_inline
