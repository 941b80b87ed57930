"""GPU time of a profiled call, by kernel and by group of kernels."""

import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch

GROUPS = (
    ("communication", r"nccl"),
    ("attention", r"flash|fmha|mha|attention|cudnn.*sdpa"),
    ("logits", r"^_vocabulary|SoftMax"),
    ("fused", r"^_(swiglu|heads)"),
    ("gemm", r"gemm|nvjet|cutlass|xmma|cublas|wgmma|splitK"),
    ("norm", r"layer_norm|LayerNorm|rms_norm|RMSNorm|RmsNorm|GammaBeta|cuComputeGradInput"),
    ("optimizer", r"multi_tensor|[Aa]dam|foreach"),
    ("copies", r"[Mm]emcpy|[Mm]emset|copy_kernel|direct_copy|CatArray|fill|Fill"),
    ("lookups", r"index|gather|scatter|embedding|sort"),
    ("elementwise", r"elementwise|vectorized|reduce"),
)
"""Groups with the pattern of their kernels' names; the first match counts."""


def profile(call: Callable[[], object], path: Path | None = None, *, top: int = 28) -> str:
    """Run `call` once under torch's profiler.

    Args:
        call: the function to profile, already warmed up.
        path: file for the trace, for a browser.
        top: number of kernels to list.

    Returns:
        A table of groups, then of kernels: milliseconds, share of the time from first to last kernel, count, name.
    """
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=kinds) as profiler:
        call()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        trace = path or Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    kernels = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    return _table(kernels, top)


def _table(kernels: list[dict[str, float | str]], top: int) -> str:
    spans = sorted((float(kernel["ts"]), float(kernel["dur"]), str(kernel["name"])) for kernel in kernels)
    begin, end = spans[0][0], max(start + length for start, length, _ in spans)
    busy, reached = 0.0, begin
    for start, length, _ in spans:
        busy += max(0.0, start + length - max(start, reached))
        reached = max(reached, start + length)
    groups: dict[str, list[float]] = defaultdict(list)
    names: dict[str, list[float]] = defaultdict(list)
    for _, length, name in spans:
        groups[_group(name)].append(length)
        names[name].append(length)
    whole = end - begin
    lines = [f"first to last kernel {whole / 1e3:.1f} ms, idle {1 - busy / whole:.1%}, {len(spans)} kernels"]
    for title, found, count in (("group", groups, len(groups)), ("kernel", names, top)):
        lines.append(f"{'ms':>8} {'share':>6} {'count':>6}  {title}")
        for name, lengths in sorted(found.items(), key=lambda item: -sum(item[1]))[:count]:
            total = sum(lengths)
            label = name if title == "group" else f"[{_group(name)}] {_shortened(name)}"
            lines.append(f"{total / 1e3:8.2f} {total / whole:6.1%} {len(lengths):6d}  {label}")
    return "\n".join(lines)


def _group(name: str) -> str:
    return next((group for group, pattern in GROUPS if re.search(pattern, name)), "other")


def _shortened(name: str) -> str:
    """Return a kernel's name without the prefixes common to torch's kernels."""
    for noise in ("at::native::", "void ", "(anonymous namespace)::", "c10::", "std::", "pytorch_flash::"):
        name = name.replace(noise, "")
    return name[:150]
