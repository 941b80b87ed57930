"""Bytes that the GPUs of each role hold, and the capacity of the engines' key-value caches."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from relaxd.config import CPU_TRANSPORTS, JudgeConfig, RolloutConfig, RunConfig
from relaxd.engines import ENGINES
from relaxd.models.folders import frozen_models, resolve_model
from relaxd.models.layouts import Layout, model_parameters, problem
from relaxd.models.shape import ModelShape, read_shape
from relaxd.roles import ROLES, TRAINER
from relaxd.tools.fitting.host_and_disk import Models, micro_batch
from relaxd.tools.fitting.trainer_memory import (
    PROCESS_BYTES,
    Bytes,
    FitError,
    Hardware,
    Held,
    TrainedModelShape,
    critic_stage,
    frozen_stage,
    trainer_stage,
)

DEFAULT_FRACTION = 0.85
"""Estimated share of a GPU's memory that SGLang uses for weights and key-value cache if no share is configured."""
ENGINE_PROCESS_BYTES = 5_600_000_000
"""Estimated GPU bytes of an engine's process in addition to weights and cache: CUDA's context, graphs and work space.
Measured: 3.6 GB for a model of 135 M parameters, 5.6 GB for 0.6 B."""


@dataclass(frozen=True)
class EngineMemory:
    """Division of the memory of each of an engine's GPUs between weights and key-value cache."""

    weights: int
    """Bytes of the model's weights on the GPU."""
    cache: int
    """Bytes of the key-value cache; negative if the weights don't fit."""
    token_bytes: int
    """Bytes of key-value cache per token."""
    assumed: bool
    """True if SGLang decides how much is for weights and cache, which is assumed: DEFAULT_FRACTION of a whole GPU."""
    share: float = 1.0
    """Share of the GPU's memory that the engine leases, from 0 to 1."""

    @property
    def bytes(self) -> Bytes:
        """The engine's bytes on the GPU by purpose: weights, key-value cache and process."""
        return {"weights": self.weights, "key-value cache": max(0, self.cache), "process": ENGINE_PROCESS_BYTES}

    @property
    def cached_tokens(self) -> int:
        """Number of tokens that fit into the key-value cache."""
        return max(0, self.cache) // self.token_bytes

    def answers(self, tokens: int) -> int:
        """Return the number of sequences of `tokens` tokens that fit into the key-value cache at once."""
        return self.cached_tokens // tokens


def engine_memory(
    shape: ModelShape, tensor: int, element: int, fraction: float, gpu_bytes: int, share: float = 1.0
) -> EngineMemory:
    """Compute how an engine divides a GPU's memory between weights and key-value cache.

    Args:
        shape: the model.
        tensor: number of GPUs that share the model. If it exceeds the number of key-value heads, GPUs hold copies.
        element: bytes per element of weights and cache.
        fraction: share of the engine's memory for weights and cache; 0 lets SGLang decide.
        gpu_bytes: total memory of the GPU, in bytes.
        share: the engine's share of the GPU. If SGLang decides, it keeps the same bytes free as on a whole GPU.
    """
    weights = model_parameters(shape) * element // tensor
    token = 2 * shape.attention_layers * max(1, shape.kv_heads // tensor) * shape.head_size * element
    static = fraction * share if fraction else share - (1 - DEFAULT_FRACTION)
    cache = int(static * gpu_bytes) - weights
    return EngineMemory(weights, cache, token, not fraction, share)


ASLEEP = {TRAINER: 7_500_000_000, "rollout": 5_600_000_000}
"""Estimated bytes that a process keeps on a GPU while it sleeps in a colocated run, by role. Measured: 4.4 to 7.5 GB
(trainer), 3.6 to 5.6 GB (engine)."""


def check_layout(
    layout: Layout, shapes: Sequence[ModelShape], section: str, hardware: Hardware, hosts: int = 1
) -> None:
    """Raise FitError for a layout that doesn't divide one of the models, or has more ranks than the hosts have GPUs."""
    for shape in shapes:
        if wrong := problem(layout, shape, section):
            raise FitError(wrong)
    sizes = "tensor_parallel x pipeline_parallel x context_parallel"
    hardware.check(f"{section}.{'ranks' if section == TRAINER else sizes}", layout.ranks, hosts)


def on_trainer(config: RunConfig, models: Models, layout: Layout, hardware: Hardware) -> list[Held]:
    """Return the GPU memory that a trainer's rank needs, for each pipeline stage."""
    critic = config.roles.critic.optimizer
    moments, vision = config.trainer.optimizer.moment_bytes, models.trains_vision
    trained = [TrainedModelShape("", models.policy, layout.offload, moments, vision)]
    if models.critic:
        trained.append(TrainedModelShape("critic", models.policy, critic.cpu_offload, critic.moment_bytes))
    batch = micro_batch(config, config.micro_batch_tokens)
    bucket = 0 if config.weights.transport in CPU_TRANSPORTS else config.weights.bucket_bytes

    def of_stage(stage: int) -> Bytes:
        return trainer_stage(trained, models.frozen, layout, stage, batch, hardware.gpu_bytes, bucket_bytes=bucket)

    return _by_stage(TRAINER, layout, hardware, of_stage)


def _by_stage(role: str, layout: Layout, hardware: Hardware, of_stage: Callable[[int], Bytes]) -> list[Held]:
    """Return the GPU memory that a role's rank needs, for each pipeline stage.

    `of_stage` returns the bytes of a stage's tensors; the bytes of the process are added.
    """
    places = [f"stage {stage}" for stage in range(layout.pipeline)] if layout.pipeline > 1 else [""]
    return [
        Held(role, place, {**of_stage(stage), "process": PROCESS_BYTES}, hardware.room)
        for stage, place in enumerate(places)
    ]


def on_frozen(config: RunConfig, role: str, hardware: Hardware) -> list[Held]:
    """Return the GPU memory that a rank of a frozen model's service needs, for each pipeline stage."""
    own = config.roles.frozen[role]
    layout, folders = Layout.of_replica(own), frozen_models(config, role, weights=False)
    shapes = [read_shape(folder, f"{own.section}.model") for folder in folders.values()]
    check_layout(layout, shapes, own.section, hardware)
    batch = micro_batch(config, own.micro_batch_tokens or config.micro_batch_tokens)
    return _by_stage(role, layout, hardware, lambda stage: frozen_stage(shapes, layout, stage, batch))


def on_critic(config: RunConfig, models: Models, hardware: Hardware) -> list[Held]:
    """Return the GPU memory that a rank of the critic service needs, for each pipeline stage.

    The critic recomputes activations and shards gradients as the trainer does.
    """
    own, trainer = config.roles.critic, config.trainer
    layout = replace(
        Layout.of_replica(own),
        recompute=trainer.recompute,
        recompute_layers=trainer.recompute_layers,
        shard_gradients=trainer.shard_gradients,
        overlap_grad_reduce=trainer.overlap_grad_reduce,
    )
    check_layout(layout, [models.policy], own.section, hardware)
    model = TrainedModelShape("critic", models.policy, own.optimizer.cpu_offload, own.optimizer.moment_bytes)
    batch = micro_batch(config, own.micro_batch_tokens or config.micro_batch_tokens)
    gpu_bytes = hardware.gpu_bytes
    return _by_stage("critic", layout, hardware, lambda stage: critic_stage(model, layout, stage, batch, gpu_bytes))


def engines(config: RunConfig, hardware: Hardware) -> dict[str, EngineMemory]:
    """Return the memory of a run's engines on each of their GPUs, by role; leave out engines that need no GPU."""
    judge = config.roles.judge
    sections: list[tuple[str, str, RolloutConfig | JudgeConfig, str, str]] = [
        ("rollout", "rollout", config.rollout, "model.path", config.model.path)
    ]
    if judge.has_replicas:
        sections.append(("judge", "roles.judge", judge, "roles.judge.model", judge.model))
    teacher = config.roles.teacher
    if "teacher" in config.frozen_roles("service") and not ENGINES[teacher.engine].in_ranks:
        sections.append(("teacher", "roles.teacher", config.teacher_engine, "roles.teacher.model", teacher.model))
    found = {}
    for role, setting, section, where, model in sections:
        if not ENGINES[section.engine].needs_gpus:
            continue
        hardware.check(f"{setting}.tensor_parallel", section.tensor_parallel)
        shape = read_shape(resolve_model(model, weights=False, setting=where), where)
        if shape.heads % section.tensor_parallel:
            raise FitError(
                f"{setting}.tensor_parallel is {section.tensor_parallel}: it must divide the model's {shape.heads} "
                "query heads"
            )
        element = 2 if section.dtype == "bfloat16" else 4
        found[role] = engine_memory(
            shape,
            section.tensor_parallel,
            element,
            section.memory_fraction,
            hardware.gpu_bytes,
            ROLES[role].gpu_share(config),
        )
    return found


def on_engine(role: str, engine: EngineMemory, hardware: Hardware) -> Held:
    """Return the GPU memory that an engine needs. Its room is the whole GPU or share that it leases, because the
    key-value cache fills whatever is left of memory_fraction."""
    place = f"{engine.share:g} of a GPU" if engine.share < 1 else ""
    return Held(role, place, engine.bytes, int(engine.share * hardware.gpu_bytes))


def in_turns(
    trainer: Sequence[Held],
    engine: EngineMemory,
    hardware: Hardware,
    bucket_bytes: int,
    judge: EngineMemory | None = None,
    *,
    offload: bool = True,
) -> list[Held]:
    """Return the memory needed on a GPU that trainer and engine share in a colocated run, for each turn: generate,
    train and synchronise.

    Args:
        trainer: the trainer's ranks, by pipeline stage.
        engine: the engine.
        hardware: the GPU.
        bucket_bytes: bytes of a weight bucket.
        judge: a judge on the same GPU.
        offload: True if the sleeping trainer's state moves to host memory; else it stays on the GPU, except gradients.
    """
    worst = max(trainer, key=lambda held: held.total)
    waiting = {name: size for name, size in worst.bytes.items() if name.split(":")[0] not in _OF_A_PASS}
    awake = {f"judge's {name}": size for name, size in judge.bytes.items()} if judge is not None else {}
    asleep = {"sleeping judge": ASLEEP["rollout"]} if judge is not None else {}
    state = {
        f"trainer's {name}": size for name, size in waiting.items() if "gradients" not in name and name != "process"
    }
    generate = {**engine.bytes, **awake, **({} if offload else state), "sleeping trainer": ASLEEP[TRAINER]}
    return [
        Held("both", "generate", generate, hardware.gpu_bytes),
        Held("both", "train", {**worst.bytes, "sleeping engine": ASLEEP["rollout"], **asleep}, hardware.room),
        Held(
            "both",
            "synchronise",
            {
                **waiting,
                "engine's weights": engine.weights,
                "sleeping engine": ASLEEP["rollout"],
                **asleep,
                "buckets of weights": 2 * bucket_bytes,
            },
            hardware.room,
        ),
    ]


_OF_A_PASS = ("activations", "recomputed layer", "logits", "work space")
"""Purposes of memory that a rank needs only while it trains, not in other turns of a colocated run."""
