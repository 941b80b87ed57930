"""Choose the model of a role that a group is for."""

from collections.abc import Mapping

from relaxd.board import Column
from relaxd.config import RunConfig
from relaxd.roles import TEACHER


def model_of(config: RunConfig, role: str, columns: Mapping[str, Column]) -> str:
    """Return the name of the model that scores a group with these columns.

    Raises:
        ValueError: no teacher is for its source.
    """
    if role != TEACHER:
        return config.roles.frozen[role].model
    teacher = config.roles.teacher
    prompt = columns.get("prompt")
    source = prompt["metadata"].get("data_source") if isinstance(prompt, dict) else None
    if not (model := teacher.model_of(source)):
        raise ValueError(f"{teacher.section}.models {teacher.without(source, 'the group')}")
    return model
