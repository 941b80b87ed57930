"""CPU support for megatron-core.

megatron-core 0.16.1 hard-codes CUDA in many places: devices, streams, pinned memory, tensor type names. Without CUDA,
`install` adds an import hook that rewrites this code in memory while Megatron's modules are imported. The installed
files and torch stay unchanged. With CUDA there is no hook.

Import Megatron only after this module; every trainer module that uses Megatron does.
"""

import contextlib
import importlib.abc
import importlib.machinery
import re
import sys
import warnings
from collections.abc import Sequence
from types import CodeType, ModuleType

import torch

_BRIDGE = f'__import__("sys").modules["{__name__}"]'

_REWRITES = [
    (re.compile(r"pin_memory=True"), "pin_memory=False"),
    (re.compile(r"""f(['"])cuda:\{torch\.cuda\.current_device\(\)\}\1"""), '"cpu"'),
    (re.compile(r"torch\.cuda\.current_device\(\)"), 'torch.device("cpu")'),
    (re.compile(r"\.cuda\(\s*(torch\.device\(\"cpu\"\))?\s*(non_blocking=True)?\)"), ""),
    (re.compile(r"""(['"])cuda\1"""), '"cpu"'),
    (re.compile(r"""(['"])torch\.cuda\.(Float|Half|BFloat16)Tensor\1"""), r"'torch.\2Tensor'"),
    (re.compile(r"torch\.cuda\.synchronize\([^)]*\)"), "None"),
    (re.compile(r"torch\.cuda\.(Stream|current_stream|stream)\("), rf"{_BRIDGE}.\1("),
    (re.compile(r"torch\.cuda\.(manual_seed|get_rng_state|set_rng_state)\("), r"torch.\1("),
    (re.compile(r"torch\.cuda\.random\.get_rng_state\(device=device\)"), "torch.get_rng_state()"),
]

_MODULE_REWRITES: dict[str, list[tuple[str, str]]] = {
    # CPU and "CUDA" share one generator here, so the check that the CPU's state stays unchanged can't hold.
    "megatron.core.tensor_parallel.random": [
        ("if not torch.all(cpu_rng_state == torch.get_rng_state()).item():", "if False:"),
        (
            "def _set_cuda_rng_state(new_state: torch.Tensor, device: int = -1, graph_safe: bool = False):",
            "def _set_cuda_rng_state(new_state: torch.Tensor, device: int = -1, graph_safe: bool = False):\n"
            "    return torch.set_rng_state(new_state)\n",
        ),
    ],
    # torch.compile needs a C++ compiler at run time and 1.6 s of imports, without a benefit on CPU.
    "megatron.core.jit": [("jit_fuser = torch.compile", "jit_fuser = noop_decorator")],
    # Megatron's optimizer offloads only tensors on a GPU.
    "megatron.core.optimizer.cpu_offloading.hybrid_optimizer": [
        ("for param in params if param.is_cuda]", "for param in params]"),
        ("offload_params_numel < offload_threshold and param.is_cuda:", "offload_params_numel < offload_threshold:"),
        (".cpu().pin_memory()", ""),
    ],
}


_EXPECTED_WARNINGS = (
    # From Megatron without Transformer Engine and apex, which the trainer doesn't use.
    ".*Transformer Engine and Apex are not installed.*",
    "Apex is not installed. Falling back to Torch Norm",
    # From torch 2.13, about calls in Megatron.
    ".*torch.distributed.reduce_scatter_tensor.* is deprecated.*",
    ".*torch.distributed.all_gather_into_tensor.* is deprecated.*",
    # About Megatron's default for CUDA graphs, which are off.
    "full scope is deprecated.*",
    # From torch, when Megatron loads a checkpoint.
    ".*load_state_dict. is deprecated and will be removed.*",
    "Please use DTensor instead and we are deprecating ShardedTensor.*",
    "The .grad attribute of a Tensor that is not a leaf Tensor is being accessed.*",
)


class Stream:
    """Replaces a CUDA stream or event. CPU operations are synchronous."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def wait_stream(self, *args: object) -> None:
        """Return at once: on CPU there is nothing to wait for."""

    wait_event = synchronize = wait = record = wait_stream

    def record_event(self, *args: object) -> "Stream":
        """Return this object as an event, which counts as completed."""
        return self

    def query(self) -> bool:
        """Return True: on CPU, all operations of the stream have completed."""
        return True


_DEFAULT_STREAM = Stream()


def current_stream(*args: object, **kwargs: object) -> Stream:
    """Return the only stream that exists on CPU. It does nothing."""
    return _DEFAULT_STREAM


stream = contextlib.nullcontext
"""Replaces the context manager `torch.cuda.stream`, with the same argument. Does nothing."""


def _rewrite(name: str, source: str) -> str:
    for pattern, replacement in _REWRITES:
        source = pattern.sub(replacement, source)
    for old, new in _MODULE_REWRITES.get(name, []):
        if old not in source:
            raise ImportError(f"{name} has no {old!r}: the bridge doesn't support this release of megatron-core")
        source = source.replace(old, new)
    return source


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType | None:
        """Compile rewritten source without the bytecode cache; load unchanged modules as usual."""
        source = self.get_data(self.path).decode()
        rewritten = _rewrite(fullname, source)
        if rewritten == source:
            return super().get_code(fullname)
        return compile(rewritten, self.path, "exec", dont_inherit=True)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith("megatron.core") or "megatron_fsdp" in fullname:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def install() -> bool:
    """Install the import hook unless CUDA is available.

    Returns:
        True if the hook is installed, so that Megatron runs on CPU.

    Raises:
        ImportError: Megatron was imported earlier, without the hook.
    """
    for message in _EXPECTED_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    if torch.cuda.is_available():
        return False
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return True
    if any(name.startswith("megatron.core") for name in sys.modules):
        raise ImportError("megatron.core was imported before services.trainer.megatron.cpu_support")
    sys.meta_path.insert(0, _Finder())
    return True


install()
