"""Checks of the NVIDIA driver and of the GPUs."""

import importlib.util
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from relaxd.replica.gpus import load_nvml, nvml_problem, visible_gpus
from relaxd.text import byte_amount
from relaxd.tools.doctor import Finding, Scope

TAKEN_BYTES = 1 << 30
"""Bytes of a GPU's memory that processes other than relaxd's may use before the doctor warns."""
PCI = Path("/sys/bus/pci/devices")
NVIDIA, DISPLAY = "0x10de", "0x03"
"""NVIDIA's PCI vendor id, and the prefix of the PCI class of display controllers."""
INSTALL_DRIVER = "install NVIDIA's driver (https://www.nvidia.com/drivers)"

Version = tuple[int, int]


@dataclass(frozen=True)
class Torch:
    """Version of the installed torch, and the CUDA version that it was built with."""

    version: str
    cuda: Version | None
    """CUDA version (major, minor) that torch was built with; None: torch was built for CPUs."""


@dataclass(frozen=True)
class GpuMemory:
    """A GPU's total memory in bytes, and who uses it."""

    index: int
    name: str
    total: int
    others: int
    """Bytes used by processes that don't belong to this machine's relaxd services."""
    holders: tuple[int, ...] = ()
    """Pids of the processes that use `others` bytes, as far as the driver shows them."""


def check_gpus(scope: Scope) -> Iterator[Finding]:
    """Check that NVIDIA's driver fits the installed torch, and that no other processes use the GPUs' memory."""
    driver = load_nvml()
    if driver is None:
        yield no_driver_finding(nvml_problem(), nvidia_devices(PCI))
        return
    cuda = driver.nvmlSystemGetCudaDriverVersion()
    gpus = visible_gpus()
    if not gpus:
        yield Finding(
            "warning",
            "GPUs",
            f"CUDA_VISIBLE_DEVICES = {os.environ.get('CUDA_VISIBLE_DEVICES')!r} shows none of this machine's "
            f"{driver.nvmlDeviceGetCount()}",
            "the GPUs that runs may use; unset: all",
            "unset CUDA_VISIBLE_DEVICES",
        )
        return
    if not scope.elsewhere:
        yield driver_finding(
            str(driver.nvmlSystemGetDriverVersion()), (cuda // 1000, cuda % 1000 // 10), installed_torch()
        )
    ours = _own_pids(scope)
    found = [_memory(driver, driver.nvmlDeviceGetHandleByUUID(gpu.uuid), gpu.index, ours) for gpu in gpus]
    yield from memory_findings([one for one in found if one is not None])


def no_driver_finding(error: str, devices: Sequence[str]) -> Finding:
    """Assess a machine without a working driver. `devices` are the PCI addresses of its NVIDIA GPUs."""
    if not devices:
        return Finding("ok", "GPUs", "none: runs use the CPU")
    right = INSTALL_DRIVER
    if "mismatch" in error.lower():  # the driver was updated, and the kernel still has the old one
        return Finding("problem", "NVIDIA driver", error, "one version in kernel and libraries", "sudo reboot")
    found = f"it doesn't work ({error}), but this machine has {len(devices)} NVIDIA GPUs ({', '.join(devices)})"
    return Finding("problem", "NVIDIA driver", found, right, "nvidia-smi")


def driver_finding(driver: str, cuda: Version, torch: Torch | None) -> Finding:
    """Assess whether the NVIDIA driver `driver`, which supports CUDA up to `cuda`, fits the installed torch."""
    about, found = "NVIDIA driver", f"{driver}, for CUDA up to {_dotted(cuda)}"
    if torch is None:  # `check_packages` says so
        return Finding("ok", about, found)
    if torch.cuda is None:
        return Finding(
            "warning",
            about,
            f"{found}; torch {torch.version} is built for CPUs, so that runs can't use the GPUs",
            "a torch built with CUDA, in an environment for GPUs (README, On GPUs)",
        )
    found += f"; torch {torch.version} is built with CUDA {_dotted(torch.cuda)}"
    if torch.cuda[0] > cuda[0]:
        return Finding(
            "problem",
            about,
            found,
            f"a driver for CUDA {torch.cuda[0]}, or a torch built with CUDA {cuda[0]}: {INSTALL_DRIVER}",
        )
    return Finding("ok", about, found)


def memory_findings(gpus: Sequence[GpuMemory]) -> Iterator[Finding]:
    """Assess how much of each GPU's memory other processes use. Unused GPUs of the same kind share a finding."""
    free = [gpu for gpu in gpus if gpu.others < TAKEN_BYTES]
    for name, total in dict.fromkeys((gpu.name, gpu.total) for gpu in free):
        alike = [str(gpu.index) for gpu in free if (gpu.name, gpu.total) == (name, total)]
        found = f"{len(alike)} of {name} with {byte_amount(total)} of memory, which nobody else uses"
        yield Finding("ok", f"GPU {', '.join(alike)}", found)
    for gpu in gpus:
        if gpu in free:
            continue
        who = f" (pid {', '.join(map(str, gpu.holders))})" if gpu.holders else ""
        others = ",".join(str(one.index) for one in free)
        yield Finding(
            "warning",
            f"GPU {gpu.index}",
            f"{gpu.name}: others use {byte_amount(gpu.others)} of {byte_amount(gpu.total)}{who}",
            "the whole memory for relaxd: end these processes, or leave this GPU out",
            f"export CUDA_VISIBLE_DEVICES={others}" if others else "nvidia-smi",
        )


def installed_torch() -> Torch | None:
    """Return the installed torch's version, read from its files, because importing torch takes seconds; None if it is
    missing."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = (Path(spec.origin).parent / "version.py").read_text()
    except OSError:
        return None
    version = re.search(r"^__version__ = '([^']+)'", text, re.MULTILINE)
    cuda = re.search(r"^cuda\b.*= '(\d+)\.(\d+)", text, re.MULTILINE)
    return Torch(version[1] if version else "", (int(cuda[1]), int(cuda[2])) if cuda else None)


def _memory(driver: Any, handle: Any, index: int, ours: frozenset[int]) -> GpuMemory | None:
    """Return a GPU's memory and who uses it; None if the driver doesn't report it.

    `ours` has the pids of this machine's relaxd services.
    """
    try:
        memory, name = driver.nvmlDeviceGetMemoryInfo(handle), driver.nvmlDeviceGetName(handle)
        running = driver.nvmlDeviceGetComputeRunningProcesses(handle)
    except driver.NVMLError:  # such as a MIG device, or a GPU that has fallen off the bus
        return None
    holders = tuple(one.pid for one in running if one.pid not in ours)
    others = sum(one.usedGpuMemory or 0 for one in running if one.pid not in ours)
    # In a container the driver shows no processes.
    return GpuMemory(index, str(name), memory.total, others if ours else max(others, memory.used), holders)


def _own_pids(scope: Scope) -> frozenset[int]:
    stack = scope.folder.read()
    try:
        return (
            frozenset(one.pid for one in psutil.Process(stack.pid).children(recursive=True)) if stack else frozenset()
        )
    except psutil.Error:
        return frozenset()


def nvidia_devices(pci: Path) -> list[str]:
    """Return the PCI addresses of this machine's NVIDIA GPUs, found without the driver."""
    found = []
    for device in sorted(pci.glob("*")):
        try:
            vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
        except OSError:
            continue
        if vendor == NVIDIA and kind.startswith(DISPLAY):
            found.append(device.name)
    return found


def _dotted(version: Version) -> str:
    return f"{version[0]}.{version[1]}"
