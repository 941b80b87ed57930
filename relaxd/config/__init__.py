"""The configuration of a run, as pydantic models."""

from relaxd.config.algorithm import AlgorithmConfig, GRPOConfig
from relaxd.config.board import LARGE_COLUMN_BYTES, BoardConfig
from relaxd.config.evaluation import EvalConfig
from relaxd.config.health import HealthConfig
from relaxd.config.prompts.data import DataConfig
from relaxd.config.prompts.reasoning_gym import ReasoningGymConfig
from relaxd.config.rehearsal import RehearsalConfig
from relaxd.config.reward import RewardConfig
from relaxd.config.roles import (
    CriticConfig,
    FrozenModelConfig,
    JudgeConfig,
    ReferenceConfig,
    ReplicaSizes,
    RolesConfig,
    TeacherConfig,
)
from relaxd.config.rollout import RolloutConfig
from relaxd.config.run import ModelConfig, RunConfig, RunSection, TelemetryConfig
from relaxd.config.trainer.moe import MoEConfig
from relaxd.config.trainer.optimizer import OptimizerConfig
from relaxd.config.trainer.trainer import TrainerConfig
from relaxd.config.weights import WeightsConfig

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
