"""Programs that the command line runs."""

from pathlib import Path

import pytest

from relaxd.client import CliError
from relaxd.local.programs import stream_program


def test_a_program_that_does_not_finish_in_time_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "endless.py").write_text('import threading\nprint("{}", flush=True)\nthreading.Event().wait()\n')
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(CliError, match="endless did not finish within 1 s"):
        list(stream_program("endless", [], "", seconds=1.0))
