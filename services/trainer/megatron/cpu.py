"""Lets megatron-core run on CPU.

megatron-core 0.16.1 names CUDA outright in many places: devices, streams, pinned memory, tensor type names. Where
there is no CUDA, `install` puts an import hook in front that rewrites those spots in memory while Megatron's modules
are imported. Neither the installed files nor torch itself change, and on a machine with CUDA there is no hook.

Import Megatron only after this module: every module of the trainer that uses Megatron imports this one first.
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
    # On CPU there is one generator, so "the CPU's state must not change while CUDA's is forked" can't hold.
    "megatron.core.tensor_parallel.random": [
        ("if not torch.all(cpu_rng_state == torch.get_rng_state()).item():", "if False:"),
        (
            "def _set_cuda_rng_state(new_state: torch.Tensor, device: int = -1, graph_safe: bool = False):",
            "def _set_cuda_rng_state(new_state: torch.Tensor, device: int = -1, graph_safe: bool = False):\n"
            "    return torch.set_rng_state(new_state)\n",
        ),
    ],
    # The decorator is torch.compile: it needs a C++ compiler at run time and 1.6 s of imports, for nothing on CPU.
    "megatron.core.jit": [("jit_fuser = torch.compile", "jit_fuser = noop_decorator")],
    # It offloads what is on a GPU.
    "megatron.core.optimizer.cpu_offloading.hybrid_optimizer": [
        ("for param in params if param.is_cuda]", "for param in params]"),
        ("offload_params_numel < offload_threshold and param.is_cuda:", "offload_params_numel < offload_threshold:"),
        (".cpu().pin_memory()", ""),
    ],
}


_EXPECTED_WARNINGS = (
    # Said when Transformer Engine and apex aren't there. We never use them.
    ".*Transformer Engine and Apex are not installed.*",
    "Apex is not installed. Falling back to Torch Norm",
    # Said by torch 2.13 to Megatron.
    ".*torch.distributed.reduce_scatter_tensor.* is deprecated.*",
    ".*torch.distributed.all_gather_into_tensor.* is deprecated.*",
    # Megatron's default for CUDA graphs, which are off.
    "full scope is deprecated.*",
    # Said to Megatron when it loads a checkpoint.
    ".*load_state_dict. is deprecated and will be removed.*",
    "Please use DTensor instead and we are deprecating ShardedTensor.*",
    "The .grad attribute of a Tensor that is not a leaf Tensor is being accessed.*",
)


class Stream:
    """Stands in for a CUDA stream or event: on CPU everything is already in order."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def wait_stream(self, *args: object) -> None:
        """Nothing to wait for."""

    wait_event = synchronize = wait = record = wait_stream

    def record_event(self, *args: object) -> "Stream":
        """An event that has already happened."""
        return self

    def query(self) -> bool:
        """Whether the work is done: always."""
        return True


_DEFAULT_STREAM = Stream()


def current_stream(*args: object, **kwargs: object) -> Stream:
    """The only stream there is."""
    return _DEFAULT_STREAM


def stream(which: Stream) -> contextlib.AbstractContextManager[None]:
    """A context that changes nothing."""
    return contextlib.nullcontext()


def _rewrite(name: str, source: str) -> str:
    for pattern, replacement in _REWRITES:
        source = pattern.sub(replacement, source)
    for old, new in _MODULE_REWRITES.get(name, []):
        if old not in source:
            raise ImportError(f"{name} has no {old!r}: this release of megatron-core isn't the one the bridge is for")
        source = source.replace(old, new)
    return source


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType | None:
        """Compile the rewritten source, past the bytecode cache; untouched modules load the usual way."""
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
    """Install the import hook unless CUDA is there.

    Returns:
        Whether Megatron is bridged (False: CUDA is there and Megatron is left as it is).

    Raises:
        ImportError: Megatron was imported before, unbridged.
    """
    for message in _EXPECTED_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    if torch.cuda.is_available():
        return False
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return True
    if any(name.startswith("megatron.core") for name in sys.modules):
        raise ImportError("megatron.core was imported before services.trainer.megatron.cpu")
    sys.meta_path.insert(0, _Finder())
    return True


BRIDGED = install()
"""Whether Megatron runs on CPU through the bridge."""
