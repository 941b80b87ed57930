"""The next move of a GPU handoff, for every situation of a colocated run."""

from dataclasses import replace
from itertools import product

from services.coordinator.weights.gpu_handoff_rules import HandoffMove, Situation, next_move
from tests.kit.cases import each

GENERATING = Situation(
    trainer="ready", trainer_awake=False, engines_awake=True, engines_able=True, engines_serving=True,
    generating=True, announced=True,
)  # fmt: skip
TRAINING = Situation(trainer="ready", trainer_awake=True, engines_able=True, due=True, announced=True)
TRAINED = replace(TRAINING, due=False)


@each(
    ("what", "now", "move"),
    [
        ("groups are generated", GENERATING, HandoffMove.WAIT),
        ("all are there", replace(GENERATING, generating=False, due=True), HandoffMove.TRAIN),
        ("the step is trained", TRAINING, HandoffMove.WAIT),
        ("it is committed, and not announced", replace(TRAINED, announced=False), HandoffMove.WAIT),
        ("it is announced", TRAINED, HandoffMove.SYNCHRONISE),
        ("a synchronisation broke", replace(TRAINED, engines_awake=True), HandoffMove.SYNCHRONISE),
        ("a wake-up broke", replace(TRAINING, engines_awake=True), HandoffMove.TRAIN),
        ("the trainer died while the engines generate", replace(GENERATING, trainer="waiting"), HandoffMove.WAIT),
        (
            "and they have ended",
            replace(GENERATING, trainer="waiting", generating=False, due=True),
            HandoffMove.START_TRAINER,
        ),
        ("they sleep, so it may ask", Situation(trainer="waiting", trainer_awake=False), HandoffMove.WAIT),
        ("it replays", replace(TRAINING, trainer="starting"), HandoffMove.WAIT),
        ("an engine died beside others", replace(GENERATING, engines_waiting=True), HandoffMove.WAIT),
        ("an engine died in its sleep", replace(TRAINING, engines_waiting=True, engines_able=False), HandoffMove.WAIT),
        ("the step after that", replace(TRAINED, engines_waiting=True, engines_able=False), HandoffMove.START_ENGINES),
        (
            "it loads",
            replace(TRAINED, trainer_awake=False, engines_starting=True, engines_awake=True, engines_able=False),
            HandoffMove.WAIT,
        ),
        (
            "it is there, without weights",
            replace(GENERATING, engines_serving=False, generating=False),
            HandoffMove.SYNCHRONISE,
        ),
        ("no trainer yet", Situation(trainer="absent", trainer_awake=False, engines_awake=True), HandoffMove.WAIT),
        ("no engine yet", replace(TRAINED, engines_able=False), HandoffMove.WAIT),
        ("groups were dropped while training", TRAINED, HandoffMove.SYNCHRONISE),
        ("the judge sleeps with the engines", replace(TRAINING, judges_asleep=True), HandoffMove.WAIT),
        ("and sleeps on while they get weights", replace(TRAINED, judges_asleep=True), HandoffMove.SYNCHRONISE),
        ("its wake-up broke", replace(GENERATING, judges_asleep=True), HandoffMove.WAKE_JUDGES),
        (
            "it failed, but others have answered for every group",
            replace(GENERATING, judges_asleep=True, generating=False, due=True),
            HandoffMove.TRAIN,
        ),
        (
            "a checkpoint is wanted while groups wait for it",
            replace(GENERATING, judges_asleep=True, due=True),
            HandoffMove.WAKE_JUDGES,
        ),
        (
            "and the trainer died, whose turn would never come without rewards",
            replace(GENERATING, judges_asleep=True, trainer="waiting"),
            HandoffMove.WAKE_JUDGES,
        ),
        (
            "another engine loads beside it",
            replace(GENERATING, judges_asleep=True, engines_starting=True),
            HandoffMove.WAKE_JUDGES,
        ),
        (
            "the trainer starts, and has the device",
            replace(GENERATING, judges_asleep=True, trainer="starting"),
            HandoffMove.WAIT,
        ),
    ],
)
def test_each_situation_has_its_move(what: str, now: Situation, move: HandoffMove) -> None:
    assert next_move(now) == move, what


def test_no_move_takes_a_device_from_a_replica_that_starts_or_works() -> None:
    flags = [name for name in Situation.__dataclass_fields__ if name != "trainer"]
    for trainer, values in product(
        ("absent", "waiting", "starting", "ready"), product((False, True), repeat=len(flags))
    ):
        now = Situation(trainer=trainer, **dict(zip(flags, values, strict=True)))  # type: ignore[arg-type]
        move = next_move(now)
        if move == HandoffMove.WAKE_JUDGES:  # onto devices that engines have
            assert now.judges_asleep
            assert now.engines_serving
            assert trainer != "starting"
            assert not now.trainer_awake
            continue
        if now.engines_starting or trainer == "starting":
            assert move == HandoffMove.WAIT, now
        if move in (HandoffMove.TRAIN, HandoffMove.START_TRAINER):
            assert not now.generating, now
        if move == HandoffMove.START_ENGINES:
            assert not now.due, now
        if move != HandoffMove.WAIT and trainer != "ready":
            assert move == HandoffMove.START_TRAINER, now
