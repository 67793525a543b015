"""Makes what reads a chat answer beside its form: the counter of its thoughts' tokens, and the reader of stop strings.
Never reads an answer itself."""

from __future__ import annotations

from serve_app.api.generation.chat_reader import (
    is_either,
    make_parsers,
    make_reasoning_parser,
    needs_reader,
    prompt_end,
)
from serve_app.api.generation.submission import Prepared
from serve_app.api.generation.thoughts import ThoughtCounter
from serve_app.api.requests.schema import ChatRequest
from serve_app.api.text.content_stops import ContentStops
from serve_app.api.text.stop_strings import StopStrings
from serve_app.api.text.tokenizer import Tokenizer
from serve_app.engines.engine_client import ServedModel


def thought_counter(
    request: ChatRequest, tokenizer: Tokenizer, model: ServedModel, ready: Prepared
) -> ThoughtCounter | None:
    """Make the counter of a chat answer's thoughts; None if the model does not mark its thoughts."""
    end = prompt_end(tokenizer, ready.submission.prompt_token_ids) if model.reasoning_parser else ""
    parser = make_reasoning_parser(request, model, end)
    return None if parser is None else ThoughtCounter(parser)


def content_stops(
    request: ChatRequest, tokenizer: Tokenizer, model: ServedModel, ready: Prepared
) -> ContentStops | None:
    """Make the stop strings' reader for a chat answer that may have thoughts or calls; None if it has no stop strings,
    or is only text."""
    if not (ready.stops and needs_reader(request, model)):
        return None
    end = prompt_end(tokenizer, ready.submission.prompt_token_ids)
    stops = StopStrings(ready.stops, shown=ready.shows_stop)
    reasoning, tools = make_parsers(request, model, end)
    return ContentStops(stops, reasoning, tools, is_either=is_either(request, tools))
