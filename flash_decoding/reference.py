"""The definition: softmax attention in float64, slow and plain. Every backend is held against it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flash_decoding.quantization import KVFormat


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layout: str = "bhnd",
    kv_lens: Tensor | None = None,
    kv_start: Tensor | None = None,
    block_table: Tensor | None = None,
    q_lens: Tensor | None = None,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    key_mask: Tensor | None = None,
    tree_mask: Tensor | None = None,
    kv_format: KVFormat | str | None = None,
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
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
    formats = str(kv_format).split("/")
    k, v = _numbers(k, formats[0], k_scale, layout), _numbers(v, formats[-1], v_scale, layout)
    if layout == "bnhd":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    batch, heads_q, q_len, head_dim = q.shape
    if block_table is not None:
        assert kv_lens is not None, "a table comes with lengths"
        k, v = (_gather_pages(x, block_table, kv_lens) for x in (k, v))
    kv_len, group = k.shape[2], heads_q // k.shape[1]
    k, v = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    scale = 1 / math.sqrt(head_dim) if scale is None else scale

    lens = torch.full((batch,), kv_len, device=q.device) if kv_lens is None else kv_lens.long()
    tokens = torch.full((batch,), q_len, device=q.device) if q_lens is None else q_lens.long()
    n = torch.arange(kv_len, device=q.device)[None, None, :]
    t = torch.arange(q_len, device=q.device)[None, :, None]
    first_new = (lens - tokens)[:, None, None]
    own = first_new + t  # [B, Lq, 1], each query's own position
    visible = ((n < lens[:, None, None]) & (t < tokens[:, None, None])).clone()  # [B, Lq, N]
    if kv_start is not None:
        visible &= n >= kv_start[:, None, None]
    if key_mask is not None:
        visible &= key_mask[:, None, :]
    if tree_mask is not None:
        new = (n - first_new).expand(batch, q_len, kv_len)
        visible &= (new < 0) | torch.gather(tree_mask, 2, new.clamp(0, q_len - 1))
    elif causal:
        visible &= n <= own
    if window is not None:
        visible &= n >= own - window
    visible = visible[:, None]  # [B, 1, Lq, N]

    s = q.double() @ k.transpose(-1, -2) * scale
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    if alibi_slopes is not None:
        s = s - alibi_slopes.double()[None, :, None, None] * (own - n).abs()[:, None]
    s = s.masked_fill(~visible, -math.inf)
    lse = torch.logsumexp(s, dim=-1)
    total = lse
    if sinks is not None:
        total = torch.logaddexp(lse, sinks.double()[None, :, None].expand_as(lse))
    p = torch.exp(s - total[..., None]).masked_fill(~visible, 0.0)
    # A weight of zero does not remove a NaN, so values that no query of a sequence sees are taken out as well.
    out = p @ v.masked_fill(~visible.any(dim=2)[..., None], 0.0)

    if layout == "bnhd":
        out = out.transpose(1, 2)
    return (out, lse) if return_lse else out


def _numbers(x: Tensor, form: str, scale: Tensor | float | None, layout: str) -> Tensor:
    """Keys or values as numbers; what codes are multiplied with shows in the axes of the scales."""
    if form.startswith("int4"):
        low, high = x.double() % 16, (x.long() // 16).double()
        x = torch.cat([low[..., 0::2], high[..., 0::2], low[..., 1::2], high[..., 1::2]], dim=-1)
        assert isinstance(scale, Tensor), "int4 has groups"
        zero = torch.full_like(scale, 8.0, dtype=torch.float64)
        if scale.ndim == 5:
            scale, zero = scale[..., 0], scale[..., 1]
        group = x.shape[-1] // scale.shape[-1]
        scale, zero = (y.double().repeat_interleave(group, dim=-1) for y in (scale, zero))
        return (x - zero) * scale
    if x.dtype == torch.uint8:
        x = x.view(torch.float8_e5m2 if form.startswith("fp8_e5m2") else torch.float8_e4m3fn)
    if scale is None:
        return x
    x = x.double()
    if not isinstance(scale, Tensor) or scale.ndim == 0 or scale.shape == (1,):
        return x * float(scale)
    scale = scale.double()
    if scale.ndim == 3:  # token
        return x * scale[..., None]
    scale = scale if scale.ndim == 2 else scale[:, None]  # [Hkv, D] or [Hkv, 1]
    return x * (scale[:, None] if layout == "bhnd" else scale)


def _gather_pages(pool: Tensor, block_table: Tensor, kv_lens: Tensor) -> Tensor:
    """[pages, Hkv, page_size, D] as [B, Hkv, N, D]; table entries that no length reaches count as page 0."""
    page_size = pool.shape[2]
    first = torch.arange(block_table.shape[1], device=pool.device) * page_size
    pages = block_table.long().masked_fill(first >= kv_lens[:, None], 0)
    return pool[pages].transpose(1, 2).flatten(2, 3)
