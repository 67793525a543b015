"""Owns the promise that every rule code in the tree is explained, and that the tests named on the page exist.
Never judges whether a test covers its rule."""

from __future__ import annotations

import re

import pytest

from docsite.rule_texts import INVARIANTS, RULES
from docsite.rules import TESTS, codes_in, find_tests, used_codes


def test_every_code_that_is_used_has_its_rule() -> None:
    assert not used_codes() - RULES.keys()


def test_every_rule_is_of_a_code_that_is_used() -> None:
    assert not RULES.keys() - used_codes()


def test_codes_that_are_written_in_short_are_found() -> None:
    assert codes_in("S2-B3, B4: x (S4-R9) I-10") == {"S2-B3", "S2-B4", "S4-R9", "I-10"}
    assert codes_in("S3-B3 to S3-B5 and S5-R1 to R2") == {"S3-B3", "S3-B4", "S3-B5", "S5-R1", "S5-R2"}
    assert codes_in("SI-10 S10-R1 GLM-4") == set()


@pytest.mark.parametrize("code", RULES)
def test_a_rule_is_a_sentence(code: str) -> None:
    assert re.fullmatch(r"[A-Z0-9].{15,}[.)]", RULES[code])


def test_a_check_in_every_run_is_not_named_for_what_its_docstring_leaves_to_others() -> None:
    """Regression: five invariants were said to be checked by the file that says that it does not check them."""
    left = {"I-17", "I-20", "I-24", "I-25", "I-34", "I-36"}
    found = find_tests()
    checked = {code for code in INVARIANTS if "support/invariants.py" in found[code]}
    assert checked == INVARIANTS.keys() - left


def test_the_tests_that_are_named_exist() -> None:
    for tests in find_tests().values():
        for entry in tests:
            file, _, name = entry.partition("::")
            assert (TESTS / file).is_file()
            assert not name or re.search(rf"def {re.escape(name)}\(", (TESTS / file).read_text(encoding="utf-8")), entry


def test_every_defect_and_invariant_has_a_test_or_cannot_have_one() -> None:
    """Some defects concern measurements, costs or the other projects themselves; test_specification says which and
    why."""
    found = find_tests()
    assert {code for code in RULES if "-B" not in code and code not in found} <= {"S1-R4", "S2-R16", "S4-R3"}
