"""Encodes text and conversations for one model, and decodes answers and single tokens, from its tokenizer.json.
Never imports transformers or torch: loading takes milliseconds, and ingress replicas stay small."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from serve_app.api.text.chat_template import ChatTemplate, TemplateFailed
from serve_app.api.text.detokenizer import Detokenizer
from serve_app.api.text.token_span import BYTE_CHARACTERS, longest_span

# The calling thread encodes one text at a time: the library's own pool would start a thread for each core, and warn
# when the process forks. The library reads the variable at each call.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

_BYTE_LEVEL_SPECIALS = ("<eos>", "<|system|>", "<|developer|>", "<|user|>", "<|assistant|>", "<|tool|>")
_BYTE_LEVEL_IMAGE = "<|image|>"
# Calls as Hermes models write them.
_BYTE_LEVEL_TEMPLATE = (
    "{% if tools %}<|system|>Tools: {{ tools | tojson }}. Call one as "
    '<tool_call>{"name": ..., "arguments": {...}}</tool_call>.<eos>{% endif %}'
    "{% for message in messages %}<|{{ message.role }}|>{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content or [] %}"
    "{% if part.type == 'image' %}<|image|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "{% for call in message.tool_calls or [] %}"
    "<tool_call>{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}</tool_call>"
    "{% endfor %}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_DEFAULT, _TOOL_USE = "default", "tool_use"  # names of templates
_BYTE_PIECE = re.compile("<0x([0-9A-F]{2})>")  # SentencePiece's name of a byte


class TooManyTokens(ValueError):
    """A prompt does not fit. It has `num_tokens` if `is_exact`, otherwise at least that many."""

    def __init__(self, num_tokens: int, *, is_exact: bool) -> None:
        super().__init__(num_tokens)
        self.num_tokens = num_tokens
        self.is_exact = is_exact


class Tokenizer:
    """Encodes and decodes. Thread-safe: long texts may be processed outside the event loop, without the interpreter
    lock. Only the library's batch calls release it; its `encode` and `decode` hold it for seconds if a text has
    megabytes.
    """

    def __init__(
        self,
        core: tokenizers.Tokenizer,
        chat_template: ChatTemplate | None,
        eos_token_id: int | None,
        bos_token_id: int | None = None,
        *,
        tool_template: ChatTemplate | None = None,
    ) -> None:
        # A tokenizer.json saved during training can contain a truncation, which would silently cut prompts.
        core.no_truncation()
        core.no_padding()
        self._core = core
        self._chat_template = chat_template
        self._tool_template = tool_template
        self.eos_token_id = eos_token_id
        self.bos_token_id = bos_token_id
        self.vocab_size = max(core.get_vocab().values()) + 1
        added = core.get_added_tokens_decoder()
        self.special_texts = {token_id: token.content for token_id, token in added.items() if token.special}
        """The texts of the special tokens, which an answer does not show."""
        self.tag_ids = {token.content: token_id for token_id, token in added.items() if _is_tag(token)}
        """The tokens that a grammar refers to by their ids."""
        self._span = longest_span(core)
        self._token_texts: dict[int, str] = {}  # at most the vocabulary

    @classmethod
    def from_dir(cls, path: str | Path) -> Tokenizer:
        """Load a Hugging Face model directory.

        Raises:
            FileNotFoundError: the directory has no tokenizer.json.
            ValueError: a file has other contents than its name says.
        """
        root = Path(path)
        if not (root / "tokenizer.json").is_file():
            raise FileNotFoundError(f"{root} has no tokenizer.json.")
        core = tokenizers.Tokenizer.from_file(str(root / "tokenizer.json"))
        config = _read_json(root / "tokenizer_config.json")
        named = _read_json(root / "special_tokens_map.json")
        # Before transformers 4.34 the map had the last word, and still has where nothing newer was written.
        specials = _special_tokens(named | config if "added_tokens_decoder" in config else config | named)
        templates = {name: ChatTemplate(source, specials) for name, source in _template_sources(root, config).items()}
        eos, bos = (core.token_to_id(specials.get(name, "")) for name in ("eos_token", "bos_token"))
        return cls(core, templates.get(_DEFAULT), eos, bos, tool_template=templates.get(_TOOL_USE))

    @classmethod
    def byte_level(cls, *, images: bool = False) -> Tokenizer:
        """Make a tokenizer of 262 tokens that needs no files. Ids up to 255 are bytes; then come `<eos>` (256) and one
        token per role; with `images`, one more that stands for an image."""
        core = tokenizers.Tokenizer(models.BPE(vocab=BYTE_CHARACTERS, merges=[]))
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        core.decoder = decoders.ByteLevel()
        core.add_special_tokens([*_BYTE_LEVEL_SPECIALS, *((_BYTE_LEVEL_IMAGE,) if images else ())])
        return cls(core, ChatTemplate(_BYTE_LEVEL_TEMPLATE, {"eos_token": "<eos>"}), core.token_to_id("<eos>"))

    def encode(self, text: str, *, add_special_tokens: bool = True, most: int | None = None) -> list[int]:
        """Encode a plain prompt. Special tokens are added as the model's post-processor says (mostly a leading BOS).

        Raises:
            TooManyTokens: there are more than `most` tokens. If the text's length alone shows it, nothing is encoded.
        """
        if most is not None and self._span is not None and (least := self._span.least_tokens(text)) > most:
            raise TooManyTokens(least, is_exact=False)
        (encoding,) = self._core.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        if most is not None and len(encoding) > most:
            raise TooManyTokens(len(encoding), is_exact=True)
        return encoding.ids

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        most: int | None = None,
        /,
        *,
        add_special_tokens: bool = False,
        **options: Any,
    ) -> list[int]:
        """Render and encode a conversation. The template writes its own special tokens, so by default none are added.
        `options` are those of `ChatTemplate.render`.

        Raises:
            TemplateFailed: there is no template, or it refuses these messages.
            TooManyTokens: as in `encode`.
        """
        template = self.template_for(tools=bool(options.get("tools")))
        if template is None:
            raise TemplateFailed("This model has no chat template; use /v1/completions.")
        text = template.render(messages, **options)
        return self.encode(text, add_special_tokens=add_special_tokens, most=most)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decode tokens, including special ones: the text that `encode` was given, with what it added."""
        (text,) = self._core.decode_batch([list(token_ids)], skip_special_tokens=False)
        return text

    def vocabulary_entry(self, token_id: int) -> str | None:
        """Return the token as in tokenizer.json, `Ġthe` instead of ` the`; None if no token has the id."""
        return self._core.id_to_token(token_id)

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    @property
    def chat_template(self) -> ChatTemplate | None:
        """The template of conversations without tools."""
        return self._chat_template

    def template_for(self, *, tools: bool) -> ChatTemplate | None:
        """Return the template of a conversation with tools, or of one without. Few models have one of their own for
        tools."""
        return self._tool_template or self._chat_template if tools else self._chat_template

    def detokenizer(self, *, skip_special_tokens: bool = True, shown: Sequence[str] = ()) -> Detokenizer:
        """Make the detokenizer of an answer. `shown`: the texts of special tokens that are shown in any case."""
        texts = {token_id: text for token_id, text in self.special_texts.items() if text in shown} if shown else {}
        return Detokenizer(self._core, skip_special_tokens=skip_special_tokens, shown=texts)

    def token_text(self, token_id: int) -> str:
        """Return the text of one token, as it is inside a text; special tokens are shown.

        A token that is only part of a character has no text. It is written as its bytes, `bytes: \\xf0\\x9f`, as OpenAI
        does: otherwise many such tokens would have the same text, U+FFFD.
        """
        text = self._token_texts.get(token_id)
        if text is None:
            text = self._token_texts[token_id] = self._decode_one(token_id)
        return text

    def token_bytes(self, token_id: int) -> list[int]:
        """Return the bytes that a token adds to a text, whether or not they are whole characters."""
        data = _partial_bytes(self._core.id_to_token(token_id)) if "\ufffd" in self._core.decode([token_id]) else None
        return list(self.token_text(token_id).encode() if data is None else data)

    def _decode_one(self, token_id: int) -> str:
        once = self._core.decode([token_id], skip_special_tokens=False)
        if "\ufffd" in once and (data := _partial_bytes(self._core.id_to_token(token_id))) is not None:
            return "bytes:" + "".join(_readable(byte) for byte in data)
        # SentencePiece's decoders strip the space of a text's first word, but not of its second.
        twice = self._core.decode([token_id, token_id], skip_special_tokens=False)
        return twice[len(once) :] if twice.startswith(once) else once


def _is_tag(token: tokenizers.AddedToken) -> bool:
    """Whether a grammar's characters never match the token. Besides special tokens, llguidance treats tokens in angle
    brackets so, which some models (Qwen's) have and show."""
    return bool(token.special) or (token.content.startswith("<") and token.content.endswith(">"))


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} must hold a JSON object.")
    return content


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Read `bos_token` and similar entries; each is a string, or an object that describes an added token."""
    entries = {name: value for name, value in config.items() if name.endswith("_token")}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in entries.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _template_sources(root: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Read the default template and that for tools, by name. chat_template.jinja wins over tokenizer_config.json, which
    may have several; beside the file, further templates are files, too."""
    default = root / "chat_template.jinja"
    found = {_DEFAULT: default.read_text(encoding="utf-8")} if default.is_file() else _named_templates(config)
    for_tools = root / "additional_chat_templates" / f"{_TOOL_USE}.jinja"
    if for_tools.is_file():
        found[_TOOL_USE] = for_tools.read_text(encoding="utf-8")
    return {name: found[name] for name in (_DEFAULT, _TOOL_USE) if name in found}


def _named_templates(config: Mapping[str, Any]) -> dict[str, str]:
    found = config.get("chat_template")
    entries = [] if found is None else [{"name": _DEFAULT, "template": found}] if isinstance(found, str) else found
    if not isinstance(entries, list) or not all(_is_named_template(entry) for entry in entries):
        raise ValueError("chat_template in tokenizer_config.json must be a string or a list of named templates.")
    return {entry["name"]: entry["template"] for entry in entries}


def _is_named_template(entry: Any) -> bool:
    return isinstance(entry, dict) and all(isinstance(entry.get(key), str) for key in ("name", "template"))


def _partial_bytes(piece: str | None) -> bytes | None:
    """Return the bytes that a vocabulary entry stands for, if they are not valid text."""
    if piece is None:
        return None
    if match := _BYTE_PIECE.fullmatch(piece):
        return bytes([int(match[1], 16)])
    if not all(character in BYTE_CHARACTERS for character in piece):
        return None
    data = bytes(BYTE_CHARACTERS[character] for character in piece)
    try:
        data.decode()
    except UnicodeDecodeError:
        return data
    return None  # U+FFFD itself


def _readable(byte: int) -> str:
    return chr(byte) if 0x20 <= byte < 0x7F and byte != ord("\\") else f"\\x{byte:02x}"
