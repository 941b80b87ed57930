"""The stage of reference replicas on a real board, with a model that only knows its tokens."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from relaxd.board import (
    CANDIDATES,
    MEDIA_CONTENTS,
    PROMPT_MEDIA,
    REF_LOGPROBS,
    SEQUENCE_CONTENTS,
    SEQUENCE_MEDIA,
    STUDENT_CANDIDATES,
    TEACHER_CANDIDATE_LOGPROBS,
    Board,
    NewGroup,
    stages_for,
)
from relaxd.board.schema import OF_CONVERSATIONS
from relaxd.config import RunConfig
from relaxd.data.vision import read_vision
from relaxd.media.images import normalise_image
from relaxd.media.media_tokens import expand
from relaxd.media.prompt_media import StoredMedia, to_columns, to_sequence_columns
from services.trainer.batch.micro_batch import PackedMicroBatch
from services.trainer.megatron.rank_messages import decode, encode, parse
from services.trainer.reference_models.model_rank import Compute, ModelStage
from tests.kit.vision import encoded, picture, write_vision_model
from tests.kit.waiting import wait_until

BUDGET, VOCAB = 64, 260


REFERENCE = {"algorithm": {"kl_coef": 0.1}, "roles": {"reference": {"placement": "service"}}}
TEACHER = {
    "algorithm": {
        "name": "opd",
        "distill_coef": 0.0,
        "distill_loss_coef": 1.0,
        "distill_top_k": 3,
        "distill_candidates": "student",
    },
    "roles": {"teacher": {"model": "teacher"}},
}


@pytest.fixture
def board(request: pytest.FixtureRequest, redis_url: str) -> Iterator[Board]:
    config = RunConfig.model_validate(
        {
            "run": {"steps": 1},
            "model": {"path": "model"},
            "data": {"source": "addition"},
            "reward": {"name": "addition"},
            **getattr(request, "param", REFERENCE),
        }
    )
    board = Board(redis_url, "run", stages_for(config), config.board)
    board.create(term=1, groups_per_step=32, steps=1)
    board.set_gate(term=1, oldest_version=0, open=True)
    yield board
    board.close()


class Model:
    """The log-prob of a token is minus the token, divided by the position; remembers the rows that it got."""

    def __init__(self) -> None:
        self.passes: list[list[int]] = []

    def __call__(self, name: str, micro_batches: Sequence[PackedMicroBatch]) -> list[dict[str, NDArray[np.float32]]]:
        self.passes.append([len(batch.tokens) for batch in micro_batches])
        rows = [-batch.tokens / (1 + batch.positions) * batch.loss_mask for batch in micro_batches]
        return [{REF_LOGPROBS: row.astype(np.float32)} for row in rows]


def answer(
    board: Board,
    group_id: str,
    lengths: Sequence[int],
    prompt: int = 5,
    of_prompt: Mapping[str, Any] = MappingProxyType({}),
    **changes: Any,
) -> dict[str, Any]:
    """Publish a prompt and commit its answers. Returns them."""
    columns = {"prompt_tokens": np.arange(prompt, dtype=np.int32), "prompt": {"text": group_id}, **of_prompt}
    board.publish(term=1, groups=[NewGroup(group_id, columns, {})])
    (delivery,) = board.take("rollout", "engine", count=1, block_seconds=1.0)
    assert board.begin(delivery, 0)
    total = sum(lengths)
    generator = np.random.default_rng(total)
    columns = {
        "tokens": generator.integers(1, 250, total).astype(np.int32),
        "lengths": np.array(lengths, np.int32),
        "loss_mask": generator.integers(0, 2, total).astype(np.uint8),
        "rollout_logprobs": np.zeros(total, np.float32),
        "versions": np.zeros(total, np.int64),
        "finish": ["stop"] * len(lengths),
        "text": [""] * len(lengths),
        "spans_weight_update": np.zeros(len(lengths), np.uint8),
        "sample_of_sequence": np.arange(len(lengths), dtype=np.int32),
        "shares_prompt": np.ones(len(lengths), np.uint8),
    } | changes
    for index in np.flatnonzero(columns["shares_prompt"] == 0):
        columns["loss_mask"][sum(lengths[:index])] = 0  # a prompt of its own
    scored = {"reward": {"reward": np.ones(1), "reward_parts": {}}, "advantage": {"advantages": np.ones(total)}}
    assert board.commit([(delivery, columns)]) == [True]
    for stage, written in scored.items():
        (delivery,) = board.take(stage, "tester", count=1, block_seconds=1.0)
        assert board.commit([(delivery, written)]) == [True]
    return columns


def expected(columns: dict[str, Any], prompt: int = 5) -> NDArray[np.float32]:
    begins = np.where(columns["shares_prompt"], prompt, 0)
    positions = np.concatenate([begin + np.arange(n) for begin, n in zip(begins, columns["lengths"], strict=True)])
    return (-columns["tokens"] / (1 + positions) * columns["loss_mask"]).astype(np.float32)


def trained_columns(board: Board, count: int) -> dict[str, dict[str, Any]]:
    """The columns that a trainer gets of the next groups, by group id."""
    found = {}
    while len(found) < count:
        deliveries = board.take("train", "trainer", count=count, block_seconds=5.0)
        assert deliveries
        for delivery, columns in zip(deliveries, board.load(deliveries, board.needs("train")), strict=True):
            assert columns is not None
            found[delivery.group_id] = columns
    return found


def work(
    board: Board, model: Compute, groups: int, role: str = "reference", of_student: int = 0, **more: Any
) -> ModelStage:
    """Have a replica work until it has finished so many groups."""
    stage = ModelStage(
        board,
        role,
        f"{role}-1",
        model,
        temperature=1.0,
        micro_batch_tokens=BUDGET,
        of_student=of_student,
        **{"vocab_sizes": {"": VOCAB}, **more},
    )
    stage.worker.start()
    deadline = time.monotonic() + 30
    while stage.worker.done < groups and time.monotonic() < deadline:
        stage.run(0.05)
    stage.worker.stop()
    assert stage.worker.done == groups
    return stage


def test_every_token_gets_its_log_prob_whatever_shares_a_row_with_it(board: Board) -> None:
    groups = {
        ("small", 5): answer(board, "small", [3, 0, 4]),
        ("tiny", 5): answer(board, "tiny", [2]),
        ("branched", 5): answer(board, "branched", [6, 8], shares_prompt=np.array([1, 0], np.uint8)),
        ("large", 7): answer(board, "large", [50, 50, 40, 9, 1], prompt=7),
    }
    model = Model()
    stage = work(board, model, 4)
    found = trained_columns(board, 4)
    for (name, prompt), columns in groups.items():
        logprobs = found[name][REF_LOGPROBS]
        assert logprobs.dtype == np.float32
        np.testing.assert_array_equal(logprobs, expected(columns, prompt))
    # Several groups in one row, and no row or pass above the budget, however large the group.
    assert len(model.passes[0]) == 1
    assert sum(len(rows) for rows in model.passes) <= 6
    assert max(tokens for rows in model.passes for tokens in rows) <= BUDGET
    assert stage.turns >= len(model.passes)


def test_groups_leave_the_stage_in_the_order_in_which_they_came(board: Board) -> None:
    """A trainer's steps take groups in the order of their arrival."""
    names = [f"g{number}" for number in range(4)]
    for number, name in enumerate(names):
        answer(board, name, [9 - number])

    def model_of(columns: Mapping[str, Any]) -> str:
        time.sleep(0.2 if len(columns["tokens"]) == 9 else 0.0)
        return ""

    work(board, Model(), 4, model_of=model_of)
    assert list(trained_columns(board, 4)) == names


def test_what_cannot_be_computed_is_dropped_and_the_rest_is_not_lost(board: Board) -> None:
    answer(board, "long", [BUDGET])
    answer(board, "malformed", [4], loss_mask=np.ones(3, np.uint8))
    answer(board, "foreign", [4], tokens=np.array([1, VOCAB, 2, 3], np.int32))
    good = answer(board, "good", [4])
    work(board, Model(), 4)
    dropped = {one.group_id: one for one in board.dropped()}
    reasons = {"long": "too_long", "malformed": "malformed", "foreign": "no_logprobs"}
    assert {name: one.reason for name, one in dropped.items()} == reasons
    assert dropped["foreign"].detail == "it has token 260, but the reference has only 260 tokens"
    assert "raise roles.reference.micro_batch_tokens" in dropped["long"].detail
    np.testing.assert_array_equal(trained_columns(board, 1)["good"][REF_LOGPROBS], expected(good))
    assert board.counts().open == 1


def test_a_log_prob_that_is_not_finite_drops_its_group_and_no_other(board: Board) -> None:
    """It must not count as agreement."""
    tokens = np.array([1, 2, 255, 3, 4, 5, 6, 7, 8], np.int32)
    answer(board, "broken", [4, 5], tokens=tokens, loss_mask=np.ones(9, np.uint8))
    good = answer(board, "good", [4])

    def model(name: str, micro_batches: Sequence[PackedMicroBatch]) -> list[dict[str, NDArray[np.float32]]]:
        rows = Model()(name, micro_batches)
        for batch, row in zip(micro_batches, rows, strict=True):
            row[REF_LOGPROBS][batch.tokens == 255] = -np.inf
        return rows

    work(board, model, 2)
    (dropped,) = board.dropped()
    assert (dropped.group_id, dropped.reason) == ("broken", "no_logprobs")
    assert dropped.detail == "the reference gives 1 of its 9 tokens a log-prob that isn't finite"
    np.testing.assert_array_equal(trained_columns(board, 1)["good"][REF_LOGPROBS], expected(good))


def test_a_replica_holds_two_passes_worth_and_leaves_the_rest_to_others(board: Board) -> None:
    for number in range(20):
        answer(board, f"g{number}", [BUDGET // 2])
    stage = ModelStage(
        board, "reference", "reference-1", Model(), vocab_sizes={"": VOCAB}, temperature=1.0, micro_batch_tokens=BUDGET
    )
    stage.worker.start()
    wait_until(lambda: stage.worker.held >= 2)
    assert stage.run(1.0)  # now it knows how large a group is
    wait_until(lambda: stage.worker.done and stage.worker.held >= 3)
    assert stage.worker.held <= 4
    done = stage.worker.done
    assert stage.worker.drain(0.1) > 0
    assert len(board.take("reference", "other", count=20, block_seconds=1.0)) == 20 - done


@pytest.mark.parametrize("board", [TEACHER], indirect=True)
def test_the_students_candidates_come_to_the_model_beside_their_tokens_and_others_are_named(board: Board) -> None:
    """The model's log-prob of a candidate is minus its id."""

    def model(name: str, micro_batches: Sequence[PackedMicroBatch]) -> list[dict[str, NDArray[Any]]]:
        ids = [np.where(batch.loss_mask[:, None], batch.columns[STUDENT_CANDIDATES], -1) for batch in micro_batches]
        return [{CANDIDATES: row, TEACHER_CANDIDATE_LOGPROBS: -row.astype(np.float32)} for row in ids]

    wanted = {}
    for name, lengths in {"one": [3, 0, 4], "other": [6, 8]}.items():
        ids = np.arange(3 * sum(lengths), dtype=np.int32).reshape(-1, 3) + len(lengths)
        own_prompt = {"shares_prompt": np.array([1, 0], np.uint8)} if name == "other" else {}
        columns = answer(board, name, lengths, student_candidates=ids, **own_prompt)
        wanted[name] = np.where(columns["loss_mask"][:, None] != 0, ids, -1)
    wrong = {
        "narrow": (np.zeros((4, 2), np.int32), "is int32 [4, 2]: it must be integers [4, 3]"),
        "short": (np.zeros((3, 3), np.int32), "is int32 [3, 3]: it must be integers [4, 3]"),
        "fractions": (np.zeros((4, 3), np.float32), "is float32 [4, 3]: it must be integers [4, 3]"),
        "twice": (np.array([[1, 2, 3], [-1, -1, 4], [5, 6, 5], [7, 8, 9]]), "[2] is [5, 6, 5]: no token may be there"),
    }
    for name, (ids, _) in wrong.items():
        answer(board, name, [4], student_candidates=ids)
    work(board, model, 6, "teacher", of_student=3)
    dropped = {one.group_id: one for one in board.dropped()}
    assert dropped.keys() == wrong.keys()
    for name, (_, problem) in wrong.items():
        assert dropped[name].reason == "malformed"
        assert problem in dropped[name].detail
    for name, columns in trained_columns(board, 2).items():
        np.testing.assert_array_equal(columns[CANDIDATES], wanted[name])
        np.testing.assert_array_equal(columns[TEACHER_CANDIDATE_LOGPROBS], -wanted[name].astype(np.float32))


@pytest.mark.parametrize(
    "board", [{**REFERENCE, "data": {"source": "files", "path": "p", "media_keys": {"image": "i"}}}], indirect=True
)
def test_images_of_a_prompt_reach_the_model(board: Board, tmp_path: Path) -> None:
    vision = read_vision(write_vision_model(tmp_path))
    item = normalise_image(encoded(picture(64, 64)), vision.rule)
    media, contents = to_columns([item])
    prompt = expand([1, vision.tokens.token, 2], [item.size.grid], vision.tokens)
    given = {"prompt_tokens": prompt, PROMPT_MEDIA: media, MEDIA_CONTENTS: contents}
    answer(board, "g1", [3, 4], len(prompt), of_prompt=given)
    answer(board, "g2", [3], len(prompt), of_prompt={**given, "prompt_tokens": np.arange(6, dtype=np.int32)})
    seen: list[PackedMicroBatch] = []

    def model(name: str, micro_batches: Sequence[PackedMicroBatch]) -> list[dict[str, NDArray[np.float32]]]:
        seen.extend(decoded(micro_batches))
        return [{REF_LOGPROBS: np.zeros(len(batch.tokens), np.float32)} for batch in micro_batches]

    work(board, model, 2, media={"": vision.tokens}, vocab_sizes={"": vision.tokens.token + 1})
    (row,) = seen
    assert row.media is not None
    assert [one.sha256 for one in row.media.items] == [item.sha256]
    assert row.media.items[0].values.shape == (64, 64, 3)
    assert row.positions.shape == (3, len(row.tokens))


@pytest.mark.parametrize(
    "board",
    [{**REFERENCE, "data": {"source": "addition"}, "agent": {"environment": "zoom", "media": ["image"]}}],
    indirect=True,
)
def test_images_of_a_conversation_reach_the_model(board: Board, tmp_path: Path) -> None:
    vision = read_vision(write_vision_model(tmp_path))
    shown = StoredMedia.of(normalise_image(encoded(picture(64, 64)), vision.rule))
    token = vision.tokens.token
    media, contents = to_sequence_columns([[], [replace(shown, begin=1)]], [])
    tokens = np.array([1, token, 2, 3, *[token] * 4, 4], np.int32)
    mask = np.array([1, 1, 1, 0, 0, 0, 0, 0, 1], np.uint8)
    of_prompt = {PROMPT_MEDIA: [], MEDIA_CONTENTS: contents[:0]}
    of_conversations = dict.fromkeys(OF_CONVERSATIONS)
    given = {"tokens": tokens, "loss_mask": mask, SEQUENCE_MEDIA: media, SEQUENCE_CONTENTS: contents}
    answer(board, "g1", [3, 6], of_prompt=of_prompt, **of_conversations, **given)
    seen: list[PackedMicroBatch] = []

    def model(name: str, micro_batches: Sequence[PackedMicroBatch]) -> list[dict[str, NDArray[np.float32]]]:
        seen.extend(decoded(micro_batches))
        return [{REF_LOGPROBS: np.zeros(len(batch.tokens), np.float32)} for batch in micro_batches]

    work(board, model, 1, media={"": vision.tokens}, vocab_sizes={"": token + 1})
    (row,) = seen
    assert row.media is not None
    assert row.media.places.tolist() == [9, 10, 11, 12]
    assert row.media.items[0].sha256 == shown.sha256


def decoded(micro_batches: Sequence[PackedMicroBatch]) -> Any:
    """Micro-batches as another rank gets them."""
    text, *arrays = encode(micro_batches)
    return decode(parse(text)[0], arrays)
