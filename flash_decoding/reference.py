"""The definition: softmax attention in float64, slow and plain. Every backend is held against it."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layout: str = "bhnd",
    kv_lens: Tensor | None = None,
    kv_start: Tensor | None = None,
    scale: float | None = None,
    key_mask: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """What flash_decode() must return, computed in float64 from the inputs as stored.

    Args: as for flash_decode().

    Returns:
        out, or (out, lse), in float64 and in the layout of q; lse is [B, Hq, Lq]. No visible key: out 0, lse -inf.

    Example:
        >>> q, k, v = torch.randn(1, 4, 1, 64), torch.randn(1, 2, 100, 64), torch.randn(1, 2, 100, 64)
        >>> reference(q, k, v).shape
        torch.Size([1, 4, 1, 64])
    """
    q, k, v = q.double(), k.double(), v.double()
    if layout == "bnhd":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    kv_len, group = k.shape[2], q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale

    n = torch.arange(kv_len, device=q.device)
    visible = torch.ones(q.shape[0], kv_len, dtype=torch.bool, device=q.device)
    if kv_lens is not None:
        visible &= n < kv_lens[:, None]
    if kv_start is not None:
        visible &= n >= kv_start[:, None]
    if key_mask is not None:
        visible &= key_mask

    s = (q @ k.transpose(-1, -2) * scale).masked_fill(~visible[:, None, None, :], -math.inf)
    lse = torch.logsumexp(s, dim=-1)
    p = torch.exp(s - lse[..., None]).masked_fill(~visible[:, None, None, :], 0.0)
    # A weight of zero does not remove a NaN, so values nobody may see are taken out as well.
    out = p @ v.masked_fill(~visible[:, None, :, None], 0.0)

    if layout == "bnhd":
        out = out.transpose(1, 2)
    return (out, lse) if return_lse else out
