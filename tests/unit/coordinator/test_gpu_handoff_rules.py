"""The next move of a GPU handoff, for every situation of a colocated run."""

from dataclasses import replace
from itertools import product

import pytest

from services.coordinator.weights.gpu_handoff_rules import Move, Situation, next_move

GENERATING = Situation(
    trainer="ready", trainer_awake=False, engines_awake=True, engines_able=True, engines_serving=True,
    generating=True, announced=True,
)  # fmt: skip
TRAINING = Situation(trainer="ready", trainer_awake=True, engines_able=True, due=True, announced=True)
TRAINED = replace(TRAINING, due=False)


@pytest.mark.parametrize(
    ("what", "now", "move"),
    [
        ("groups are generated", GENERATING, Move.WAIT),
        ("all are there", replace(GENERATING, generating=False, due=True), Move.TRAIN),
        ("the step is trained", TRAINING, Move.WAIT),
        ("it is committed, and not announced", replace(TRAINED, announced=False), Move.WAIT),
        ("it is announced", TRAINED, Move.SYNCHRONISE),
        ("a synchronisation broke", replace(TRAINED, engines_awake=True), Move.SYNCHRONISE),
        ("a wake-up broke", replace(TRAINING, engines_awake=True), Move.TRAIN),
        ("the trainer died while the engines generate", replace(GENERATING, trainer="waiting"), Move.WAIT),
        (
            "and they have ended",
            replace(GENERATING, trainer="waiting", generating=False, due=True),
            Move.START_TRAINER,
        ),
        ("they sleep, so it may ask", Situation(trainer="waiting", trainer_awake=False), Move.WAIT),
        ("it replays", replace(TRAINING, trainer="starting"), Move.WAIT),
        ("an engine died beside others", replace(GENERATING, engines_waiting=True), Move.WAIT),
        ("an engine died in its sleep", replace(TRAINING, engines_waiting=True, engines_able=False), Move.WAIT),
        ("the step after that", replace(TRAINED, engines_waiting=True, engines_able=False), Move.START_ENGINES),
        (
            "it loads",
            replace(TRAINED, trainer_awake=False, engines_starting=True, engines_awake=True, engines_able=False),
            Move.WAIT,
        ),
        (
            "it is there, without weights",
            replace(GENERATING, engines_serving=False, generating=False),
            Move.SYNCHRONISE,
        ),
        ("no trainer yet", Situation(trainer="absent", trainer_awake=False, engines_awake=True), Move.WAIT),
        ("no engine yet", replace(TRAINED, engines_able=False), Move.WAIT),
        ("groups were dropped while training", TRAINED, Move.SYNCHRONISE),
        ("the judge sleeps with the engines", replace(TRAINING, judges_asleep=True), Move.WAIT),
        ("and sleeps on while they get weights", replace(TRAINED, judges_asleep=True), Move.SYNCHRONISE),
        ("its wake-up broke", replace(GENERATING, judges_asleep=True), Move.WAKE_JUDGES),
        (
            "and the trainer died, whose turn would never come without rewards",
            replace(GENERATING, judges_asleep=True, trainer="waiting"),
            Move.WAKE_JUDGES,
        ),
        (
            "another engine loads beside it",
            replace(GENERATING, judges_asleep=True, engines_starting=True),
            Move.WAKE_JUDGES,
        ),
        (
            "the trainer starts, and has the device",
            replace(GENERATING, judges_asleep=True, trainer="starting"),
            Move.WAIT,
        ),
    ],
)
def test_each_situation_has_its_move(what: str, now: Situation, move: Move) -> None:
    assert next_move(now) == move, what


def test_no_move_takes_a_device_from_a_replica_that_starts_or_works() -> None:
    flags = [name for name in Situation.__dataclass_fields__ if name != "trainer"]
    for trainer, values in product(
        ("absent", "waiting", "starting", "ready"), product((False, True), repeat=len(flags))
    ):
        now = Situation(trainer=trainer, **dict(zip(flags, values, strict=True)))  # type: ignore[arg-type]
        move = next_move(now)
        if move == Move.WAKE_JUDGES:  # onto devices that engines have
            assert now.judges_asleep
            assert now.engines_serving
            assert trainer != "starting"
            assert not now.trainer_awake
            continue
        if now.engines_starting or trainer == "starting":
            assert move == Move.WAIT, now
        if move in (Move.TRAIN, Move.START_TRAINER):
            assert not now.generating, now
        if move == Move.START_ENGINES:
            assert not now.due, now
        if move != Move.WAIT and trainer != "ready":
            assert move == Move.START_TRAINER, now
