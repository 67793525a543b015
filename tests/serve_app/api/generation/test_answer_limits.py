"""Owns the contract of requests with many answers: what the answers share is made once, and what each of them has a
copy of is limited over all of them.
Never looks at what an answer says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from engine.build.engine import FAKE_IMAGES
from engine.protocol import SamplingParams, Scheduled
from serve_app.api.generation import answer_limits
from serve_app.api.ingress import create_app
from serve_app.api.requests.messages import ToolDefinition
from serve_app.api.text.tokenizer import Tokenizer
from serve_app.images.intake import ImageIntake
from serve_app.settings.images import ImageSettings
from tests.serve_app.harness import CHAT, MODEL, PROMPT, ScriptedClient, complete, finished, post, tokens
from tests.support.image_files import data_url, make_image

pytestmark = pytest.mark.anyio


async def test_what_answers_share_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a prompt of a context's length, and words to ban, were made again for each of a hundred answers,
    on the event loop."""
    words: list[str] = []
    encode = Tokenizer.encode

    def counted_encode(self: Tokenizer, text: str, **options: Any) -> list[int]:
        words.append(text)
        return encode(self, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", counted_encode)
    client = ScriptedClient([Scheduled("r", 0)], [finished()])
    allowed = list(range(200))
    answer = await complete(client, n=5, bad_words=["ab", "c"], allowed_token_ids=allowed, seed=7, max_tokens=4)
    assert answer.status == 200
    assert sorted(words) == [" ab", " c", "ab", "c", "hi"]
    made = [submission.sampling for submission in client.submissions]
    assert sorted(sampling.seed or 0 for sampling in made) == [7, 8, 9, 10, 11]
    assert len({id(one.prompt_token_ids) for one in client.submissions}) == 1
    assert len({id(sampling.allowed_token_ids) for sampling in made}) == 1
    assert isinstance(made[0], SamplingParams)


@pytest.mark.parametrize("stream", [False, True])
async def test_tools_are_written_once_however_many_answers_read_calls(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: each answer's readers wrote all of them again, on the event loop: with a thousand tools, a stop
    string and sixteen answers it stood still for three seconds."""
    written: list[str] = []
    for_template = ToolDefinition.for_template

    def counted(self: ToolDefinition) -> dict[str, Any]:
        written.append(self.function.name)
        return for_template(self)

    monkeypatch.setattr(ToolDefinition, "for_template", counted)
    client = ScriptedClient([Scheduled("r", 0)], tokens("hi"), [finished()])
    model = replace(MODEL, max_model_len=2000, tool_parser="hermes", reasoning_parser="qwen3")
    tools = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
    body = CHAT | {"tools": tools, "n": 5, "stop": "z", "stream": stream}
    answer = await post(create_app(client, Tokenizer.byte_level(), model), "/v1/chat/completions", body)
    assert (answer.status, len(client.submissions)) == (200, 5)
    assert written == ["f", "g"]


@pytest.mark.parametrize(
    ("prompts", "num_answers"), [("hi", 128), (["hi", "ho"], 64), (["hi"] * 128, 1)], ids=("n", "both", "prompts")
)
@pytest.mark.parametrize(
    ("param", "most", "more"),
    [
        ("allowed_token_ids", [*range(200), *range(200)] * 100, list(range(8193))),
        # A word of n bytes has n tokens at the beginning of a text, and one more after a space.
        (
            "bad_words",
            [*(one * 1000 for one in "abcd"), "e" * 50, "f" * 43],
            [*(one * 1000 for one in "abcd"), "e" * 94],
        ),
    ],
    ids=("allowed", "banned"),
)
async def test_the_lists_of_tokens_of_all_answers_have_a_limit(
    prompts: Any, num_answers: int, param: str, most: list[Any], more: list[Any]
) -> None:
    """Regression: each answer has lists of its own. With 230 kB of bad words and 128 answers, checking them took an
    engine's event loop two seconds; a whole vocabulary allowed to each took its steps a second."""
    client = ScriptedClient([finished()])
    app = create_app(client, Tokenizer.byte_level(), replace(MODEL, max_model_len=9000))
    body = PROMPT | {"prompt": prompts, "n": num_answers, "max_tokens": 1}
    answer = await post(app, "/v1/completions", body | {param: more})
    assert (answer.status, answer.error["param"]) == (400, param)
    assert f"tokens for each of 128 answers are {answer_limits.MAX_LISTED_TOKENS + 128}" in answer.error["message"]
    assert not client.submissions
    assert (await post(app, "/v1/completions", body | {param: most})).status == 200
    sampling = client.submissions[0].sampling
    assert sampling.allowed_token_ids == (tuple(range(200)) if param == "allowed_token_ids" else None)


async def test_the_answers_to_a_prompt_with_images_have_a_limit_by_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: 60 kB of pictures of one colour have 23 MB of pixels, of which 128 answers took three gigabytes to
    their engines."""
    images = ImageIntake(FAKE_IMAGES, ImageSettings())
    model = replace(MODEL, max_model_len=2000, images=images)
    url = data_url(make_image(1, 8 * FAKE_IMAGES.side, 8 * FAKE_IMAGES.side))
    parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": url}}]
    client = ScriptedClient([finished()])
    app = create_app(client, Tokenizer.byte_level(images=True), model)
    body = CHAT | {"messages": [{"role": "user", "content": parts}]}
    assert (await post(app, "/v1/chat/completions", body)).status == 200
    (first,) = client.submissions
    size = 5 * len(first.prompt_token_ids) + len(first.inputs[0].data)
    assert size > 3 * 64 * FAKE_IMAGES.side**2
    monkeypatch.setattr(answer_limits, "MAX_COPIED_BYTES", 3 * size)
    assert (await post(app, "/v1/chat/completions", body | {"n": 3})).status == 200
    answer = await post(app, "/v1/chat/completions", body | {"n": 4})
    assert (answer.status, answer.error["param"]) == (400, "n")
    assert f"take {4 * size} bytes to the engines, and at most {3 * size}" in answer.error["message"]
    monkeypatch.setattr(answer_limits, "MAX_COPIED_BYTES", 1)
    assert (await post(app, "/v1/chat/completions", body)).status == 200


async def test_long_prompts_and_grammars_count_to_the_size_of_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_limits, "MAX_COPIED_BYTES", 2000)
    for asked, status in (({"prompt": [120] * 100, "n": 4}, 200), ({"prompt": [120] * 101, "n": 4}, 400)):
        assert (await complete(ScriptedClient([finished()]), **asked)).status == status
    assert (await complete(ScriptedClient([finished()]), n=2, regex="a{1,5}" * 200)).status == 400


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"prompt_logprobs": 20}, "prompt_logprobs"), ({"logprobs": 20, "echo": True}, "logprobs")],
)
async def test_a_prompt_has_so_many_log_probabilities_and_no_more(fields: dict[str, Any], param: str) -> None:
    most = answer_limits.MAX_PROMPT_SCORES // 21
    client = ScriptedClient([finished()])
    app = create_app(client, Tokenizer.byte_level(), replace(MODEL, max_model_len=most + 100))
    body = PROMPT | fields | {"max_tokens": 1}
    answer = await post(app, "/v1/completions", body | {"prompt": [120] * (most + 1)})
    assert (answer.status, answer.error["param"]) == (400, param)
    assert (
        f"{(most + 1) * 21} log-probabilities, and at most {answer_limits.MAX_PROMPT_SCORES}" in answer.error["message"]
    )
    assert not client.submissions
    await post(app, "/v1/completions", body | {"prompt": [120] * most})
    assert len(client.submissions) == 1


@pytest.mark.parametrize(
    ("prompts", "num_answers"), [([[120] * 3121], 16), ([[120] * 780, [121] * 2341], 16), ([[120] * 3121] * 16, 1)]
)
@pytest.mark.parametrize(
    ("fields", "param"),
    [({"prompt_logprobs": 20}, "prompt_logprobs"), ({"logprobs": 20, "echo": True}, "logprobs")],
)
async def test_the_answers_of_a_response_have_so_many_log_probabilities_of_prompts_and_no_more(
    prompts: list[list[int]], num_answers: int, fields: dict[str, Any], param: str
) -> None:
    """Regression: the limit held for each prompt, and 128 answers repeat it: 40 kB asked for an answer of a gigabyte,
    for which an ingress replica had no memory."""
    client = ScriptedClient([finished()])
    app = create_app(client, Tokenizer.byte_level(), replace(MODEL, max_model_len=4000))
    body = PROMPT | fields | {"max_tokens": 1, "n": num_answers}
    answer = await post(app, "/v1/completions", body | {"prompt": prompts})
    assert (answer.status, answer.error["param"]) == (400, param)
    told = f"{3121 * 16 * 21} log-probabilities, and at most {answer_limits.MAX_RESPONSE_SCORES}"
    assert told in answer.error["message"]
    assert not client.submissions
    fewer = [*prompts[:-1], prompts[-1][:-16]]
    await post(app, "/v1/completions", body | {"prompt": fewer})
    assert len(client.submissions) == len(prompts) * num_answers
