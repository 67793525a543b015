"""Defines the fields that constrain an answer's text: `response_format`, `structured_outputs`, and SGLang's.
Never reads a schema or a grammar: `constraint` has them checked and written."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from serve_app.api.requests.messages import FUNCTION_NAME
from serve_app.api.requests.strict_model import StrictModel, Unsupported
from serve_app.api.requests.unions import by_type
from serve_app.grammars.texts import MAX_CHOICE_CHARS, MAX_CHOICES

MAX_STRUCTURES = 128
MAX_TAG_CHARS = 1000
MAX_PATTERN_CHARS = 2**16
"""In characters; the bytes are limited again when a pattern is read."""

Schema = dict[str, Any]
Written = Annotated[str, Field(min_length=1, max_length=MAX_PATTERN_CHARS)]


def _text_or_object(value: Any) -> str | None:
    return "<text>" if isinstance(value, str) else None if isinstance(value, list) else "<object>"


SchemaOrText = Annotated[
    Annotated[Written, Tag("<text>")] | Annotated[Schema, Tag("<object>")],
    Discriminator(
        _text_or_object, custom_error_type="type", custom_error_message="should be a JSON schema, also as a string"
    ),
]


class TextFormat(StrictModel):
    type: Literal["text"]


class JsonObjectFormat(StrictModel):
    """The answer is any JSON object, or JSON that the schema allows."""

    type: Literal["json_object"]
    schema_: SchemaOrText | None = Field(None, alias="schema")
    """A JSON schema, which llama.cpp and others accept here, also as a string."""
    value: SchemaOrText | None = None
    """TGI's name for `schema`, which Hugging Face's client writes for any `json_schema`."""

    @model_validator(mode="after")
    def _one_schema(self) -> JsonObjectFormat:
        if None not in (self.schema_, self.value):
            text = "not allowed together with schema, which has the same meaning"
            raise PydanticCustomError("schemas", "{text}", {"text": text, "field": "value"})
        return self


class NamedSchema(StrictModel):
    name: str = Field(pattern=FUNCTION_NAME)
    description: str | None = None
    schema_: Schema = Field(alias="schema")
    """A JSON schema. Keywords that cannot be enforced are refused by name."""
    strict: bool | None = None
    """Without effect: the schema is always enforced."""


class JsonSchemaFormat(StrictModel):
    """The answer is JSON that the schema allows, on one line. The prompt must describe it: the model gets no schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


class StructureTag(StrictModel):
    begin: str = Field(min_length=1, max_length=MAX_TAG_CHARS)
    schema_: Schema = Field(alias="schema")
    end: str = Field(max_length=MAX_TAG_CHARS)


class StructuralTagFormat(StrictModel):
    """The answer is free text, in which each trigger begins one of the structures."""

    unsupported: ClassVar[Unsupported] = {"format": ()}
    type: Literal["structural_tag"]
    structures: Annotated[list[StructureTag], Field(min_length=1, max_length=MAX_STRUCTURES, fail_fast=True)]
    triggers: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=MAX_TAG_CHARS)]],
        Field(min_length=1, max_length=MAX_STRUCTURES, fail_fast=True),
    ]


_FORMATS = ("text", "json_object", "json_schema", "structural_tag")


ResponseFormat = Annotated[
    Annotated[TextFormat, Tag("<text>")]
    | Annotated[JsonObjectFormat, Tag("<json_object>")]
    | Annotated[JsonSchemaFormat, Tag("<json_schema>")]
    | Annotated[StructuralTagFormat, Tag("<structural_tag>")],
    by_type(_FORMATS, f"an object of type {', '.join(_FORMATS)}"),
]

ChoiceText = Annotated[str, Field(min_length=1, max_length=MAX_CHOICE_CHARS)]


KINDS = ("json", "regex", "choice", "grammar", "structural_tag", "json_object")


class StructuredOutputs(StrictModel):
    """vLLM's object; exactly one of its fields may be set. JSON is written on one line."""

    unsupported: ClassVar[Unsupported] = {
        "disable_any_whitespace": (True, False),  # JSON is always written without white space
        "disable_fallback": (True, False),  # there is no other backend
        "disable_additional_properties": (False,),
        "whitespace_pattern": (),
    }
    json_: SchemaOrText | None = Field(None, alias="json")
    """A JSON schema."""
    regex: Written | None = None
    r"""Matches the whole answer. Written as for Rust's `regex`, without look-around; `\d` and `\w` are ASCII."""
    choice: Annotated[list[ChoiceText], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)] | None = None
    grammar: Written | None = None
    """A grammar in llguidance's Lark with a rule `start`, or in GBNF with a rule `root`."""
    structural_tag: StructuralTagFormat | None = None
    json_object: Literal[True] | None = None

    @model_validator(mode="after")
    def _is_one(self) -> StructuredOutputs:
        if len(given := self.given) != 1:
            names = " and ".join(given) or "none"
            text = f"should have exactly one of {', '.join(KINDS)}, but it has {names}"
            raise PydanticCustomError("structured", "{text}", {"text": text})
        return self

    @property
    def given(self) -> list[str]:
        return [name for name in KINDS if getattr(self, "json_" if name == "json" else name) is not None]
