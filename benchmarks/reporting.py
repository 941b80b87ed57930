"""Reporting of benchmarks: description of the machine, table, JSON file."""

import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pynvml
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """Describe the machine: processor, cores, memory in GiB, GPUs, Python, and its load before the benchmark."""
    cpuinfo = Path("/proc/cpuinfo").read_text().splitlines()
    model = next(
        (line.split(":", 1)[1].strip() for line in cpuinfo if "model name" in line),
        platform.processor(),
    )
    return {
        "processor": model,
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        **({"gpus": gpus} if (gpus := _gpus()) else {}),
        "python": platform.python_version(),
        "load_before": round(os.getloadavg()[0], 2),
    }


def report(name: str, rows: Sequence[Mapping[str, Any]], **facts: Any) -> None:
    """Print rows as a table and write them, with machine, date and facts, to benchmarks/results/NAME.json."""
    table = Table(title=name)
    for column in rows[0]:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*(f"{value:,.3g}" if isinstance(value, float) else str(value) for value in row.values()))
    console = Console(width=140)
    console.print(table)
    for fact, value in facts.items():
        console.print(f"{fact}: {value}")
    RESULTS.mkdir(exist_ok=True)
    document = {"name": name, "date": time.strftime("%Y-%m-%d"), "machine": machine(), **facts, "rows": list(rows)}
    (RESULTS / f"{name}.json").write_text(json.dumps(document, indent=2) + "\n")


def _gpus() -> list[str]:
    """Return the names of the GPUs, none without NVIDIA's driver."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    return [pynvml.nvmlDeviceGetName(handle) for handle in handles]
