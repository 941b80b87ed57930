"""What every section of the configuration shares."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A section of the configuration: immutable, every field documented, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)
