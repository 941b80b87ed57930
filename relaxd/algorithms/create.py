"""Making of the algorithm that a configuration names: one of relaxd's, or a user's own class."""

import difflib
import importlib
import os
import sys
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
from relaxd.algorithms.rloo import RLOO
from relaxd.algorithms.sapo import SAPO
from relaxd.config import AlgorithmConfig
from relaxd.config.algorithm import OwnConfig

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
"""relaxd's algorithms by the `name` in the configuration."""

METHODS = ("advantages", "token_weights", "normalizer", "loss")
ATTRIBUTES = ("needs", "needs_entropy")
"""Names of the methods and properties of `Algorithm`."""

_changed_at: dict[str, float] = {}
"""When the file of a user's module that is imported was changed."""


class AlgorithmError(ValueError):
    """A user's own algorithm can't be used. The message names the setting."""


def create(config: AlgorithmConfig) -> Algorithm:
    """Make the algorithm of a configuration's [algorithm] section.

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
    """Return the class, of the file as it is now: services outlive many runs."""
    module_name, _, class_name = name.partition(":")
    folder = os.getcwd()
    if folder not in sys.path and "" not in sys.path:
        sys.path.append(folder)
    try:
        module = importlib.import_module(module_name)
        changed = os.path.getmtime(module.__file__) if module.__file__ else 0.0
        if _changed_at.setdefault(module_name, changed) != changed:
            importlib.invalidate_caches()
            module = importlib.reload(module)
            _changed_at[module_name] = changed
    except Exception as error:  # a user's module may raise anything
        hint = ""
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            hint = " (coordinator and advantage service have none: use the methods of tensors, or import it in loss())"
        raise AlgorithmError(
            f"{who}: module {module_name} can't be imported: {type(error).__name__}: {error}{hint}"
        ) from error
    kind = getattr(module, class_name, None)
    if not isinstance(kind, type):
        near = difflib.get_close_matches(class_name, [n for n, v in vars(module).items() if isinstance(v, type)], n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        what = f"has no class {class_name}" if kind is None else f"has {class_name}, which isn't a class"
        raise AlgorithmError(f"{who}: module {module_name} {what}{hint}")
    return kind
