"""Messages to an address and their times, as tables of statuses, clock and the messages that are due; how addresses
are read, and that nothing that is shown has a secret of one.
"""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from relaxd.alerts.notifications import (
    MAX_PENDING,
    NO_QUIET_HOURS,
    VARIABLE,
    Message,
    Outbox,
    UrlProblem,
    parse_quiet_hours,
    parse_urls,
    read_urls,
)
from tests.kit.cases import each

NOON = datetime(2026, 5, 4, 12, 0, tzinfo=UTC)


def status(state: str = "running", step: int = 0, *alarms: str, first_step: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "state": state,
        "reason": "",
        "step": step,
        "steps": 9,
        "begin_time": "b1",
        "pause_time": "",
        "end_time": "e1" if state in ("stopped", "failed") else "",
        "alarms": [{"name": name, "first_step": first_step, "text": f"{name} is wrong"} for name in alarms],
    } | more


def outbox(quiet: str = "", every: int = 0, state: dict[str, Any] | None = None) -> Outbox:
    return Outbox("r", parse_quiet_hours(quiet), 3600.0, every, state)


def send(box: Outbox, now: datetime = NOON) -> Message | None:
    message = box.due(now)
    box.sent()
    return message


def test_each_event_is_told_once() -> None:
    box = outbox()
    told = []
    for one in (
        status("pending"),
        status(),
        status("paused", 3, pause_time="p1", reason="too many drops"),
        status("running", 3),
        status("paused", 4, pause_time="p2", reason="by hand"),
        status("stopped", 9, reason="completed"),
        status("stopped", 9, reason="completed"),
    ):
        box.observe(one, NOON)
        told.append(send(box))
    assert told == [
        Message("run r begins", "step 0 of 9", "info"),
        None,
        Message("run r is paused", "too many drops\nstep 3 of 9", "warning"),
        None,
        Message("run r is paused", "by hand\nstep 4 of 9", "warning"),
        Message("run r has ended", "completed\nstep 9 of 9", "success"),
        None,
    ]


def test_a_failed_run_and_one_that_goes_on() -> None:
    box = outbox()
    box.observe_step(2, {"reward_mean": 0.25, "other": 1.0}, NOON)
    box.observe(status("failed", 2, reason="no trainer"), NOON)
    box.observe(status("running", 2, begin_time="b2"), NOON)
    message = send(box)
    assert message is not None
    assert (message.title, message.level) == ("run r failed", "failure")
    assert "12:00 run r failed\nno trainer\nstep 2 of 9\nreward_mean 0.25\n\n12:00 run r goes on" in message.body


KL, KL_3 = status("running", 2, "kl"), status("running", 3, "kl", first_step=3)
BEGINS, OVER = "run r: alarm", "run r: alarm is over"
ALARMS: list[tuple[list[tuple[float, dict[str, Any]]], list[tuple[float, str]]]] = [
    # minutes and statuses; minutes and titles of messages
    ([(0, KL), (1, KL), (99, KL)], [(0, BEGINS)]),
    ([(0, KL), (5, status("running", 2, "disk", "kl"))], [(0, BEGINS), (5, BEGINS)]),
    # back within a minute: it has gone on
    ([(0, KL), (1, status()), (1.9, KL_3), (2, status()), (2.9, KL_3), (99, KL_3)], [(0, BEGINS)]),
    ([(0, KL), (1, status()), (1.9, status()), (2, status()), (99, status())], [(0, BEGINS), (2, OVER)]),
    # it ends and begins again: within the hour neither is news, later both are
    ([(0, KL), (1, status()), (2, status()), (3, KL_3), (4, status()), (5, status()), (9, status())],
     [(0, BEGINS), (2, OVER)]),
    ([(0, KL), (1, status()), (2, status()), (3, KL_3), (59, KL_3), (60, KL_3), (61, status()), (62, status())],
     [(0, BEGINS), (2, OVER), (60, BEGINS), (62, OVER)]),
    # the end of the run is the end of its alarms; they may begin again when it goes on
    ([(0, KL), (1, status("stopped")), (5, status("stopped")), (70, status(begin_time="b2")), (75, status()),
      (80, KL)], [(0, BEGINS), (1, "run r has ended"), (70, "run r begins"), (75, "run r begins"), (80, BEGINS)]),
]  # fmt: skip


@each(("statuses", "messages"), ALARMS)
def test_beginning_and_end_of_an_alarm_are_told_once(
    statuses: list[tuple[float, dict[str, Any]]], messages: list[tuple[float, str]]
) -> None:
    box = outbox()
    box.observe(status(), NOON)
    send(box)
    told = []
    for minute, one in statuses:
        now = NOON + timedelta(minutes=minute)
        box.observe(one, now)
        if (message := send(box, now)) is not None:
            told.append((minute, message.title))
    assert told == messages


def test_the_end_of_an_alarm_says_how_long_it_went_on() -> None:
    box = outbox()
    box.observe(status("running", 2, "kl", first_step=2), NOON)
    send(box)
    again = outbox(state=json.loads(json.dumps(box.state)))  # the coordinator is started again
    for minute in (12, 13):
        again.observe(status("running", 7), NOON + timedelta(minutes=minute))
    body = "It went on for 12 min, from step 2 to step 7: kl is wrong"
    assert send(again) == Message("run r: alarm is over", body, "success")


def test_an_alarm_that_comes_and_goes_in_quiet_hours_is_told_afterwards() -> None:
    box, night = outbox("22:00-07:00"), NOON.replace(hour=23)
    for minute, one in enumerate((status("running", 1, "kl"), status(), status())):
        box.observe(one, night + timedelta(minutes=minute))
    assert box.due(night + timedelta(minutes=2)) is None
    message = send(box, NOON + timedelta(days=1))
    assert message is not None
    assert [part.partition("\n")[0] for part in message.body.split("\n\n")] == [
        "23:00 run r goes on",
        "23:00 run r: alarm",
        "23:02 run r: alarm is over",
    ]


def test_after_a_restart_nothing_is_told_twice_and_nothing_is_lost() -> None:
    box = outbox()
    box.observe(status("running", 1, "kl"), NOON)
    send(box)
    box.observe(status("running", 1, "kl", "disk"), NOON)  # is never sent
    again = outbox(state=json.loads(json.dumps(box.state)))
    again.observe(status("running", 1, "kl", "disk"), NOON)
    assert send(again) == Message("run r: alarm", "since step 1: disk is wrong", "warning")


QUIET: list[tuple[str, str, bool]] = [
    ("", "00:00", False),
    ("22:00-07:00", "21:59", False),
    ("22:00-07:00", "22:00", True),
    ("22:00-07:00", "03:00", True),
    ("22:00-07:00", "06:59", True),
    ("22:00-07:00", "07:00", False),
    ("12:00-13:30", "13:29", True),
    ("12:00-13:30", "13:30", False),
]


@each(("hours", "time", "quiet"), QUIET)
def test_messages_wait_in_quiet_hours(hours: str, time: str, quiet: bool) -> None:
    now = datetime.combine(NOON.date(), datetime.strptime(time, "%H:%M").time(), UTC)
    box = outbox(hours)
    box.observe(status("running", 1, "kl"), now)
    assert (box.due(now) is None) == quiet


def test_what_waited_comes_as_one_message_and_the_end_does_not_wait() -> None:
    box, night = outbox("22:00-07:00", every=1), NOON.replace(hour=23)
    for step in range(1, 4):
        box.observe_step(step, {"reward_mean": step / 4}, night)
    box.observe(status("running", 3, "kl"), night)
    assert box.due(night) is None
    box.observe(status("stopped", 9, "kl", reason="completed"), night.replace(hour=1) + timedelta(days=1))
    message = box.due(night.replace(hour=1) + timedelta(days=1))
    assert message is not None
    assert (message.title, message.level) == ("run r: alarm", "warning")  # the most urgent
    assert [part.partition("\n")[0] for part in message.body.split("\n\n")] == [
        "23:00 run r goes on",
        "23:00 run r: alarm",
        "23:00 run r: step 3",  # only the last report
        "01:00 run r has ended",
    ]


def test_reports_come_every_n_steps_with_changes() -> None:
    box = outbox(every=2)
    told = []
    for step in range(1, 6):
        box.observe_step(step, {"reward_mean": step / 4, "loss": -1.0, "other": 3.0}, NOON)
        message = send(box)
        told.append(message.body if message else None)
    assert told == [None, "reward_mean 0.5\nloss -1", None, "reward_mean 1 (+0.5)\nloss -1 (+0)", None]
    again = outbox(every=2, state=json.loads(json.dumps(box.state)))
    for step in range(1, 6):  # the file is read from its beginning
        again.observe_step(step, {"reward_mean": 0.0}, NOON)
    assert again.due(NOON) is None


def test_messages_that_nobody_takes_stay_few() -> None:
    box = Outbox("r", NO_QUIET_HOURS, 0.0, 0)
    for step in range(3 * MAX_PENDING):
        box.observe(status("running", step, f"rule {step}"), NOON)
    message = box.due(NOON)
    assert message is not None
    assert message.body.startswith(f"{2 * MAX_PENDING + 1} earlier messages are left out")
    assert message.body.count("is wrong") == MAX_PENDING


TEXTS = [
    ("", []),
    ("json://h/p", [("json://h/p", 0)]),
    (" json://h/a,b?freq=10,slack://t/o \n tgram://1:a/c?freq=3&x=y", [
        ("json://h/a,b", 10), ("slack://t/o", 0), ("tgram://1:a/c?x=y", 3)]),
    ("json://h/p?x=y&freq=5", [("json://h/p?x=y", 5)]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "urls"), TEXTS)
def test_addresses_are_separated_and_lose_their_freq(text: str, urls: list[tuple[str, int]]) -> None:
    assert [(url.address, url.every) for url in parse_urls(text, "F")] == urls


WRONG = [
    ("hunter2", "F: URL 1 is none: expected an Apprise URL"),
    ("json://h/p\njson://hunter2/?freq=0", "F: URL 2: freq must be a number of steps, 1 or more"),
    ("json://hunter2/?freq=often", "F: URL 1: freq must be"),
]


@pytest.mark.parametrize(("text", "problem"), WRONG)
def test_wrong_addresses_are_refused_without_showing_them(text: str, problem: str) -> None:
    with pytest.raises(UrlProblem) as caught:
        parse_urls(text, "F")
    assert str(caught.value).startswith(problem)
    assert "hunter2" not in str(caught.value)


def test_a_file_comes_before_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "urls"
    file.write_text("# who is on call\njson://h/one\n\n# slack://h/two\nslack://three/x?freq=2\n")
    environment = {VARIABLE: "json://other"}
    assert [url.address for url in read_urls(str(file), environment)] == ["json://h/one", "slack://three/x"]
    assert [url.address for url in read_urls("", environment)] == ["json://other"]
    assert read_urls("", {}) == []
    with pytest.raises(UrlProblem, match="can't be read: FileNotFoundError"):
        read_urls(str(tmp_path / "none"), environment)


def test_what_is_shown_has_only_the_number_and_the_service() -> None:
    _, url = parse_urls("json://h slack://hunter2/hunter2", "F")
    assert url.shown == "URL 2 (slack)"
    assert "hunter2" not in repr(url)
