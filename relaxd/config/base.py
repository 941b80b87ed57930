"""Base of the configuration's sections."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A section of the configuration: immutable, with documented fields; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)
