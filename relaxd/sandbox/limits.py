"""Limits of a confined process."""

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Limits:
    """Limits of each confined process."""

    seconds: float = 3.0
    """Processor time for one question."""
    memory_bytes: int = 512 << 20
    """Address space."""
    output_bytes: int = 1 << 20
    """Bytes that it may print, or return."""
    confine_files: bool = True
    """Hide all files but Python's own, which needs Landlock. False: it can read what this user can, but write none."""

    def to_json(self) -> str:
        """Return JSON for `from_json`."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Limits":
        """Read what `to_json` wrote."""
        return cls(**json.loads(text))
