"""Warnings about dropped groups: every reason has a meaning, and none is told again and again."""

from relaxd.reasons import DROP_MEANINGS, DropReason, DropWatch, drop_warnings, most_frequent


def test_shares_of_drops_are_warnings_with_their_meaning() -> None:
    drops = {"zero_variance": 30, "reward_failed": 10, "stale": 9, "run_ended": 50}
    warnings = drop_warnings(drops, 100)
    assert [warning.partition(":")[0] for warning in warnings] == [
        "30% of the groups were dropped as zero_variance",
        "10% of the groups were dropped as reward_failed",
    ]
    assert "too easy or too hard" in warnings[0]
    assert drop_warnings(drops, 1000) == []
    assert drop_warnings({"zero_variance": 3}, 5) == []  # too few to say


def test_answers_that_were_all_cut_have_a_reason_of_their_own_that_names_the_setting() -> None:
    (warning,) = drop_warnings({"all_truncated": 100}, 100)
    assert "rollout.max_new_tokens" in warning
    assert "too easy" not in warning


def test_a_pause_names_the_most_frequent_reason() -> None:
    named = most_frequent(["all_truncated", "stale", "all_truncated", "run_ended", "run_ended", "run_ended"])
    assert named == f"all_truncated: {DROP_MEANINGS['all_truncated']}"
    assert most_frequent(["run_ended"]) == ""


def test_every_reason_but_the_end_has_a_meaning() -> None:
    assert set(DropReason) - set(DROP_MEANINGS) == {DropReason.RUN_ENDED, DropReason.RUN_FAILED}


def test_a_share_is_told_when_it_has_doubled() -> None:
    watch = DropWatch()
    told = [len(watch.observe({"zero_variance": share}, 100)) for share in (5, 10, 11, 19, 20, 30, 39, 40, 10, 40)]
    assert told == [0, 1, 0, 0, 1, 0, 0, 1, 0, 0]


def test_drops_before_a_resume_are_not_told_again() -> None:
    before = {"reward_failed": 40, "stale": 1}
    watch = DropWatch(before, 40)
    assert watch.observe(before, 40) == []
    assert watch.observe(before, 60) == []
    (warning,) = watch.observe({"reward_failed": 40, "stale": 11}, 60)
    assert warning.startswith("50% of the groups were dropped as stale")
    assert DropWatch().observe(before, 40) != []
