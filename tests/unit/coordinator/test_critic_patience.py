"""How long a critic's checkpoint is waited for: as a table of what is seen of the critic, and when."""

from relaxd.v1.coordinator_pb2 import Registration
from relaxd.v1.replica_pb2 import (
    REPLICA_STATE_FAILED,
    REPLICA_STATE_READY,
    REPLICA_STATE_STARTING,
    ReplicaStatus,
)
from services.coordinator.fleet.checkpoints import CriticPatience
from services.coordinator.fleet.registry import Replica
from tests.kit.cases import each

READY, STARTING, FAILED = REPLICA_STATE_READY, REPLICA_STATE_STARTING, REPLICA_STATE_FAILED
Seen = tuple[str, int, str, int] | None
"""Id, state, detail, progress."""


def replica(seen: Seen) -> Replica | None:
    if seen is None:
        return None
    name, state, detail, progress = seen
    status = ReplicaStatus(state=state, detail=detail, progress=progress)  # type: ignore[arg-type]
    return Replica(Registration(replica_id=name, role="critic"), 0.0, 0.0, status)


CASES: dict[str, tuple[list[tuple[float, Seen]], str]] = {
    "never there": ([(20.0, None), (31.0, None)], "no critic has been there for 31 s"),
    "there again in time": (
        [(0.0, ("c", READY, "", 0)), (1.0, None), (30.0, None), (31.0, ("c-r1", STARTING, "", 0)), (60.0, None)],
        "",
    ),
    "away for too long": (
        [(5.0, ("c", READY, "", 0)), (30.0, None), (36.0, None)],
        "no critic has been there for 31 s",
    ),
    "a long start that reads": ([(t, ("c", STARTING, f"{t} bytes", 0)) for t in (0.0, 90.0, 180.0, 270.0)], ""),
    "repeats long steps": ([(t, ("c", READY, "training on step 5", int(t))) for t in (0.0, 90.0, 180.0)], ""),
    "stands still in a step": (
        [(t, ("c", READY, "training on step 5", 7)) for t in (0.0, 100.0, 101.0)],
        "c has made no progress for 101 s",
    ),
    "only idles": ([(t, ("c", READY, "", int(t))) for t in (0.0, 100.0, 101.0)], "c has made no progress for 101 s"),
    "waits for room": ([(t, ("c", READY, "no room", int(t))) for t in (0.0, 90.0, 180.0, 270.0)], ""),
    "fails and recovers": (
        [(0.0, ("c", FAILED, "no file", 0)), (10.0, ("c", STARTING, "", 0)), (15.0, ("c", FAILED, "no file", 0))],
        "",
    ),
    "keeps failing": ([(t, ("c", FAILED, "no file", int(t))) for t in (0.0, 11.0)], "c has failed: no file"),
    "is restarted without end": (
        [(float(t), (f"c-r{t}", READY, "training on step 5", 0)) for t in range(4)],
        "it was started again 3 times, more than health.max_restarts = 2",
    ),
}


@each("case", CASES)
def test_how_long_a_critic_is_waited_for(case: str) -> None:
    events, said = CASES[case]
    now = [0.0]
    patience = CriticPatience(
        away_seconds=30, failed_seconds=10, still_seconds=100, max_restarts=2, clock=lambda: now[0]
    )
    answers = []
    for time, seen in events:
        now[0] = time
        answers.append(patience.exhausted(replica(seen)))
    assert answers == ["" for _ in answers[:-1]] + [said]
