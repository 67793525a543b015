"""Owns the promise that no system turn is lost or moved, whatever the chat template does with later ones.
Never reads an answer."""

from __future__ import annotations

from typing import Any

import pytest

from serve_app.api.ingress import create_app
from serve_app.api.text.chat_template import ChatTemplate
from serve_app.api.text.system_turns import SYSTEM_ROLES, with_system_turns
from serve_app.api.text.tokenizer import Tokenizer
from tests.serve_app.api.generation.test_tools import CALLER, prompt_of, saying
from tests.serve_app.harness import post

ALL = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
RAISES = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('not here') }}{% endif %}"
    "[{{ m.role }}:{{ m.content }}]{% endfor %}"
)
DROPS = (
    "{% for m in messages %}{% if m.role != 'system' or loop.first %}[{{ m.role }}:{{ m.content }}]{% endif %}"
    "{% endfor %}"
)
DROPS_THE_LAST = (
    "{% for m in messages %}{% if m.role != 'system' or not loop.last %}[{{ m.role }}:{{ m.content }}]{% endif %}"
    "{% endfor %}"
)
HOISTS = (
    "{% for m in messages if m.role == 'system' %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
    "{% for m in messages if m.role != 'system' %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
)
ALTERNATES = (
    "{% set ns = namespace(last='') %}{% for m in messages %}{% if m.role == 'system' and not loop.first or "
    "m.role == ns.last %}{{ raise_exception('must alternate') }}{% endif %}{% set ns.last = m.role %}"
    "[{{ m.role }}:{{ m.content }}]{% endfor %}"
)
CHATS_ONLY = (
    "{% for m in messages %}{% if m.role in ('user', 'assistant') or (m.role == 'system' and loop.first) %}"
    "[{{ m.role }}:{{ m.content }}]{% endif %}{% endfor %}"
)
DEVELOPER_FIRST = (
    "{% for m in messages %}{% if m.role in ('user', 'assistant') or loop.first %}[{{ m.role }}:{{ m.content }}]"
    "{% endif %}{% endfor %}"
)
FIRST_ONLY = [RAISES, DROPS, DROPS_THE_LAST, HOISTS, ALTERNATES, CHATS_ONLY, DEVELOPER_FIRST]
IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}


def turn(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def turns(*pairs: tuple[str, Any]) -> list[dict[str, Any]]:
    return [turn(role, content) for role, content in pairs]


def marked(text: str) -> str:
    return f"<system>\n{text}\n</system>"


def told_to(source: str, given: Any) -> Any:
    """Return what a template of this kind is given to show."""
    return with_system_turns(given, ChatTemplate(source, {})._lost_roles)


def shown(*turns: tuple[str, str]) -> str:
    return "".join(f"[{role}:{text}]" for role, text in turns)


def test_a_template_that_shows_later_turns_is_given_them() -> None:
    given = turns(("system", "s"), ("system", "t"), ("user", "a"), ("developer", "b"), ("user", "c"))
    assert told_to(ALL, given) == given
    assert ChatTemplate(ALL, {}).render(given) == "[system:s][system:t][user:a][developer:b][user:c]"


@pytest.mark.parametrize("source", FIRST_ONLY)
@pytest.mark.parametrize(
    ("given", "told"),
    [
        (turns(("system", "s"), ("user", "a")), turns(("system", "s"), ("user", "a"))),
        (turns(("system", "s"), ("system", "t"), ("user", "a")), turns(("system", "s\nt"), ("user", "a"))),
        (turns(("user", "a"), ("system", "b")), turns(("user", f"a\n\n{marked('b')}"))),
        (turns(("user", "a"), ("system", "b"), ("user", "c")), turns(("user", f"a\n\n{marked('b')}\n\nc"))),
        (
            turns(("user", "a"), ("system", "b"), ("system", "c"), ("user", "d"), ("assistant", "e"), ("user", "f")),
            turns(("user", f"a\n\n{marked('b')}\n\n{marked('c')}\n\nd"), ("assistant", "e"), ("user", "f")),
        ),
        (
            turns(("user", "a"), ("assistant", "b"), ("system", "c"), ("user", "d")),
            turns(("user", "a"), ("assistant", "b"), ("user", f"{marked('c')}\n\nd")),
        ),
        (
            turns(("user", "a"), ("tool", "r"), ("system", "c")),
            turns(("user", "a"), ("tool", "r"), ("user", marked("c"))),
        ),
        (
            turns(("user", [IMAGE]), ("system", "b"), ("user", "c")),
            turns(("user", [IMAGE, *({"type": "text", "text": text} for text in (marked("b"), "c"))])),
        ),
        (
            turns(("user", "a"), ("user", "b"), ("assistant", "c")),
            turns(("user", "a"), ("user", "b"), ("assistant", "c")),
        ),
    ],
    ids=str,
)
def test_other_templates_are_given_them_as_words_of_the_user(source: str, given: Any, told: Any) -> None:
    assert told_to(source, given) == told


@pytest.mark.parametrize("source", [ALL, *FIRST_ONLY])
def test_a_conversation_that_goes_on_begins_with_the_same_prompt(source: str) -> None:
    template = ChatTemplate(source, {})
    texts = ["first", "asked", "told", "answered", "more"]
    given = turns(*zip(("system", "user", "system", "assistant", "user"), texts, strict=True))
    first = template.render(given[:3])
    later = template.render(given)
    assert later.startswith(first)
    places = [later.index(text) for text in texts]
    assert places == sorted(places)


@pytest.mark.parametrize(("source", "first"), [(CHATS_ONLY, "system"), (DEVELOPER_FIRST, "developer")])
def test_developers_are_read_as_the_system_is(source: str, first: str) -> None:
    given = turns(("developer", "s"), ("user", "a"), ("assistant", "b"), ("developer", "c"), ("user", "d"))
    read = ((first, "s"), ("user", "a"), ("assistant", "b"), ("user", f"{marked('c')}\n\nd"))
    assert ChatTemplate(source, {}).render(given) == shown(*read)
    both = turns(("system", "s"), ("developer", "t"), ("user", "a"))
    assert ChatTemplate(source, {}).render(both) == shown(("system", "s\nt"), ("user", "a"))


def test_a_turn_keeps_what_it_has_besides_its_content() -> None:
    given = [turn("user", "a") | {"name": "n"}, turn("system", "b")]
    assert told_to(RAISES, given) == [{"role": "user", "content": f"a\n\n{marked('b')}", "name": "n"}]


@pytest.mark.parametrize("content", ["x", [{"type": "text", "text": "x"}]], ids=["text", "parts"])
def test_turns_by_the_ten_thousands_become_one_in_one_go(content: Any) -> None:
    """This would take minutes if each turn were joined to all before it."""
    given = turns(("user", content), ("system", "y")) * 100_000
    (one,) = with_system_turns(given, SYSTEM_ROLES)
    if isinstance(content, str):
        assert one["content"] == "\n\n".join(["x", marked("y")] * 100_000)
    else:
        assert len(one["content"]) == 200_000


def asked(role: str) -> dict[str, dict[str, Any]]:
    """Return the same conversation in each API. Anthropic's has no developers."""
    later = turns(("user", "a"), ("assistant", "b"), (role, "c"), ("user", "d"))
    system = turns(("user", "a"), ("assistant", "b"), ("system", "c"), ("user", "d"))
    chat = {"messages": turns(("system", "s")) + later}
    anthropic = {"model": CALLER.id, "system": "s", "messages": system}
    return {
        "/v1/chat/completions": {"model": CALLER.id, **chat},
        "/tokenize": chat,
        "/v1/responses": {"model": CALLER.id, "instructions": "s", "input": later},
        "/v1/messages": anthropic | {"max_tokens": 9},
        "/v1/messages/count_tokens": anthropic,
    }


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("source", "role"),
    [(CHATS_ONLY, "developer"), (DROPS, "system"), (DROPS_THE_LAST, "system"), (HOISTS, "system"), (RAISES, "system")],
)
async def test_no_api_loses_a_later_turn(source: str, role: str) -> None:
    told = shown(("system", "s"), ("user", "a"), ("assistant", "b"), ("user", f"{marked('c')}\n\nd"))
    tokenizer = Tokenizer.byte_level()
    tokenizer._chat_template = ChatTemplate(source, {})
    for path, body in asked(role).items():
        client = saying("x")
        answer = await post(create_app(client, tokenizer, CALLER), path, body)
        assert answer.status == 200, answer.json
        if client.submissions:
            assert prompt_of(client) == told
        else:
            assert answer.json.get("count", answer.json.get("input_tokens")) == len(told)


@pytest.mark.anyio
async def test_an_image_beside_a_later_turn_is_called_what_the_request_calls_it() -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    messages = turns(("user", "a"), ("system", "b"), ("user", [{"type": "image", "source": source}]))
    tokenizer = Tokenizer.byte_level()
    tokenizer._chat_template = ChatTemplate(DROPS, {})
    body = {"model": CALLER.id, "max_tokens": 9, "messages": messages}
    answer = await post(create_app(saying("x"), tokenizer, CALLER), "/v1/messages", body)
    assert answer.status == 400
    assert "messages.2.content.0.image.source" in answer.anthropic_error["message"]


def test_images_of_turns_that_become_one_stay_in_order() -> None:
    text = {"type": "text", "text": "x"}
    given = turns(("system", "s"), ("user", [text, IMAGE]), ("system", "b"), ("user", [IMAGE | {"n": 2}, text]))
    middle = {"type": "text", "text": marked("b")}
    assert told_to(DROPS, given)[1:] == turns(("user", [text, IMAGE, middle, IMAGE | {"n": 2}, text]))
