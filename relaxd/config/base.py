"""Base of the configuration's sections."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A section of the configuration: immutable, with documented fields; unknown keys are errors."""

    # Without use_attribute_docstrings, which costs every process 0.2 s at its start: `settings` reads them.
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
