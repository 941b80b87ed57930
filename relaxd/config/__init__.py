"""The configuration of a run, as pydantic models."""

from relaxd.config.algorithm import AlgorithmConfig, GRPOConfig
from relaxd.config.run import (
    BoardConfig,
    DataConfig,
    EvalConfig,
    ModelConfig,
    OptimizerConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    RunSection,
    TelemetryConfig,
    TrainerConfig,
    WeightsConfig,
)

__all__ = [
    "AlgorithmConfig",
    "BoardConfig",
    "DataConfig",
    "EvalConfig",
    "GRPOConfig",
    "ModelConfig",
    "OptimizerConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "RunSection",
    "TelemetryConfig",
    "TrainerConfig",
    "WeightsConfig",
]
