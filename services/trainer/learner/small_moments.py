"""AdamW with smaller moments: both in bfloat16, rounded stochastically, or the first in float8 and the second in
bfloat16.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

CHUNK = 1 << 22
"""Maximum number of elements updated at a time. Each takes about 50 bytes for float32 values and random numbers."""
MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of the first and the second moment in the state of a parameter."""


class ShardPlace(NamedTuple):
    """Place of a shard in the model. It seeds stochastic rounding, so that all copies of a parameter round alike."""

    parameter: str
    """Name of the parameter; copies in other pipeline stages have the same name."""
    start: int
    """Index of the shard's first element within the parameter."""


class Bfloat16MomentsAdamW(torch.optim.AdamW):
    """AdamW (arXiv 1711.05101, algorithm 2) whose moments are kept in bfloat16.

    An update computes in float32: it reads the moments, adds the gradient, changes the parameter, and only then rounds
    the moments. Like 8-bit optimizers (Dettmers et al. 2022, arXiv 2110.02861) this keeps low precision in memory
    alone; bfloat16 has the range of float32, so it needs no scales.

    Rounding is stochastic (Gupta et al. 2015, arXiv 1502.02551; for bfloat16 Zamirai et al. 2020, arXiv 2010.06192): up
    or down, such that the mean is the unrounded value. Rounded to the nearest, the second moment would stop shrinking:
    an update reduces it by 1 - beta2 = 0.001, but half of the distance between two bfloat16 numbers is 0.002 of them or
    more.

    The random numbers of an element depend on the seed, the number of the update and its `ShardPlace` alone: a resumed
    or replayed run repeats them, and they are the same whatever the chunks and the data-parallel shards are.
    """

    def __init__(self, built: torch.optim.Optimizer, places: Mapping[Tensor, ShardPlace], seed: int) -> None:
        """Create an optimizer with the parameter groups of an AdamW that has no state yet.

        Args:
            built: the AdamW, whose parameters are float32 and contiguous.
            places: place in the model of each parameter's shard.
            seed: seed of the run.
        """
        super().__init__([{"params": []}])
        # Set the groups as Megatron does: the constructor refuses views of parameters, which shards may be.
        self.defaults, self.param_groups = built.defaults, built.param_groups
        self._places, self._seed = places, seed
        for group in self.param_groups:
            for parameter in group["params"]:
                # The step is on the host, where reading it doesn't wait for a GPU.
                self.state[parameter] = {"step": torch.zeros((), dtype=torch.float32), **self._zeros(parameter)}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient. `closure` must be None."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(group, parameter)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load an AdamW's state, and convert its moments to bfloat16. torch's method would convert them to float32."""
        super().load_state_dict({**state_dict, "state": {}})
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            loaded = state_dict["state"][number]
            moments = {name: loaded[name].to(parameter.device, torch.bfloat16) for name in MOMENTS}
            self.state[parameter] = {"step": loaded["step"].to("cpu", torch.float32, copy=True), **moments}

    def _zeros(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return a parameter's moments before the first update: zeros."""
        return {name: torch.zeros_like(parameter, dtype=torch.bfloat16) for name in MOMENTS}

    def _update(self, group: dict[str, Any], parameter: Tensor) -> None:
        """Update a parameter's weights and moments, chunk by chunk."""
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
        """Return a float32 copy of a shard's first moments `begin` to `end - 1`."""
        return state["exp_avg"].view(-1)[begin:end].float()

    def _keep_first(self, state: dict[str, Any], place: ShardPlace, begin: int, first: Tensor, random: Tensor) -> None:
        """Store a shard's first moments from element `begin` on, rounded with the lowest 16 bits of `random`."""
        state["exp_avg"].view(-1)[begin : begin + len(first)].copy_(rounded(first, random))


def chunks(start: int, count: int) -> Iterator[tuple[int, int]]:
    """Yield begin and end of the chunks of a shard, which is cut at multiples of CHUNK in the parameter."""
    begin = 0
    while begin < count:
        end = min(count, begin + CHUNK - (start + begin) % CHUNK)
        yield begin, end
        begin = end


def rounded(values: Tensor, random: Tensor) -> Tensor:
    """Round finite numbers stochastically, so that the mean is the number itself.

    The lower 16 bits of a float32 are its fractional distance to the next bfloat16 away from zero. Adding a random
    16-bit number carries into the upper bits with that probability.

    Args:
        values: float32 [n].
        random: int64 [n]; the lowest 16 bits are used.

    Returns:
        bfloat16 [n]. Numbers that bfloat16 represents exactly stay unchanged.
    """
    bits = values.view(torch.int32) + (random & 0xFFFF).int()
    return (bits >> 16).short().view(torch.bfloat16)


def stream_key(seed: int, step: int, parameter: str) -> int:
    """Return the random generator's initial state for one update of a parameter: a signed 64-bit integer."""
    digest = hashlib.blake2b(f"{seed} {step} {parameter}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def random_numbers(key: int, begin: int, count: int, device: torch.device | str) -> Tensor:
    """Return numbers `begin` to `begin + count - 1` of SplitMix64 (Steele et al. 2014, "Fast Splittable
    Pseudorandom Number Generators"), each computed from its position alone.

    Args:
        key: the generator's state before number 0.
        begin: position of the first number.
        count: number of values.
        device: device of the result.

    Returns:
        int64 [count], with 64 random bits each.
    """
    mixed = torch.arange(begin + 1, begin + count + 1, dtype=torch.int64, device=device)
    mixed.mul_(_signed(0x9E3779B97F4A7C15)).add_(key)
    mixed.bitwise_xor_(_shifted(mixed, 30)).mul_(_signed(0xBF58476D1CE4E5B9))
    mixed.bitwise_xor_(_shifted(mixed, 27)).mul_(_signed(0x94D049BB133111EB))
    return mixed.bitwise_xor_(_shifted(mixed, 31))


def _signed(constant: int) -> int:
    """Return the int64 with the bits of an unsigned 64-bit number. Products of int64 are modulo 2^64."""
    return constant - (1 << 64) if constant >> 63 else constant


def _shifted(numbers: Tensor, places: int) -> Tensor:
    """Return int64 numbers shifted right by `places` bits, filled with zero bits from the left."""
    return (numbers >> places).bitwise_and_((1 << (64 - places)) - 1)


BLOCK = 32
"""Block size: number of elements that share a scale, as in the MX formats (arXiv 2310.10537). Blocks begin at multiples
of BLOCK in the parameter. So do Megatron's shards, except with many data-parallel ranks: then a shard may cut a block,
and each part has a scale."""
EXPONENTS = "exp_avg_exponents"
"""Name in a parameter's state of the base-2 exponents of the blocks' scales, int8 [blocks]."""
TOP = 8
"""Base-2 exponent of the limit of numbers divided by their scale: 2^8 = 256; the maximum of float8_e4m3fn is 448."""
LEAST_EXPONENT = -117
"""Minimum exponent of a scale. The smallest positive number is then 2^-126, which float32 and bfloat16 represent."""


@dataclass(frozen=True)
class Float8Values:
    """Numbers in float8 with their scales. bfloat16 represents them exactly, so checkpoints store them in bfloat16."""

    codes: Tensor
    """Numbers divided by the scales of their blocks, float8_e4m3fn [n]."""
    exponents: Tensor
    """Base-2 exponents of the scales of the blocks that contain the numbers, int8 [blocks]."""
    start: int
    """Index of the first number in its block."""

    dtype = torch.bfloat16
    """Element type that `read` returns and checkpoints store."""

    def numel(self) -> int:
        """Return the number of elements."""
        return self.codes.numel()

    def element_size(self) -> int:
        """Return the size of one number in a checkpoint, in bytes."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Size of all numbers in a checkpoint, in bytes."""
        return self.numel() * self.element_size()

    @property
    def is_cuda(self) -> bool:
        """True if the numbers are on a GPU."""
        return self.codes.is_cuda

    def __getitem__(self, part: slice) -> "Float8Values":
        """Return a view of the numbers in slice `part`, which must have no step."""
        begin, end, _ = part.indices(self.numel())
        first, start = divmod(self.start + begin, BLOCK)
        last = -(-(self.start + end) // BLOCK)
        return Float8Values(self.codes[begin:end], self.exponents[first:last], start)

    def split(self, count: int) -> Iterator["Float8Values"]:
        """Yield views of `count` consecutive numbers each."""
        return (self[begin : begin + count] for begin in range(0, self.numel(), count))

    def read(self) -> Tensor:
        """Return a copy of the numbers, multiplied by their scales, bfloat16 [n]."""
        return self.read_float32().bfloat16()

    def read_float32(self) -> Tensor:
        """Return a copy of the numbers, multiplied by their scales, float32 [n]."""
        scales = _power_of_two(self.exponents).repeat_interleave(BLOCK)
        return self.codes.float().mul_(scales[self.start : self.start + self.numel()])

    def keep(self, values: Tensor, random: Tensor | None) -> None:
        """Replace the numbers by `values`, rounded, and set the scales. The numbers must be whole blocks of the shard.

        Scales are powers of two, so storing the numbers that `read` returns leaves them unchanged.

        Args:
            values: float32 [n], finite.
            random: int64 [n], whose lowest 16 bits round stochastically; None: round to the nearest.
        """
        blocks = torch.zeros(self.exponents.numel() * BLOCK, dtype=torch.float32, device=values.device)
        blocks[self.start : self.start + len(values)] = values
        largest = blocks.view(-1, BLOCK).abs().amax(1)
        # Round up to a power of two: the addition carries into the exponent if the fraction isn't zero.
        exponents = ((largest.view(torch.int32) + 0x7FFFFF) >> 23) - 127 - TOP
        self.exponents.copy_(exponents.clamp_(min=LEAST_EXPONENT))
        down = _power_of_two(-self.exponents.int()).repeat_interleave(BLOCK)[self.start : self.start + len(values)]
        self.codes.copy_(rounded_to_float8(values * down, random))


class Float8MomentAdamW(Bfloat16MomentsAdamW):
    """AdamW whose first moment is kept in float8 (e4m3), with a scale for each block, and the second in bfloat16.

    FP8-LM (arXiv 2310.18313, section 2.2) uses the same split: 8 bits suffice for the first moment, but not for the
    second. Blocks are as in 8-bit optimizers (arXiv 2110.02861, section 2.1): a large element costs precision only
    within its block. Rounding is stochastic, as in bfloat16.

    The second moment changes by a fraction of 1 - beta2 = 0.001 per update, while neighbouring e4m3 numbers differ by 6
    to 12 %. Rounded to the nearest it would never change; rounded stochastically it would accumulate the noise of about
    a thousand updates. The first moment averages only about ten.
    """

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load an AdamW's state. A first moment that isn't in float8 is rounded to the nearest float8 numbers."""
        super().load_state_dict(state_dict)
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            loaded = state_dict["state"][number]
            if EXPONENTS in loaded:
                codes, exponents = (loaded[name].to(parameter.device, copy=True) for name in ("exp_avg", EXPONENTS))
                self.state[parameter] |= {"exp_avg": codes, EXPONENTS: exponents}
            else:
                self._pack(parameter)

    @torch.no_grad()
    def unpack(self) -> None:
        """Replace all first moments by bfloat16 zeros, into which a checkpoint can be loaded."""
        for parameter, state in self.state.items():
            state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.bfloat16)

    @torch.no_grad()
    def pack(self) -> None:
        """Convert all first moments from bfloat16, as loaded, to float8."""
        for parameter in self.state:
            self._pack(parameter)

    def _pack(self, parameter: Tensor) -> None:
        loaded, start = self.state[parameter]["exp_avg"].view(-1), self._places[parameter].start
        self.state[parameter] |= _zeros(parameter, start)
        kept = float8_values(self.state[parameter], start)
        for begin, end in chunks(start, len(loaded)):
            kept[begin:end].keep(loaded[begin:end].float(), None)

    def _zeros(self, parameter: Tensor) -> dict[str, Tensor]:
        return {**super()._zeros(parameter), **_zeros(parameter, self._places[parameter].start)}

    def _read_first(self, state: dict[str, Any], place: ShardPlace, begin: int, end: int) -> Tensor:
        return float8_values(state, place.start)[begin:end].read_float32()

    def _keep_first(self, state: dict[str, Any], place: ShardPlace, begin: int, first: Tensor, random: Tensor) -> None:
        float8_values(state, place.start)[begin : begin + len(first)].keep(first, random)


def float8_values(state: Mapping[str, Any], start: int) -> Float8Values:
    """Return a view of the first moments in a shard's state; `start`: the shard's first element in the parameter."""
    return Float8Values(state["exp_avg"].view(-1), state[EXPONENTS], start % BLOCK)


def rounded_to_float8(values: Tensor, random: Tensor | None) -> Tensor:
    """Round numbers up to 448 to float8; see `Float8Values.keep`.

    Returns:
        float8_e4m3fn [n]. Numbers that float8 represents exactly stay unchanged.
    """
    size = values.abs()
    # Distance between neighbours: an eighth of the next lower power of two, constant below 2^-6.
    power = (size.view(torch.int32) & 0x7F800000).clamp_(min=(127 - 6) << 23)
    step = (power - (3 << 23)).view(torch.float32)
    steps = size.div_(step)
    steps = steps.round_() if random is None else steps.add_((random & 0xFFFF).float(), alpha=2.0**-16).floor_()
    return steps.mul_(step).copysign_(values).to(torch.float8_e4m3fn)


def _power_of_two(exponents: Tensor) -> Tensor:
    """Return exact float32 powers of two for integer exponents from -126 to 127."""
    return ((exponents.int() + 127) << 23).view(torch.float32)


def _zeros(parameter: Tensor, start: int) -> dict[str, Tensor]:
    """Return the state of first moments that are zero, as `float8_values` reads it."""
    blocks = -(-(start % BLOCK + parameter.numel()) // BLOCK)
    return {
        "exp_avg": torch.zeros_like(parameter, dtype=torch.uint8).view(torch.float8_e4m3fn),
        EXPONENTS: torch.full((blocks,), LEAST_EXPONENT, dtype=torch.int8, device=parameter.device),
    }
