"""Owns what of a request's system prompt is for whoever keeps accounts.
Never takes more than that line, nor one that stands elsewhere or says something else."""

from __future__ import annotations

import re

from serve_app.api.anthropic.blocks import TextBlock

_BILLING_LINE = re.compile(r"x-anthropic-billing-header:(?: *[\w.-]+=[^;\s]*;)+(?: *[\w.-]+=[^;\s]*)?\s*", re.ASCII)
"""Claude Code begins its system prompt with this line. It has a part that changes, which would keep every prefix from
being found in the cache."""


def without_billing_header(system: str | list[TextBlock]) -> list[str]:
    """The texts of a system prompt, the first without its first line if that is the header and nothing else."""
    texts = [system] if isinstance(system, str) else [block.text for block in system]
    if not texts:
        return texts
    line, _, rest = texts[0].partition("\n")
    return [rest, *texts[1:]] if _BILLING_LINE.fullmatch(line) else texts
