"""The log that a failed run shows: that of the replica whose failure ended it, whatever names its reason has."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from relaxd.cli.execute import Where, _with_log
from relaxd.client import CliError, RunFailedError
from relaxd.local.state_folder import ServiceState, StackState, StateFolder
from relaxd.v1.coordinator_pb2 import Run

NAMES = {"trainer": "trainer", "rollout-1": "rollout", "rollout-2": "rollout"}
REASON = "rollout-2-8c1f refuses the weights of trainer: no lm_head.weight"


@pytest.fixture
def where(tmp_path: Path) -> Iterator[Where]:
    folder = StateFolder(tmp_path / "state")
    folder.create()
    folder.begin_logs(None)
    for name in NAMES:
        folder.log(name).write_text(f"the end of {name}\n")
    services = [ServiceState(name=name, role=role) for name, role in NAMES.items()]
    with folder.locked():  # as by a supervisor
        folder.write(StackState(pid=1, started=0, coordinator="127.0.0.1:1", redis="redis://x", services=services))
        yield Where(folder)


@pytest.mark.parametrize(
    ("role", "instance", "shown"),
    [
        ("rollout", "rollout-2", "rollout-2"),
        ("trainer", "", "trainer"),
        ("rollout", "on-another-machine", None),
        ("", "", None),  # it did not fail because of a replica
    ],
)
def test_a_failed_run_shows_the_log_of_the_replica(where: Where, role: str, instance: str, shown: str | None) -> None:
    run = Run(run_id="r", reason=REASON, failed_role=role, failed_instance=instance)
    error = _with_log(RunFailedError(run), where)
    log = f"; the last lines of {where.folder.log(shown)}:\n  the end of {shown}" if shown else ""
    assert error.message == f"run r failed: {REASON}{log}"
    assert error.hint == f"all logs are in {where.folder.logs}"


def test_another_error_that_names_services_shows_no_log(where: Where) -> None:
    assert _with_log(CliError("the trainer is paused", "wait"), where).message == "the trainer is paused"
