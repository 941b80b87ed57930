"""Lets SGLang be imported where there is no Triton, no sgl_kernel and no torchvision that fits: a CPU-only machine.

Copied into the environment of the SGLang tests together with a .pth file that imports it, so that it is there before
anything of SGLang's, in every process. It does nothing unless SGLANG_USE_CPU_ENGINE is 1. What it puts in the place of
the missing packages is SGLang's own stand-in (sglang/_triton_stub.py): names that can be imported, not functions that
compute.
"""

import importlib.util
import os
import sys
import typing
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType


def _stand_in() -> ModuleType:
    path = Path(__file__).parent / "sglang" / "_triton_stub.py"
    spec = importlib.util.spec_from_file_location("_sglang_stand_in", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # SGLang writes `stand-in | None` in annotations.
    module._MockModule.__or__ = lambda self, other: typing.Any
    module._MockModule.__ror__ = lambda self, other: typing.Any
    return module


class _Made(Loader):
    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        pass


class _Finder(MetaPathFinder):
    def __init__(self, stand_in: ModuleType, missing: Sequence[str]) -> None:
        self._stand_in = stand_in
        self._missing = missing
        self._operators: object = None

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        root = name.partition(".")[0]
        if root == "torchvision" and self._operators is None:
            self._operators = _declare_operators()
            _ignore_pinned_memory()
        if root not in self._missing:
            return None
        module = self._stand_in._MockModule(name)
        module.__spec__ = ModuleSpec(name, _Made(module), is_package=True)
        return module.__spec__


def _declare_operators() -> object:
    """torchvision registers fake versions of operators that only its compiled part would declare."""
    import torch

    library = torch.library.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def _ignore_pinned_memory() -> None:
    """torch refuses pinned memory where there is no accelerator; SGLang asks for it when it keeps routed experts."""
    import torch

    zeros = torch.zeros

    def unpinned_zeros(*arguments: typing.Any, pin_memory: bool = False, **named: typing.Any) -> torch.Tensor:
        return zeros(*arguments, **named)

    torch.zeros = unpinned_zeros


def _install() -> None:
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    stand_in = _stand_in()
    missing = [name for name in ("sgl_kernel", "triton") if PathFinder.find_spec(name) is None]
    if "triton" in missing:
        stand_in.install()  # what SGLang needs of it in sys.modules; the rest comes from the finder below
        sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "_TritonFinder"]
    sys.meta_path.insert(0, _Finder(stand_in, missing))


if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
    _install()
