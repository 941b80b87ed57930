"""AdamW with moments in bfloat16, against AdamW in float64 and what stochastic rounding promises."""

from typing import Any

import pytest
import torch
from torch import Tensor

from services.trainer.learner import small_moments
from services.trainer.learner.small_moments import Bfloat16MomentsAdamW, ShardPlace, random_numbers, rounded
from tests.unit.trainer.learner.moments_kit import SETTINGS, gradients

pytestmark = pytest.mark.usefixtures("one_thread")


def adamw(parameter: Tensor, start: int = 0, seed: int = 3, **settings: Any) -> Bfloat16MomentsAdamW:
    built = torch.optim.AdamW([parameter], **{**SETTINGS, **settings})
    return Bfloat16MomentsAdamW(built, {parameter: ShardPlace("layer.weight", start)}, seed)


def exact_step(weight: Tensor, first: Tensor, second: Tensor, grad: Tensor, step: int) -> None:
    """AdamW's formula, in float64 and in place."""
    beta1, beta2 = SETTINGS["betas"]
    first.mul_(beta1).add_(grad, alpha=1 - beta1)
    second.mul_(beta2).add_(grad**2, alpha=1 - beta2)
    unbiased = first / (1 - beta1**step), second / (1 - beta2**step)
    weight -= SETTINGS["lr"] * (
        unbiased[0] / (unbiased[1].sqrt() + SETTINGS["eps"]) + SETTINGS["weight_decay"] * weight
    )


def test_the_random_numbers_are_those_of_splitmix64() -> None:
    # The first five of the seed 1234567, as other implementations list them.
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert [number % (1 << 64) for number in random_numbers(1234567, 0, 5, "cpu").tolist()] == known
    assert [number % (1 << 64) for number in random_numbers(1234567, 3, 2, "cpu").tolist()] == known[3:]


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_rounding_keeps_the_mean(sign: float) -> None:
    low, high = 1.0, 1.0 + 2**-7  # neighbours in bfloat16
    for part in (0.0, 0.125, 0.5, 0.9):
        values = torch.full((100_000,), sign * (low + part * (high - low)))
        found = rounded(values, random_numbers(5, 0, len(values), "cpu")).double() * sign
        assert set(found.unique().tolist()) <= {low, high}
        assert (found == high).double().mean().item() == pytest.approx(part, abs=0.006)  # four standard deviations


def test_training_follows_adamw_in_float64() -> None:
    """400 updates of a regression with noise: both end in the same place, within half a percent of the way there."""
    torch.manual_seed(0)
    inputs, target = torch.randn(400, 64, 24, dtype=torch.float64), torch.randn(24, 40, dtype=torch.float64)
    outputs = inputs @ target + 0.5 * torch.randn(400, 64, 40, dtype=torch.float64)
    exact, ours = torch.zeros(24, 40, dtype=torch.float64), torch.zeros(24, 40)
    first, second = torch.zeros_like(exact), torch.zeros_like(exact)
    optimizer = adamw(ours)
    for step, (x, y) in enumerate(zip(inputs, outputs, strict=True), start=1):
        exact_step(exact, first, second, x.T @ (x @ exact - y) / len(x), step)
        ours.grad = (x.T @ (x @ ours.double() - y) / len(x)).float()
        optimizer.step()
    assert (exact - target).norm() < 0.1 * target.norm()
    assert (ours.double() - exact).norm() < 0.005 * exact.norm()
    state = optimizer.state[ours]
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.bfloat16
    assert (state["exp_avg_sq"].double().mean() / second.mean()).item() == pytest.approx(1, abs=0.005)


def test_the_second_moment_goes_on_shrinking(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the nearest it wouldn't: an update takes less than half of the distance between two numbers."""
    for how, expected in ((rounded, 0.999**500), (lambda values, random: values.bfloat16(), 1.0)):
        monkeypatch.setattr(small_moments, "rounded", how)
        parameter = torch.zeros(4_000)
        optimizer = adamw(parameter)
        optimizer.state[parameter]["exp_avg_sq"].fill_(1.0)
        for _ in range(500):
            parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
        assert optimizer.state[parameter]["exp_avg_sq"].double().mean().item() == pytest.approx(expected, rel=0.005)


def test_shards_and_chunks_round_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    size, cut = 1024, 640
    whole, parts = torch.ones(size), [torch.ones(cut), torch.ones(size - cut)]
    optimizers = [adamw(whole), adamw(parts[0]), adamw(parts[1], start=cut)]
    for number, grad in enumerate(gradients(20, size)):
        monkeypatch.setattr(small_moments, "CHUNK", 1 << 22 if number % 2 else 128)
        whole.grad, parts[0].grad, parts[1].grad = grad, grad[:cut], grad[cut:]
        for optimizer in optimizers:
            optimizer.step()
        monkeypatch.setattr(small_moments, "CHUNK", 256)
    assert torch.equal(whole, torch.cat(parts))
    for name in small_moments.MOMENTS:
        of_parts = [one.state[part][name] for one, part in zip(optimizers[1:], parts, strict=True)]
        assert torch.equal(optimizers[0].state[whole][name], torch.cat(of_parts))


def test_a_loaded_state_goes_on_bit_for_bit() -> None:
    size = 512
    one, other = torch.ones(size), torch.zeros(size)
    optimizer, resumed, elsewhere = adamw(one), adamw(other), adamw(again := torch.ones(size), seed=4)
    given = gradients(20, size)
    for grad in given[:10]:
        one.grad = again.grad = grad
        optimizer.step()
        elsewhere.step()
    other.copy_(one)
    state = optimizer.state_dict()
    resumed.load_state_dict(
        {**state, "state": {0: {name: value.clone().float() for name, value in state["state"][0].items()}}}
    )
    assert resumed.state[other]["exp_avg"].dtype == torch.bfloat16
    for grad in given[10:]:
        one.grad = other.grad = again.grad = grad
        for each in (optimizer, resumed, elsewhere):
            each.step()
    assert torch.equal(one, other)
    assert all(torch.equal(optimizer.state[one][key], resumed.state[other][key]) for key in optimizer.state[one])
    assert not torch.equal(one, again)  # another seed rounds otherwise
