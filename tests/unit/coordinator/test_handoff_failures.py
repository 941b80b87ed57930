"""How long a process may fail to sleep or wake up before turns go on without it."""

from services.coordinator.weights.gpu_handoff_rules import HandoffFailures
from tests.kit.cases import each

Call = tuple[float, str, str, float]
"""When a call begins, what it asks for, its error (empty: it worked), and how long it takes."""


@each(
    ("what", "calls", "seconds", "given_up"),
    [
        ("nothing was asked", [], None, False),
        ("one call hung", [(0, "wake up", "late", 125)], 125, False),
        ("three did", [(n * 126, "wake up", "late", 125) for n in range(3)], 377, True),
        ("it refuses at once, many times", [(n * 2, "wake up", "no memory", 0.1) for n in range(179)], 356.1, False),
        ("and goes on", [(n * 2, "wake up", "no memory", 0.1) for n in range(182)], 362.1, True),
        ("it works in the end", [(0, "wake up", "late", 400), (401, "wake up", "", 1)], None, False),
        ("nobody asked for long", [(0, "wake up", "late", 10), (10, "wake up", "late", 1)], 11, False),
        ("it wakes up, and can't sleep", [(0, "wake up", "late", 300), (301, "sleep", "late", 100)], 100, False),
    ],
)
def test_a_process_is_given_up_after_three_timeouts_in_a_row(
    what: str, calls: list[Call], seconds: float | None, given_up: bool
) -> None:
    now = 1000.0
    failures = HandoffFailures(120.0, lambda: now)
    for begins, action, error, takes in calls:
        began, now = 1000.0 + begins, 1000.0 + begins + takes
        if error:
            failures.failed("judge-1", action, error, began)
        else:
            failures.worked("judge-1")
    now += 5000.0  # no call was made meanwhile
    failure = failures.of("judge-1")
    assert (None if failure is None else round(failure.seconds, 3)) == seconds, what
    assert failures.given_up("judge-1") == given_up, what
    assert failures.of("judge-2") is None
    assert not failures.given_up("judge-2")
