"""What a program writes into a page, and what it leaves alone."""

from __future__ import annotations

import pytest

from loadtest.marks import marks, with_text

BEGIN, END = marks("it")


def test_the_text_between_the_marks_is_replaced_and_nothing_else() -> None:
    page = f"before\n{BEGIN}\nold\n{END}\nafter <!-- other -->\n"
    once = with_text(page, "it", "new")
    assert once == f"before\n{BEGIN}\n\nnew\n\n{END}\nafter <!-- other -->\n"
    assert with_text(once, "it", "new") == once


@pytest.mark.parametrize("page", ["", f"{BEGIN} {BEGIN} {END}", f"{END} only", f"{BEGIN} only"])
def test_a_page_without_both_marks_once_each_is_refused(page: str) -> None:
    with pytest.raises(ValueError):
        with_text(page, "it", "new")
