"""States of checkpoints."""

from services.trainer.loop.checkpoint_folders import BoardState, CheckpointState, Ledger

BOARD = BoardState(
    cursor={"epoch": 0, "position": 4},
    open_groups=("0-000003",),
    published=4,
    trained=3,
    dropped=0,
    dropped_by_reason={},
)


def state(step: int) -> CheckpointState:
    return CheckpointState(
        run_id="run",
        step=step,
        term=2,
        ledger=Ledger(step=step, term=2, plan_sha256="x"),
        board=BOARD,
        trainer={"ranks": 2},
        algorithm={},
        weights_checksum=7,
        versions={},
    )
