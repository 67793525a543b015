"""Removes the billing line that Claude Code writes at the beginning of its system prompt.
Never removes more than that line, nor one that stands elsewhere or has other contents."""

from __future__ import annotations

import re

from serve_app.api.anthropic.blocks import TextBlock

_BILLING_LINE = re.compile(r"x-anthropic-billing-header:(?: *[\w.-]+=[^;\s]*;)+(?: *[\w.-]+=[^;\s]*)?\s*", re.ASCII)
"""Claude Code begins its system prompt with this line. Part of it changes with each request, so no prefix would ever be
found in the cache."""


def without_billing_header(system: str | list[TextBlock]) -> list[str]:
    """Return the texts of a system prompt. If the first line is exactly the header, leave it out."""
    texts = [system] if isinstance(system, str) else [block.text for block in system]
    if not texts:
        return texts
    line, _, rest = texts[0].partition("\n")
    return [rest, *texts[1:]] if _BILLING_LINE.fullmatch(line) else texts
