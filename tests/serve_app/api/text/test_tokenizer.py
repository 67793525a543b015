"""Owns the contract of loading a model directory and of rendering conversations.
Never reads a model from outside: directories are written here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from serve_app.api.text.chat_template import ChatTemplate, TemplateFailed
from serve_app.api.text.tokenizer import Tokenizer

CHATML = (
    "{% for message in messages %}\n    {% if loop.first and message['role'] != 'system' %}\n"
    "{{ bos_token }}system\nBe kind{{ eos_token }}\n{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MESSAGES = [{"role": "user", "content": 'a <b> & "é" '}, {"role": "assistant", "content": "x\n"}]


def write_model(root: Path, **config: Any) -> Path:
    core = tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2, "hi": 3}, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.add_special_tokens(["<s>", "</s>"])
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 4)])
    core.enable_truncation(max_length=3)
    core.enable_padding(length=5)
    core.save(str(root / "tokenizer.json"))
    (root / "tokenizer_config.json").write_text(json.dumps(config))
    return root


def test_prompts_get_the_post_processors_tokens_and_are_neither_truncated_nor_padded(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_dir(write_model(tmp_path))
    assert tokenizer.encode("a b a b a") == [4, 1, 2, 1, 2, 1]
    assert tokenizer.encode("a") == [4, 1]


def test_a_conversation_gets_only_the_special_tokens_that_its_template_writes(tmp_path: Path) -> None:
    source = "{{ bos_token }}{% for m in messages %} {{ m.content }}{% endfor %}"
    root = write_model(tmp_path, chat_template=source, bos_token={"content": "<s>"}, eos_token="</s>")
    tokenizer = Tokenizer.from_dir(root)
    assert tokenizer.encode_chat([{"role": "user", "content": "hi a"}]) == [4, 3, 1]
    assert tokenizer.eos_token_id == 5
    assert tokenizer.vocab_size == 6


@pytest.mark.parametrize("newer", [{}, {"added_tokens_decoder": {}}], ids=["before 4.34", "since"])
def test_the_map_of_special_tokens_has_the_last_word_where_nothing_newer_was_written(
    newer: dict[str, Any], tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    form = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "unk_token": "[UNK]"}
    root = write_model(tmp_path, eos_token="<s>", **form, **newer)
    (root / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    ours = Tokenizer.from_dir(root).eos_token_id
    assert ours == (4 if newer else 5)
    assert ours == AutoTokenizer.from_pretrained(root).eos_token_id


def test_the_template_file_wins_and_named_templates_give_the_default(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "b"}, {"name": "default", "template": "a"}]
    root = write_model(tmp_path, chat_template=named)
    assert Tokenizer.from_dir(root).encode_chat(MESSAGES) == [1]
    (root / "chat_template.jinja").write_text("b b")
    assert Tokenizer.from_dir(root).encode_chat(MESSAGES) == [2, 2]


@pytest.mark.parametrize(
    "in_config", [None, "a", [("default", "a")], [("tool_use", "b"), ("default", "a"), ("rag", "b b b")]]
)
@pytest.mark.parametrize("files", [(), ("chat_template",), ("chat_template", "additional_chat_templates/tool_use")])
@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "f"}}]])
def test_a_template_for_tools_renders_conversations_with_tools_as_in_transformers(
    in_config: Any, files: tuple[str, ...], tools: Any, tmp_path: Path
) -> None:
    AutoTokenizer = pytest.importorskip("transformers").AutoTokenizer
    named = [{"name": name, "template": text} for name, text in in_config] if isinstance(in_config, list) else in_config
    root = write_model(tmp_path, tokenizer_class="PreTrainedTokenizerFast", chat_template=named)
    for number, name in enumerate(files):
        (root / f"{name}.jinja").parent.mkdir(exist_ok=True)
        (root / f"{name}.jinja").write_text("hi " + "a " * number)
    theirs, ours = AutoTokenizer.from_pretrained(root), Tokenizer.from_dir(root)
    if theirs.chat_template is None:
        assert not ours.has_chat_template
        return
    want = theirs.get_chat_template(tools=tools)
    template = ours.template_for(tools=tools is not None)
    assert template is not None
    assert template.source == want
    assert ours.encode_chat(MESSAGES, tools=tools) == ours.encode(want, add_special_tokens=False)


def test_a_template_that_is_no_text_is_refused(tmp_path: Path) -> None:
    for found in ({"default": "a"}, [{"name": "default"}], ["a"], [{"name": 1, "template": "a"}]):
        with pytest.raises(ValueError, match="must be a string or a list of named templates"):
            Tokenizer.from_dir(write_model(tmp_path, chat_template=found))


def test_a_model_without_a_template_says_so(tmp_path: Path) -> None:
    with pytest.raises(TemplateFailed, match="no chat template"):
        Tokenizer.from_dir(write_model(tmp_path)).encode_chat(MESSAGES)


def test_a_directory_without_a_tokenizer_is_named_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        Tokenizer.from_dir(tmp_path)


def test_byte_level_ids_are_bytes_and_its_roles_are_one_token_each() -> None:
    tokenizer = Tokenizer.byte_level()
    assert tokenizer.encode("é<") == [0xC3, 0xA9, ord("<")]
    assert (tokenizer.eos_token_id, tokenizer.vocab_size) == (256, 262)
    assert tokenizer.encode_chat([{"role": "user", "content": "hi"}]) == [259, *b"hi", 256, 260]


def test_a_template_may_refuse_with_its_own_words_and_other_failures_show_nothing_of_the_inside() -> None:
    with pytest.raises(TemplateFailed, match="roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}", {}).render(MESSAGES)
    for source in ("{{ messages[5].content + 1 }}", "{{ ''.__class__.__mro__ }}{{ 1 / 0 }}", "{{ 'a' + 1 }}"):
        with pytest.raises(TemplateFailed, match="cannot render these messages"):
            ChatTemplate(source, {}).render(MESSAGES)


def test_the_sandbox_keeps_templates_from_changing_messages() -> None:
    with pytest.raises(TemplateFailed):
        ChatTemplate("{{ messages.append(1) }}", {}).render(MESSAGES)


@pytest.mark.parametrize(
    "source",
    [
        CHATML,
        "{{ messages | tojson }}|{{ messages | tojson(indent=2) }}|{{ tools is none }}{{ documents is none }}",
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
        "{%- set ns = namespace(n=0) %}\n  {%- for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
        "{{ strftime_now('%Y') }}{{ unk_token is defined }}",
    ],
)
def test_templates_render_as_transformers_renders_them(source: str) -> None:
    render_jinja_template = pytest.importorskip("transformers.utils.chat_template_utils").render_jinja_template
    specials = {"bos_token": "<s>", "eos_token": "</s>"}
    expected, _ = render_jinja_template([MESSAGES], chat_template=source, add_generation_prompt=True, **specials)
    assert ChatTemplate(source, specials).render(MESSAGES) == expected[0]


TOOLS = [{"type": "function", "function": {"name": "now", "description": "é <b>", "parameters": {"type": "object"}}}]
WITH_TOOLS = (
    "{% if tools %}<tools>\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}</tools>{% endif %}"
    "{% for d in documents or [] %}[{{ d.title }}] {{ d.text }}{% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


@pytest.mark.parametrize(
    "options",
    [
        {"tools": TOOLS, "documents": [{"title": "a", "text": "b"}]},
        {"tools": TOOLS, "enable_thinking": False},
        {"add_generation_prompt": False},
        {"enable_thinking": True, "unknown_to_the_template": [1, {"a": None}]},
    ],
)
def test_what_a_request_gives_to_its_template_renders_as_in_transformers(options: dict[str, Any]) -> None:
    render_jinja_template = pytest.importorskip("transformers.utils.chat_template_utils").render_jinja_template
    as_there = {"add_generation_prompt": True} | options
    expected, _ = render_jinja_template([MESSAGES], chat_template=WITH_TOOLS, **as_there)
    assert ChatTemplate(WITH_TOOLS, {}).render(MESSAGES, **options) == expected[0]


@pytest.mark.parametrize("content", ["The answer is", "ends with spaces  ", "\n- one\n- two\n", "twice twice", ""])
@pytest.mark.parametrize(
    "source",
    [
        CHATML,
        WITH_TOOLS,
        "{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}\n{% endfor %}",
        "{% for m in messages %}{{ m.content }}{{ '</s>' }}{% endfor %}{{ messages[0].content }} again",
    ],
)
def test_a_last_message_to_be_continued_ends_the_prompt_as_in_transformers(source: str, content: str) -> None:
    render_jinja_template = pytest.importorskip("transformers.utils.chat_template_utils").render_jinja_template
    specials = {"bos_token": "<s>", "eos_token": "</s>"}
    messages = [*MESSAGES[:1], {"role": "assistant", "content": content}]
    expected, _ = render_jinja_template([messages], chat_template=source, continue_final_message=True, **specials)
    rendered = ChatTemplate(source, specials).render(messages, continue_final_message=True)
    assert rendered == expected[0]
    assert rendered.rstrip().endswith(content.strip())
    assert messages[-1]["content"] == content


def test_the_last_text_of_a_last_message_in_parts_is_continued() -> None:
    source = "{% for m in messages %}{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endfor %}"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}, {"type": "image_url"}]
    messages = [{"role": "assistant", "content": parts}]
    assert ChatTemplate(source, {}).render(messages, continue_final_message=True) == "<a><b"
    assert parts[1] == {"type": "text", "text": "b"}


@pytest.mark.parametrize(
    ("source", "messages"),
    [
        ("{{ messages[0].content }}", MESSAGES),
        ("{{ messages[-1].content | upper }}", MESSAGES),
        ("{{ messages[-1].content[-9:] }}", MESSAGES),
        ("x", []),
        ("x", [{"role": "assistant", "content": None}]),
        ("x", [{"role": "assistant", "content": [{"type": "image_url"}]}]),
    ],
)
def test_a_last_message_that_the_prompt_does_not_show_cannot_be_continued(
    source: str, messages: list[dict[str, Any]]
) -> None:
    with pytest.raises(TemplateFailed, match="continue"):
        ChatTemplate(source, {}).render(messages, continue_final_message=True)


@pytest.mark.parametrize("name", ["messages", "bos_token", "raise_exception", "strftime_now", "range"])
def test_a_request_cannot_give_what_the_template_has_already(name: str) -> None:
    template = ChatTemplate("{{ messages }}", {"bos_token": "<s>"})
    with pytest.raises(TemplateFailed, match=name):
        template.render(MESSAGES, **{name: "x"})


def test_a_tokenizer_gives_its_template_what_the_request_gave(tmp_path: Path) -> None:
    source = "{% for m in messages %} {{ m.content }} {{ tools[0] }}{{ end }}{% endfor %}"
    tokenizer = Tokenizer.from_dir(write_model(tmp_path, chat_template=source))
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.encode_chat(messages, tools=["a"], end=" b", self="no Python name is special") == [3, 1, 2]
    assert tokenizer.encode_chat(messages, tools=["a"], continue_final_message=True) == [3]


def test_serving_imports_neither_torch_nor_transformers_nor_ray() -> None:
    code = (
        "import sys, serve_app.api.ingress\n"
        "heavy = {'torch', 'transformers', 'ray', 'kernels', 'engine.scheduling.scheduler'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
