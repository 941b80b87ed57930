"""Creation of the algorithm that a configuration names: a bundled one or a user's own class."""

from typing import Any

from pydantic import ValidationError

from relaxd.algorithms.base import Algorithm
from relaxd.algorithms.cispo import CISPO
from relaxd.algorithms.dapo import DAPO
from relaxd.algorithms.dr_grpo import DrGRPO
from relaxd.algorithms.grpo import GRPO
from relaxd.algorithms.gspo import GSPO
from relaxd.algorithms.opd import OPD
from relaxd.algorithms.policy_gradient import PolicyGradient
from relaxd.algorithms.ppo import PPO
from relaxd.algorithms.reinforce_plus_plus import ReinforcePlusPlus, ReinforcePlusPlusBaseline
from relaxd.algorithms.results import AlgorithmError
from relaxd.algorithms.rloo import RLOO
from relaxd.algorithms.sapo import SAPO
from relaxd.config import AlgorithmConfig
from relaxd.config.algorithm import OwnConfig
from relaxd.importing import ImportProblem, import_own

ALGORITHMS: dict[str, type[PolicyGradient]] = {
    algorithm.Config.model_fields["name"].default: algorithm
    for algorithm in (
        GRPO,
        DrGRPO,
        DAPO,
        GSPO,
        SAPO,
        CISPO,
        RLOO,
        ReinforcePlusPlus,
        ReinforcePlusPlusBaseline,
        OPD,
        PPO,
    )
}
"""Classes of the bundled algorithms, by `algorithm.name` in the configuration."""

METHODS = ("advantages", "token_weights", "normalizer", "loss")
ATTRIBUTES = ("needs", "needs_entropy")
"""Names of the methods and properties of `Algorithm`."""


def create(config: AlgorithmConfig) -> Algorithm:
    """Create the algorithm of a configuration's [algorithm] section.

    Raises:
        AlgorithmError: a user's own class can't be imported, is no algorithm, or refuses its settings.
    """
    return _create_own(config) if isinstance(config, OwnConfig) else ALGORITHMS[config.name](config)


def _create_own(config: OwnConfig) -> Algorithm:
    who = f"algorithm.name = {config.name!r}"
    kind = _import(config.name, who)
    if missing := [name for name in (*METHODS, *ATTRIBUTES) if not hasattr(kind, name)]:
        raise AlgorithmError(
            f"{who}: the class has no {' and no '.join(missing)}; a subclass of relaxd.algorithms.PolicyGradient or of "
            "one of its algorithms has them"
        )
    try:
        if (settings := getattr(kind, "Config", None)) is not None:
            made = kind(settings.model_validate(config.settings))
        else:
            made = kind(**config.settings)
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        raise AlgorithmError(f"algorithm.settings doesn't fit {config.name}: {wrong}") from error
    except Exception as error:  # a user's class may raise anything
        raise AlgorithmError(f"{who} can't be made: {type(error).__name__}: {error}") from error
    algorithm: Algorithm = made
    return algorithm


def _import(name: str, who: str) -> Any:
    try:
        kind = import_own(name)
    except ImportProblem as error:
        hint = ""
        cause = error.__cause__
        if isinstance(cause, ModuleNotFoundError) and cause.name == "torch":
            hint = " (coordinator and advantage service have none: use the methods of tensors, or import it in loss())"
        raise AlgorithmError(f"{who}: {error}{hint}") from error
    if not isinstance(kind, type):
        module_name, _, class_name = name.partition(":")
        raise AlgorithmError(f"{who}: module {module_name} has {class_name}, which isn't a class")
    return kind
