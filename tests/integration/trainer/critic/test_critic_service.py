"""A critic service as a process, beside the loop of a trainer: the numbers of a plain torch loop, also when killed."""

import os
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from relaxd.board import CRITIC_STATE, Board, stages_for
from relaxd.config import RunConfig
from relaxd.roles import CRITIC, ROLES
from relaxd.run_folder import checkpoint_path, critic_folder
from services.trainer.batch.step_plan import read_committed
from services.trainer.loop.checkpoint_folders import read_state
from tests.integration.trainer.critic.critic_kit import PlainLoop, config_of, critic_rank, prepare_run, rewards_of
from tests.integration.trainer.service_kit import RUN_ID, ScriptedCoordinator, TrainerProcess
from tests.integration.trainer.training_worlds import RunJob, run_job
from tests.kit.megatron_world import shut_down
from tests.kit.waiting import wait_until

OF_UPDATES = ("value_loss", "value_grad_norm", "value_clip_fraction")


class Critics:
    """The critic replicas of a run, one after the other."""

    def __init__(self, job: RunJob) -> None:
        self._job = job
        self.coordinator = ScriptedCoordinator(job.config, job.folder, CRITIC)
        self.board = Board(job.redis_url, RUN_ID, stages_for(job.config), job.config.board)
        self.process = self.start()

    def start(self) -> TrainerProcess:
        """Start a replica, which is ready once it has its model."""
        self.process = TrainerProcess(self.coordinator, self._job.redis_url, module=ROLES[CRITIC].module)
        self.coordinator.wait_until_ready()
        return self.process

    def replace_after(self, step: int) -> None:
        """Kill the rank once a step is committed, and start the next replica."""
        wait_until(lambda: len(self.board.ledger()) >= step, f"step {step}")
        os.kill(self.process.rank_pid(), signal.SIGKILL)
        assert self.process.process.wait(60) == 1  # a supervisor starts the next
        self.process.close()
        self.start()

    def close(self) -> None:
        self.process.close()
        self.coordinator.close()
        self.board.close()


def train(job: RunJob, loop: PlainLoop, *, killed_after: int = 0) -> dict[int, dict[str, list[float]]]:
    """Train both steps beside a critic service, and compare all numbers but those of the critic's updates, by step."""
    config, critics = job.config, Critics(job)
    try:
        critics.coordinator.wait(lambda: critics.coordinator.status.done_groups == 8)  # under the critic of step 0
        killing = threading.Thread(target=critics.replace_after, args=(killed_after,))
        if killed_after:
            killing.start()
        result = run_job(job)
        if killed_after:
            killing.join()
        last = checkpoint_path(critic_folder(job.folder), 2)
        wait_until(last.is_dir, "the critic's checkpoint of the last step")
        critics.board.ask_critic(term=critics.board.trainer_term(), step=2, keep=True)
        wait_until((last / "kept").exists, "the mark that it stays")
    finally:
        critics.close()
    of_critic: dict[int, dict[str, list[float]]] = {}
    for entry in result["ledger"]:
        file = read_committed(job.folder, entry.step, entry.plan)
        parts = [file.plan.groups_of(mini_batch) for mini_batch in file.plan.mini_batches]
        expected = loop.step(entry.step, file.groups, rewards_of(config, file.groups), parts)
        of_critic[entry.step] = {name: expected.pop(name) for name in OF_UPDATES}
        tokens = [mini_batch.trained_tokens for mini_batch in file.plan.updates]
        for name, values in expected.items():
            mean = np.average(values, weights=tokens if name == "ratio" else None)
            assert entry.metrics[name] == pytest.approx(mean, rel=1e-3, abs=1e-5), (entry.step, name)
        state = next(iter(file.groups.values()))[CRITIC_STATE]
        for name, value in state["metrics"].items():
            if name in OF_UPDATES:
                weights = tokens if name == "value_clip_fraction" else None
                mean = np.average(of_critic[state["step"]][name], weights=weights)
                assert value == pytest.approx(mean, rel=1e-3, abs=1e-5), (entry.step, name)
                assert entry.metrics[name] == value
    exact = {name: parameter.detach().float().numpy() for name, parameter in loop.policy.named_parameters()}
    for name, tensor in result["tensors"].items():
        np.testing.assert_allclose(tensor, exact[name], atol=5e-5, err_msg=name)
    return {entry.step: entry.metrics for entry in result["ledger"]}


def service_config(model: Path, max_value_staleness: int, **sizes: int) -> RunConfig:
    own = {"placement": "service", "threads": 1, "max_value_staleness": max_value_staleness, **sizes}
    return config_of(model, own, checkpoint={"every": 1})


def check_weights(config: RunConfig, job: RunJob, loop: PlainLoop) -> None:
    """The critic of the last checkpoint gives the values of the plain loop's; that of another step is refused."""
    from services.trainer.loop.checkpoint_control import restore

    shut_down()
    board = Board(job.redis_url, RUN_ID, stages_for(config), config.board)
    rank, folder = critic_rank(config, job.folder, board), critic_folder(job.folder)
    learner = rank.learner
    assert restore(rank, config, 9)[0] == learner.step == 2
    assert read_state(checkpoint_path(folder, 2)).weights_checksum == rank.checksum()
    file = read_committed(job.folder, 2, board.ledger()[1].plan)
    from services.trainer.batch.micro_batch import pack

    for group_id, columns in file.groups.items():
        sequences = learner._group(group_id, file).sequences(
            range(len(columns["lengths"])), (), learner._algorithm, 1.0, None
        )
        (found,) = learner.values([pack(sequences)])
        with torch.no_grad():
            _, expected = loop.of_answers(columns)
        prompts = len(columns["prompt_tokens"])
        np.testing.assert_allclose(found["values"][prompts:], expected.numpy(), atol=1e-4)

    checkpoint_path(folder, 1).rename(folder / "aside")
    checkpoint_path(folder, 2).rename(checkpoint_path(folder, 1))
    assert restore(rank, config, 9) == (0, None)
    assert checkpoint_path(folder, 1).with_name("step-000001.broken").is_dir()
    board.close()


@pytest.mark.slow
def test_a_killed_critic_goes_on_with_the_numbers_of_a_plain_loop(
    tiny_qwen3: Path, redis_url: str, tmp_path: Path, alone: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Groups of step 2 are valued again, by the critic of step 1: as if it were in the trainer's ranks."""
    config = service_config(tiny_qwen3, 0)
    job, loop = prepare_run(redis_url, 1, config, tmp_path / "run"), PlainLoop(config)
    metrics = train(job, loop, killed_after=1)
    assert (metrics[1]["critic_step"], metrics[2]["critic_step"]) == (0, 1)
    assert metrics[1]["revalued_groups"] == 0
    assert metrics[2]["revalued_groups"] >= 4  # more, where the next process values some before it has followed step 1
    assert (metrics[1]["value_staleness_max"], metrics[2]["value_staleness_max"]) == (0, 0)
    assert metrics[2]["value_lr"] == pytest.approx(1e-2)
    check_weights(config, job, loop)
    assert "it is of another step 1 than the ledger's" in caplog.text


@pytest.mark.slow
def test_values_of_the_critic_before_are_accepted_where_they_may_be(
    tiny_qwen3: Path, redis_url: str, tmp_path: Path, alone: None
) -> None:
    """One step of delay: step 2 has the values that the critic gave before step 1. It has two ranks."""
    config = service_config(tiny_qwen3, 1, tensor_parallel=2, micro_batch_tokens=96)
    job, loop = prepare_run(redis_url, 1, config, tmp_path / "run"), PlainLoop(config)
    metrics = train(job, loop)
    assert (metrics[1]["critic_step"], metrics[2]["critic_step"]) == (0, 0)
    assert (metrics[1]["value_staleness_max"], metrics[2]["value_staleness_max"]) == (0, 1)
    assert metrics[2]["revalued_groups"] == 0
