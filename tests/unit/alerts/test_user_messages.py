"""Messages of users' code to people, and their limits."""

import threading
from types import SimpleNamespace

import pytest

import relaxd
from relaxd.alerts.user_messages import (
    KEPT_SECONDS,
    MAX_CHARACTERS,
    MAX_TOLD,
    MAX_WAITING,
    RecentMessages,
    take_messages,
)


def test_messages_of_all_threads_are_taken_once() -> None:
    relaxd.notify("one\n\ttwo")
    thread = threading.Thread(target=relaxd.notify, args=("three",))
    thread.start()
    thread.join()
    relaxd.notify("three")
    assert take_messages() == ["one two", "three"]
    assert take_messages() == []


def test_long_odd_and_many_messages_are_cut_off() -> None:
    relaxd.notify("x" * 1000)
    relaxd.notify("\udcff")
    for number in range(MAX_WAITING):
        relaxd.notify(f"text {number}")
    taken = take_messages()
    assert (taken[0], taken[1]) == ("x" * (MAX_CHARACTERS - 1) + "…", "?")
    assert len(taken) == MAX_WAITING


@pytest.mark.parametrize("text", ["", " \n", None, 3, b"bytes"])
def test_a_message_must_be_a_text(text: object) -> None:
    with pytest.raises(ValueError, match="must be a text that isn't empty"):
        relaxd.notify(text)  # type: ignore[arg-type]


def test_a_replica_has_few_messages_at_once_each_for_some_minutes() -> None:
    now = SimpleNamespace(time=0.0)
    recent = RecentMessages(lambda: now.time)
    recent.add(f"text {number}" for number in range(MAX_TOLD + 3))
    assert recent.current() == [f"text {number}" for number in range(MAX_TOLD)]
    now.time = KEPT_SECONDS - 1
    recent.add(["text 0", "another"])
    now.time = KEPT_SECONDS
    assert recent.current() == ["text 0"]
    recent.add(["another"])
    assert recent.current() == ["text 0", "another"]
    recent.clear()
    assert recent.current() == []
