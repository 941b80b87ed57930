"""The record of a tracker's logged steps, in the run's folder, from which a restarted tracker continues."""

import json
import secrets
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from relaxd.run_folder import append_lines, read_lines

Part = Literal["step", "evaluation", "samples"]


class Logged:
    """Record of a tracker's data in an edition: the digest of each step's numbers, and the steps with samples."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.edition = ""
        """Id of the newest edition, "" before the first."""
        self._digests: dict[tuple[int, Part], int] = {}
        self._unsaved: list[str] = []
        for line in read_lines(path):
            if "edition" in line:
                self.edition, self._digests = line["edition"], {}
            else:
                self._digests[line["step"], line["part"]] = line["digest"]
        self.last_step = max((step for step, _ in self._digests), default=-1)
        """The last step with a logged part; -1 if there is none."""

    def begin_edition(self) -> None:
        """Begin the next, empty edition. Raises OSError."""
        self.edition = secrets.token_hex(4)
        self.last_step = -1
        self._digests, self._unsaved = {}, []
        self._path.parent.mkdir(parents=True, exist_ok=True)
        append_lines(self._path, json.dumps({"edition": self.edition}) + "\n")

    def known(self, step: int, part: Part) -> int | None:
        """Return the digest of a logged part, else None."""
        return self._digests.get((step, part))

    def add(self, step: int, part: Part, digest: int) -> None:
        """Add a logged part; `save` stores it."""
        self._digests[step, part] = digest
        self.last_step = max(self.last_step, step)
        self._unsaved.append(json.dumps({"step": step, "part": part, "digest": digest}) + "\n")

    def save(self) -> None:
        """Store added parts. Raises OSError."""
        if self._unsaved:
            append_lines(self._path, "".join(self._unsaved))
            self._unsaved = []


def digest(numbers: Mapping[str, Any]) -> int:
    """Return a digest by which a step that was trained again is recognised."""
    return zlib.crc32(json.dumps(numbers, sort_keys=True).encode())
