"""Chooses the parser of a model's answers by the setting or the chat template, and logs the choice with its reason.
Never reads an answer."""

from __future__ import annotations

import logging
from collections.abc import Callable

from serve_app.parsing.template_signs import Suggestion

logger = logging.getLogger(__name__)


def chosen_parser(
    setting: str, value: str, chat_template: str | None, suggest: Callable[[str], Suggestion | None]
) -> str | None:
    """Choose a parser. `setting`: the setting's name, for the log; `value`: a parser's name, `none`, or `auto`."""
    if value == "none":
        return None
    if value != "auto":
        return value
    suggestion = None if chat_template is None else suggest(chat_template)
    if suggestion is None:
        why = "there is no chat template" if chat_template is None else "the chat template writes no known format"
        logger.info("%s is auto: none, because %s.", setting, why)
        return None
    logger.info("%s is auto: %s, because %s.", setting, suggestion.parser, suggestion.why)
    return suggestion.parser
