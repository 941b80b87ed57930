"""The model families that the trainer supports: one file each, named after its `model_type`, with the `Family` FAMILY.

docs/models.md says how to add one.
"""

import json
import pkgutil
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path

from relaxd.models.model_contradictions import config_contradiction
from services.trainer.model.architecture import Architecture, ModelError, ModelFileError
from services.trainer.model.family import Config, Family

FAMILIES: dict[str, Family] = {
    module.name: import_module(f"{__name__}.{module.name}").FAMILY for module in pkgutil.iter_modules(__path__)
}
"""Supported model families, by `model_type`."""


def read_architecture(folder: Path) -> Architecture:
    """Read the architecture from a model folder's config.json.

    Args:
        folder: a Hugging Face model folder.

    Raises:
        ModelError: the file isn't JSON, a field is missing, or a feature isn't supported.
        ModelFileError: the file is missing.
    """
    path = folder / "config.json"
    try:
        config: Config = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ModelFileError(f"{folder} has no config.json: it must be a Hugging Face model folder") from error
    except json.JSONDecodeError as error:
        raise ModelError(f"{path} isn't valid JSON: {error}") from error
    if problem := config_contradiction(config):
        raise ModelError(f"{path}: {problem}")
    try:
        return _family(config["model_type"]).read(config)
    except KeyError as error:
        raise ModelError(f"{path} has no field {error}") from error
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error


def _family(model_type: str) -> Family:
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    nearest = get_close_matches(model_type, FAMILIES, n=1, cutoff=0)
    raise ModelError(
        f'model_type is "{model_type}": supported are {", ".join(FAMILIES)}. The nearest name is "{nearest[0]}"; '
        "docs/models.md says how to add a family"
    )
