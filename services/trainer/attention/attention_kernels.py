"""Which attention kernel this machine has, found out once by trying."""

import inspect
import logging
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as functional
from torch import Tensor

from services.trainer.attention.sequence_layout import AttentionKernel, cudnn_runs

logger = logging.getLogger(__name__)

LENGTHS = (300, 1, 77, 128)
"""Sequences on which kernels are tried."""


class AttentionUnavailable(RuntimeError):
    """The attention kernel that was asked for doesn't work here; the message says why."""


def attention_kernel(device: torch.device, dtype: torch.dtype, head_size: int, asked: str) -> AttentionKernel:
    """The kernel to use; logs once which, and why not a faster one.

    Args:
        device: where it is computed.
        dtype: of queries, keys and values.
        head_size: width of a head.
        asked: `trainer.attention`.

    Raises:
        AttentionUnavailable: `asked` isn't "auto" and doesn't work.
    """
    if device.type != "cuda" or dtype != torch.bfloat16:
        return "blocks"
    return _on_gpu(asked, head_size)


@lru_cache
def _on_gpu(asked: str, head_size: int) -> AttentionKernel:
    why = None
    if asked != "varlen":
        why = _why_not(_cudnn, head_size)
        if why is None:
            logger.info("attention by cuDNN")
            return "cudnn"
        if asked == "cudnn":
            raise AttentionUnavailable(
                f'trainer.attention is "cudnn", which doesn\'t work here: {why}. It needs the package '
                'nvidia-cudnn-frontend, cuDNN 9.6 and an H100 or newer; "auto" uses it only where it works'
            )
    flash = _newest_flash_attention(head_size)
    logger.info("attention by torch's variable-length kernel (%s)%s", flash, f": cuDNN fails: {why}" if why else "")
    return "varlen"


def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, longest: int, scale: float
) -> Tensor:
    """Causal attention within each sequence by torch's variable-length kernel.

    Args:
        query: bfloat16 [T, heads, size].
        key: bfloat16 [T, kv_heads, size]; kv_heads divide heads.
        value: like `key`.
        cu_seqlens: int32 [sequences + 1].
        longest: tokens of the longest sequence.
        scale: what the scores are multiplied by.

    Returns:
        [T, heads, size].
    """
    from torch.nn.attention.varlen import varlen_attn

    settings: dict[str, Any] = {"scale": scale, "window_size": (-1, 0), **_grouped_heads()}
    output: Any = varlen_attn(query, key, value, cu_seqlens, cu_seqlens, longest, longest, **settings)
    return output


@lru_cache
def _grouped_heads() -> dict[str, bool]:
    """What torch from 2.13 on wants to be told where there are fewer key heads than query heads."""
    from torch.nn.attention.varlen import varlen_attn

    return {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def _newest_flash_attention(head_size: int) -> str:
    """Have torch's kernel be FlashAttention 3 where that is installed and works."""
    try:
        from torch.nn import attention

        attention.activate_flash_attention_impl("FA3")
    except (AttributeError, ImportError, RuntimeError, ValueError):
        return "FlashAttention 2"
    why = _why_not(_varlen, head_size)
    if why is None:
        return "FlashAttention 3"
    logger.warning("FlashAttention 3 is installed, but fails: %s", why)
    attention.restore_flash_attention_impl()
    return "FlashAttention 2"


def _cudnn(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    from services.trainer.attention.cudnn_attention import cudnn_attention

    return cudnn_attention(query, key, value, cudnn_runs(LENGTHS, query.device), query.shape[-1] ** -0.5)


def _varlen(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    cu_seqlens = torch.tensor(np.cumsum([0, *LENGTHS]), dtype=torch.int32, device=query.device)
    return varlen_attention(query, key, value, cu_seqlens, max(LENGTHS), query.shape[-1] ** -0.5)


def _why_not(attend: Callable[[Tensor, Tensor, Tensor], Tensor], head_size: int) -> str | None:
    """Try a kernel, forward and backward, against the formula in float32. Returns what is wrong with it."""
    try:
        if attend is _cudnn and torch.cuda.get_device_capability() < (9, 0):
            return f"the GPU has compute capability {torch.cuda.get_device_capability()}"
        generator = torch.Generator("cuda").manual_seed(0)
        settings: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16, "generator": generator}
        inputs = [torch.randn(sum(LENGTHS), heads, head_size, **settings).requires_grad_() for heads in (4, 2, 2)]
        grad = torch.randn(sum(LENGTHS), 4, head_size, **settings)
        output = attend(*inputs)
        found = [output, *torch.autograd.grad(output, inputs, grad)]
        exact = [x.detach().float().requires_grad_() for x in inputs]
        reference = _formula(*exact)
        expected = [reference, *torch.autograd.grad(reference, exact, grad.float())]
        for ours, theirs in zip(found, expected, strict=True):
            error = float((ours.detach().float() - theirs.detach()).norm() / theirs.detach().norm())
            if not error < 0.02:
                return f"its results are off by {error:.3g}"
    except Exception as error:  # a third party's: whatever it raises, it doesn't work
        return f"{type(error).__name__}: {error}"
    return None


def _formula(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    outputs = []
    for q, k, v in zip(*(x.transpose(0, 1).split(LENGTHS, 1) for x in (query, key, value)), strict=True):
        outputs.append(
            functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)
        )
    return torch.cat(outputs, 2)[0].transpose(0, 1)
