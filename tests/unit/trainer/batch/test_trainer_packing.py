"""Packing: every token once, within the budget, clear refusals."""

import numpy as np
import pytest

from services.trainer.batch.micro_batch import (
    UNROUTED,
    PackingError,
    TrainSequence,
    empty_micro_batch,
    pack,
    with_padding,
)


def sample(prompt: int, response: int, **changes: object) -> TrainSequence:
    columns = {
        "rollout_logprobs": np.arange(response, dtype=np.float32),
        "advantages": changes.pop("advantages", np.full(response, 2.0, np.float32)),
    }
    values = {"loss_mask": np.ones(response, np.uint8), "weight": np.full(response, 0.5, np.float32), **changes}
    return TrainSequence.from_response(np.arange(prompt), np.arange(response), columns=columns, **values)


def test_pack_aligns_columns_with_the_tokens_they_are_about() -> None:
    batch = pack(
        [
            sample(3, 2),
            sample(1, 3, loss_mask=np.array([1, 0, 1], np.uint8), logprobs_comparable=False, temperature=0.5),
        ]
    )
    assert batch.tokens.tolist() == [0, 1, 2, 0, 1, 0, 0, 1, 2]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3]
    assert batch.cu_seqlens.tolist() == [0, 5, 9]
    assert batch.previous.tolist() == [-1, 0, 1, 2, 3, -1, 5, 6, 7]
    assert not batch.prefixes.any()
    assert batch.loss_mask.tolist() == [0, 0, 0, 1, 1, 0, 1, 0, 1]
    assert batch.logprobs_comparable.tolist() == [0, 0, 0, 1, 1, 0, 0, 0, 0]
    assert batch.columns["rollout_logprobs"].tolist() == [0, 0, 0, 0, 1, 0, 0, 1, 2]
    assert batch.temperature.tolist() == [1.0] * 5 + [0.5] * 4


def test_neighbours_share_a_prompt() -> None:
    samples = [sample(3, 2), sample(3, 0), sample(3, 3), sample(2, 1), sample(3, 1)]
    batch = pack(samples)
    assert batch.tokens.tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 0, 1, 0, 0, 1, 2, 0]
    assert batch.cu_seqlens.tolist() == [0, 5, 5, 8, 11, 15]
    assert batch.prefixes.tolist() == [[0, 0], [0, 3], [0, 3], [0, 0], [0, 0]]
    assert batch.previous.tolist() == [-1, 0, 1, 2, 3, 2, 5, 6, -1, 8, 9, -1, 11, 12, 13]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 3, 4, 5, 0, 1, 2, 0, 1, 2, 3]
    assert batch.columns["rollout_logprobs"].tolist() == [0, 0, 0, 0, 1, 0, 1, 2, 0, 0, 0, 0, 0, 0, 0]
    assert len(pack(samples, share_prompts=False).tokens) == sum(len(one.tokens) for one in samples)


def test_a_sequence_with_a_prompt_of_its_own_may_be_among_those_that_share_one() -> None:
    own = sample(0, 3, loss_mask=np.array([0, 0, 1], np.uint8))
    batch = pack([sample(3, 2), own, sample(3, 1)])
    assert batch.tokens.tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 0]
    assert batch.prefixes.tolist() == [[0, 0], [0, 0], [0, 3]]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3]
    assert batch.previous.tolist() == [-1, 0, 1, 2, 3, -1, 5, 6, 2]
    assert batch.loss_mask.tolist() == [0, 0, 0, 1, 1, 0, 0, 1, 1]
    assert batch.sequence_of_token.tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 2]
    with pytest.raises(PackingError, match="prompt is empty"):
        sample(0, 3)


def test_padding_is_a_sequence_of_its_own_without_effect() -> None:
    batch = with_padding(pack([sample(3, 2)]), 4)
    assert batch.cu_seqlens.tolist() == [0, 5, 8]
    assert batch.previous[5:].tolist() == [-1, 5, 6]
    assert batch.positions[5:].tolist() == [0, 1, 2]
    assert batch.loss_mask[5:].tolist() == [0, 0, 0]
    assert len(batch.tokens) == len(batch.temperature) == len(batch.weight) == 8
    assert with_padding(batch, 4) is batch
    assert empty_micro_batch(["advantages"]).loss_mask.sum() == 0


def test_experts_are_stored_with_their_tokens() -> None:
    first, second = np.arange(4 * 2 * 3).reshape(4, 2, 3), 50 + np.arange(5 * 2 * 3).reshape(5, 2, 3)
    batch = pack([sample(3, 2, experts=first), sample(3, 3, experts=second)])
    # Behind the prompt, which comes with the first: its own tokens but the last, then the second's own.
    assert batch.places_of(1).tolist() == [0, 1, 2, 5, 6, 7]
    assert batch.experts is not None
    assert batch.experts[:4].tolist() == first.tolist()
    assert batch.experts[5:7].tolist() == second[3:].tolist()
    assert (batch.experts[[4, 7]] == UNROUTED).all()
    padded = with_padding(batch, 5).experts
    assert padded is not None
    assert padded.shape == (10, 2, 3)
    assert (padded[8:] == UNROUTED).all()
    with pytest.raises(PackingError, match="experts has 4 rows: it must have 5, for all tokens but the last"):
        sample(3, 3, experts=first)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": 0}, "prompt is empty"),
        ({"advantages": np.zeros(3, np.float32)}, "advantages has 3 values for 2 response tokens"),
        ({"temperature": 0.0}, "temperature is 0.0: it must be positive"),
    ],
)
def test_samples_that_make_no_sense_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(PackingError, match=message):
        sample(int(changes.pop("prompt", 3)), 2, **changes)  # type: ignore[call-overload]


def test_micro_batches_that_make_no_sense_are_refused() -> None:
    with pytest.raises(PackingError, match="at least one sequence"):
        pack([])
