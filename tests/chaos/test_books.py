"""The auditor notices what is wrong, and says nothing when all is well."""

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import redis
from safetensors.numpy import save_file

from relaxd.board import Board
from relaxd.redis_client import key_prefix
from tests.chaos.__main__ import result_name
from tests.chaos.books import Books
from tests.chaos.memory import Sample, slope
from tests.kit.boards import STAGES, advance, group, make_board, take

PREFIX = key_prefix("run")


def train(
    board: Board, step: int, folder: Path, staleness: float = 0.0, *, skipped: bool = False, critic_skipped: float = 0.0
) -> list[str]:
    advance(board, ["rollout", "reward", "critic", "advantage"])
    deliveries = take(board, "train", "trainer", 2)
    ids = [delivery.group_id for delivery in deliveries]
    board.commit_step(
        term=board.trainer_term(),
        step=step,
        plan={"groups": ids, "skipped_updates": [0] if skipped else []},
        metrics={
            "staleness_max": staleness,
            "step_seconds": 0.5,
            "skipped_updates": float(skipped),
            "critic_step": step - 1,
            "value_skipped_updates": critic_skipped,
        },
    )
    tensors = {f"{id}/versions": np.full(3, step - 1, np.int64) for id in ids}
    tensors |= {f"{id}/loss_mask": np.ones(3, np.uint8) for id in ids}
    save_file(tensors, folder / "steps" / f"step-{step:06d}.safetensors")
    return ids


@pytest.fixture
def board(redis_url: str) -> Iterator[Board]:
    board = make_board(redis_url, groups_per_step=2, max_staleness=8)
    board.new_trainer_term()
    places = [f"0-{position:06d}" for position in range(8)]
    board.publish(term=1, groups=[group(place) for place in places], cursor={"epoch": 0, "position": 8})
    yield board
    board.close()


@pytest.fixture
def books(board: Board, redis_url: str, tmp_path: Path) -> Books:
    (tmp_path / "steps").mkdir()
    client = redis.Redis.from_url(redis_url)
    kept = Books(client, "run", tmp_path, max_staleness=1, groups_per_step=2)
    train(board, 1, tmp_path)
    train(board, 2, tmp_path)
    board.drop_groups(["0-000004"], term=1, reason="poison", retry=True)
    return kept


def test_good_books(board: Board, books: Books) -> None:
    assert books.audit() == []
    board.publish(term=1, groups=[group("0-000004~1", retry_of="0-000004")], cursor={"epoch": 0, "position": 8})
    train(board, 3, books.run_folder)
    assert books.audit() == []
    assert [step.number for step in books.steps] == [1, 2, 3]
    assert books.steps[0].committed - books.steps[0].began == pytest.approx(0.5)


def test_a_skipped_update_that_changes_nothing_is_in_order(board: Board, books: Books) -> None:
    train(board, 3, books.run_folder, skipped=True)
    assert books.audit() == []
    assert [step.skipped for step in books.steps] == [False, False, True]
    assert [step.updated_since(0.0) for step in books.steps] == [True, True, False]


def test_what_polling_finds_is_not_forgotten(books: Books) -> None:
    assert books.audit() == []
    train_old(books.client)
    books.poll()
    assert "step 3 trained tokens that were 2 versions old" in books.audit()


def test_what_is_delivered_again_is_counted(board: Board, books: Books) -> None:
    assert STAGES[-1].name == "train"
    held = take(board, "train", "somebody", 2)
    board.nack("train", "somebody", held[:1])  # as if it had not happened
    board.nack("train", "somebody", held[1:], failed=True)
    books.audit()
    assert books.recomputed == len(held[1:]) == 1


def lose(client: redis.Redis) -> None:
    client.srem(f"{PREFIX}open", "0-000006")


def lose_and_hide(client: redis.Redis) -> None:
    lose(client)
    client.hincrby(f"{PREFIX}state", "published", -1)


def strand(client: redis.Redis) -> None:
    client.hdel(f"{PREFIX}group:0-000006", "entry:rollout", "entry:reward", "entry:critic", "entry:advantage")
    client.hdel(f"{PREFIX}group:0-000006", "entry:train")


def reopen(client: redis.Redis) -> None:
    client.sadd(f"{PREFIX}open", "0-000000")


def train_twice(client: redis.Redis) -> None:
    fields = {"time": 1, "term": 1, "plan": json.dumps({"groups": ["0-000000", "0-000007"]})}
    client.xadd(f"{PREFIX}ledger", fields | {"metrics": '{"staleness_max": 0, "step_seconds": 1}'}, id="3-0")


def train_old(client: redis.Redis) -> None:
    fields = {"time": 1, "term": 1, "plan": json.dumps({"groups": ["0-000006", "0-000007"]})}
    client.xadd(f"{PREFIX}ledger", fields | {"metrics": '{"staleness_max": 2, "step_seconds": 1}'}, id="3-0")


def give_up(client: redis.Redis) -> None:
    fields = {"time": 1, "group": "0-000006", "reason": "stale", "retried": 0}
    client.xadd(f"{PREFIX}dropped", fields)


def forget_a_retry(client: redis.Redis) -> None:
    client.hdel(f"{PREFIX}retries", "0-000004")


def skip_a_step(client: redis.Redis) -> None:
    fields = {"time": 1, "term": 1, "plan": json.dumps({"groups": ["0-000006", "0-000007"]})}
    client.xadd(f"{PREFIX}ledger", fields | {"metrics": '{"staleness_max": 0, "step_seconds": 1}'}, id="4-0")


def forget_a_step(client: redis.Redis) -> None:
    client.xdel(f"{PREFIX}ledger", "2-0")


def skip_an_update(client: redis.Redis, checksum: float = 7.0, skipped: float = 1.0) -> None:
    """The steps before have no checksum: the weights seem to have changed."""
    plan = {"groups": ["0-000006", "0-000007"], "skipped_updates": [0]}
    metrics = {"staleness_max": 0, "step_seconds": 1, "skipped_updates": skipped, "weights_checksum": checksum}
    fields = {"time": 1, "term": 1, "plan": json.dumps(plan), "metrics": json.dumps(metrics)}
    client.xadd(f"{PREFIX}ledger", fields, id="3-0")


def skip_in_secret(client: redis.Redis) -> None:
    skip_an_update(client, skipped=0.0)


def train_again(client: redis.Redis) -> None:
    metrics = '{"staleness_max": 0, "step_seconds": 1, "optimizer_steps": 4}'
    fields = {"time": 1, "term": 1, "plan": json.dumps({"groups": ["0-000006", "0-000007"]})}
    client.xadd(f"{PREFIX}ledger", fields | {"metrics": metrics}, id="3-0")


def miscount(client: redis.Redis) -> None:
    client.hincrby(f"{PREFIX}drops", "poison", 1)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lose, "published = open"),
        (lose_and_hide, "1 groups of epoch 0 are lost"),
        (strand, "is at no stage"),
        (reopen, "both trained and open"),
        (train_twice, "0-000000 was trained in step 1 and in step 3"),
        (train_old, "step 3 trained tokens that were 2 versions old"),
        (skip_a_step, "step 4 follows step 2"),
        (forget_a_step, "the ledger has 1 of 2 steps"),
        (miscount, "drops by reason"),
        (skip_an_update, "all updates of step 3 were skipped, and the weights have changed"),
        (skip_in_secret, "step 3 has other skipped updates in its metrics than in its plan"),
        (train_again, "the trainer had made 4 updates after step 3, but the ledger has 3"),
        (give_up, "0-000006 is lost: stale, and not tried again"),
        (forget_a_retry, "0-000004 is lost: nobody tries it again"),
    ],
)
def test_wrong_books(books: Books, damage: Callable[[redis.Redis], None], said: str) -> None:
    assert books.audit() == []
    damage(books.client)
    assert any(said in wrong for wrong in books.audit()), books.audit()


def test_step_files_are_believed_rather_than_metrics(board: Board, books: Books) -> None:
    path = books.run_folder / "steps" / "step-000002.safetensors"
    path.unlink()
    ids = [id for id, step in _trained(books).items() if step == 2]
    tensors = {f"{id}/versions": np.full(3, -1, np.int64) for id in ids}
    save_file(tensors | {f"{id}/loss_mask": np.ones(3, np.uint8) for id in ids}, path)
    assert books.audit() == ["step 2 trained tokens of version -1"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, []),
        ({"optimizer_steps": 3}, ["step-000002: updates: 3, but by the ledger 2"]),
        ({"schedule": 1}, ["step-000002: steps that have trained the policy: 1, but by the ledger 2"]),
        ({"critic_schedule": 3}, ["step-000002: steps that have trained the critic: 3, but by the ledger 2"]),
        ({"critic_step": 1}, ["step-000002: the critic's step: 1, but by the ledger 2"]),
    ],
)
def test_policy_and_critic_of_a_checkpoint_have_trained_every_step_once(
    books: Books, change: dict[str, int], said: list[str]
) -> None:
    found = {"optimizer_steps": 2, "schedule": 2, "critic_schedule": 2, "critic_step": 2} | change
    folder = books.run_folder / "checkpoints" / "step-000002"
    folder.mkdir(parents=True)
    critic = {"step": found["critic_step"], "schedule": {"num_steps": found["critic_schedule"]}}
    policy = {"schedule": {"num_steps": found["schedule"]}}
    state = {"optimizer_steps": found["optimizer_steps"], "policy": policy, "critic": critic}
    (folder / "common.json").write_text(json.dumps(state))
    assert books.audit() == said


@pytest.mark.parametrize(
    ("steps", "skipped", "said"),
    [(2, 0, []), (1, 0, ["1, but by the ledger 2"]), (1, 1, []), (3, 1, ["3, but by the ledger 2"])],
)
def test_a_critic_service_has_trained_every_step_once(
    board: Board, books: Books, steps: int, skipped: int, said: list[str]
) -> None:
    folder = books.run_folder / "critic" / "checkpoints" / "step-000002"
    folder.mkdir(parents=True)
    (folder / "common.json").write_text(json.dumps({"policy": {"schedule": {"num_steps": steps}}}))
    wrong = "critic/step-000002: steps that have trained the critic: "
    assert books.audit() == [], "what it skipped in step 2 isn't known yet"
    board.publish(term=1, groups=[group("0-000004~1", retry_of="0-000004")], cursor={"epoch": 0, "position": 8})
    train(board, 3, books.run_folder, critic_skipped=skipped)
    assert books.audit() == [wrong + text for text in said]


def _trained(books: Books) -> dict[str, int]:
    other = Books(books.client, "run", books.run_folder, 8, 2)
    other.audit()
    return other.trained


def test_slope_of_memory_over_lives() -> None:
    rng = np.random.default_rng(0)
    samples = [
        Sample(5.0 * i + 4000 * life, (life, 0.0), 100.0 * life + 6.0 * (5.0 * i / 3600) + rng.normal(0, 0.1))
        for life in range(3)
        for i in range(400)
    ]
    found = slope(samples)
    assert found is not None
    assert found.megabytes_per_hour == pytest.approx(6.0, abs=4 * found.error)
    assert 0 < found.error < 0.1
    assert slope(samples[:5]) is None


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({}, "chaos"),
        ({"minutes": 60.0}, "soak"),
        ({"algorithm": "ppo"}, "chaos-ppo"),
        ({"algorithm": "critic", "roles": "teacher,critic"}, "chaos-critic-roles-critic-teacher"),
        ({"roles": "critic"}, "chaos-roles-critic"),
        ({"columns": "large"}, "chaos-large-columns"),
        ({"redis": "sentinel", "columns": "large"}, "chaos-sentinel-large-columns"),
        ({"only": ["kill -9: trainer"], "minutes": 5.0}, "soak-only"),
    ],
)
def test_each_combination_of_algorithm_and_faults_has_results_of_its_own(given: dict, name: str) -> None:
    plain = {"minutes": 0.0, "algorithm": "grpo", "columns": "small", "redis": "single", "roles": "", "only": []}
    assert result_name(argparse.Namespace(**{**plain, **given})) == name
