"""The configuration of a run, as pydantic models."""

from relaxd.config.agent import AgentConfig
from relaxd.config.algorithm import AlgorithmConfig, GRPOConfig
from relaxd.config.algorithm_shared import PolicyGradientConfig
from relaxd.config.data import DataConfig, ReasoningGymConfig
from relaxd.config.evaluation import EvalConfig
from relaxd.config.operation import (
    CPU_TRANSPORTS,
    LARGE_COLUMN_BYTES,
    AlertsConfig,
    BoardConfig,
    HealthConfig,
    RehearsalConfig,
    TrackingConfig,
    WeightsConfig,
)
from relaxd.config.reward import RewardConfig
from relaxd.config.role_settings import (
    CriticConfig,
    FrozenModelConfig,
    JudgeConfig,
    PlacementConfig,
    ReferenceConfig,
    ReplicaSizes,
    RolesConfig,
    TeacherConfig,
)
from relaxd.config.rollout import RolloutConfig
from relaxd.config.run import ModelConfig, RunConfig, RunSection, TelemetryConfig
from relaxd.config.trainer import MoEConfig, OptimizerConfig, TrainerConfig

__all__ = [
    "CPU_TRANSPORTS",
    "LARGE_COLUMN_BYTES",
    "AgentConfig",
    "AlertsConfig",
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
    "PlacementConfig",
    "PolicyGradientConfig",
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
    "TrackingConfig",
    "TrainerConfig",
    "WeightsConfig",
]
