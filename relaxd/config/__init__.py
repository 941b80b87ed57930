"""The configuration of a run, as pydantic models."""

from relaxd.config.algorithm import AlgorithmConfig, GRPOConfig
from relaxd.config.evaluation import EvalConfig
from relaxd.config.health import HealthConfig
from relaxd.config.moe import MoEConfig
from relaxd.config.optimizer import OptimizerConfig
from relaxd.config.prompts.reasoning_gym import ReasoningGymConfig
from relaxd.config.rehearsal import RehearsalConfig
from relaxd.config.roles import (
    CriticConfig,
    FrozenModelConfig,
    JudgeConfig,
    ReferenceConfig,
    ReplicaSizes,
    RolesConfig,
    TeacherConfig,
)
from relaxd.config.run import (
    LARGE_COLUMN_BYTES,
    BoardConfig,
    DataConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    RunSection,
    TelemetryConfig,
    TrainerConfig,
    WeightsConfig,
)

__all__ = [
    "LARGE_COLUMN_BYTES",
    "AlgorithmConfig",
    "BoardConfig",
    "CriticConfig",
    "DataConfig",
    "EvalConfig",
    "FrozenModelConfig",
    "GRPOConfig",
    "HealthConfig",
    "JudgeConfig",
    "MoEConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ReasoningGymConfig",
    "ReferenceConfig",
    "RehearsalConfig",
    "ReplicaSizes",
    "RewardConfig",
    "RolesConfig",
    "RolloutConfig",
    "RunConfig",
    "RunSection",
    "TeacherConfig",
    "TelemetryConfig",
    "TrainerConfig",
    "WeightsConfig",
]
