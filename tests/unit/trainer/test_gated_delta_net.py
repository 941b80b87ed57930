"""The gated delta rule of packed sequences against the recurrence of one sequence after the other, in float64."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from relaxd.board import ADVANTAGES
from services.trainer.batch.micro_batch import PackedMicroBatch, TrainSequence, pack, with_padding
from services.trainer.transformer.gated_delta_net import causal_convolution, gated_delta_rule, unit
from services.trainer.transformer.sequence_layout import CHUNK, chunk_tree

CPU = torch.device("cpu")
HEADS, SHARED, KEY, VALUE = 2, 3, 8, 5


def packed(*lengths: tuple[int, int, int]) -> PackedMicroBatch:
    """Sequences of a prompt's number, its length and the response's."""
    sequences = []
    for number, prompt, response in lengths:
        tokens = np.concatenate([np.random.default_rng(number).integers(0, 99, prompt), np.arange(response)])
        mask = np.concatenate([np.zeros(prompt), np.ones(response)]).astype(np.uint8)
        ones = np.ones(prompt + response, np.float32)
        sequences.append(TrainSequence(tokens, mask, {ADVANTAGES: ones}, ones, mask, prompt_length=prompt))
    return with_padding(pack(sequences), 4)


BATCHES = {
    "one token": packed((1, 1, 1)),
    "short": packed((1, 3, 2), (2, 4, 7)),
    "chunks": packed((1, CHUNK, CHUNK), (2, 1, 3 * CHUNK)),
    "shared prompts": packed((1, 150, 10), (1, 150, 90), (1, 150, 1), (2, 64, 30), (2, 64, 70), (3, 2, 1), (3, 2, 2)),
    "empty response": packed((1, 70, 0), (1, 70, 5)),
}


def inputs(tokens: int) -> list[Tensor]:
    """Queries, keys, values, log decays and strengths."""
    random = torch.Generator().manual_seed(0)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(tokens, HEADS, *sizes, dtype=torch.float64, generator=random)

    decays = -torch.nn.functional.softplus(normal(SHARED))
    found = [normal(KEY), unit(normal(KEY)), normal(SHARED, VALUE), decays, normal(SHARED).sigmoid()]
    return [x.requires_grad_() for x in found]


def recurrence(query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, strength: Tensor) -> Tensor:
    """The outputs of one sequence by equation 10 of arXiv 2412.06464, token by token."""
    state = torch.zeros(HEADS, SHARED, KEY, VALUE, dtype=torch.float64)
    outputs = []
    for q, k, v, decay, b in zip(query, key, value, log_decay, strength, strict=True):
        change = torch.eye(KEY, dtype=torch.float64) - b[..., None, None] * (k[:, :, None] * k[:, None])[:, None]
        state = decay.exp()[..., None, None] * (change @ state)
        state = state + b[..., None, None] * k[:, None, :, None] * v[..., None, :]
        outputs.append(torch.einsum("hk,hskv->hsv", q, state))
    return torch.stack(outputs)


def own_places(batch: PackedMicroBatch) -> Iterator[tuple[np.ndarray, int]]:
    """Places of each sequence's tokens, and how many of the last ones are stored with it."""
    for number, own in enumerate(np.diff(batch.cu_seqlens).tolist()):
        yield batch.places_of(number), own


@pytest.mark.parametrize("name", BATCHES)
def test_outputs_and_gradients_are_those_of_each_sequence_alone(name: str) -> None:
    batch = BATCHES[name]
    given = inputs(len(batch.tokens))
    found = gated_delta_rule(*given, tree=chunk_tree(batch, 3, CPU))
    each = [
        (places, own, recurrence(*(x[torch.from_numpy(places)] for x in given))) for places, own in own_places(batch)
    ]
    for places, own, expected in each:
        torch.testing.assert_close(found[torch.from_numpy(places[len(places) - own :])], expected[len(places) - own :])
    weights = torch.randn(found.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    ours = torch.autograd.grad((found * weights).sum(), given)
    loss = sum(
        (expected[len(places) - own :] * weights[torch.from_numpy(places[len(places) - own :])]).sum()
        for places, own, expected in each
    )
    torch.testing.assert_close(ours, torch.autograd.grad(loss, given))


@pytest.mark.parametrize("name", BATCHES)
def test_convolutions_begin_with_zeros_in_each_sequence(name: str) -> None:
    batch = BATCHES[name]
    random = torch.Generator().manual_seed(0)
    x = torch.randn(len(batch.tokens), 6, dtype=torch.float64, generator=random)
    weight = torch.randn(6, 4, dtype=torch.float64, generator=random)
    found = causal_convolution(x, weight, chunk_tree(batch, 3, CPU))
    for places, own in own_places(batch):
        alone = torch.nn.functional.pad(x[torch.from_numpy(places)].T, (3, 0))
        expected = torch.nn.functional.conv1d(alone[None], weight[:, None], groups=6)[0].T
        torch.testing.assert_close(found[torch.from_numpy(places[len(places) - own :])], expected[len(places) - own :])


def test_shared_prompts_are_computed_once() -> None:
    tree = chunk_tree(packed((1, 128, 64), (1, 128, 64), (1, 128, 64)), 3, CPU)
    assert tree.levels == (1, 1, 3)
    assert tree.parents.tolist() == [0, 0, 0, 0, 0]
