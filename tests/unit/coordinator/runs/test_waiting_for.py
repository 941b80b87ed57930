"""What a run waits for: one case for each reason, with its sentence and what to do."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from relaxd.board import HeldGroup, QueueDepth
from relaxd.rpc.message_parts import numbers, words
from relaxd.v1 import replica_pb2
from relaxd.v1.coordinator_pb2 import WAIT_KIND_HELD_GROUP, WAIT_KIND_ROLE, WaitKind
from services.coordinator.runs.wait_reasons import REASONS, Named, Peer, RunSnapshot, evidence, explain, is_late
from tests.kit.cases import each

NOW = 10_000.0


def queues(rollout: tuple[int, int] = (0, 0), reward: tuple[int, int] = (0, 0), train: tuple[int, int] = (0, 0)):
    depths = {"rollout": rollout, "reward": reward, "advantage": (0, 0), "train": train}
    return [QueueDepth(stage, waiting=waiting, held=held) for stage, (waiting, held) in depths.items()]


PEERS = (
    Peer("trainer-0", "trainer", detail="step 13: 4 groups", version=12),
    Peer("rollout-0", "rollout", version=12),
    Peer("reward-0", "reward"),
    Peer("advantage-0", "advantage"),
)
RUN = RunSnapshot(
    "demo", NOW, 100, 16, step=12, step_ended=NOW - 50, usual_seconds=4.0, queues=queues(), peers=PEERS, announced=12
)
"""A run whose step is late, for no reason that is known."""


def without(role: str, *instead: Peer) -> list[Peer]:
    return [*(peer for peer in PEERS if peer.role != role), *instead]


HANG = "my reward has been scoring a sample for 40 s (reward.py:7, in score): 'What is hot?'"
FULL_DISK = "no longer able to write to /runs/demo/steps: No space left"
STARTING = replica_pb2.REPLICA_STATE_STARTING
HELD = HeldGroup("0-000012", "reward-0", enqueued_at=NOW - 45, deliveries=2)

CASES = [
    ("redis", {"redis": "Redis at r:6379 refuses connections"}, "it waits for Redis: Redis at r:6379 refuses", "Redis"),
    (
        "disk",
        {"waits": [Named("the disk of /runs/demo, for run demo: No space left on device", "", NOW - 12, disk=True)]},
        "it waits for the disk of /runs/demo, for run demo: No space left on device, for 12 s",
        "make room on the disk",
    ),
    (
        "disk",
        {
            "peers": without(
                "trainer",
                Peer("trainer-0", "trainer", detail=FULL_DISK, wait=replica_pb2.REPLICA_WAIT_DISK),
            ),
        },
        f"trainer-0 is {FULL_DISK}",
        "make room on the disk, or let trainer-0 write to it",
    ),
    (
        "media",
        {"waits": [Named('a media host (h), for run demo: "images"[0] is a URL of h', "a media host", NOW - 12)]},
        'it waits for a media host (h), for run demo: "images"[0] is a URL of h, for 12 s',
        "make the host answer again: the run goes on by itself",
    ),
    (
        "stopping",
        {"stopping": "by hand", "waits": [Named("trainer-0 to hand back 4 groups", "trainer-0", NOW - 12)]},
        "it is stopping (by hand): waiting for trainer-0 to hand back 4 groups, for 12 s",
        "",
    ),
    ("stopping", {"stopping": "completed"}, "it is stopping (completed): writing its last records", ""),
    (
        "paused",
        {"paused": "9 groups failed", "paused_since": NOW - 180},
        "it is paused and waits for a person: 9 groups failed, for 3 min",
        "relaxd resume demo",
    ),
    (
        "rebuild",
        {"paused": "no reward replica works", "paused_since": NOW - 20, "rebuilding": True},
        "it is paused until a role is back: no reward replica works, for 20 s",
        "",
    ),
    (
        "role",
        {"missing": ["reward"], "peers": without("reward")},
        "no reward replica is registered",
        "relaxd scale reward=1",
    ),
    ("role", {"missing": ["trainer"], "peers": without("trainer")}, "no trainer replica is registered", "relaxd up"),
    (
        "role",
        {"missing": ["rollout"], "peers": without("rollout", Peer("rollout-0", "rollout", STARTING, "loading"))},
        "rollout-0 is starting: loading",
        "",
    ),
    (  # whoever is there may start by itself
        "role",
        {
            "missing": ["rollout", "teacher", "judge"],
            "peers": without("rollout", Peer("rollout-0", "rollout", "starting", "loading")),
        },
        "no teacher or judge replica is registered",
        "relaxd scale teacher=1",
    ),
    (
        "lease",
        {
            "missing": ["rollout"],
            "peers": without(
                "rollout",
                Peer("rollout-0", "rollout", STARTING, "x holds GPU-1", wait=replica_pb2.REPLICA_WAIT_GPUS),
            ),
        },
        "rollout-0 is starting: x holds GPU-1",
        "relaxd status shows who holds each GPU",
    ),
    (
        "starting",
        {
            "training": False,
            "starting": "evaluating before the first step",
            "waits": [Named("12 of 100 answers", "", NOW - 9)],
        },
        "evaluating before the first step: 12 of 100 answers, for 9 s",
        "",
    ),
    (
        "sync",
        {"training": False, "starting": "waiting for the first weight synchronisation", "sync_since": NOW - 3,
         "peers": without("rollout", Peer("rollout-0", "rollout"))},
        "rollout-0 waits for the weights of version 12, for 3 s",
        "",
    ),
    (
        "data",
        {"gate": ("sampler", "choose() raises KeyError")},
        "publishing can't go on: choose() raises KeyError",
        "repair the sampler's file",
    ),
    ("full", {"gate": ("full", "Redis is full: it uses 9 of 9 MB.")}, "publishing waits: Redis is full", "maxmemory"),
    (
        "memory",
        {"gate": ("memory", "open groups have stored 9 MB")},
        "publishing waits: open groups have stored 9 MB",
        "board.high_water_bytes",
    ),
    ("handoff", {"handoff": "train"}, "trainer and engines change places on the GPUs: train, for 50 s", ""),
    (
        "sync",
        {"announced": 13, "sync_since": NOW - 30, "sync_failure": "rollout-0 did not connect"},
        "rollout-0 waits for the weights of version 13; the last attempt failed: rollout-0 did not connect, for 30 s",
        "docs/weights.md",
    ),
    (
        "sync",
        {"announced": 13, "sync_since": NOW - 30, "sync_delay": "rollout-0 waits for weights, which t is changing"},
        "rollout-0 waits for weights, which t is changing, for 30 s",
        "",
    ),
    (
        "trainer",
        {"queues": queues(rollout=(9, 9), train=(4, 12))},
        "the trainer has all 16 groups of step 13 and works on it: step 13: 4 groups, for 50 s",
        "",
    ),
    (
        "held_group",
        {"queues": queues(reward=(0, 3), train=(13, 0)), "held": {"reward": HELD},
         "peers": without("reward", Peer("reward-0", "reward", detail=HANG, wait=replica_pb2.REPLICA_WAIT_SCORE))},
        "step 13 lacks 3 of its 16 groups; reward works on 3 groups, of which 0-000012 is the oldest, with reward-0 "
        f"(delivery 2): {HANG}, for 45 s",
        "repair the reward's file",
    ),
    (
        "held_group",
        {"queues": queues(reward=(5, 3)), "held": {"reward": replace(HELD, holder="reward-9", idle_seconds=20)}},
        "step 13 lacks 16 of its 16 groups; group 0-000012 is held at reward by reward-9, which is gone: another "
        "replica gets it within 40 s, when its lease ends, for 45 s",
        "",
    ),
    (
        "stage",
        {"queues": queues(rollout=(8, 4), reward=(0, 1), train=(3, 0)),
         "held": {"rollout": replace(HELD, holder="rollout-0")}},
        "step 13 lacks 13 of its 16 groups; rollout is the slow stage: 8 groups wait for it, 4 are with its 1 replica, "
        "for 50 s",
        "relaxd scale rollout=2 adds a replica",
    ),
    (
        "gate",
        {"gate": ("staleness", "all 64 groups are published"), "queues": queues(train=(10, 0))},
        "step 13 lacks 6 of its 16 groups; publishing waits: all 64 groups are published, for 50 s",
        "",
    ),
]  # fmt: skip


@each(("kind", "changes", "sentence", "advice"), CASES)
def test_each_reason_has_its_sentence(kind: str, changes: dict, sentence: str, advice: str) -> None:
    run = replace(RUN, **changes)
    reason = explain(run)
    assert reason is not None
    assert words(WaitKind)[reason.kind] == kind
    assert reason.sentence(NOW).startswith(sentence)
    assert ("; ".join(reason.advice) + " ").startswith(advice) or advice in reason.advice[0]
    assert bool(reason.advice) == bool(advice)
    assert evidence(run)


def test_wait_for_the_first_weights_is_told_at_once() -> None:
    engines = without("rollout", Peer("rollout-0", "rollout"))
    run = replace(RUN, training=False, starting="waiting for weights", sync_since=NOW - 0.02, peers=engines)
    reason = explain(run)
    assert reason is not None
    assert reason.always  # nothing is late before the first step, and this wait may never end


def test_every_reason_of_the_table_has_a_case() -> None:
    found = {next(find for find in REASONS if find(replace(RUN, **changes))) for _, changes, _, _ in CASES}
    assert found == set(REASONS)


def test_nothing_is_made_up() -> None:
    assert explain(RUN) is None


def test_a_step_is_late_once_it_takes_longer_than_usual() -> None:
    for usual, ago, late in ((None, 29, False), (None, 31, True), (4.0, 9, False), (4.0, 11, True), (60.0, 119, False)):
        assert is_late(replace(RUN, usual_seconds=usual, step_ended=NOW - ago)) is late
    assert not is_late(replace(RUN, training=False, step_ended=0.0))  # its start says by itself what it is at


def test_the_evidence_has_the_numbers() -> None:
    lines = "\n".join(evidence(replace(RUN, queues=queues(reward=(2, 3), train=(13, 0)), held={"reward": HELD})))
    for expected in (
        "step 12 of 100 ended 50 s ago; the last steps usually took 4 s",
        "step 13: 13 of 16 groups are with the trainer",
        "reward: 2 groups wait, 3 are held; 0-000012 has been there for 45 s, with reward-0 (delivery 2)",
        "rollout-0: ready, weights of version 12",
    ):
        assert expected in lines


def test_every_kind_is_in_the_docs() -> None:
    text = (Path(__file__).parents[4] / "docs" / "waiting.md").read_text()
    assert {word for row in re.findall(r"^\| (`.*?) \|", text, re.M) for word in re.findall(r"`(\w+)`", row)} == {
        kind for kind in numbers(WaitKind) if kind
    }
    assert {kind for kind, *_ in CASES} == {kind for kind in numbers(WaitKind) if kind}


@pytest.mark.parametrize(
    ("wait", "advice"),
    [
        ("UNSPECIFIED", ("relaxd scale reward=2 adds a replica",)),
        ("SERVICE", ("make it answer again: the run goes on by itself",)),
        (
            "SCORE",
            (
                "repair the reward's file, then: relaxd pause && relaxd resume, which loads it again",
                "relaxd scale reward=2 adds a replica",
            ),
        ),
    ],
)
def test_advice_follows_the_code_of_a_wait_whatever_its_words(wait: str, advice: tuple[str, ...]) -> None:
    for said in (HANG, FULL_DISK, "waiting for GPUs: x holds GPU-1", "the service at r:1 does not answer"):
        peer = Peer("reward-0", "reward", detail=said, wait=replica_pb2.ReplicaWait.Value(f"REPLICA_WAIT_{wait}"))
        run = replace(RUN, queues=queues(reward=(0, 3), train=(13, 0)), held={"reward": HELD})
        reason = explain(replace(run, peers=without("reward", peer)))
        assert reason is not None
        assert (reason.kind, reason.advice) == (WAIT_KIND_HELD_GROUP, advice)


def test_a_group_that_is_held_shortly_needs_no_replica() -> None:
    new = {"reward": replace(HELD, enqueued_at=NOW - 1)}
    run = replace(RUN, queues=queues(reward=(0, 3), train=(13, 0)), held=new)
    reason = explain(replace(run, peers=without("reward", Peer("reward-0", "reward"))))
    assert reason is not None
    assert (reason.kind, reason.advice) == (WAIT_KIND_HELD_GROUP, ())


@pytest.mark.parametrize("said", ["waiting for GPUs: x holds GPU-1", "waiting for the disk of /runs/demo"])
def test_a_wait_is_not_recognised_by_its_words(said: str) -> None:
    peer = Peer("rollout-0", "rollout", STARTING, said)
    reason = explain(replace(RUN, missing=["rollout"], peers=without("rollout", peer)))
    assert reason is not None
    assert (reason.kind, reason.advice) == (WAIT_KIND_ROLE, ())
