"""AdamW with moments in bfloat16, rounded stochastically: half of the moments' memory."""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

CHUNK = 1 << 22
"""Elements that are updated at a time. Float32 values and random numbers exist of these alone: about 50 bytes each."""
MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of the first and the second moment in the state of a parameter."""


class ShardPlace(NamedTuple):
    """Place of a shard's elements in the model. Copies of a parameter on several ranks are rounded alike."""

    parameter: str
    """Name of the parameter, the same for all copies."""
    start: int
    """Index of the shard's first element among those of the parameter."""


class Bfloat16MomentsAdamW(torch.optim.AdamW):
    """AdamW (arXiv 1711.05101, algorithm 2) whose moments are kept in bfloat16.

    An update computes in float32: it reads the moments, adds the gradient, changes the parameter, and only then rounds
    the moments. Like 8-bit optimizers (Dettmers et al. 2022, arXiv 2110.02861) this keeps low precision in memory
    alone; bfloat16 has the range of float32, so that it needs no scales.

    Rounding is stochastic (Gupta et al. 2015, arXiv 1502.02551; for bfloat16 Zamirai et al. 2020, arXiv 2010.06192): up
    or down, such that the mean is the unrounded value. To the nearest, the second moment would stop shrinking: an
    update takes 1 - beta2 = 0.001 of it, and half of the distance between two numbers is 0.002 of them or more.

    The random numbers of an element depend on the seed, the number of the update and its `ShardPlace` alone: a resumed
    or replayed run repeats them, and they are the same whatever the chunks and the data-parallel shards are.
    """

    def __init__(self, built: torch.optim.Optimizer, places: Mapping[Tensor, ShardPlace], seed: int) -> None:
        """Take the place of an AdamW without state.

        Args:
            built: the optimizer, whose parameter groups this one gets. Its parameters are float32 and contiguous.
            places: of each of its parameters.
            seed: seed of the run.
        """
        super().__init__([{"params": []}])
        # As Megatron sets the groups: the constructor refuses views of parameters, which its shards may be.
        self.defaults, self.param_groups = built.defaults, built.param_groups
        self._places, self._seed = places, seed
        for group in self.param_groups:
            for parameter in group["params"]:
                # The step is on the host, where reading it doesn't wait for a GPU.
                self.state[parameter] = {"step": torch.zeros((), dtype=torch.float32), **self._zeros(parameter)}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the parameters that have a gradient. There must be no `closure`."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(group, parameter)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, moments of another element type also. torch's method would make them float32."""
        super().load_state_dict({**state_dict, "state": {}})
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            loaded = state_dict["state"][number]
            moments = {name: loaded[name].to(parameter.device, torch.bfloat16) for name in MOMENTS}
            self.state[parameter] = {"step": loaded["step"].to("cpu", torch.float32, copy=True), **moments}

    def _zeros(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the moments before the first update."""
        return {name: torch.zeros_like(parameter, dtype=torch.bfloat16) for name in MOMENTS}

    def _update(self, group: dict[str, Any], parameter: Tensor) -> None:
        """Update one parameter, chunk by chunk."""
        state, place = self.state[parameter], self._places[parameter]
        state["step"] += 1
        step, (beta1, beta2), lr = int(state["step"]), group["betas"], float(group["lr"])
        step_size, root_of_correction = lr / (1 - beta1**step), (1 - beta2**step) ** 0.5
        key = stream_key(self._seed, step, place.parameter)
        assert parameter.grad is not None
        weights, grads, seconds = (each.view(-1) for each in (parameter, parameter.grad, state["exp_avg_sq"]))
        for begin, end in chunks(place.start, len(weights)):
            weight, grad, stored_second = (flat[begin:end] for flat in (weights, grads, seconds))
            first = self._read_first(state, place, begin, end).mul_(beta1).add_(grad, alpha=1 - beta1)
            second = stored_second.float().mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            scale = second.sqrt().div_(root_of_correction).add_(group["eps"])
            weight.mul_(1 - lr * group["weight_decay"]).addcdiv_(first, scale, value=-step_size)
            random = random_numbers(key, place.start + begin, end - begin, weight.device)
            self._keep_first(state, place, begin, first, random)
            stored_second.copy_(rounded(second, random >> 16))

    def _read_first(self, state: dict[str, Any], place: ShardPlace, begin: int, end: int) -> Tensor:
        """Return a shard's elements `begin` to `end - 1` of the first moment: float32, new."""
        return state["exp_avg"].view(-1)[begin:end].float()

    def _keep_first(self, state: dict[str, Any], place: ShardPlace, begin: int, first: Tensor, random: Tensor) -> None:
        """Round the first moment, from a shard's element `begin` on, with the lowest 16 bits of `random`."""
        state["exp_avg"].view(-1)[begin : begin + len(first)].copy_(rounded(first, random))


def chunks(start: int, count: int) -> Iterator[tuple[int, int]]:
    """Divide a shard of `count` elements where their places in the parameter are multiples of CHUNK."""
    begin = 0
    while begin < count:
        end = min(count, begin + CHUNK - (start + begin) % CHUNK)
        yield begin, end
        begin = end


def rounded(values: Tensor, random: Tensor) -> Tensor:
    """Round finite numbers stochastically, so that the mean is the number itself.

    The lower half of a float32's bits is the part of the way to the next bfloat16 away from zero. Adding a random
    number of as many bits carries with that probability.

    Args:
        values: float32 [n].
        random: int64 [n], of whose bits the lowest 16 are used.

    Returns:
        bfloat16 [n]. Numbers that are exact in bfloat16 stay what they are.
    """
    bits = values.view(torch.int32) + (random & 0xFFFF).int()
    return (bits >> 16).short().view(torch.bfloat16)


def stream_key(seed: int, step: int, parameter: str) -> int:
    """Return the state, 64 bits with a sign, with which the random numbers of a parameter's update begin."""
    digest = hashlib.blake2b(f"{seed} {step} {parameter}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def random_numbers(key: int, begin: int, count: int, device: torch.device | str) -> Tensor:
    """Return numbers `begin` to `begin + count - 1` of SplitMix64 (Steele et al. 2014, "Fast Splittable
    Pseudorandom Number Generators"), each computed from its position alone.

    Args:
        key: the generator's state before number 0.
        begin: position of the first number.
        count: how many.
        device: where they are computed.

    Returns:
        int64 [count], with 64 random bits each.
    """
    mixed = torch.arange(begin + 1, begin + count + 1, dtype=torch.int64, device=device)
    mixed.mul_(_signed(0x9E3779B97F4A7C15)).add_(key)
    mixed.bitwise_xor_(_shifted(mixed, 30)).mul_(_signed(0xBF58476D1CE4E5B9))
    mixed.bitwise_xor_(_shifted(mixed, 27)).mul_(_signed(0x94D049BB133111EB))
    return mixed.bitwise_xor_(_shifted(mixed, 31))


def _signed(constant: int) -> int:
    """Return the int64 with the bits of a 64-bit number. Products of int64 are modulo 2^64."""
    return constant - (1 << 64) if constant >> 63 else constant


def _shifted(numbers: Tensor, places: int) -> Tensor:
    """Shift to the right as numbers without a sign."""
    return (numbers >> places).bitwise_and_((1 << (64 - places)) - 1)
