"""Tests on GPUs: skipped where there are too few, and a table of what they took and found at the end."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.table import Table

from tests.e2e.conftest import Workplace

HERE = Path(__file__).parent
GPUS = torch.cuda.device_count()


AFTERWARDS = ("test_gpu_run.py", "test_external.py")
"""Slow to start unless others have compiled SGLang's kernels before."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this folder, skip those that need more GPUs than there are, and put some last."""
    items.sort(key=lambda item: item.path.is_relative_to(HERE) and item.path.name in AFTERWARDS)
    for item in items:
        if not item.path.is_relative_to(HERE):
            continue
        marker = item.get_closest_marker("gpu")
        if marker is None:
            item.add_marker(pytest.mark.gpu)
        needed = marker.args[0] if marker and marker.args else 1
        item.user_properties.append(("GPUs", needed))
        if needed > GPUS:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPUs, this machine has {GPUS}"))


@pytest.fixture(scope="session")
def gpu_count() -> int:
    """How many GPUs there are: at least as many as the test's mark `gpu(n)` asks for."""
    return GPUS


@pytest.fixture
def facts(record_property: Callable[[str, object], None]) -> Callable[[str, object], None]:
    """`facts("sync_seconds", 0.03)` puts a figure into the table at the end."""
    return record_property


@pytest.fixture
def end() -> Iterator[list[Workplace]]:
    """Workplaces of the test: their services are brought down at the end."""
    places: list[Workplace] = []
    yield places
    for place in places:
        place.end()
        place.relaxd("down")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print what each test took and found."""
    reports = [r for found in terminalreporter.stats.values() for r in found if isinstance(r, pytest.TestReport)]
    ours = [r for r in reports if r.nodeid.startswith("tests/gpu/")]
    seconds: dict[str, float] = {}
    for report in ours:
        seconds[report.nodeid] = seconds.get(report.nodeid, 0.0) + report.duration
    shown = [r for r in ours if r.when == "call" or r.failed]
    if not shown:
        return
    table = Table("test", "GPUs", "seconds", "outcome", "facts", box=None, header_style="bold", padding=(0, 2, 0, 0))
    for report in shown:
        properties = dict(report.user_properties)
        needed = properties.pop("GPUs", "")
        found = "  ".join(f"{name} {_figure(value)}" for name, value in properties.items())
        outcome = report.outcome if report.when == "call" else f"{report.when} {report.outcome}"
        name = report.nodeid.removeprefix("tests/gpu/")
        table.add_row(name, str(needed), f"{seconds[report.nodeid]:.1f}", outcome, found)
    device = torch.cuda.get_device_name(0) if GPUS else "no GPU"
    terminalreporter.section(f"on {GPUS} x {device}, torch {torch.__version__}: {sum(seconds.values()):.0f} s")
    console = Console(width=200, highlight=False, markup=False)
    with console.capture() as text:
        console.print(table)
    terminalreporter.write(text.get())


def _figure(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
