"""AdamW with its first moment in float8, against AdamW in float64 and what its scales and its rounding promise."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor

from services.trainer.learner import small_moments
from services.trainer.learner.small_moments import (
    BLOCK,
    EXPONENTS,
    Float8MomentAdamW,
    Float8Values,
    ShardPlace,
    float8_values,
    random_numbers,
    rounded_to_float8,
)
from tests.unit.trainer.learner.moments_kit import SETTINGS, gradients

pytestmark = pytest.mark.usefixtures("one_thread")


def adamw(parameter: Tensor, start: int = 0, seed: int = 3, **settings: Any) -> Float8MomentAdamW:
    built = torch.optim.AdamW([parameter], **{**SETTINGS, **settings})
    return Float8MomentAdamW(built, {parameter: ShardPlace("layer.weight", start)}, seed)


def packed(values: Tensor, start: int = 0, random: Tensor | None = None) -> Float8Values:
    blocks = -(-(start + len(values)) // BLOCK)
    codes = torch.zeros(len(values), dtype=torch.uint8).view(torch.float8_e4m3fn)
    found = Float8Values(codes, torch.zeros(blocks, dtype=torch.int8), start)
    found.keep(values, random)
    return found


def first_moments(optimizer: Float8MomentAdamW, parameter: Tensor, start: int = 0) -> Tensor:
    return float8_values(optimizer.state[parameter], start).read_float32()


@pytest.mark.parametrize(("low", "high"), [(1.0, 1.125), (208.0, 224.0), (0.0, 2**-9), (5 * 2**-9, 6 * 2**-9)])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_rounding_keeps_the_mean(sign: float, low: float, high: float) -> None:
    for part in (0.0, 0.125, 0.5, 0.9):
        values = torch.full((100_000,), sign * (low + part * (high - low)))
        found = rounded_to_float8(values, random_numbers(5, 0, len(values), "cpu")).double() * sign
        assert set(found.unique().tolist()) <= {low, high}
        assert (found == high).double().mean().item() == pytest.approx(part, abs=0.006)  # four standard deviations


def test_to_the_nearest_is_what_torch_does() -> None:
    torch.manual_seed(0)
    values = torch.randn(100_000) * torch.logspace(-4, 2, 100_000)
    assert torch.equal(rounded_to_float8(values, None).float(), values.to(torch.float8_e4m3fn).float())


def test_what_is_kept_stays_what_it_is() -> None:
    """Kept, read and kept again, with whatever random numbers, and in bfloat16 as in a checkpoint."""
    torch.manual_seed(0)
    size = 64 * BLOCK
    scales = torch.logspace(-42, 37, 64).repeat_interleave(BLOCK)
    values = torch.randn(size) * scales * torch.logspace(0, -6, size)[torch.randperm(size)]
    values[:BLOCK] = 0.0
    for start in (0, 5):
        once = packed(values, start, random_numbers(1, 0, size, "cpu"))
        again = packed(once.read().float(), start, random_numbers(2, 0, size, "cpu"))
        assert torch.equal(once.read().float(), once.read_float32())
        assert torch.equal(once.read_float32(), again.read_float32())
        errors = (once.read_float32() - values).abs()
        blocks = torch.nn.functional.pad(values.abs(), (start, 0))
        largest = torch.nn.functional.pad(blocks, (0, -len(blocks) % BLOCK)).view(-1, BLOCK).amax(1)
        per_element = largest.repeat_interleave(BLOCK)[start : start + size]
        assert (errors <= torch.maximum(values.abs() / 8, (per_element * 2**-16).clamp(min=2**-126))).all()


def test_parts_are_those_of_the_whole() -> None:
    values = gradients(1, 500)[0]
    for start in (0, 7):
        whole = packed(values, start)
        for part in (slice(0, 500), slice(3, 90), slice(25, 26), slice(480, 500), slice(40, 40)):
            assert torch.equal(whole[part].read(), whole.read()[part])
        assert torch.equal(torch.cat([part.read() for part in whole.split(77)]), whole.read())


def test_training_follows_adamw_in_float64() -> None:
    """400 updates of a regression with noise: both end in the same place, within a percent of the way there."""
    torch.manual_seed(0)
    inputs, target = torch.randn(400, 64, 24, dtype=torch.float64), torch.randn(24, 40, dtype=torch.float64)
    outputs = inputs @ target + 0.5 * torch.randn(400, 64, 40, dtype=torch.float64)
    exact, ours = torch.zeros(24, 40, dtype=torch.float64, requires_grad=True), torch.zeros(24, 40)
    reference, optimizer = torch.optim.AdamW([exact], foreach=False, **SETTINGS), adamw(ours)
    for x, y in zip(inputs, outputs, strict=True):
        with torch.no_grad():
            exact.grad = x.T @ (x @ exact - y) / len(x)
            ours.grad = (x.T @ (x @ ours.double() - y) / len(x)).float()
        reference.step()
        optimizer.step()
    found = exact.detach()
    assert (found - target).norm() < 0.1 * target.norm()
    assert (ours.double() - found).norm() < 0.01 * found.norm()
    state = optimizer.state[ours]
    assert (state["exp_avg"].dtype, state["exp_avg_sq"].dtype) == (torch.float8_e4m3fn, torch.bfloat16)
    assert sum(value.nbytes for name, value in state.items() if name != "step") == 24 * 40 * (3 + 1 / BLOCK)


def test_shards_and_chunks_round_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    size, cut = 1024, 640
    whole, parts = torch.ones(size), [torch.ones(cut), torch.ones(size - cut)]
    optimizers = [adamw(whole), adamw(parts[0]), adamw(parts[1], start=cut)]
    for number, grad in enumerate(gradients(20, size)):
        monkeypatch.setattr(small_moments, "CHUNK", 1 << 22 if number % 2 else 128)
        whole.grad, parts[0].grad, parts[1].grad = grad, grad[:cut], grad[cut:]
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(whole, torch.cat(parts))
    of_parts = [first_moments(*one) for one in zip(optimizers[1:], parts, (0, cut), strict=True)]
    assert torch.equal(first_moments(optimizers[0], whole), torch.cat(of_parts))


def test_a_shard_may_begin_within_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks then end at blocks nevertheless, and only the cut block has another scale."""
    size, cut = 1024, 650
    whole, chunked, part = torch.ones(size), torch.ones(size - cut), torch.ones(size - cut)
    optimizers = [adamw(whole), adamw(chunked, start=cut), adamw(part, start=cut)]
    for grad in gradients(20, size):
        whole.grad, chunked.grad, part.grad = grad, grad[cut:], grad[cut:]
        for optimizer, chunk in zip(optimizers, (1 << 22, 64, 1 << 22), strict=True):
            monkeypatch.setattr(small_moments, "CHUNK", chunk)
            optimizer.step()
    assert torch.equal(chunked, part)
    assert torch.equal(part[BLOCK:], whole[cut + BLOCK :])
    assert torch.allclose(part, whole[cut:], atol=0.01)


def test_a_loaded_state_goes_on_bit_for_bit() -> None:
    size, start = 512, 40
    one, other, third = torch.ones(size), torch.zeros(size), torch.zeros(size)
    optimizer, resumed, unpacked = (adamw(each, start=start) for each in (one, other, third))
    given = gradients(20, size)
    for grad in given[:10]:
        one.grad = grad
        optimizer.step()
    other.copy_(one)
    third.copy_(one)
    resumed.load_state_dict(deepcopy(optimizer.state_dict()))
    # As a checkpoint: bfloat16 values, which are packed once they are there.
    unpacked.load_state_dict(deepcopy(optimizer.state_dict()))
    unpacked.unpack()
    unpacked.state[third]["exp_avg"].copy_(float8_values(optimizer.state[one], start).read())
    unpacked.pack()
    assert unpacked.state[third]["exp_avg"].dtype == torch.float8_e4m3fn
    for grad in given[10:]:
        one.grad = other.grad = third.grad = grad
        for each in (optimizer, resumed, unpacked):
            each.step()
    assert torch.equal(one, other)
    assert torch.equal(one, third)
    for name in ("step", "exp_avg_sq", EXPONENTS):
        assert torch.equal(optimizer.state[one][name], resumed.state[other][name])
        assert torch.equal(optimizer.state[one][name], unpacked.state[third][name])
    assert torch.equal(first_moments(optimizer, one, start), first_moments(unpacked, third, start))


def test_a_state_of_another_adamw_is_rounded() -> None:
    size = 512
    before, after = torch.ones(size, requires_grad=True), torch.ones(size)
    exact, ours = torch.optim.AdamW([before], **SETTINGS), adamw(after)
    for grad in gradients(5, size):
        before.grad = grad
        exact.step()
    ours.load_state_dict(exact.state_dict())
    moments = exact.state[before]["exp_avg"]
    assert ours.state[after]["step"] == 5
    errors = (first_moments(ours, after) - moments).abs()
    assert (errors <= torch.maximum(moments.abs() / 15, moments.abs().max() * 2**-16)).all()
