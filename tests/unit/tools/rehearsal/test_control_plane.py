"""Verdicts on the control plane, as tables: its goals, and which calls are judged."""

from pathlib import Path

from relaxd.tools.rehearsal.control_plane import AnsweredCall, CallTimes, call_times, line, p99, read_calls, verdict
from tests.kit.cases import each

VERDICTS = [
    # p99 at rest, p99 while it works, p99 of leases, cores, busy at rest; what is said
    (
        0.02,
        0.05,
        0.6,
        0.5,
        False,
        "meets its goals with 512 rollout replicas: uses 0.5 of 1 cores; p99 of Heartbeat 20 ms",
    ),
    (0.1, 0.1, 5.0, 1.0, False, "meets its goals"),
    (0.02, 3.0, 0.6, 0.5, False, "meets its goals"),  # steps come faster than they will
    (0.02, 0.05, None, 0.5, False, "meets its goals"),
    (0.02, 0.05, 0.6, 1.5, False, "misses its goals with 512 rollout replicas: uses 1.5 of 1 cores (all: "),
    (0.2, 0.2, 0.6, 0.5, False, "misses its goals with 512 rollout replicas: p99 of Heartbeat 200 ms of 100 ms (all: "),
    (0.02, 0.05, 6.0, 0.5, False, "misses its goals with 512 rollout replicas: p99 of LeaseGpus 6 s of 5 s (all: "),
    (0.2, 0.2, 0.6, 0.5, True, "not judged: this machine had no processor left, at rest either"),
    (0.2, 0.2, 0.6, 1.5, True, "misses its goals"),  # processor seconds don't depend on who else works here
    (0.02, 0.05, 0.6, 0.5, True, "meets its goals"),
    (None, 0.05, 0.6, 0.5, False, "not judged: no heartbeat was answered in the window at rest"),
]


@each(("rest", "working", "lease", "cores", "busy", "said"), VERDICTS)
def test_verdict(
    rest: float | None, working: float | None, lease: float | None, cores: float, busy: bool, said: str
) -> None:
    assert verdict(CallTimes(rest, working, lease), cores, 512, busy_at_rest=busy).startswith(said)


def test_heartbeats_count_in_the_window_in_which_they_were_sent_and_leases_always() -> None:
    calls = [
        AnsweredCall("LeaseGpus", 1.0, 0.7),
        AnsweredCall("Heartbeat", 5.0, 9.0),  # before both windows
        AnsweredCall("Heartbeat", 11.0, 0.3),
        AnsweredCall("Heartbeat", 25.0, 8.0),  # between them: the run comes to rest
        AnsweredCall("Heartbeat", 31.0, 0.1),
    ]
    assert call_times(calls, (10.0, 20.0), (30.0, 40.0)) == CallTimes(0.1, 0.3, 0.7)
    assert call_times([], (10.0, 20.0), (30.0, 40.0)) == CallTimes(None, None, None)


def test_p99() -> None:
    assert p99([]) is None
    assert p99([float(number) for number in range(100, -1, -1)]) == 99.0


def test_a_line_that_is_being_written_is_not_read(tmp_path: Path) -> None:
    whole = line("Heartbeat", 1.5, 0.25)
    (tmp_path / "1.txt").write_text(whole + line("LeaseGpus", 2.0, 0.5) + "Heartb")
    (tmp_path / "2.txt").write_text(whole[:-3])
    assert read_calls(tmp_path) == [AnsweredCall("Heartbeat", 1.5, 0.25), AnsweredCall("LeaseGpus", 2.0, 0.5)]
