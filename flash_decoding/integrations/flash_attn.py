"""flash_attn_with_kvcache() as flash-attn 2 has it: the same names, order and defaults, on our kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_decoding.api import flash_decode
from flash_decoding.append import append_kv
from flash_decoding.problem import Call, find_errors

# What other libraries call the same thing, and what it is called here.
_ALIASES = {
    "softmax_scale": ("scale", "sm_scale", "scaling"),
    "window_size": ("window", "window_left", "sliding_window"),
    "softcap": ("logits_soft_cap", "logit_softcapping"),
    "cache_seqlens": ("cache_lens", "kv_lens", "seq_lens", "seqused_k", "context_lens"),
    "cache_leftpad": ("kv_start", "leftpad_k"),
    "block_table": ("block_tables", "page_tables"),
    "k_cache and v_cache": ("kv_cache", "paged_kv_cache"),
    "return_softmax_lse": ("return_lse", "return_attn_probs"),
}
_OURS = {alias: name for name, aliases in _ALIASES.items() for alias in aliases}
# Options that flash-attn 2 does not have: they are options of flash_decode().
_DECODE_ONLY = {
    "sinks": "sinks", "s_aux": "sinks", "learnable_sink": "sinks", "attn_sink": "sinks", "tree_mask": "tree_mask",
    "key_mask": "key_mask", "attn_mask": "key_mask", "q_lens": "q_lens", "cu_seqlens_q": "q_lens",
    "workspace": "workspace", "split_size": "split_size", "out": "out",
}  # fmt: skip


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    page_table: Tensor | None = None,
    **unknown: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """flash-attn 2's function of this name: append k and v to the cache if given, then attend to it.

    Differs from flash-attn in three things: a row of q that sees no key has LSE -inf (flash-attn: +inf), q holds at
    most 64 tokens, and window_size has no right side other than those below.

    Args:
        q: [B, Sq, Hq, D], float16, bfloat16 or float32, as for flash_decode().
        k_cache: [B_cache, N, Hkv, D], or with a block_table [pages, page_size, Hkv, D].
        v_cache: likewise, Dv wide.
        k: [B, L, Hkv, D], new keys, written in place to positions cache_seqlens[b] + i of the cache before attending.
            None appends nothing.
        v: [B, L, Hkv, Dv], new values, given with k.
        rotary_cos: [positions, rotary_dim / 2], dtype of q or float32, a row for each position of the cache. Rotates k
            by its positions, and q: token i by position cache_seqlens[b] + i if causal or with a window, all tokens by
            cache_seqlens[b] otherwise. Needs k. None means no rotation.
        rotary_sin: likewise.
        cache_seqlens: [B] int32 or int64 or one int, the length of each sequence before k is appended. None means the
            whole cache, and needs k None.
        cache_batch_idx: [B] integers, the row of the cache that each sequence of q uses; no duplicates where k is
            appended. None means row b. Not with a block_table.
        cache_leftpad: [B] int32 or int64, the first key of each sequence; None means 0.
        block_table: [B, max_pages] int32, the pages of each sequence.
        softmax_scale: None means 1/sqrt(D).
        causal: aligned to the last key: token i of q sees keys up to N_b - Sq + i, N_b with the appended ones.
        window_size: (left, right), keys besides its own position that a token sees; -1 means no limit. right must be
            -1, 0, or at least Sq - 1; with causal it does not matter.
        softcap: 0 means off.
        rotary_interleaved: pairs are 2 d and 2 d + 1 (True, the default as in flash-attn), or d and d + rotary_dim / 2.
        alibi_slopes: [Hq] float32; None means off.
        num_splits: 0 lets the planner choose.
        return_softmax_lse: return (out, lse) instead of out.
        page_table: flash-attn 3's name for block_table.
        unknown: raises a TypeError, which names the right option where it is another library's name for it.

    Returns:
        out: [B, Sq, Hq, Dv], dtype of q, zero for a row that sees no key. lse, with return_softmax_lse: [B, Hq, Sq]
        float32, natural log, -inf for such a row.

    Raises:
        ValueError: shapes, devices or values that do not fit.
        TypeError: a wrong type or dtype, or an unknown argument.

    Example:
        >>> k_cache, v_cache = torch.zeros(2, 100, 4, 64), torch.zeros(2, 100, 4, 64)
        >>> q, k, v = torch.randn(2, 1, 8, 64), torch.randn(2, 1, 4, 64), torch.randn(2, 1, 4, 64)
        >>> out = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=7, causal=True)
        >>> out.shape, torch.equal(k_cache[:, 7], k[:, 0])
        (torch.Size([2, 1, 8, 64]), True)
    """
    _refuse_unknown(unknown)
    if page_table is not None:
        if block_table is not None:
            raise ValueError("page_table must be None when block_table is given: it is another name for it")
        block_table = page_table
    for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        if x.ndim != 4:
            raise ValueError(f"{name} must have shape [B, L, H, D], got {list(x.shape)}")
    batch, q_len = q.shape[:2]
    if cache_batch_idx is not None:
        if block_table is not None:
            raise ValueError("cache_batch_idx must be None with a block_table, which has a row for each sequence of q")
        if cache_batch_idx.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"cache_batch_idx must be int32 or int64, got {cache_batch_idx.dtype}")
        # A row of the cache is a sequence's only page.
        block_table = cache_batch_idx.to(torch.int32)[:, None]
    capacity = k_cache.shape[1] * (1 if block_table is None else block_table.shape[-1])
    causal, window, advances = _masks(causal, window_size, q_len, capacity)
    if cache_seqlens is None and k is not None:
        raise ValueError("cache_seqlens must be given with k, got None")
    lens = cache_seqlens
    if isinstance(lens, int) or (lens is None and block_table is not None):
        lens = torch.full((batch,), capacity if lens is None else lens, dtype=torch.int32, device=q.device)

    kv_lens, q = lens, _last_contiguous(q)
    decoding: dict[str, Any] = {
        "layout": "bnhd", "kv_start": cache_leftpad, "block_table": block_table, "scale": softmax_scale,
        "causal": causal, "window": window, "softcap": softcap or None, "alibi_slopes": alibi_slopes,
        "num_splits": num_splits or None,
    }  # fmt: skip
    if k is not None and not torch.compiler.is_compiling():
        # What decoding would refuse is refused before anything is written.
        for error in find_errors(Call(q, k_cache, v_cache, kv_lens=lens, **decoding)):
            raise error
    if k is not None and v is not None and lens is not None:
        rotated = append_kv(
            _last_contiguous(k), _last_contiguous(v), k_cache, v_cache, lens, layout="bnhd", block_table=block_table,
            rotary_cos=rotary_cos, rotary_sin=rotary_sin, rotary_interleaved=rotary_interleaved,
            q=None if rotary_cos is None else q, q_advances=advances,
        )  # fmt: skip
        q = q if rotated is None else rotated
        kv_lens = lens + k.shape[1]
    elif k is not None or v is not None:
        raise ValueError(f"{'v' if v is None else 'k'} must be given with {'k' if v is None else 'v'}, got None")
    elif rotary_cos is not None or rotary_sin is not None:
        raise ValueError("k must be given with rotary_cos and rotary_sin, got None")
    return flash_decode(q, k_cache, v_cache, kv_lens=kv_lens, return_lse=return_softmax_lse, **decoding)


def _last_contiguous(x: Tensor) -> Tensor:
    """A copy only where the last axis has gaps, as flash-attn makes one of q, k and v."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _masks(
    causal: bool, window_size: tuple[int, int], q_len: int, capacity: int
) -> tuple[bool, int | None, bool]:  # fmt: skip
    """causal and window as flash_decode() has them, and whether rotated queries advance from token to token."""
    if len(window_size) != 2:
        raise ValueError(f"window_size must be (left, right), got {window_size}")
    # None is how flash-attn 4 says -1, and a side as long as the cache is as good as none.
    left, right = (-1 if x is None or x >= capacity else x for x in window_size)
    if not causal and 0 < right < q_len - 1:
        raise ValueError(
            f"window_size must have a right side of -1, of 0, or of at least {q_len - 1} for {q_len} query tokens, "
            f"got {right}"
        )
    return causal or right == 0, None if left < 0 else left, causal or left >= 0 or right >= 0


def _refuse_unknown(unknown: dict[str, Any]) -> None:
    for name in unknown:
        if name in _OURS:
            raise TypeError(f"flash_attn_with_kvcache() has no argument {name!r}: here it is {_OURS[name]}")
        if name in _DECODE_ONLY:
            raise TypeError(
                f"flash_attn_with_kvcache() has no argument {name!r}: use flash_decode() and its {_DECODE_ONLY[name]}"
            )
        raise TypeError(f"flash_attn_with_kvcache() got an unexpected keyword argument {name!r}")
