"""Owns the values of `include`: what else an answer may report.
Never adds anything to an answer."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from serve_app.api.requests.unions import of_words

LOGPROBS = "message.output_text.logprobs"
SEALED_THOUGHTS = "reasoning.encrypted_content"
MAX_INCLUDED = 16

Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]


VALUE_HINTS = {
    f"include.{value}": "Where the model does not think, or there is no key to seal with."
    if value == SEALED_THOUGHTS
    else "This server does not give it."
    for value in get_args(Includable)
    if value != LOGPROBS
}

Included = Annotated[Includable, of_words(*get_args(Includable))]
