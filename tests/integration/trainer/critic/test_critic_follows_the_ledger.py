"""A critic that was out of touch while its run went back to an earlier step, and on from there with other groups."""

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from relaxd.board import Board, LedgerEntry, stages_for
from relaxd.config import RunConfig
from relaxd.roles import CRITIC
from relaxd.run_folder import KEPT, LEDGER, checkpoint_path, checkpoint_steps, checkpoints_folder, critic_folder
from services.trainer.batch.step_plan import step_file_path
from services.trainer.critic_rank import Follower, LedgerWentBack
from services.trainer.loop import commanded_rank
from services.trainer.reference_models.model_rank import ModelStage
from tests.integration.trainer.critic.critic_kit import config_of, critic_rank, prepare_run
from tests.integration.trainer.service_kit import RUN_ID
from tests.integration.trainer.training_worlds import RunJob, run_job
from tests.kit.megatron_world import shut_down
from tests.kit.waiting import wait_until

STEPS = 4
OTHER_REWARDS = {f"g{number}": {"advantage": -0.3 * number} for number in range(3, 9)}
"""Of the groups after the first step."""


class Run:
    """A run whose trainer is gone, a board for its ledger, and a critic that follows it."""

    def __init__(self, config: RunConfig, redis_url: str, folder: Path) -> None:
        self._config, self.folder = config, folder
        self.board = Board(redis_url, RUN_ID, stages_for(config), config.board)
        self.restore([])
        self.rank = critic_rank(config, folder, self.board)
        self.follower = self.start_critic()

    def restore(self, ledger: Sequence[LedgerEntry], *, on_board: int = STEPS) -> None:
        """Restore the run from its folder with a ledger, whose newest steps are on the board. Another critic begins."""
        (self.folder / LEDGER).write_text("".join(json.dumps(asdict(entry)) + "\n" for entry in ledger))
        self.board.delete()
        self.board.create(term=1, groups_per_step=self._config.trainer.groups_per_step, steps=STEPS)
        self.board.restore(ledger=ledger, cursor=None, dropped={}, trainer_term=20)
        if len(ledger) > on_board:
            client: Any = self.board._connection.client
            client.xtrim(f"{self.board.prefix}ledger", minid=f"{len(ledger) - on_board + 1}-0", approximate=False)
        self.board.new_critic_term()

    def start_critic(self) -> Follower:
        stage = ModelStage(
            self.board,
            CRITIC,
            "critic",
            lambda name, micro_batches: [],
            vocab_sizes={"": 1},
            temperature=1.0,
            micro_batch_tokens=1,
        )
        follower = Follower(self._config, RUN_ID, self.rank, stage, lambda detail: None)
        follower.restore()
        return follower

    def follow(self) -> int:
        """Have the critic do all that there is, and write the checkpoint. Returns its step."""

        def done() -> bool:
            busy = self.follower._train_next()
            return not busy and checkpoint_path(critic_folder(self.folder), self.rank.learner.step).is_dir()

        wait_until(done, "a critic that has nothing to do")
        return self.rank.learner.step


def train(job: RunJob, *, term: int) -> list[LedgerEntry]:
    """Train a run to its end with a critic in the trainer of this term. Returns its ledger."""
    board = Board(job.redis_url, RUN_ID, stages_for(job.config), job.config.board)
    while board.trainer_term() < term - 1:
        board.new_trainer_term()
    board.close()
    ledger: list[LedgerEntry] = run_job(job)["ledger"]
    shut_down()
    return ledger


@pytest.fixture
def histories(
    tiny_qwen3: Path, redis_url: str, tmp_path: Path, alone: None
) -> Iterator[tuple[Run, list[LedgerEntry], list[LedgerEntry], Path]]:
    """A run, its ledger, the ledger of the same run with other groups after the first step, and the folder of those."""

    def config(critic: dict[str, Any], **trainer: Any) -> RunConfig:
        found = config_of(tiny_qwen3, critic, groups_per_step=2, **trainer)
        return found.model_copy(update={"run": found.run.model_copy(update={"steps": STEPS})})

    folder, other_folder = tmp_path / "run", tmp_path / "other"
    first = train(prepare_run(redis_url, 1, config({}), folder), term=1)
    other = train(prepare_run(redis_url, 2, config({}), other_folder, **OTHER_REWARDS), term=17)
    as_service = config({"placement": "service", "threads": 1}, checkpoint={"every": 1, "keep": STEPS})
    run = Run(as_service, redis_url, folder)
    yield run, first, [first[0], *other[1:]], other_folder
    run.board.close()


def test_it_notices_steps_that_were_committed_again_and_repeats_them(
    histories: tuple[Run, list[LedgerEntry], list[LedgerEntry], Path],
) -> None:
    run, first, other, other_folder = histories
    run.restore(first[:1])
    assert run.follow() == 1
    run.restore(first[:3], on_board=1)  # the rest is in the folder
    assert run.follow() == 3
    value_loss = run.rank.learner.metrics["value_loss"]
    assert value_loss == pytest.approx(first[2].metrics["value_loss"], rel=1e-3)
    saved = run.rank.learner.checksum()

    run.restore(first[:2])
    with pytest.raises(LedgerWentBack, match="the ledger ends at step 2, but this critic has trained on step 3: the"):
        run.follow()
    again = "step 3 was committed again, by the trainer of term 17, since this critic trained on that of term 1: the"
    for steps, on_board in ((3, 3), (4, 4), (4, 1)):
        run.restore(other[:steps], on_board=on_board)
        with pytest.raises(LedgerWentBack, match=again):
            run.follow()
    run.restore(first[:3])  # it is the same ledger again
    assert run.follow() == 3
    assert run.rank.learner.checksum() == saved

    # The next critic, or the same one after it was started again, goes back no further than it has to.
    for step in range(2, STEPS + 1):
        shutil.copy(step_file_path(other_folder, step), step_file_path(run.folder, step))
    run.restore(other)
    run.follower = run.start_critic()
    assert run.rank.learner.step == 1
    assert run.follow() == STEPS
    found = run.rank.learner.metrics["value_loss"]
    assert found == pytest.approx(other[-1].metrics["value_loss"], rel=1e-3)
    assert found != pytest.approx(first[-1].metrics["value_loss"], rel=1e-2)
    critic = critic_folder(run.folder)
    assert checkpoint_steps(critic)[0] == STEPS
    assert (checkpoints_folder(critic) / "step-000003.broken").is_dir()


def test_a_checkpoint_that_the_disk_refused_is_taken_of_a_later_step(
    histories: tuple[Run, list[LedgerEntry], list[LedgerEntry], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, first, _, _ = histories
    run.restore(first[:1])
    assert run.follow() == 1
    run.restore(first[:2])
    run.board.ask_critic(term=20, step=2, keep=True)
    with monkeypatch.context() as full:
        full.setattr(commanded_rank, "has_room", lambda folder, size: False)
        wait_until(lambda: not run.follower._train_next() and run.follower._problem() != "", "the refusal")
        assert "doesn't fit" in run.follower._problem()
        run.restore(first[:3])
        wait_until(lambda: not run.follower._train_next(), "a critic that has nothing to do")
    monkeypatch.setattr("services.trainer.critic_rank.RETRY_SECONDS", 0.0)
    kept = checkpoint_path(critic_folder(run.folder), 3) / KEPT
    wait_until(lambda: not run.follower._train_next() and kept.exists(), "the checkpoint that was asked for")
    assert run.follower._problem() == ""
