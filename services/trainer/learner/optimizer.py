"""Megatron's distributed optimizer and learning-rate schedule, from the run's configuration, and the optimizer's state.

Loading Megatron's distributed optimizer over torch's AdamW, without Transformer Engine or apex, has two pitfalls,
handled by `fill` and `_separate_steps`.
"""

from typing import Any, cast

import services.trainer.megatron.cpu_support  # noqa: F401  must come before Megatron

# isort: split
import torch
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_standard_config_overrides as no_decay_for_norms
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from relaxd.config import OptimizerConfig, TrainerConfig
from services.trainer.learner.data_parallel import DataParallel
from services.trainer.learner.small_moments import (
    EXPONENTS,
    MOMENTS,
    Bfloat16MomentsAdamW,
    Float8MomentAdamW,
    ShardPlace,
)
from services.trainer.megatron.sharded_gradients import use_shards
from services.trainer.model.hf_weights import ROUNDING

Groups = list[list[dict[str, Any]]]
"""Settings of each parameter group, for each of several optimizers."""
EMBEDDING = "embedding.word_embeddings.weight"
"""Name of the token embedding parameter, which the first pipeline stage has."""


def build_optimizer(
    model: DataParallel, config: TrainerConfig, settings: OptimizerConfig | None = None, *, seed: int
) -> MegatronOptimizer:
    """Build AdamW (arXiv 1711.05101) with state and main weights sharded over the data-parallel ranks.

    Norms have no weight decay. With `cpu_offload`, state and main weights are in the host's memory and updates are
    computed there, one parameter at a time, overlapping the transfer of others. With moments in bfloat16 or float8,
    `small_moments` makes the update, because Megatron would need Transformer Engine.

    Args:
        model: the model.
        config: the trainer's settings.
        settings: the optimizer's settings; None: those in `config`.
        seed: seed of the run, for moments that are rounded stochastically.
    """
    settings = settings or config.optimizer
    dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
    megatron_config = MegatronOptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        min_lr=settings.min_lr,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.beta1,
        adam_beta2=settings.beta2,
        adam_eps=settings.epsilon,
        clip_grad=settings.clip_grad,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        use_distributed_optimizer=True,
        optimizer_cpu_offload=settings.cpu_offload,
        optimizer_offload_fraction=float(settings.cpu_offload),
        overlap_cpu_optimizer_d2h_h2d=settings.cpu_offload,
        pin_cpu_grads=torch.cuda.is_available(),
    )
    if settings.cpu_offload:
        # Keep main weights only in the offloaded optimizer, not on the GPU. Set after construction, because the
        # constructor would require Transformer Engine.
        megatron_config.use_precision_aware_optimizer = True
        megatron_config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
        megatron_config.store_param_remainders = False
    optimizer = get_megatron_optimizer(megatron_config, [model], config_overrides=no_decay_for_norms(megatron_config))
    for one in optimizer.chained_optimizers if model.sharded is not None else ():
        if one.optimizer is not None:
            one._copy_model_grads_to_main_grads = use_shards(one)
    for group in optimizer.param_groups:
        group["fused"] = True  # one pass over memory instead of about twelve
    if settings.moments != "float32":
        kind = Bfloat16MomentsAdamW if settings.moments == "bfloat16" else Float8MomentAdamW
        for one in optimizer.chained_optimizers:
            if one.optimizer is not None:
                one.optimizer = kind(one.optimizer, _places(one, model), seed)
    _make_exact(optimizer, model)
    return optimizer


@torch.no_grad()
def _make_exact(optimizer: MegatronOptimizer, model: DataParallel) -> None:
    """Add to main weights the differences between the model folder's float32 weights and their bfloat16 parameters.

    Main weights that start at bfloat16 values would change no bfloat16 parameter until their updates add up to half of
    the distance between two such values: a dozen steps for a weight of 0.05 and a learning rate of 1e-5.
    """
    for one in optimizer.chained_optimizers:
        for parameter in one.model_param_group_index_map if one.optimizer is not None else ():
            rounding = getattr(parameter, ROUNDING, None)
            if rounding is not None:
                place, main = one._get_model_param_range_map(parameter)["param"], main_weights(one, parameter)
                main.view(-1).add_(rounding.view(-1)[place.start : place.end].to(main.device))
    for parameter in model.module.parameters():
        parameter.__dict__.pop(ROUNDING, None)


def main_weights(one: Any, parameter: Tensor) -> Tensor:
    """Return this rank's shard of a parameter's float32 main weights; call it only before the first update."""
    if isinstance(one.optimizer, HybridDeviceOptimizer):  # Megatron would look in the state, which is still empty
        group, index = one.model_param_group_index_map[parameter]
        return cast(Tensor, one.optimizer.param_to_fp32_param[one.optimizer.param_groups[group]["params"][index]])
    return cast(Tensor, one._get_main_param_and_optimizer_states(parameter)["param"])


def _places(one: Any, model: DataParallel) -> dict[Tensor, ShardPlace]:
    """Return where in the model each shard of a distributed optimizer belongs.

    With tied embeddings, the copies of the parameter in the first and the last pipeline stage get the same place.
    """
    names = {parameter: name for name, parameter in model.module.named_parameters()}
    found = {}
    for parameter, (group, index) in one.model_param_group_index_map.items():
        name = EMBEDDING if getattr(parameter, "shared_embedding", False) else names[parameter]
        start = one._get_model_param_range_map(parameter)["param"].start
        found[one.optimizer.param_groups[group]["params"][index]] = ShardPlace(name, start)
    return found


def build_schedule(
    optimizer: MegatronOptimizer, settings: OptimizerConfig, steps: int, section: str = "trainer.optimizer"
) -> OptimizerParamScheduler:
    """Build the schedule: linear warm-up, then constant, or linear or cosine decay to `min_lr` at the last step.

    Advance the schedule before the first applied update of each step. Step s of 1..steps then has s / warmup_steps of
    the full rate during warm-up, and the last step has min_lr. Steps whose updates are all skipped don't count.

    Args:
        optimizer: the optimizer.
        settings: its settings.
        steps: steps of the whole run.
        section: name of the settings' section, for errors.

    Raises:
        ValueError: the settings contradict each other.
    """
    if settings.min_lr > settings.lr:
        raise ValueError(f"{section}.min_lr is {settings.min_lr}: it must not be above lr = {settings.lr}")
    if settings.warmup_steps >= max(steps, 1) and settings.warmup_steps > 0:
        raise ValueError(f"{section}.warmup_steps is {settings.warmup_steps}: it must be below run.steps = {steps}")
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=settings.warmup_steps,
        lr_decay_steps=max(steps, 1),
        lr_decay_style=settings.schedule,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=max(steps, 1),
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,  # load only its position: an extended run has other `steps`
        override_opt_param_scheduler=True,
    )


def single_optimizers(optimizer: MegatronOptimizer) -> list[Any]:
    """Return the distributed optimizers that a chained optimizer consists of, or a single optimizer itself."""
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
    """Return the settings and the step number of each parameter group, as plain values. Call `fill` before."""
    return [
        [
            # The offloaded optimizer's settings include classes.
            {name: value for name, value in group.items() if not isinstance(value, type)}
            for group in one.state_dict()["optimizer"]["param_groups"]
        ]
        for one in single_optimizers(optimizer)
    ]


def write_groups(optimizer: MegatronOptimizer, groups: Groups) -> None:
    """Set the settings and the step number of each parameter group. Call `fill` before; load main weights and moments
    after this and before `use_loaded`."""
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
    """Copy the loaded main weights to the model's weights on all ranks. All ranks call it together."""
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
