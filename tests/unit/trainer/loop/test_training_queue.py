"""Which groups a step gets, which are too old, when it may close: the rules, and on a real board."""

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relaxd.algorithms import create
from relaxd.board import STAGES, Board, Delivery, Fenced
from relaxd.config import GRPOConfig, RunConfig
from relaxd.roles import CRITIC, REFERENCE
from services.trainer.batch.groups import MalformedGroup, RoutingShape, TrainGroup, check_group
from services.trainer.loop.training_queue import (
    DeliveredGroup,
    ReceiptCheck,
    TrainingQueue,
    choose,
    due_groups,
    may_close,
    written_by,
)
from tests.integration.trainer.service_kit import Feeder, make_config, train_group
from tests.kit.cases import each


def taken(group_id: str, arrival: int) -> DeliveredGroup:
    return DeliveredGroup(Delivery(group_id, "1-0", "train", "t", 1, {}, 0, {}), TrainGroup(group_id, {}), arrival)


def ids(chosen: list[DeliveredGroup]) -> list[str]:
    return [one.group.group_id for one in chosen]


@pytest.mark.parametrize(
    ("step", "max_staleness", "due"),
    [(1, 0, {"a"}), (1, 1, set()), (2, 1, {"a"}), (3, 1, {"a", "b"}), (3, 2, {"a"}), (4, 1, {"a", "b", "c"})],
)
def test_due_is_what_the_next_step_could_not_train(step: int, max_staleness: int, due: set[str]) -> None:
    assert due_groups(step, max_staleness, {"a": 0, "b": 1, "c": 2}) == due


def test_places_are_kept_for_groups_that_are_due() -> None:
    ready = [taken("new", 1), taken("newer", 2), taken("due", 3)]
    assert ids(choose(ready, [], [], 2)) == ["new", "newer"]
    assert ids(choose(ready, [], ["due"], 2)) == ["due", "new"]
    assert ids(choose(ready, [], ["due", "slow"], 2)) == ["due"]
    assert ids(choose(ready, ["x"], ["x", "slow"], 2)) == []
    # More are due than a step has places: all of them, rather than throw one away.
    assert ids(choose(ready, [], ["new", "newer", "due"], 2)) == ["new", "newer", "due"]


def test_a_step_closes_when_it_is_full_and_nothing_is_due() -> None:
    assert not may_close(["a"], [], 2)
    assert may_close(["a", "b"], ["a"], 2)
    assert not may_close(["a", "b"], ["slow"], 2)
    assert may_close(["a", "b", "slow"], ["slow"], 2)


class Trainer:
    """An intake on a real board, and who feeds it."""

    def __init__(self, redis_url: str, config: RunConfig) -> None:
        self.feeder = Feeder(redis_url, config)
        self.board = self.feeder.board
        self.board.new_trainer_term()
        self.intake = TrainingQueue(self.board, "trainer", config)

    def take_all(self, step: int = 1) -> None:
        while self.intake.take(step, 0.05):
            pass


@pytest.fixture
def trainer(request: pytest.FixtureRequest, redis_url: str) -> Iterator[Trainer]:
    board = {"lease_seconds": 0.8} | request.param
    made = Trainer(redis_url, make_config(Path("model"), board=board, weights=board.pop("weights", {})))
    yield made
    made.intake.close()
    made.board.close()


on_policy = pytest.mark.parametrize("trainer", [{"max_staleness": 0}], indirect=True)
one_off = pytest.mark.parametrize("trainer", [{"max_staleness": 1}], indirect=True)


@on_policy
def test_on_policy_takes_only_the_current_version(trainer: Trainer) -> None:
    trainer.feeder.feed(2, 0)
    trainer.take_all()
    selection = trainer.intake.select(1, [])
    assert ids(selection.chosen) == ["g1", "g2"]
    assert selection.may_close
    selection = trainer.intake.select(2, [])
    assert not selection.chosen
    assert trainer.board.counts().dropped_by_reason == {"stale": 2}
    assert trainer.intake.held == 0
    assert [retry.group_id for retry in trainer.board.retries()] == ["g1", "g2"]


@one_off
def test_a_slow_group_keeps_its_place_until_it_comes(trainer: Trainer) -> None:
    trainer.feeder.publish()
    slow = trainer.feeder.begin(1, 0)
    trainer.feeder.feed(3, 1)
    trainer.take_all()
    selection = trainer.intake.select(2, [])
    assert ids(selection.chosen) == ["g2"]
    assert not selection.may_close
    trainer.feeder.finish(slow, 0)
    trainer.take_all()
    selection = trainer.intake.select(2, ["g2"])
    assert ids(selection.chosen) == ["g1"]
    assert selection.may_close


@one_off
def test_what_is_masked_may_be_old(trainer: Trainer) -> None:
    versions = np.array([0, 0, 5, 5, 5, 5] * 2)
    trainer.feeder.feed(1, 5, versions=versions, loss_mask=(versions > 0).astype(np.uint8))
    trainer.take_all()
    assert ids(trainer.intake.select(6, []).chosen) == ["g1"]


@one_off
def test_holds_are_renewed_and_lost_groups_noticed(trainer: Trainer) -> None:
    trainer.feeder.feed(2, 0)
    trainer.take_all()
    end = time.monotonic() + 1.2  # longer than a lease
    while time.monotonic() < end:
        assert not trainer.board.take("train", "another", count=5, block_seconds=0.1)
    assert trainer.intake.lost(["g1", "g2"]) == []
    assert trainer.board.drop_groups(["g2"], term=1, reason="stopped")
    assert trainer.intake.lost(["g1", "g2"]) == ["g2"]
    trainer.intake.release_all()
    assert [d.group_id for d in trainer.board.take("train", "another", count=5, block_seconds=1.0)] == ["g1"]


@one_off
def test_a_group_that_comes_again_while_leases_are_renewed_is_held(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    renewed, renew = threading.Event(), trainer.board.renew
    held: list[str] = []

    def come_again(stage: str, consumer: str, deliveries: Sequence[Delivery]) -> set[str]:
        if held:  # the second renewal, if there is anything to renew
            renewed.set()
        else:
            trainer.board.nack(stage, consumer, deliveries)
            assert trainer.intake.take(1, 1.0)
            held.append("g1")
        return renew(stage, consumer, deliveries)

    trainer.feeder.feed(1, 0)
    trainer.take_all()
    monkeypatch.setattr(trainer.board, "renew", come_again)
    assert renewed.wait(5.0)
    assert trainer.intake.held == 1
    assert trainer.intake.lost(["g1"]) == []


@one_off
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rollout_logprobs": np.full(12, np.nan, np.float32)}, "malformed"),
        ({"tokens": np.arange(11, dtype=np.int32)}, "malformed"),
        ({"text": "no list"}, "malformed"),
        ({"length": 60}, "too_long"),
    ],
)
def test_what_cannot_be_trained_is_dropped(trainer: Trainer, changes: dict[str, Any], reason: str) -> None:
    trainer.feeder.feed(1, 0, **changes)
    trainer.feeder.feed(1, 0)
    trainer.take_all()
    assert trainer.board.counts().dropped_by_reason == {reason: 1}
    assert ids(trainer.intake.select(1, []).chosen) == ["g2"]


def test_a_teacher_that_gives_another_number_of_candidates_is_named_with_both(redis_url: str) -> None:
    distilled = {"name": "opd", "distill_coef": 0.0, "distill_loss_coef": 1.0, "distill_top_k": 2}
    config = make_config(Path("model"), algorithm=distilled, roles={"teacher": {"model": "teacher"}})
    trainer = Trainer(redis_url, config)
    trainer.feeder.feed(2, 0)
    for width, delivery in zip((3, 2), trainer.board.take("teacher", "t", count=2, block_seconds=1.0), strict=True):
        shape = (config.rollout.samples_per_prompt * 6, width)
        given = {"candidates": np.zeros(shape, np.int32), "teacher_candidate_logprobs": np.zeros(shape, np.float32)}
        assert trainer.board.commit([(delivery, given)]) == [True]
    trainer.take_all()
    (dropped,) = trainer.board.dropped()
    assert (dropped.group_id, dropped.reason) == ("g1", "malformed")
    assert "candidates 3 and teacher_candidate_logprobs 3 candidates" in dropped.detail
    assert "must have 2" in dropped.detail
    assert ids(trainer.intake.select(1, []).chosen) == ["g2"]
    trainer.intake.close()
    trainer.board.close()


NAMES = STAGES["train"].needs


def columns() -> dict[str, Any]:
    return {
        "prompt_tokens": np.arange(1, 4, dtype=np.int32),
        "prompt": {"text": "p"},
        "tokens": np.arange(5, dtype=np.int32),
        "sample_of_sequence": np.arange(2, dtype=np.int32),
        "lengths": np.array([2, 3], np.int32),
        "shares_prompt": np.ones(2, np.uint8),
        "loss_mask": np.array([1, 1, 0, 1, 1], np.uint8),
        "rollout_logprobs": np.zeros(5, np.float32),
        "versions": np.array([4, 4, 1, 3, 4]),
        "finish": ["stop", "stop"],
        "text": ["a", "b"],
        "spans_weight_update": np.zeros(2, np.uint8),
        "reward": np.zeros(2),
        "reward_parts": {},
        "advantages": np.zeros(5, np.float32),
    }


def test_a_group_knows_its_sizes_and_versions() -> None:
    group = check_group("g", columns(), NAMES)
    assert group.sequence_tokens == [5, 6]
    assert group.trained_tokens == 4
    assert group.oldest_version == 3
    assert check_group("g", columns() | {"loss_mask": np.zeros(5, np.uint8)}, NAMES).oldest_version is None


def test_a_group_of_more_sequences_than_samples_knows_its_sizes() -> None:
    changes = {
        "sample_of_sequence": np.zeros(2, np.int32),
        "shares_prompt": np.array([1, 0], np.uint8),
        "reward": np.zeros(1),
    }
    group = check_group("g", columns() | changes, NAMES)
    assert (group.samples, group.sample_lengths.tolist(), group.sequence_tokens) == (1, [5], [5, 3])


def test_optional_columns_are_checked_where_the_run_has_them() -> None:
    names = (*NAMES, "ref_logprobs")
    with pytest.raises(MalformedGroup, match="column ref_logprobs is missing"):
        check_group("g", columns(), names)
    with pytest.raises(MalformedGroup, match="ref_logprobs is NaN or infinite at a trained token"):
        check_group("g", columns() | {"ref_logprobs": np.full(5, np.nan, np.float32)}, names)
    assert "ref_logprobs" not in check_group("g", columns() | {"ref_logprobs": None}, NAMES).columns


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((5, 4), (5, 4)), "candidates 4 and teacher_candidate_logprobs 4 candidates: .* must have 3"),
        (((5, 3), (5, 4)), "candidates 3 and teacher_candidate_logprobs 4 candidates: .* must have 3"),
        (((4, 3), (5, 3)), "candidates has 4 values for 5 response tokens"),
        (((5, 3), (6, 3)), "teacher_candidate_logprobs has 6 values for 5 response tokens"),
    ],
)
def test_candidates_of_another_number_or_length_are_named(shapes: Any, message: str) -> None:
    ids, logprobs = (np.zeros(shape, dtype) for shape, dtype in zip(shapes, (np.int32, np.float32), strict=True))
    given = columns() | {"candidates": ids, "teacher_candidate_logprobs": logprobs}
    with pytest.raises(MalformedGroup, match=message):
        check_group("g", given, (*NAMES, "candidates", "teacher_candidate_logprobs"), candidates=3)


ROUTING = RoutingShape(layers=2, top_k=3, experts=300)


def test_routed_experts_are_those_of_each_sequence_and_kept_narrow() -> None:
    names = (*NAMES, "routed_experts")
    experts = np.arange((4 + 5) * 2 * 3, dtype=np.int32).reshape(9, 2, 3)
    for given, dtype in ((experts, np.uint8), (experts + 240, np.uint16)):
        group = check_group("g", columns() | {"routed_experts": given}, names, ROUTING)
        assert group.columns["routed_experts"].dtype == dtype
        first, second = group.sequences([0, 1], ["advantages", "routed_experts"], create(GRPOConfig()), 1.0, None)
        for sequence, rows in ((first, given[:4]), (second, given[4:])):
            assert sequence.experts is not None
            assert sequence.experts.tolist() == [*rows.tolist(), [[-1] * 3] * 2]
            assert sequence.columns.keys() == {"advantages"}
    own_prompt = columns() | {"shares_prompt": np.array([1, 0], np.uint8), "routed_experts": experts[: 4 + 2]}
    assert check_group("g", own_prompt, names, ROUTING).routed_tokens == [4, 2]


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        (np.zeros((8, 2, 3), np.uint8), "routed_experts has 8 rows: it must have 9, one for each token of prompt and"),
        (
            np.zeros((9, 4, 3), np.uint8),
            r"has \[4, 3\] experts for each token: the model has \[layers, top_k\] = \[2, 3\]",
        ),
        (np.full((9, 2, 3), 300, np.int32), "numbers from 300 to 300: the model's experts are 0 to 299"),
        (np.full((9, 2, 3), -1, np.int32), "numbers from -1 to -1: the model's experts are 0 to 299"),
        (np.zeros((9, 2, 3), np.float32), r"routed_experts must be an array of integers \[rows, layers, top_k\]"),
        ([], "routed_experts must be an array of integers"),
    ],
)
def test_routed_experts_that_do_not_fit_are_named(experts: Any, message: str) -> None:
    with pytest.raises(MalformedGroup, match=message):
        check_group("g", columns() | {"routed_experts": experts}, (*NAMES, "routed_experts"), ROUTING)


@each(
    ("name", "value", "message"),
    [
        ("prompt_tokens", np.zeros(0, np.int32), "prompt_tokens is empty"),
        ("lengths", np.array([-1, 6], np.int32), "lengths is"),
        ("lengths", np.array([2, 2], np.int32), "tokens has 5 values for 4 response tokens"),
        ("spans_weight_update", np.zeros(3, np.uint8), "spans_weight_update has 3 values for 2 sequences"),
        ("reward", [0.0, 1.0], "reward is list"),
        ("advantages", np.array([0, 0, 0, np.inf, 0], np.float32), "advantages is NaN or infinite"),
        ("versions", np.zeros(5, np.float32), "versions is float32"),
        ("finish", ["stop"], "finish must be a list of 2"),
        (
            "sample_of_sequence",
            np.array([1, 0], np.int32),
            r"sample_of_sequence is \[1, 0\]: it must ascend",
        ),
        ("sample_of_sequence", np.array([0, 0], np.int32), "at least one sequence for each of the 2 samples"),
        ("sample_of_sequence", np.array([0, 2], np.int32), "sample_of_sequence is"),
        ("sample_of_sequence", np.array([0, 0, 1], np.int32), "sample_of_sequence has 3 values for 2 sequences"),
        ("shares_prompt", np.array([1], np.uint8), "shares_prompt has 1 values for 2 sequences"),
        ("shares_prompt", np.array([0, 1], np.uint8), "sequence 0 has shares_prompt 0, so it must begin with a prompt"),
        ("reward", np.zeros(3), "it must ascend from 0 to 2"),
    ],
)
def test_columns_that_do_not_fit_are_named(name: str, value: Any, message: str) -> None:
    with pytest.raises(MalformedGroup, match=message):
        check_group("g", columns() | {name: value}, NAMES)
    # What nobody trains on may be anything.
    check_group("g", columns() | {"advantages": np.array([0, 0, np.nan, 0, 0], np.float32)}, NAMES)


@one_off
def test_choosing_groups_doesnt_read_their_tokens_again(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer chooses whenever groups have come, and has all groups of a step and of the next one by then."""
    trainer.feeder.feed(2, 0)
    trainer.take_all()

    def read(group: TrainGroup) -> None:
        raise AssertionError(f"the tokens of {group.group_id} are read")

    monkeypatch.setattr(TrainGroup, "trained_versions", property(read))
    assert ids(trainer.intake.select(1, []).chosen) == ["g1", "g2"]


# --- values of a critic service -------------------------------------------------------------------------------------


def value(board: Board, step: int) -> int:
    """Give values to what waits for the critic, as one that has seen `step` steps. Returns the number of groups."""
    waiting = board.take("critic", "critic", count=9, block_seconds=0.1)
    state = {"step": step, "metrics": {}}
    for delivery, columns in zip(waiting, board.load(waiting, ["tokens"]), strict=True):
        assert columns is not None
        values = np.full(len(columns["tokens"]), step, np.float32)
        assert board.commit([(delivery, {"values": values, "critic_state": state})]) == [True]
    return len(waiting)


def test_groups_with_old_values_go_back_to_the_critic_and_come_again(redis_url: str) -> None:
    config = make_config(
        Path("model"), algorithm={"name": "ppo"}, roles={"critic": {"placement": "service"}}, board={"max_staleness": 9}
    )
    trainer = Trainer(redis_url, config)
    trainer.feeder.feed(3, 0)
    assert value(trainer.board, 0) == 3
    trainer.take_all()
    assert ids(trainer.intake.select(1, []).chosen) == ["g1", "g2"]
    assert ids(trainer.intake.select(2, ["g1"]).chosen) == ["g2"]  # one step old: as it may be
    assert trainer.intake.take_redone(CRITIC) == 0

    assert not trainer.intake.select(3, ["g1"]).chosen  # what the step has already stays
    assert trainer.intake.take_redone(CRITIC) == 2
    assert trainer.intake.take_redone(CRITIC) == 0
    assert trainer.intake.held == 1
    assert value(trainer.board, 2) == 2
    trainer.take_all()
    chosen = trainer.intake.select(3, ["g1"]).chosen
    assert ids(chosen) == ["g2"]
    assert [(one.critic_step, set(one.group.columns["values"])) for one in chosen] == [(2, {2.0})]
    assert trainer.board.counts().dropped == 0
    trainer.intake.close()
    trainer.board.close()


@pytest.mark.parametrize("state", [None, {"metrics": {}}, {"step": "1", "metrics": {}}, {"step": 1, "metrics": []}])
def test_a_critic_that_does_not_say_what_it_is_gives_no_values(state: Any) -> None:
    with pytest.raises(MalformedGroup, match=r"critic_state is .*: it must be"):
        check_group("g", columns_of_a_group() | {"critic_state": state}, ("critic_state",))


def columns_of_a_group() -> dict[str, Any]:
    return {
        "prompt_tokens": np.arange(2),
        "lengths": np.array([3]),
        "reward": np.ones(1),
        "sample_of_sequence": np.zeros(1, np.int32),
        "shares_prompt": np.ones(1, np.uint8),
        "loss_mask": np.ones(3, np.uint8),
    }


# --- a reference service that takes over weights ---------------------------------------------------------------------


def score(board: Board, weights: str) -> int:
    """Score what waits for the reference, as one with these weights. Returns the number of groups."""
    waiting = board.take("reference", "reference", count=9, block_seconds=0.1)
    for delivery, columns in zip(waiting, board.load(waiting, ["tokens"]), strict=True):
        assert columns is not None
        logprobs = np.zeros(len(columns["tokens"]), np.float32)
        assert board.commit([(delivery, {"ref_logprobs": logprobs, "reference_weights": weights})]) == [True]
    return len(waiting)


def test_groups_that_were_scored_with_other_weights_go_back_to_the_reference(redis_url: str) -> None:
    """Also those that a replica scored before it had heard of the newer weights, however often."""
    config = make_config(
        Path("model"),
        algorithm={"kl_coef": 0.1},
        roles={"reference": {"placement": "service", "refresh_every": 2}},
        board={"max_staleness": 9},
    )
    trainer = Trainer(redis_url, config)
    trainer.feeder.feed(3, 0)
    assert score(trainer.board, "") == 3
    trainer.take_all()
    assert ids(trainer.intake.select(1, []).chosen) == ["g1", "g2"]
    for _ in range(2):
        assert not trainer.intake.select(3, ["g1"], "step-000002.1").chosen
        assert trainer.intake.take_redone(REFERENCE) == 2
        assert score(trainer.board, "") == 2
        trainer.take_all()
    assert not trainer.intake.select(3, ["g1"], "step-000002.1").chosen
    assert score(trainer.board, "step-000002.1") == 2
    trainer.take_all()
    assert ids(trainer.intake.select(3, ["g1"], "step-000002.1").chosen) == ["g2"]
    assert trainer.intake.take_redone(CRITIC) == 0
    trainer.intake.close()
    trainer.board.close()


with_receipts = pytest.mark.parametrize(
    "trainer", [{"max_staleness": 1, "weights": {"verify": "always"}}], indirect=True
)


@with_receipts
def test_groups_of_weights_that_were_never_sent_are_dropped_and_tried_again(trainer: Trainer) -> None:
    """The digest of each of the weights that wrote a group must be one that was sent as their version."""
    board, feed = trainer.board, trainer.feeder.feed
    for version, digest in ((0, "aa"), (1, "bb"), (1, "bb"), (1, "cc")):  # two terms sent a version 1
        board.record_weights(term=1, version=version, digest=digest)
    assert board.sent_weights() == {0: ["aa"], 1: ["bb", "cc"]}
    halves = np.repeat([0, 1, 1, 1], 3)
    both, own = [(0, "aa", "rollout-0"), (1, "cc", "rollout-1")], [(1, "bb", "rollout-0")]
    feed(1, 1, versions=halves, weight_receipts=[both, own])
    trainer.take_all()
    assert trainer.intake.held == 1
    feed(1, 1, weight_receipts=[own, [(1, "dd", "rollout-1")]])
    feed(1, 1, weight_receipts=[own, [(1, "aa", "rollout-1")]])
    feed(1, 1, weight_receipts=[own, [(1, "", "rollout-1")]])
    feed(1, 1, versions=halves, weight_receipts=[own, own])
    feed(1, 1, weight_receipts=[own, [1, "bb"]])
    trainer.take_all()
    assert trainer.intake.held == 1
    assert board.counts().dropped_by_reason == {"wrong_weights": 5}
    wrote = "rollout-1 wrote tokens of version 1"
    assert [one.detail for one in reversed(board.dropped())] == [
        f"{wrote} with weights of digest dd, which no trainer of this run has sent",
        f"{wrote} with weights of digest aa, which was sent as version 0",
        f"{wrote}, but doesn't know the digest of its weights",
        "sample 0 has tokens of version 0, but no receipt for it",
        "weight_receipts must have [version, digest, engine] for each of a sample's weights",
    ]
    assert [retry.group_id for retry in board.retries()] == [f"g{number}" for number in range(2, 7)]
    # What was sent is looked up again before a group is refused.
    board.record_weights(term=1, version=2, digest="ee")
    feed(1, 2, weight_receipts=[[(2, "ee", "rollout-0")]] * 2)
    trainer.take_all()
    assert trainer.intake.held == 2


@with_receipts
def test_receipts_for_weights_that_are_too_old_are_not_compared(trainer: Trainer) -> None:
    """The coordinator forgets the digests of versions that no step trains on any more."""
    board, feed = trainer.board, trainer.feeder.feed
    for version in range(4):
        board.record_weights(term=1, version=version, digest=f"d{version}")
    for step in (1, 2, 3):
        board.commit_step(term=1, step=step, plan={"groups": []}, metrics={})
    assert board.forget_weights(term=1, before=2) == 2
    assert board.forget_weights(term=1, before=2) == 0
    assert board.sent_weights() == {2: ["d2"], 3: ["d3"]}
    of = lambda version: (version, f"d{version}", "rollout-0")  # noqa: E731
    mixed, masked = np.repeat([1, 2, 3, 3], 3), np.repeat([0, 1, 1, 1], 3).astype(np.uint8)
    feed(1, 2, versions=mixed, loss_mask=masked, weight_receipts=[[of(1), of(2)], [of(3)]])
    feed(1, 1, weight_receipts=[[of(1)]] * 2)
    feed(1, 2, weight_receipts=[[(2, "xx", "rollout-0")]] * 2)
    trainer.take_all(4)
    assert ids(trainer.intake.select(4, []).chosen) == ["g1"]
    assert board.counts().dropped_by_reason == {"stale": 1, "wrong_weights": 1}
    since = "which no trainer of this run has sent since version 2"
    assert [one.detail for one in board.dropped() if one.detail] == [
        f"rollout-0 wrote tokens of version 2 with weights of digest xx, {since}"
    ]
    board.create(term=2, groups_per_step=2, steps=9)
    with pytest.raises(Fenced):
        board.forget_weights(term=1, before=3)


def test_engines_that_take_no_checksums_say_that_the_digest_is_unknown() -> None:
    unknown = [[(4, "", "rollout-0")]] * 2
    assert ReceiptCheck(dict, may_be_unknown=True).problem(train_group(4, unknown), 0) == ""
    assert ReceiptCheck(dict, may_be_unknown=False).problem(train_group(4, unknown), 0)


def test_weights_count_only_where_they_wrote_tokens_that_are_trained() -> None:
    columns = {
        "sample_of_sequence": np.array([0, 0, 1]),
        "lengths": np.array([2, 1, 3]),
        "versions": np.array([5, 6, 6, 7, 8, 7]),
        "loss_mask": np.array([1, 1, 1, 1, 0, 1]),
    }
    assert written_by(TrainGroup("g", columns)) == {(0, 5), (0, 6), (1, 7)}
