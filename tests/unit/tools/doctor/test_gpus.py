"""The doctor's findings about drivers and GPUs, as tables."""

from pathlib import Path

import pytest

from relaxd.tools.doctor.gpus import (
    GpuMemory,
    Torch,
    driver_finding,
    installed_torch,
    memory_findings,
    no_driver_finding,
    nvidia_devices,
)

GIB = 1 << 30
H100 = "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize(
    ("cuda", "torch", "level", "told"),
    [
        ((13, 0), Torch("2.11.0+cu130", (13, 0)), "ok", "torch 2.11.0+cu130 is built with CUDA 13.0"),
        ((12, 4), Torch("2.11.0+cu128", (12, 8)), "ok", "for CUDA up to 12.4"),
        ((12, 8), Torch("2.11.0", (13, 0)), "problem", "built with CUDA 13.0"),
        ((13, 0), Torch("2.13.0+cpu", None), "warning", "is built for CPUs"),
        ((13, 0), None, "ok", "for CUDA up to 13.0"),
    ],
)
def test_the_driver_must_suit_torch(cuda: tuple[int, int], torch: Torch | None, level: str, told: str) -> None:
    finding = driver_finding("580.159.04", cuda, torch)
    assert finding.level == level
    assert told in finding.found


@pytest.mark.parametrize(
    ("error", "devices", "level", "command"),
    [
        ("NVML Shared Library Not Found", [], "ok", ""),
        ("NVML Shared Library Not Found", ["0000:01:00.0"], "problem", "nvidia-smi"),
        ("Driver/library version mismatch", ["0000:01:00.0"], "problem", "sudo reboot"),
    ],
)
def test_gpus_without_a_driver_are_a_problem(error: str, devices: list[str], level: str, command: str) -> None:
    finding = no_driver_finding(error, devices)
    assert (finding.level, finding.how) == (level, command)


def test_memory_that_others_use_is_named() -> None:
    gpus = [GpuMemory(index, H100, 80 * GIB, 600 << 20) for index in range(3)]
    gpus[1] = GpuMemory(1, H100, 80 * GIB, 30 * GIB, (123, 456))
    free, taken = memory_findings(gpus)
    assert (free.level, free.about, free.found.startswith(f"2 of {H100} with 85.9 GB")) == ("ok", "GPU 0, 2", True)
    assert (taken.level, taken.about, taken.how) == ("warning", "GPU 1", "export CUDA_VISIBLE_DEVICES=0,2")
    assert "others use 32.2 GB of 85.9 GB (pid 123, 456)" in taken.found
    (alone,) = memory_findings(gpus[1:2])
    assert alone.how == "nvidia-smi"


def test_torch_is_read_without_importing_it() -> None:
    import torch

    cuda = torch.version.cuda
    expected = tuple(map(int, cuda.split(".")[:2])) if cuda else None
    assert installed_torch() == Torch(torch.__version__, expected)


def test_gpus_are_found_on_the_bus(tmp_path: Path) -> None:
    for name, vendor, kind in (("0000:01:00.0", "0x10de", "0x030200"), ("0000:02:00.0", "0x1af4", "0x020000")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text(f"{vendor}\n")
        (tmp_path / name / "class").write_text(f"{kind}\n")
    assert nvidia_devices(tmp_path) == ["0000:01:00.0"]
