"""Table of the engines that hold a run's models.

The setting `engine` of a section chooses an engine by name. The table says for each engine which settings it takes,
which hardware it needs, how it pauses and how it receives weights. Error messages list engines from the table. No other
code compares engines' names. docs/engines.md, "Adding an engine", says what else an engine needs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

SCRIPTED = "scripted"
"""Name of the simulated engine of a rehearsal, which `relaxd rehearse` chooses."""
MODEL_KINDS = {
    "qwen3_vl": ("image", "video"),
    "qwen3_vl_moe": ("image", "video"),
    "qwen3_5": ("image", "video"),
    "qwen3_5_moe": ("image", "video"),
    "qwen3_omni_moe": ("image", "video", "audio"),
}
"""Kinds of media that models take, by model type: only kinds whose token layout was compared with transformers'."""
HYBRID_MODELS = ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
"""Model types that have gated delta nets (linear attention)."""


@dataclass(frozen=True, kw_only=True)
class EngineCapabilities:
    """Settings and abilities of an engine."""

    name: str
    settings: Mapping[str, tuple[str, ...]]
    """Settings of this engine that some other engines lack, by the configuration section that may choose the engine."""
    in_ranks: bool = False
    """True if the engine's model runs on ranks like the trainer's, which have parallel sizes and may hold several
    models."""
    module: str = "services.rollout.service.child_engine"
    """Module whose `start_engine` starts the engine for a rollout replica (services.rollout.engines.engine_interface).
    By default the engine is a child process."""
    process: str = ""
    """Module that the engine's child process runs; empty if there is no child process."""
    extra: str = "rollout"
    """Extra of the package relaxd with what the engine needs, as in pip install 'relaxd[rollout]'."""
    has_model: bool = True
    """True if the engine runs a model. False for the simulated engine of a rehearsal, which errors don't name."""
    needs_gpus: bool = False
    """True if the engine needs GPUs of its replica's machine."""
    leases_gpus: bool = False
    """True if the engine's replica leases as many GPUs as tensor_parallel says. In a rehearsal there are no
    GPUs."""
    shares_gpus: bool = False
    """True if the engine can leave a share of its GPUs' memory to other engines."""
    sleeps: bool = False
    """True if the engine can free its memory and allocate it again, to take turns with a trainer."""
    pauses: tuple[str, ...] = ("in_place", "retract", "abort", "drain")
    """Values of weights.pause that the engine supports."""
    takes_url: bool = False
    """True if the engine's replica needs the URL of a running server."""
    stock_weight_group: bool = False
    """True if the engine receives weights like SGLang's own servers: by torch's process group, in flat buckets, from
    one rank."""
    gives_checksums: bool = True
    """True if the engine takes checksums of the weights that it serves. Receipts of other engines say "unknown"."""
    gives_likeliest: bool = False
    """True if the engine can report the likeliest tokens at each position of an answer."""
    media: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Kinds of media that the engine accepts, by model type."""
    refused_models: tuple[str, ...] = ()
    """Model types that the engine refuses, because it isn't known to compute them as the trainer does."""
    takes_candidates: bool = False
    """True if the engine, as a teacher, can score a different list of tokens at each position of an answer."""

    def takes(self, kind: str, model_type: str | None = None) -> bool:
        """Return True if the engine accepts this kind of media for a model type; None: for at least one model type."""
        if model_type is not None:
            return kind in self.media.get(model_type, ())
        return any(kind in kinds for kinds in self.media.values())


ENGINES: dict[str, EngineCapabilities] = {
    engine.name: engine
    for engine in (
        EngineCapabilities(
            name="megatron",
            settings={
                "roles.teacher": ("pipeline_parallel", "context_parallel", "expert_parallel", "micro_batch_tokens")
            },
            in_ranks=True,
            extra="trainer",
            takes_candidates=True,
        ),
        EngineCapabilities(
            name="transformers",
            settings={"rollout": (), "roles.judge": ()},
            process="services.rollout.engines.transformers.transformers_process",
            sleeps=True,
            pauses=("in_place", "abort", "drain"),
            gives_likeliest=True,
            media=MODEL_KINDS,
        ),
        EngineCapabilities(
            name="sglang",
            settings={
                "rollout": ("tensor_parallel", "memory_fraction", "return_routed_experts", "sglang"),
                "roles.judge": ("tensor_parallel", "memory_fraction", "sglang"),
                "roles.teacher": ("max_tokens_in_flight", "gpu_share", "memory_fraction", "sglang"),
            },
            process="services.rollout.engines.sglang.sglang_process",
            extra="sglang",
            needs_gpus=True,
            leases_gpus=True,
            shares_gpus=True,
            sleeps=True,
            gives_likeliest=True,
            media={
                "qwen3_vl": ("image", "video"),
                "qwen3_vl_moe": ("image", "video"),
                "qwen3_omni_moe": ("image", "video", "audio"),
            },
            refused_models=HYBRID_MODELS,
        ),
        EngineCapabilities(
            name="sglang_external",
            settings={"rollout": ("tensor_parallel",)},
            module="services.rollout.engines.sglang_external.external_engine",
            takes_url=True,
            stock_weight_group=True,
            gives_checksums=False,
            refused_models=("qwen3_vl_moe", "qwen3_omni_moe", *HYBRID_MODELS),
        ),
        EngineCapabilities(
            name=SCRIPTED,
            # A rehearsal keeps what the run sets for its own engine.
            settings={"rollout": ("tensor_parallel", "memory_fraction", "return_routed_experts", "sglang")},
            module="services.rollout.engines.scripted_engine",
            has_model=False,
            leases_gpus=True,
            media=MODEL_KINDS,
        ),
    )
}
"""Capabilities of all engines by name, in the order in which settings and errors list the engines."""


def engines_of(section: str) -> tuple[str, ...]:
    """Return the names that the setting `engine` of a section may have."""
    return tuple(engine.name for engine in ENGINES.values() if section in engine.settings)


def list_engines(section: str, able: Callable[[EngineCapabilities], bool]) -> str:
    """Return the names of a section's engines for which `able` is true, for error messages: '"transformers" or
    "sglang"'."""
    engines = (ENGINES[name] for name in engines_of(section))
    return " or ".join(f'"{engine.name}"' for engine in engines if engine.has_model and able(engine))


if TYPE_CHECKING:  # mypy knows no Literal of a table's names
    RolloutEngineName = str
    TeacherEngineName = str
    JudgeEngineName = str
else:
    RolloutEngineName = Literal[engines_of("rollout")]
    TeacherEngineName = Literal[engines_of("roles.teacher")]
    JudgeEngineName = Literal[engines_of("roles.judge")]
