"""Programs that the command line runs."""

from pathlib import Path

import pytest

from relaxd.client import CliError
from relaxd.local.programs import stream_program


@pytest.mark.parametrize("lines", [0, 1])
def test_a_program_without_another_answer_in_time_is_killed(
    lines: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = f'import threading\nprint("{{}}\\n" * {lines}, end="", flush=True)\nthreading.Event().wait()\n'
    (tmp_path / "endless.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(CliError, match="endless was killed after 1 s without an answer"):
        list(stream_program("endless", [], "", seconds=1.0))
