"""tests/kit/cases.py: a test with a table of cases names those that fail, and calls the others, too."""

import pytest

from tests.kit.cases import each

CALLED: list[tuple[int, str]] = []


@each("number", [1, 2, 3])
@each(("text", "length"), [("a", 1), ("bc", 2)])
def test_tables_are_combined(number: int, text: str, length: int) -> None:
    assert len(text) == length
    CALLED.append((number, text))


def test_all_cases_were_called() -> None:
    assert sorted(CALLED) == [(number, text) for number in (1, 2, 3) for text in ("a", "bc")]


def test_each_case_that_fails_is_named() -> None:
    @each("number", [1, 2, 3, 4])
    def odd(number: int) -> None:
        assert number != 2
        if number == 3:
            pytest.fail("three")

    with pytest.raises(BaseExceptionGroup, match="2 of 4 cases") as caught:
        odd()
    assert [error.__notes__ for error in caught.value.exceptions] == [["in the case (2,)"], ["in the case (3,)"]]
