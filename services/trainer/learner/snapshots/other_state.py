"""State of a rank besides the model's tensors: Megatron's distributed optimizers and random generators.

Loading Megatron's distributed optimizer over torch's AdamW, without Transformer Engine or apex, has two pitfalls,
handled by `fill` and `_separate_steps`.
"""

from typing import Any

import services.trainer.megatron.cpu_support  # noqa: F401  must come before Megatron

# isort: split
import random

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

from services.trainer.learner.small_moments import EXPONENTS, MOMENTS, Float8MomentAdamW

# isort: split
import numpy as np
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import Tensor

Groups = list[list[dict[str, Any]]]
"""Settings of the parameter groups, for each optimizer."""


def single_optimizers(optimizer: MegatronOptimizer) -> list[Any]:
    """Return the distributed optimizers that an optimizer is made of."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def fill(optimizer: MegatronOptimizer) -> None:
    """Create the state that AdamW creates at its first step, for every parameter.

    Pitfall 1: Megatron reads the optimizer's step number from the existing state, which is empty before the first step.
    To load an offloaded optimizer, it would create the state with a step on random gradients.
    """
    for one in single_optimizers(optimizer):
        if isinstance(one.optimizer, HybridDeviceOptimizer):  # offloaded: one optimizer per parameter
            for part in one.optimizer.sub_optimizers:
                _fill(part)
            one.optimizer._sync_sub_optimizers_state_to_hdo()
        else:
            _fill(one.optimizer)


def _fill(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                device = parameter.device if group["fused"] else None
                optimizer.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=device),
                    "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                    "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                }


@torch.no_grad()
def reset_moments(optimizer: MegatronOptimizer) -> None:
    """Reset an optimizer to its state before the first update: no moments, and no steps for bias correction."""
    for one in single_optimizers(optimizer):
        offloaded = isinstance(one.optimizer, HybridDeviceOptimizer)
        for part in one.optimizer.sub_optimizers if offloaded else [one.optimizer]:
            for state in part.state.values():
                for name in ("step", *MOMENTS, EXPONENTS):
                    if name in state:
                        state[name].zero_()
        if offloaded:
            one.optimizer._sync_sub_optimizers_state_to_hdo()


def read_groups(optimizer: MegatronOptimizer) -> Groups:
    """Return the settings and the step of a filled optimizer, as plain values."""
    return [
        [
            # The offloaded optimizer's settings include classes.
            {name: value for name, value in group.items() if not isinstance(value, type)}
            for group in one.state_dict()["optimizer"]["param_groups"]
        ]
        for one in single_optimizers(optimizer)
    ]


def write_groups(optimizer: MegatronOptimizer, groups: Groups) -> None:
    """Set the settings and the step of a filled optimizer. Load its tensors after this and before `use_loaded`."""
    for one, own in zip(single_optimizers(optimizer), groups, strict=True):
        classes = {name: value for name, value in one.optimizer.defaults.items() if isinstance(value, type)}
        settings = [
            {name: tuple(value) if isinstance(value, list) else value for name, value in group.items()} | classes
            for group in own  # JSON has no tuples
        ]
        one.load_state_dict({"optimizer": {"param_groups": settings}})
    _separate_steps(optimizer)
    for one in single_optimizers(optimizer):
        if isinstance(one.optimizer, Float8MomentAdamW):
            one.optimizer.unpack()


def _separate_steps(optimizer: MegatronOptimizer) -> None:
    """Give every parameter its own step tensor.

    Pitfall 2: Megatron shares one tensor among all parameters' states. Each parameter's update increments it, so the
    next step counts as number s + parameters instead of s, and AdamW silently corrects too little bias.
    """
    for one in single_optimizers(optimizer):
        for state in one.optimizer.state.values():
            state["step"] = state["step"].clone()


@torch.no_grad()
def use_loaded(optimizer: MegatronOptimizer) -> None:
    """Copy loaded main weights to the model's weights. All ranks call it together."""
    chunks = []
    for one in single_optimizers(optimizer):
        for parameter in one.model_param_group_index_map:
            places = one._get_model_param_range_map(parameter)["param"]
            main = one._get_main_param_and_optimizer_states(parameter)["param"]
            parameter.detach().view(-1)[places.start : places.end].copy_(main.detach().view(-1))
        if isinstance(one.optimizer, HybridDeviceOptimizer):
            one.optimizer._sync_hdo_state_to_sub_optimizers()
        if isinstance(one.optimizer, Float8MomentAdamW):
            one.optimizer.pack()
        chunks += [chunk for chunk in one.model_chunks if chunk not in chunks]
    for chunk in chunks:
        chunk.start_param_sync()


def read_generators() -> dict[str, Any]:
    """Return the states of this process's random generators."""
    version, numbers, gauss = random.getstate()
    name, keys, *rest = np.random.get_state(legacy=True)
    return {
        "torch": _text(torch.get_rng_state()),
        "cuda": _text(torch.cuda.get_rng_state()) if torch.cuda.is_available() else None,
        "megatron": {name: _text(states) for name, states in get_cuda_rng_tracker().get_states().items()},
        "python": [version, list(numbers), gauss],
        "numpy": [name, np.asarray(keys).tolist(), *rest],
    }


def write_generators(states: dict[str, Any]) -> None:
    """Restore the states that `read_generators` returned."""
    torch.set_rng_state(_state(states["torch"]))
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(_state(states["cuda"]))
    get_cuda_rng_tracker().set_states({name: _state(text) for name, text in states["megatron"].items()})
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, np.asarray(keys, np.uint32), *rest))


def _text(state: Tensor) -> str:
    """Return a generator's state as hexadecimal text."""
    return state.cpu().numpy().tobytes().hex()


def _state(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
