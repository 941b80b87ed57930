"""FlashAttention 2 for transformers and verl where the package flash-attn is not installed.

torch has the same kernels, which relaxd's trainer uses, too. `provide(folder)` writes a package `flash_attn` that calls
them; with `folder` in PYTHONPATH, `attn_implementation="flash_attention_2"` works. A folder flash_attn/ops from the
package's sources, elsewhere in PYTHONPATH, is part of it: verl takes its cross-entropy in Triton.
"""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

VERSION = "2.8.3"
PACKAGE = """from pkgutil import extend_path

from benchmarks.peers.flash_attention import flash_attn_func, flash_attn_varlen_func

flash_attn_with_kvcache = None
__version__ = "{version}"
__path__ = extend_path(__path__, __name__)
"""
PADDING = """from transformers.modeling_flash_attention_utils import _index_first_axis as index_first_axis
from transformers.modeling_flash_attention_utils import _pad_input as pad_input
from transformers.modeling_flash_attention_utils import _unpad_input as unpad_input
from einops import rearrange
"""


def provide(folder: Path) -> None:
    """Write the package into `folder`, unless flash-attn is installed."""
    try:
        version("flash-attn")
    except PackageNotFoundError:
        pass
    else:
        return
    package, facts = folder / "flash_attn", folder / f"flash_attn-{VERSION}.dist-info"
    package.mkdir(parents=True, exist_ok=True)
    facts.mkdir(exist_ok=True)
    (package / "__init__.py").write_text(PACKAGE.format(version=VERSION))
    (package / "bert_padding.py").write_text(PADDING)
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: flash-attn\nVersion: {VERSION}\n")
    (facts / "top_level.txt").write_text("flash_attn\n")
    (facts / "RECORD").write_text("flash_attn/__init__.py,,\n")


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    deterministic: bool = False,
    softcap: float = 0.0,
) -> Tensor:
    """Attend within each sequence.

    Args:
        q: bfloat16 [queries, heads, size].
        k: bfloat16 [keys, kv_heads, size]; kv_heads divide heads.
        v: like `k`.
        cu_seqlens_q: int32 [sequences + 1].
        cu_seqlens_k: int32 [sequences + 1].

    Returns:
        [queries, heads, size].
    """
    if softcap or deterministic or dropout_p:
        raise ValueError(f"softcap {softcap}, deterministic {deterministic}, dropout_p {dropout_p}: only 0 and False")
    if causal:
        window_size = (window_size[0], 0)
    longest = int(max_seqlen_q), int(max_seqlen_k)
    output: Any = varlen_attn(
        q, k, v, cu_seqlens_q, cu_seqlens_k, *longest, scale=softmax_scale, window_size=window_size
    )
    return output


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, **settings: Any) -> Tensor:
    """Attend in a batch of equally long sequences: `q` is bfloat16 [batch, queries, heads, size]."""

    def begins(tensor: Tensor) -> Tensor:
        count, length = tensor.shape[:2]
        return torch.arange(0, (count + 1) * length, length, dtype=torch.int32, device=tensor.device)

    queries, keys, values = (tensor.reshape(-1, *tensor.shape[2:]) for tensor in (q, k, v))
    output = flash_attn_varlen_func(queries, keys, values, begins(q), begins(k), q.shape[1], k.shape[1], **settings)
    return output.view(q.shape)
