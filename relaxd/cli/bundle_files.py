"""Bundles of `relaxd bundle`: their description, and their use as a run's folder."""

import json
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from relaxd.client import CliError
from relaxd.run_folder import CONFIG

CONTENTS = "bundle.json"
"""Description of the bundle. All other files keep the places and names that they have in the run's folder."""
MODEL = "model"
"""Folder of the initial model, in a bundle with weights."""
HINT = "relaxd bundle RUN --step N makes one"


@dataclass(frozen=True)
class Bundle:
    """The content of bundle.json."""

    run_id: str
    step: int
    """The step that the bundle is about."""
    start: int | None
    """Step of the checkpoint from which the step can be repeated; 0: the initial model; None: it has no weights."""


@contextmanager
def opened_bundle(path: Path) -> Iterator[tuple[Path, Bundle]]:
    """Unpack a bundle into a temporary folder, with which commands work as with a run's. Raises CliError."""
    with TemporaryDirectory(prefix="relaxd-bundle-") as place:
        folder = Path(place)
        try:
            with tarfile.open(path) as archive:
                archive.extractall(folder, filter="data")
            facts = Bundle(**json.loads((folder / CONTENTS).read_text(encoding="utf-8")))
            config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
            config["model"]["path"] = str(folder / MODEL)
        except KeyError as error:
            raise CliError(f"{path} is not a bundle: its {CONFIG} has no {error}", HINT) from error
        except (OSError, tarfile.TarError, ValueError, TypeError) as error:
            raise CliError(f"{path} is not a bundle: {error}", HINT) from error
        if facts.start is None:
            raise CliError(f"{path} has no weights to repeat the step with", "relaxd bundle --weights adds them")
        (folder / CONFIG).write_text(json.dumps(config))
        yield folder, facts
