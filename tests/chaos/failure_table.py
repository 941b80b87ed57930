"""Write the table of failures in docs/reliability.md from the last campaigns: `python -m tests.chaos.failure_table`."""

import json
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import median

from benchmarks.reporting import RESULTS

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
BEGIN, END = "<!-- failures: written by python -m tests.chaos.failure_table -->", "<!-- failures: end -->"

# Results files: the long run, then campaigns whose jobs have what its job lacks.
CAMPAIGNS = (
    "chaos",
    "chaos-critic-roles-critic-reference-teacher",
    "chaos-teacher-engine-only",
    "chaos-agent-roles-agent",
    "chaos-program-roles-agent",
    "chaos-hosts-roles-ranks",
)

# The failure, the faults that cause it, the response. Nothing may be lost in any of them.
FAILURES: list[tuple[str, tuple[str, ...], str]] = [
    (
        "a rollout, reward, advantage, reference or teacher replica dies",
        (
            "kill rollout",
            "kill reward",
            "kill advantage",
            "kill reference",
            "kill teacher",
            "kill both rollouts",
            "kill both rewards",
            "restart rollout",
            "restart reference",
            "restart teacher",
        ),
        "its supervisor starts another; other replicas take its groups as soon as its end is known, at the latest when "
        "their lease ends; after a drain no group is repeated",
    ),
    (
        "an engine's process or a reward's worker dies",
        ("kill engine", "kill reward worker"),
        "its service starts another; the engine's groups are generated again, the worker's sample is tried once more",
    ),
    (
        "services and a command of another stack come to the coordinator",
        ("two stacks",),
        "they are refused, with both stacks' identities; nothing of the run changes",
    ),
    (
        "a service's clock is set back by two days or ahead by three hours, and set right again",
        ("clock *",),
        "nobody notices: what is compared comes from clocks that never go back, or from Redis's own, which isn't set",
    ),
    (
        "an agent replica dies, is stopped or loses its connections",
        ("kill agent", "kill both agents", "restart agent", "stall agent *"),
        "others hold the conversations of its groups anew; the host of its environment, or its programs, end with it",
    ),
    (
        "the process that hosts a run's environment dies, also after it has forked, or hangs for good",
        ("kill agent environment", "freeze agent environment", "agent environment forks and dies"),
        "its conversations have failed (`agent.on_failure`); it is killed with what it has started, and started again",
    ),
    (
        "an environment hangs, raises, leaks, answers invalid UTF-8 or writes 100 MB",
        (
            "agent environment hangs",
            "agent environment raises",
            "agent environment leaks",
            "agent environment answers *",
            "agent environment writes *",
        ),
        "the conversation has failed (`agent.on_failure`); groups are dropped as `environment_failed`, with a detail",
    ),
    (
        "a program that leads conversations dies, hangs for good, never asks the model or ends with an exit code",
        ("kill agent program", "freeze agent program", "agent program never asks", "agent program exits"),
        "the conversation has failed, of one that hangs or never asks at `agent.conversation_seconds`, where it is "
        "killed; a group without a message of the model is dropped as `environment_failed`",
    ),
    (
        "a program sends requests three times at once, goes on from what the model never said, or asks in another's "
        "session",
        ("agent program repeats *", "agent program asks *", "agent program sends *"),
        "repetitions get one answer, other histories are sequences of their own, other sessions refuse its key",
    ),
    (
        "a judge or its engine dies, or its engine hangs for good",
        ("kill judge", "kill judge engine", "freeze judge engine"),
        "the judge is started again, if it hangs once it makes no progress (`health.stuck_seconds`); meanwhile rewards "
        "wait for it (`roles.judge.outage_seconds`), and then ask again",
    ),
    (
        "a rank of a reference or a teacher dies, or a teacher's engine",
        ("kill reference rank", "kill teacher rank", "kill teacher engine"),
        "its service ends, too, and its supervisor starts another; others take its groups as soon as that is known",
    ),
    (
        "a critic service or its rank dies, is stopped or hangs, also together with a rank of the trainer",
        ("kill critic*", "freeze critic*", "restart critic", "stall critic *"),
        "it is started again, loads its newest checkpoint and repeats the steps after it from their files; meanwhile "
        "groups wait for their values",
    ),
    (
        "a replica is stopped (SIGSTOP), for less and for more than its leases",
        (
            "stall rollout *",
            "stall reward *",
            "stall advantage *",
            "stall reference *",
            "stall teacher *",
            "stall engine *",
        ),
        "other replicas take its groups when the lease ends; what it commits when it continues is acknowledged and "
        "changes nothing; a replica that is silent for longer than `--lease-seconds` is restarted",
    ),
    (
        "a process of an engine, a reference or a teacher hangs for good, while its service answers",
        ("freeze engine", "freeze reference rank", "freeze teacher rank", "freeze teacher engine"),
        "the trainer goes on with the other engines, or waits for the reference or the teacher; the coordinator "
        "restarts the replica when it makes no progress (`health.stuck_seconds`) or its synchronisations keep failing "
        "(`health.max_sync_failures`)",
    ),
    (
        "a teacher's engine fails requests, gives too few log-probs or some that aren't finite",
        ("wrong answers of the teacher engine",),
        "the group is dropped as `no_logprobs` or `malformed`, with a detail; its prompt isn't tried again, because a "
        "model that isn't trained answers the same again",
    ),
    (
        "the trainer, or one of its ranks, dies",
        ("kill trainer*", "kill a rank*"),
        "under a new term it loads the newest intact checkpoint and replays the step files after it, then a "
        "synchronisation is forced; the open step starts again",
    ),
    (
        "another host of the trainer or its rank dies, is stopped or hangs",
        ("kill ranks", "restart ranks", "stall ranks *", "freeze ranks *"),
        "the ranks of all hosts end; the trainer waits for the host, or takes a spare, and goes on as after the death "
        "of a rank",
    ),
    (
        "the trainer is stopped",
        ("stall trainer*",),
        "publishing stops at the gate; the trainer continues when it wakes up, or is restarted when it is silent for "
        "longer than `--lease-seconds`",
    ),
    (
        "a gradient overflows",
        ("overflow a gradient",),
        "all ranks skip the update; the step is committed as skipped, and replayed as skipped; "
        "`trainer.max_skipped_updates` limits this",
    ),
    (
        "the coordinator dies",
        ("kill coordinator", "restart coordinator"),
        "its supervisor starts another, which takes the next term and continues from Redis; meanwhile stages and "
        "trainer work on the groups that are published",
    ),
    (
        "the coordinator is stopped",
        ("stall coordinator *",),
        "the same, without a restart; when it continues it gives every replica a new lease",
    ),
    (
        "the coordinator may open no more files and connections",
        ("descriptors: coordinator",),
        "it publishes nothing and says what it waits for; steps end with the groups that are open, and are recorded "
        "once it may open files again",
    ),
    (
        "a reward replica may open no more files, and its workers die",
        ("descriptors: reward",),
        "it hands its groups back, says why and ends; its supervisor starts another. Groups that it can't hand back "
        "wait for its lease",
    ),
    (
        "Redis is killed or restarted",
        ("kill redis", "restart redis"),
        "services wait and retry; Redis loads everything from its append-only file",
    ),
    ("Redis is stopped", ("stall redis *",), "services wait and retry"),
    (
        "Redis is full",
        ("fill redis",),
        "nothing is published; commits and steps, which make room, still pass; publishing resumes when there is room",
    ),
    (
        "Redis refuses writes: its disk is full, it is a replica, a script keeps it busy",
        ("redis: *",),
        "services wait, say for what, and retry",
    ),
    (
        "connections to Redis are reset, delayed or swallowed",
        ("cut: * - redis", "delay: * - redis", "drop: * - redis"),
        "operations are retried, and take effect once; other replicas take the groups of a replica that is away for "
        "longer than its lease",
    ),
    (
        "connections from and to the coordinator are reset, delayed or swallowed",
        ("cut: * - coordinator", "delay: * - coordinator", "drop: * - coordinator", "reset all connections"),
        "work goes on; a replica that the coordinator has forgotten registers again; synchronisations leave out an "
        "engine that can't be reached",
    ),
    (
        "an engine fails in a weight synchronisation (join, pause, broadcast, commit, resume)",
        ("sync: engine *", "sync: rollout *"),
        "every member leaves the process group, the rest form a new one and repeat the broadcast; the trainer goes on",
    ),
    (
        "the trainer fails in a broadcast",
        ("sync: rank *", "sync: trainer *"),
        "engines that received a part of it serve nothing until the next trainer's first synchronisation",
    ),
    (
        "the coordinator fails in a synchronisation",
        ("sync: coordinator *",),
        "the next coordinator aborts the synchronisation on record and starts another",
    ),
]


def table(campaigns: Sequence[dict]) -> str:
    """Return the table as Markdown. A row has the faults of the first campaign that has any of its kinds.

    Raises ValueError if a kind of fault is in no row.
    """
    rest = {outcome["fault"] for campaign in campaigns for outcome in campaign["outcomes"]}
    lines = [
        "| failure | response | lost | times | trains again after (p50 / max) | deliveries repeated |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for failure, patterns, response in FAILURES:
        rest = {fault for fault in rest if not any(fnmatchcase(fault, pattern) for pattern in patterns)}
        found, where = [], ""
        for campaign in campaigns:
            found = [o for o in campaign["outcomes"] if any(fnmatchcase(o["fault"], pattern) for pattern in patterns)]
            if found:
                where = "" if campaign is campaigns[0] else f" ({campaign['algorithm']})"
                break
        seconds = [outcome["recovery"] for outcome in found if outcome["recovery"] is not None]
        figures = f"{median(seconds):.1f} s / {max(seconds):.1f} s" if seconds else "not measured"
        violations = sum(outcome["violations"] for outcome in found)
        lost = "not measured" if not found else "nothing" if not violations else f"{violations} violations"
        recomputed = sum(outcome["recomputed"] for outcome in found)
        lines.append(f"| {failure} | {response} | {lost} | {len(found)}{where} | {figures} | {recomputed} |")
    if rest:
        raise ValueError(f"no row of FAILURES has these faults: {', '.join(sorted(rest))}")
    lines += [
        "",
        "Rows with a word after their count are of the campaign with that `ALGORITHM`, all others of the first:",
        "",
    ]
    return "\n".join(lines + [f"- {summary(campaign)}" for campaign in campaigns])


def summary(campaign: dict) -> str:
    """Return a campaign's command, machine and totals in one line."""
    algorithm, machine = campaign["algorithm"], campaign["machine"]
    command = "make chaos" if algorithm == "grpo" else f"make chaos ALGORITHM={algorithm}"
    return (
        f"{campaign['faults']} faults (`{command}`, seed {campaign['seed']}) on {campaign['date']}, {machine['cores']} "
        f"cores ({machine['processor']}, load {machine['load_before']} before): {campaign['violations']} violations in "
        f"{campaign['steps']} steps with {campaign['groups']['trained']} groups."
    )


def load_campaigns() -> list[dict]:
    """Return the recorded results of CAMPAIGNS."""
    return [json.loads((RESULTS / f"{name}.json").read_text()) for name in CAMPAIGNS]


def main() -> None:
    """Rewrite the table."""
    before, begin, rest = PAGE.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{PAGE} has no lines {BEGIN} and {END}")
    PAGE.write_text(f"{before}{BEGIN}\n{table(load_campaigns())}\n{END}{after}")


if __name__ == "__main__":
    main()
