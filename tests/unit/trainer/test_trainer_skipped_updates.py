"""How many updates in a row may be skipped, and what is said when there were too many."""

import pytest

from services.trainer.loop.skip_limit import SkippedUpdates, TooManySkippedUpdates


def test_so_many_in_a_row_are_allowed_and_no_more() -> None:
    skipped = SkippedUpdates(2)
    for step in (1, 2):
        skipped.check(step, ["a"])
        skipped.record(step, ["a"], skipped=True)
    with pytest.raises(TooManySkippedUpdates, match="3 updates in a row"):
        skipped.check(3, ["a"])
    # An update that is done ends the row.
    skipped.record(3, ["a"], skipped=False)
    for step in (4, 5):
        skipped.check(step, ["a"])
        skipped.record(step, ["a"], skipped=True)
    with pytest.raises(TooManySkippedUpdates, match="The weights are those of step 3; the groups of step 6 are"):
        skipped.check(6, ["a"])


def test_zero_fails_at_the_first() -> None:
    skipped = SkippedUpdates(0)
    skipped.record(1, ["a"], skipped=False)
    with pytest.raises(TooManySkippedUpdates, match=r"1 update in a row .*[.]max_skipped_updates = 0 \(step 2: b, c\)"):
        skipped.check(2, ["b", "c"])


def test_an_error_stays_readable() -> None:
    skipped = SkippedUpdates(8)
    groups = [f"0-{number:06d}" for number in range(128)]
    for step in range(1, 9):
        skipped.record(step, groups, skipped=True)
    with pytest.raises(TooManySkippedUpdates) as raised:
        skipped.check(9, groups)
    assert str(raised.value).count("and 120 more") == 9
    assert len(str(raised.value)) < 2000
