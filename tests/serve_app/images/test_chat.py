"""Contracts of chats with images, from a request's body to the answer of a real engine over a tiny checkpoint.
The answers are those that transformers gives to the same prompt, which it makes with its own processor."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from starlette.applications import Starlette
from transformers import Qwen2_5_VLForConditionalGeneration

from engine.async_engine import AsyncEngine
from engine.build.engine import build_engine
from engine.config import EngineConfig
from serve_app.api.http.hint_header import HEADER
from serve_app.api.ingress import create_app
from serve_app.api.text.tokenizer import Tokenizer
from serve_app.engines.engine_client import ServedModel
from serve_app.images.intake import ImageIntake
from serve_app.settings.images import ImageSettings
from tests.serve_app.harness import CHAT, Answer, LocalClient, ScriptedClient, app_for, post
from tests.support.image_files import Given, data_url, image_file, image_server, make_image
from tests.support.tiny_vision import Shown, save_vision_model, show

NEW_TOKENS = 8
SETTINGS = ImageSettings(max_per_request=3, max_bytes=20_000, max_pixels=40_000)


class Served:
    """One checkpoint: transformers' model, and an app over an engine of its own."""

    def __init__(self, directory: Path) -> None:
        self.reference: Qwen2_5_VLForConditionalGeneration = save_vision_model(directory)
        config = EngineConfig(dtype="float32", num_kv_blocks=160, num_threads=1)
        self.engine: AsyncEngine = build_engine(str(directory), config)
        self.tokenizer = Tokenizer.from_dir(directory)
        (self.kind,) = self.engine.config.inputs

    def app(self, **changes: Any) -> Starlette:
        settings = SETTINGS.model_copy(update=changes)
        model = ServedModel(id="tiny", max_model_len=512, created=0, images=ImageIntake(self.kind, settings))
        return create_app(LocalClient(self.engine), self.tokenizer, model)

    def chat(self, *content: Any, **fields: Any) -> Answer:
        body = {"model": "tiny", "messages": [{"role": "user", "content": list(content)}], "max_tokens": NEW_TOKENS}
        body |= {"temperature": 0, "return_token_ids": True, "ignore_eos": True}
        return asyncio.run(post(self.app(), "/v1/chat/completions", body | fields))

    def answer_of_transformers(self, prompt: Shown) -> list[int]:
        given = prompt.for_transformers()
        answer = self.reference.generate(
            **given, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        found: list[int] = answer[0, len(prompt.token_ids) :].tolist()
        return found

    def prompt(self, *parts: str | Image.Image) -> Shown:
        """Return the conversation of one message with these parts."""
        made: list[list[int] | Image.Image] = [self.tokenizer.encode("<|im_start|>user\n")]
        made += [self.tokenizer.encode(part) if isinstance(part, str) else part for part in parts]
        return show(*made, self.tokenizer.encode("<|im_end|>\n<|im_start|>assistant\n"))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    found = Served(tmp_path_factory.mktemp("vision"))
    yield found
    found.engine.shutdown()


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def picture(image: Image.Image | str, **options: Any) -> dict[str, Any]:
    url = image if isinstance(image, str) else data_url(image)
    return {"type": "image_url", "image_url": {"url": url} | options}


def test_the_answer_to_texts_and_images_is_that_of_transformers_and_counts_every_token_of_them(served: Served) -> None:
    first, second = make_image(1, 70, 50), make_image(2, 30, 30)
    prompt = served.prompt("What is ", first, "beside", second, "?")
    answer = served.chat(text("What is "), picture(first), text("beside"), picture(second), text("?")).json
    assert answer["prompt_token_ids"] == prompt.token_ids
    assert answer["choices"][0]["token_ids"] == served.answer_of_transformers(prompt)
    assert answer["usage"]["prompt_tokens"] == len(prompt.token_ids)


def test_a_stream_tells_the_same(served: Served) -> None:
    image = make_image(3, 64, 64)
    whole = served.chat(text("Look: "), picture(image)).json
    stream = served.chat(text("Look: "), picture(image), stream=True, stream_options={"include_usage": True})
    assert stream.text == whole["choices"][0]["message"]["content"]
    assert stream.frames[-1]["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]


def test_two_images_of_one_size_are_told_apart_and_the_same_one_is_found_again(served: Served) -> None:
    """Their prompts have the same tokens: only what the blocks are hashed with differs."""
    one, other = make_image(4, 64, 64), make_image(5, 64, 64)
    prompts = [served.prompt(image, "?") for image in (one, other)]
    assert prompts[0].token_ids == prompts[1].token_ids
    cached = []
    for image, prompt in zip((one, other, one), (*prompts, prompts[0]), strict=True):
        answer = served.chat(picture(image), text("?")).json
        assert answer["choices"][0]["token_ids"] == served.answer_of_transformers(prompt)
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert [count // 16 for count in cached] == [0, 0, len(prompts[0].token_ids) // 16]


def test_the_count_of_tokenize_is_the_usage_of_the_chat(served: Served) -> None:
    content = [text("a"), picture(make_image(6, 40, 90))]
    asked = {"messages": [{"role": "user", "content": content}]}
    counted = asyncio.run(post(served.app(), "/tokenize", asked)).json
    assert counted["count"] == served.chat(*content).json["usage"]["prompt_tokens"]


@pytest.mark.parametrize("name", ["media_type", "format"])
def test_what_a_client_says_an_images_type_is_changes_nothing(served: Served, name: str) -> None:
    """VS Code's Copilot and Strands' agents say it beside the URL."""
    image = make_image(7, 40, 40)
    answer, other = served.chat(picture(image, **{name: "image/png"})), served.chat(picture(image))
    assert (answer.status, answer.headers[HEADER]) == (200, f"messages.content.image_url.{name}")
    assert answer.json["choices"][0]["token_ids"] == other.json["choices"][0]["token_ids"]


def test_low_detail_shows_fewer_pixels(served: Served) -> None:
    kind = dataclasses.replace(served.kind, max_pixels=2_000_000)
    images = ImageIntake(kind, ImageSettings(max_tokens=9000))
    model = ServedModel(id="tiny", max_model_len=8192, created=0, images=images)
    app = create_app(LocalClient(served.engine), served.tokenizer, model)
    url = data_url(Image.new("RGB", (1024, 512)), "jpeg")
    counts = {}
    for detail in ("low", "high", "original", "auto", None):
        asked = {"messages": [{"role": "user", "content": [picture(url, detail=detail)]}]}
        counts[detail] = asyncio.run(post(app, "/tokenize", asked)).json["count"]
    assert counts["auto"] - counts["low"] == 128 * 64 - 90 * 45, "of 8 x 8 pixels each, 512 x 512 in all"
    assert counts["high"] == counts["original"] == counts["auto"] == counts[None]


@pytest.mark.parametrize(
    ("part", "told"),
    [
        (picture("data:image/bmp;base64,AA=="), "type is image/bmp"),
        (picture("data:image/png,AA=="), "not written data:image/png;base64,"),
        (picture("data:image/png;base64,A*=="), "not base64"),
        (picture("data:image/png;base64,AAAA"), "cannot be read"),
        (picture("file:///etc/passwd"), "does not begin with data:, http:// or https://"),
        (picture("https://example.com/a.png"), "'example.com' at port 443 is not listed in images.allowed_hosts"),
        (picture(data_url(Image.new("RGB", (201, 200)))), "201 x 200 pixels, and at most 40000"),
        (picture(data_url(Image.new("RGB", (201, 1)))), "at most 1 : 200"),
        (picture("data:image/png;base64," + "A" * 40_000), "30000 bytes or more, and at most 20000"),
        (
            picture(data_url(make_image(1, 9, 9), "gif", save_all=True, append_images=[make_image(2, 9, 9)])),
            "animation",
        ),
        (picture(data_url(make_image(7, 60, 60))[:-400]), "cannot be read"),
    ],
)
def test_an_image_that_is_refused_is_named_with_the_limit(served: Served, part: dict[str, Any], told: str) -> None:
    answer = served.chat(text("a"), part)
    assert answer.status == 400
    assert answer.error["param"] == "messages.0.content.1.image_url"
    assert told in answer.error["message"]


def test_too_many_images_are_refused(served: Served) -> None:
    answer = served.chat(*[picture(make_image(1, 8, 8))] * 4)
    assert (answer.status, answer.error["param"]) == (400, "messages.0.content.3.image_url")
    assert "4 images, and at most 3" in answer.error["message"]


def test_images_of_one_request_are_fetched_side_by_side(served: Served) -> None:
    """If they were fetched one after another, a slow server would take its time for each of them."""
    arrived = threading.Barrier(3)
    file = image_file(make_image(1, 20, 20))
    paths = {f"/{number}": Given(file, wait=lambda: arrived.wait(20)) for number in range(3)}
    with image_server(paths) as server:
        app = served.app(allowed_hosts=(server.host,))
        content = [picture(server.url(path)) for path in paths]
        asked = {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": content}]}
        assert asyncio.run(post(app, "/v1/chat/completions", asked)).status == 200


def test_a_text_with_the_models_own_mark_of_an_image_is_no_image(served: Served) -> None:
    answer = served.chat(text("<|image_pad|>"))
    assert (answer.status, answer.error["param"]) == (400, "messages")
    assert "1 places for the conversation's 0 images" in answer.error["message"]


def test_images_are_the_users(served: Served) -> None:
    messages = [{"role": "assistant", "content": [picture(make_image(1, 8, 8))]}]
    answer = served.chat(messages=messages)
    assert (answer.status, answer.error["param"]) == (400, "messages.0.content")


def test_a_prompt_with_images_is_not_truncated(served: Served) -> None:
    answer = served.chat(picture(make_image(1, 8, 8)), truncate_prompt_tokens=4)
    assert (answer.status, answer.error["param"]) == (400, "truncate_prompt_tokens")


def test_a_model_without_images_refuses_them_by_name() -> None:
    asked = CHAT | {"messages": [{"role": "user", "content": [text("a"), picture("data:image/png;base64,AA==")]}]}
    answer = asyncio.run(post(app_for(ScriptedClient()), "/v1/chat/completions", asked))
    assert (answer.status, answer.error["param"]) == (400, "messages.0.content.1.image_url")
    assert answer.error["code"] == "unsupported_parameter"


# --- the other forms of a conversation --------------------------------------------------------------------------------


def responses(served: Served, *content: dict[str, Any], **fields: Any) -> Answer:
    body = {"model": "tiny", "input": [{"role": "user", "content": list(content)}], "max_output_tokens": 4}
    return asyncio.run(post(served.app(), "/v1/responses", body | {"temperature": 0} | fields))


def messages(served: Served, *content: dict[str, Any], path: str = "/v1/messages", **fields: Any) -> Answer:
    body = {"model": "tiny", "messages": [{"role": "user", "content": list(content)}]} | fields
    return asyncio.run(post(served.app(), path, body))


def block(url: str) -> dict[str, Any]:
    media_type, data = url.removeprefix("data:").split(";base64,")
    return {"type": "image", "source": {"type": "base64", "media_type": media_type, "data": data}}


def test_a_response_and_a_message_are_the_chats_answer(served: Served) -> None:
    url = data_url(make_image(8, 60, 44))
    chat = served.chat(text("See "), picture(url), text("!"), max_tokens=4, ignore_eos=False).json
    told = chat["choices"][0]["message"]["content"]
    response = responses(
        served,
        {"type": "input_text", "text": "See "},
        {"type": "input_image", "image_url": url, "detail": "auto"},
        {"type": "input_text", "text": "!"},
    ).json
    assert response["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    assert response["output"][0]["content"][0]["text"] == told
    blocks = (text("See "), block(url), text("!"))
    message = messages(served, *blocks, max_tokens=4, temperature=0).json
    usage = message["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == chat["usage"]["prompt_tokens"]
    assert message["content"][0]["text"] == told
    counted = messages(served, *blocks, path="/v1/messages/count_tokens").json
    assert counted == {"input_tokens": chat["usage"]["prompt_tokens"]}


def test_images_of_a_tools_results_are_shown_after_the_last_of_them(served: Served) -> None:
    first, second = data_url(make_image(9, 64, 64)), data_url(make_image(10, 30, 30))
    calls = [{"id": name, "type": "function", "function": {"name": "look", "arguments": "{}"}} for name in "ab"]
    results = [("a", [text("x"), block(first)]), ("b", [block(second)])]
    blocks = [{"type": "tool_result", "tool_use_id": name, "content": content} for name, content in results]
    uses = [{"type": "tool_use", "id": name, "name": "look", "input": {}} for name in "ab"]
    asked = {"role": "user", "content": "look"}
    turns = [asked, {"role": "assistant", "content": uses}, {"role": "user", "content": [*blocks, text("?")]}]
    body = {"model": "tiny", "max_tokens": 1, "messages": turns}
    answer = asyncio.run(post(served.app(), "/v1/messages", body))
    chat = [
        asked,
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "a", "content": "x\n[image]"},
        {"role": "tool", "tool_call_id": "b", "content": "[image]"},
        {"role": "user", "content": [picture(first), picture(second), text("?")]},
    ]
    counted = asyncio.run(post(served.app(), "/tokenize", {"messages": chat})).json
    assert answer.status == 200, answer.json
    usage = answer.json["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == counted["count"]


def test_an_image_that_is_refused_has_the_name_that_the_body_gives_it(served: Served) -> None:
    told = responses(
        served, text("a") | {"type": "input_text"}, {"type": "input_image", "image_url": "b"}, instructions="c"
    )
    assert (told.status, told.error["param"]) == (400, "input.0.content.1.image_url")
    assert told.error["message"].startswith("input.0.content.1.image_url: the image is refused: its URL does not")
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        asked = {"max_tokens": 4} if path == "/v1/messages" else {}
        refused = messages(served, text("a"), block("data:image/png;base64,AAAA"), path=path, system="c", **asked)
        assert refused.status == 400
        assert refused.anthropic_error["message"].startswith(
            "messages.0.content.1.image.source: the image is refused: it"
        )
        result = {
            "type": "tool_result",
            "tool_use_id": "a",
            "content": [text("a"), block("data:image/png;base64,AAAA")],
        }
        told = messages(served, block(data_url(make_image(11, 30, 30))), result, path=path, **asked).anthropic_error
        place = "messages.0.content.1.tool_result.content.1.image.source"
        assert told["message"].startswith(f"{place}: the image is refused: it")


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"input": [{"role": "assistant", "content": [{"type": "input_image", "image_url": "a"}]}]}, "input.0.content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0.image_url"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "a", "file_id": "f"}]}]},
            "input.0.content.0.file_id",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input.0.content.0.type"),
    ],
)
def test_what_a_response_cannot_be_shown_is_refused_by_name(served: Served, asked: dict[str, Any], param: str) -> None:
    answer = responses(served, **asked)
    assert (answer.status, answer.error["param"]) == (400, param)
