"""flash-attn's functions under their own names, order and defaults, on our kernels.

flash_attn_with_kvcache() is what decoding calls; the two others are what a library wants beside it that takes
flash-attn as a module, Transformers' continuous batching for one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flash_decoding.append import AppendCall, append_kv, find_append_errors
from flash_decoding.integrations.query_blocks import attend, attend_blocks, block_options, cut, pack, unpack
from flash_decoding.op import is_traced
from flash_decoding.problem import MAX_Q_LEN, Call, make_problem
from flash_decoding.quantization import find_value_errors, is_number, place_scale

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
    "s_aux": ("sinks", "learnable_sink", "attn_sink"),
    "k_descale": ("k_scale",),
    "v_descale": ("v_scale",),
}
_OURS = {alias: name for name, aliases in _ALIASES.items() for alias in aliases}
# What is an option of another function of ours.
_ELSEWHERE = {
    "tree_mask": "flash_decode() and its tree_mask", "key_mask": "flash_decode() and its key_mask",
    "attn_mask": "flash_decode() and its key_mask", "q_lens": "flash_decode() and its q_lens",
    "workspace": "flash_decode() and its workspace", "split_size": "flash_decode() and its split_size",
    "out": "flash_decode() and its out", "cu_seqlens_k_new": "append_kv() and its new_lens",
    "kv_format": "flash_decode() and its kv_format",
    "qv": "flash_decode() with keys as wide as both parts",
}  # fmt: skip
# flash-attn 3's other arguments, with the defaults that ask for nothing.
_SILENT = {
    "scheduler_metadata": None, "qv": None, "rotary_seqlens": None, "cu_seqlens_k_new": None, "attention_chunk": 0,
    "pack_gqa": None, "sm_margin": 0,
}  # fmt: skip
# What the functions beneath call an argument, and what it is called here, in their errors.
_OPTIONS = {
    "sinks": "s_aux", "scale": "softmax_scale", "window": "window_size", "k_scale": "k_descale", "v_scale": "v_descale",
}  # fmt: skip
_CACHE = _OPTIONS | {
    "k": "k_cache", "v": "v_cache", "k_new": "k", "v_new": "v", "kv_lens": "cache_seqlens", "kv_start": "cache_leftpad",
}  # fmt: skip
_ROWS = {"block_table": "cache_batch_idx", "pages": "rows", "page": "row"}
_PACKED = _OPTIONS | {"kv_lens": "cu_seqlens_k", "kv_start": "cu_seqlens_k"}
_WHOLE = {
    "k_cache": "k", "v_cache": "v", "cache_seqlens": "cu_seqlens_k",
    **{name: f"{name} of flash_attn_with_kvcache()" for name in ("k_descale", "v_descale")},
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
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    s_aux: Tensor | None = None,
    q_descale: None = None,
    k_descale: Tensor | float | None = None,
    v_descale: Tensor | float | None = None,
    **unknown: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """flash-attn 2's function of this name: append k and v to the cache if given, then attend to it.

    The arguments up to return_softmax_lse are flash-attn 2's, those behind it are of version 3 and of vLLM's edition.
    Differs from flash-attn in two things: a row of q that sees no key has LSE -inf (flash-attn: +inf), and window_size
    has no right side other than those below.

    More than 64 tokens per sequence, and packed ones, are cut into blocks of up to 64 tokens of one sequence. Every
    block reads the keys that it sees, and q and the result are copied once more, the cache never. That is exact, also
    for a whole prompt, but kernels made for prompts are faster there. A dense cache is then addressed as pages of N
    keys, for each N of which a GPU compiles its kernel once.

    Args:
        q: [B, Sq, Hq, D], float16, bfloat16 or float32, as for flash_decode(); with cu_seqlens_q [total_q, Hq, D].
        k_cache: [B_cache, N, Hkv, D], or with a block_table [pages, page_size, Hkv, D].
        v_cache: likewise, Dv wide.
        k: [B, L, Hkv, D], new keys, written in place to positions cache_seqlens[b] + i of the cache before attending.
            None appends nothing.
        v: [B, L, Hkv, Dv], new values, given with k.
        rotary_cos: [positions, rotary_dim / 2], dtype of q or float32, a row for each position of the cache. Rotates k
            by its positions, and q: token i by position cache_seqlens[b] + i if causal or with a window shorter than
            the cache, all tokens by cache_seqlens[b] otherwise. Needs k. None means no rotation.
        rotary_sin: likewise.
        cache_seqlens: [B] int32 or int64 or one int, the length of each sequence before k is appended. None means the
            whole cache, and needs k None.
        cache_batch_idx: [B] integers, the row of the cache that each sequence of q uses; no duplicates where k is
            appended, which the CPU refuses where two new keys meet. None means row b. Not with a block_table.
        cache_leftpad: [B] int32 or int64, the first key of each sequence; None means 0.
        block_table: [B, max_pages] int32, the pages of each sequence.
        softmax_scale: None means 1/sqrt(D).
        causal: aligned to the last key: token i of q sees keys up to N_b - Sq + i, N_b with the appended ones.
        window_size: (left, right), keys besides its own position that a token sees; -1 means no limit. right must be
            -1, 0, or at least Sq - 1; with causal it does not matter. More than 64 tokens per sequence need causal, or
            right 0, for a left side.
        softcap: 0 means off.
        rotary_interleaved: pairs are 2 d and 2 d + 1 (True, the default as in flash-attn), or d and d + rotary_dim / 2.
        alibi_slopes: [Hq] or [B, Hq] float32; None means off. Slopes that differ by sequence cost a call for each
            sequence (for each block where q is cut). More than 64 tokens per sequence need causal with it.
        num_splits: 0 lets the planner choose.
        return_softmax_lse: return (out, lse) instead of out.
        page_table: flash-attn 3's name for block_table.
        cu_seqlens_q: [B + 1] int32 or int64 on the device of q, where each sequence's tokens begin in a packed q, and
            where the last one's end; tokens behind that belong to nobody and get zeros. Not read on the host, except
            on the CPU. None means a q that is not packed.
        max_seqlen_q: the most tokens of a sequence, or any larger number; must be given with cu_seqlens_q, and does
            not matter without. On a GPU, results are undefined where a sequence has more.
        s_aux: [Hq], attention sinks, of any dtype: one more logit per head in the denominator; None means off.
        q_descale: must be None: queries are not quantised here.
        k_descale: what the keys of a cache of dtype float8_e4m3fn, float8_e5m2 or int8 are multiplied with: float32
            [B, Hkv] as in flash-attn 3, or [Hkv], [] or a number for all sequences, or per token [B_cache, N, Hkv]
            ([pages, page_size, Hkv]); None means 1 for float8. Scales in memory for each sequence cost a call for each
            where k is appended, and with a block_table or cache_batch_idx (for each block where q is cut). k, which is
            not quantised, is on its way into the cache; scales per token are then made and written.
        v_descale: likewise.
        unknown: raises a TypeError, which names the right option where it is another library's name for it; what
            flash-attn 3 has besides may be given as it is by default.

    Returns:
        out: [B, Sq, Hq, Dv], dtype of q, zero for a row that sees no key. lse, with return_softmax_lse: [B, Hq, Sq]
        float32, natural log, -inf for such a row. With cu_seqlens_q [total_q, Hq, Dv] and [Hq, total_q].

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
    names = _CACHE
    if page_table is not None:
        if block_table is not None:
            raise ValueError("page_table must be None when block_table is given: it is another name for it")
        block_table, names = page_table, _CACHE | {"block_table": "page_table"}
    if cu_seqlens_q is None:
        _check_arrays("B, L, H, D", q=q)
    else:
        _check_arrays("total_q, H, D", " with cu_seqlens_q", q=q)
    _check_arrays("B, L, H, D", k_cache=k_cache, v_cache=v_cache)
    if q_descale is not None:
        raise ValueError(
            "q_descale must be None, queries are float16, bfloat16 or float32 here and not quantised, "
            f"got {type(q_descale).__name__}"
        )
    _check_codes("k_cache", k_cache, k_descale)
    _check_codes("v_cache", v_cache, v_descale)
    if block_table is not None:
        _check_arrays("B, max_pages", "", **{names.get("block_table", "block_table"): block_table})
    _check_given(
        k=k, v=v, rotary_cos=rotary_cos, rotary_sin=rotary_sin, cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad, alibi_slopes=alibi_slopes, s_aux=s_aux,
    )  # fmt: skip
    batch, q_len = q.shape[:2]
    if cu_seqlens_q is not None:
        _check_starts("q", cu_seqlens_q, q, max_seqlen_q)
        batch, q_len = cu_seqlens_q.shape[0] - 1, max(int(max_seqlen_q or 0), 1)
    if cache_batch_idx is not None:
        if block_table is not None:
            raise ValueError("cache_batch_idx must be None with a block_table, which has a row for each sequence of q")
        if cache_batch_idx.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"cache_batch_idx must be int32 or int64, got {cache_batch_idx.dtype}")
        if cache_batch_idx.shape != (batch,):
            raise ValueError(f"cache_batch_idx must have shape [{batch}], got {list(cache_batch_idx.shape)}")
        # A row of the cache is a sequence's only page.
        block_table, names = cache_batch_idx.to(torch.int32)[:, None], _CACHE | _ROWS
    capacity = k_cache.shape[1] * (1 if block_table is None else block_table.shape[-1])
    causal, window, advances = _masks(causal, window_size, q_len, capacity)
    if cache_seqlens is None and k is not None:
        raise ValueError("cache_seqlens must be given with k, got None")
    if isinstance(cache_seqlens, int):
        if not 0 <= cache_seqlens <= capacity:
            raise ValueError(f"cache_seqlens must lie from 0 to {capacity}, the cache's keys, got {cache_seqlens}")
    elif cache_seqlens is not None and not isinstance(cache_seqlens, Tensor):
        raise TypeError(
            f"cache_seqlens must be an int, a torch.Tensor or None, got {type(cache_seqlens).__name__}; "
            "torch.tensor([...], dtype=torch.int32, device=q.device)"
        )
    scales: dict[str, Any] = {
        "k_scale": _scales(k_descale, "k_descale", batch, k_cache, block_table),
        "v_scale": _scales(v_descale, "v_descale", batch, v_cache, block_table),
    }
    in_blocks = cu_seqlens_q is not None or q_len > MAX_Q_LEN
    lens = cache_seqlens
    if isinstance(lens, int) or (lens is None and (block_table is not None or in_blocks)):
        lens = torch.full((batch,), capacity if lens is None else lens, dtype=torch.int32, device=q.device)

    q, kv_lens = _last_contiguous(q), lens
    decoding = _decoding(
        cache_leftpad, block_table, softmax_scale, causal, window, softcap, alibi_slopes, num_splits, s_aux, q_len
    ) | scales  # fmt: skip
    taken_apart = in_blocks or any(x is not None and x.ndim == 2 for x in (alibi_slopes, *scales.values()))
    if (k is not None or taken_apart) and not torch.compiler.is_compiling():
        # What decoding would refuse is refused before anything is written, and before arrays are taken apart.
        _in_words(names, _refuse, q, batch, k_cache, v_cache, lens, decoding)
    if k is not None and v is not None and lens is not None:
        turning = None if rotary_cos is None else q
        if turning is not None and cu_seqlens_q is not None:
            turning = unpack(q, cu_seqlens_q, q_len)
        append = AppendCall(
            _last_contiguous(k), _last_contiguous(v), k_cache, v_cache, lens, "bnhd", block_table,
            rotary_cos=rotary_cos, rotary_sin=rotary_sin, rotary_interleaved=rotary_interleaved, q=turning,
            q_advances=advances, **scales,
        )  # fmt: skip
        by_sequence = {
            f"{name}_scale": _last_contiguous(x) for name, x in (("k", k_descale), ("v", v_descale))
            if isinstance(x, Tensor) and x.ndim == 2 and _is_by_sequence(x)
        }  # fmt: skip
        rotated = _in_words(names, _append, append, by_sequence)
        if rotated is not None:
            q = rotated if cu_seqlens_q is None else pack(rotated, cu_seqlens_q, q.shape[0])
        kv_lens = lens + k.shape[1]
    elif k is not None or v is not None:
        raise ValueError(f"{'v' if v is None else 'k'} must be given with {'k' if v is None else 'v'}, got None")
    elif rotary_cos is not None or rotary_sin is not None:
        raise ValueError("k must be given with rotary_cos and rotary_sin, got None")

    if not in_blocks:
        out, lse = _in_words(names, attend, q, k_cache, v_cache, decoding | {"kv_lens": kv_lens}, return_softmax_lse)
        return out if lse is None else (out, lse)
    if block_table is None:
        decoding["block_table"] = torch.arange(batch, dtype=torch.int32, device=q.device)[:, None]
    starts = cu_seqlens_q
    if starts is None:
        starts = torch.arange(batch + 1, device=q.device) * q_len
    tokens = q if cu_seqlens_q is not None else q.flatten(0, 1)
    blocks = cut(starts, tokens.shape[0], q_len)
    assert kv_lens is not None, "blocks come with lengths"
    options = block_options(blocks, kv_lens, decoding)
    out, lse = attend_blocks(tokens, k_cache, v_cache, blocks, options, return_softmax_lse)
    if cu_seqlens_q is None:
        out = out.unflatten(0, (batch, q_len))
        lse = None if lse is None else lse.unflatten(1, (batch, q_len)).transpose(0, 1).contiguous()
    return out if lse is None else (out, lse)


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
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    s_aux: Tensor | None = None,
) -> Tensor:
    """flash-attn 2's function of this name, forward only: packed queries against packed or paged keys.

    Queries are cut into blocks as in flash_attn_with_kvcache(), whose arguments of the same names these are. Keys and
    values are never copied.

    Args:
        q: [total_q, Hq, D].
        k: [total_k, Hkv, D], or with a block_table [pages, page_size, Hkv, D].
        v: likewise, Dv wide.
        cu_seqlens_q: [B + 1] int32 or int64.
        cu_seqlens_k: [B + 1], where each sequence's keys begin; with a block_table only the lengths between count.
        max_seqlen_q: the most query tokens of a sequence, or any larger number.
        max_seqlen_k: the most keys of a sequence. Nothing depends on it.
        dropout_p: must be 0.
        softmax_scale, causal, window_size, softcap, alibi_slopes, block_table, s_aux: as there.
        deterministic: does not matter, results always are.
        return_attn_probs: must be False.

    Returns:
        out: [total_q, Hq, Dv], dtype of q, zero for a row that sees no key.

    Raises:
        ValueError, TypeError: as there.

    Example:
        >>> q, k, v = torch.randn(5, 8, 64), torch.randn(90, 2, 64), torch.randn(90, 2, 64)
        >>> starts_q, starts_k = torch.tensor([0, 4, 5]), torch.tensor([0, 60, 90])
        >>> flash_attn_varlen_func(q, k, v, starts_q, starts_k, 4, 60, causal=True).shape
        torch.Size([5, 8, 64])
    """
    _refuse_training(dropout_p, return_attn_probs)
    _check_arrays("total, H, D", q=q)
    if block_table is not None:
        _check_arrays("pages, page_size, H, D", " with a block_table", k=k, v=v)
        _check_lens("k", cu_seqlens_k)
        return _in_words(
            _WHOLE, flash_attn_with_kvcache, q, k, v, cache_seqlens=cu_seqlens_k.diff(), block_table=block_table,
            softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
            alibi_slopes=alibi_slopes, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q, s_aux=s_aux,
        )  # fmt: skip
    _check_arrays("total, H, D", k=k, v=v)
    _check_starts("q", cu_seqlens_q, q, max_seqlen_q)
    _check_starts("k", cu_seqlens_k, k, max_seqlen_k)
    for name, x in (("k_cache", k), ("v_cache", v)):
        _in_words(_WHOLE, _check_codes, name, x, None)
    batch, q_len = cu_seqlens_q.shape[0] - 1, max(int(max_seqlen_q), 1)
    if cu_seqlens_k.shape != cu_seqlens_q.shape:
        raise ValueError(f"cu_seqlens_k must have shape [{batch + 1}] as cu_seqlens_q, got {list(cu_seqlens_k.shape)}")
    causal, window, _ = _masks(causal, window_size, q_len, k.shape[0])
    # All keys are one long sequence, of which each sequence of queries sees its part.
    decoding = _decoding(
        cu_seqlens_k[:-1], None, softmax_scale, causal, window, softcap, alibi_slopes, 0, s_aux, q_len
    )  # fmt: skip
    q, k, v = (_last_contiguous(x) for x in (q, k, v))
    if not torch.compiler.is_compiling():
        keys, values = k.expand(batch, *k.shape), v.expand(batch, *v.shape)
        _in_words(_PACKED, _refuse, q, batch, keys, values, cu_seqlens_k[1:], decoding)
    blocks = cut(cu_seqlens_q, q.shape[0], q_len)
    keys, values = (x.expand(blocks.sequence.shape[0], *x.shape) for x in (k, v))
    return attend_blocks(q, keys, values, blocks, block_options(blocks, cu_seqlens_k[1:], decoding), False)[0]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
) -> Tensor:
    """flash-attn 2's function of this name, forward only: flash_attn_with_kvcache() on the whole of k and v.

    Args:
        q: [B, Sq, Hq, D].
        k: [B, N, Hkv, D].
        v: [B, N, Hkv, Dv].
        dropout_p: must be 0.
        softmax_scale, causal, window_size, softcap, alibi_slopes, s_aux: as there.
        deterministic: does not matter, results always are.
        return_attn_probs: must be False.

    Returns:
        out: [B, Sq, Hq, Dv], dtype of q, zero for a row that sees no key.

    Raises:
        ValueError, TypeError: as there.
    """
    _refuse_training(dropout_p, return_attn_probs)
    _check_arrays("B, L, H, D", q=q, k=k, v=v)
    return _in_words(
        _WHOLE, flash_attn_with_kvcache, q, _last_contiguous(k), _last_contiguous(v), softmax_scale=softmax_scale,
        causal=causal, window_size=window_size, softcap=softcap, alibi_slopes=alibi_slopes, s_aux=s_aux,
    )  # fmt: skip


def _decoding(
    kv_start: Tensor | None, block_table: Tensor | None, scale: float | None, causal: bool, window: int | None,
    softcap: float, alibi_slopes: Tensor | None, num_splits: int, s_aux: Tensor | None, q_len: int,
) -> dict[str, Any]:  # fmt: skip
    """Options of flash_decode(), those that are per sequence not yet per block."""
    if q_len > MAX_Q_LEN and not causal and (window is not None or alibi_slopes is not None):
        raise ValueError(
            f"causal must be True for window_size or alibi_slopes with more than {MAX_Q_LEN} query tokens, got False"
        )
    return {
        "layout": "bnhd", "kv_start": kv_start, "block_table": block_table, "scale": scale, "causal": causal,
        "window": window, "softcap": softcap or None, "alibi_slopes": alibi_slopes, "num_splits": num_splits or None,
        "sinks": s_aux.float() if isinstance(s_aux, Tensor) else s_aux,
    }  # fmt: skip


def _check_codes(name: str, cache: Tensor, descale: object) -> None:
    """A dtype that does not tell the codes, and codes without scales."""
    if cache.dtype == torch.uint8:
        raise TypeError(
            f"{name} must have a dtype that tells its codes, float8_e4m3fn, float8_e5m2 or int8, got torch.uint8; bits "
            "of fp8 have one with view(torch.float8_e4m3fn), and int4 is for flash_decode() and its kv_format"
        )
    if cache.dtype == torch.int8 and descale is None:
        raise ValueError(f"{name[0]}_descale must be given with int8 codes, as float32 [B, Hkv] or a number, got None")


def _append(call: AppendCall, by_sequence: dict[str, Tensor]) -> Tensor | None:
    """append_kv(), where scales may be [B, Hkv] besides, in place of those of the call: a call for each sequence."""
    if not by_sequence:
        return append_kv(**call._asdict())
    # Of no sequences, whatever has the right form is as good.
    rows: list[dict[str, Any]] = [
        {name: x[b] for name, x in by_sequence.items()} for b in range(call.kv_lens.shape[0])
    ] or [{name: x.new_ones(()) for name, x in by_sequence.items()}]
    if not torch.compiler.is_compiling():
        for error in find_append_errors(call._replace(**rows[0])):  # before anything is written
            raise error
    own = ["k_new", "v_new", "kv_lens", "block_table", "q"]
    if call.block_table is None:
        own += ["k_cache", "v_cache"]
        own += [x for x in ("k_scale", "v_scale") if x not in by_sequence and getattr(getattr(call, x), "ndim", 0) == 3]
    rotated = []
    for b, row in enumerate(rows):
        mine = {name: getattr(call, name)[b : b + 1] for name in own if getattr(call, name) is not None}
        rotated.append(append_kv(**call._replace(**mine | row)._asdict()))
    return None if call.q is None else torch.cat([x for x in rotated if x is not None])


def _scales(
    descale: Tensor | float | None, name: str, batch: int, cache: Tensor, block_table: Tensor | None
) -> Tensor | None:  # fmt: skip
    """Scales as flash_decode() takes them, or [B, Hkv] where they may differ by sequence and pages may be shared."""
    if descale is None:
        return None
    if not isinstance(descale, Tensor):
        if not is_number(descale):
            raise TypeError(f"{name} must be a torch.Tensor, a number or None, got {type(descale).__name__}")
        for error in find_value_errors(name, descale):
            raise error
        return place_scale(descale, cache.device)
    if descale.ndim != 2:
        return descale
    if descale.dtype != torch.float32 or descale.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor of float32, got {descale.dtype} of {descale.layout}")
    if descale.shape != (batch, cache.shape[2]):
        raise ValueError(f"{name} must have shape [{batch}, {cache.shape[2]}], got {list(descale.shape)}")
    if not _is_by_sequence(descale):
        return descale[0, 0] if descale.stride(1) == 0 else _last_contiguous(descale[0])
    # As scales per token, which they become, nobody would look at them.
    if descale.device.type == "cpu" and not is_traced(descale):
        for error in find_value_errors(name, descale):
            raise error
    return descale if block_table is not None else descale[:, None].expand(-1, cache.shape[1], -1)


def _is_by_sequence(descale: Tensor) -> bool:
    """Whether scales [B, Hkv] may differ by sequence; other libraries expand those that do not."""
    return descale.shape[0] != 1 and (descale.shape[0] == 0 or descale.stride(0) != 0)


def _in_words(names: dict[str, str], function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """function(*args, **options), whose refusals call its arguments by the names that the caller knows."""
    try:
        return function(*args, **options)
    except (TypeError, ValueError) as error:
        message = str(error)
        if re.match(r"[\w, ]+ must ", message):
            message = re.sub(r"\w+", lambda word: names.get(word[0], word[0]), message)
            message = message.replace("; None means automatic", "; 0 means automatic")
            message = message.replace("; a kv_format can", "; flash_decode() and its kv_format can")
            error.args = (message.replace("layout='bhnd'", "[B, H, L, D], not flash-attn's [B, L, H, D]"),)
        raise


def _refuse(q: Tensor, batch: int, k: Tensor, v: Tensor, kv_lens: Tensor | None, decoding: dict[str, Any]) -> None:
    """Raise what flash_decode() would refuse, asked about one token per sequence where it does not get q as it is."""
    if q.ndim == 3:
        q = q.new_empty((batch, 1, *q.shape[1:]))
    slopes = decoding["alibi_slopes"]
    if isinstance(slopes, Tensor) and slopes.ndim == 2:
        if slopes.shape[0] != batch:
            raise ValueError(f"alibi_slopes must have one row per sequence, {batch}, got {slopes.shape[0]}")
        decoding = decoding | {"alibi_slopes": slopes[0] if batch else None}
    for name in ("k_scale", "v_scale"):
        scale = decoding.get(name)
        if scale is not None and scale.ndim == 2:
            decoding = decoding | {name: scale[0] if batch else scale.new_ones(())}
    make_problem(Call(q[:, :MAX_Q_LEN], k, v, kv_lens=kv_lens, **decoding))


def _check_given(**arrays: Tensor | None) -> None:
    for name, x in arrays.items():
        if x is not None and not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")


def _check_arrays(axes: str, where: str = "", **arrays: Tensor) -> None:
    for name, x in arrays.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        if x.ndim != len(axes.split(", ")):
            raise ValueError(f"{name} must have shape [{axes}]{where}, got {list(x.shape)}")


def _check_lens(which: str, starts: Tensor) -> None:
    """Type and shape of cu_seqlens_q or cu_seqlens_k."""
    name = f"cu_seqlens_{which}"
    if not isinstance(starts, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(starts).__name__}")
    if starts.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be int32 or int64, got {starts.dtype}")
    if starts.ndim != 1 or starts.shape[0] < 2:
        raise ValueError(f"{name} must have shape [B + 1] for at least one sequence, got {list(starts.shape)}")


def _check_starts(which: str, starts: Tensor, x: Tensor, most: int | None) -> None:
    """cu_seqlens_q or cu_seqlens_k of the packed x; values are looked at on the CPU alone."""
    name = f"cu_seqlens_{which}"
    _check_lens(which, starts)
    if starts.device != x.device:
        raise ValueError(f"{name} must be on the device of {which}, {x.device}, got {starts.device}")
    if most is None:
        raise ValueError(f"max_seqlen_{which} must be given with {name}, got None")
    if starts.device.type != "cpu" or torch.compiler.is_compiling():
        return
    low, high = (int(y) for y in torch.aminmax(starts.diff()))
    if int(starts[0]) != 0 or low < 0 or int(starts[-1]) > x.shape[0]:
        raise ValueError(f"{name} must rise from 0 to at most {x.shape[0]}, got {int(starts[0])} to {int(starts[-1])}")
    if which == "q" and high > int(most):
        raise ValueError(f"max_seqlen_q must be at least that of cu_seqlens_q, {high}, got {int(most)}")


def _refuse_training(dropout_p: float, return_attn_probs: bool) -> None:
    if dropout_p:
        raise ValueError(f"dropout_p must be 0, there is no training, got {dropout_p}")
    if return_attn_probs:
        raise ValueError("return_attn_probs must be False, the weights are never formed, got True")


def _last_contiguous(x: Tensor) -> Tensor:
    """A copy only where the last axis has gaps, as flash-attn makes one of q, k and v."""
    return x if x.ndim == 0 or x.stride(-1) == 1 else x.contiguous()


def _masks(
    causal: bool, window_size: tuple[int, int], q_len: int, capacity: int
) -> tuple[bool, int | None, bool]:  # fmt: skip
    """causal and window as flash_decode() has them, and whether rotated queries advance from token to token."""
    if not isinstance(window_size, (tuple, list)):
        raise TypeError(f"window_size must be (left, right), got {window_size}")
    if len(window_size) != 2:
        raise ValueError(f"window_size must be (left, right), got {window_size}")
    if not all(x is None or isinstance(x, int) for x in window_size):
        raise TypeError(f"window_size must hold two ints, got {window_size}")
    # None is how flash-attn 4 says -1, and a side as long as the cache is as good as none.
    left, right = (-1 if x is None or x >= capacity else x for x in window_size)
    if not causal and 0 < right < q_len - 1:
        raise ValueError(
            f"window_size must have a right side of -1, of 0, or of at least {q_len - 1} for {q_len} query tokens, "
            f"got {right}"
        )
    return causal or right == 0, None if left < 0 else left, causal or left >= 0 or right >= 0


def _refuse_unknown(unknown: dict[str, Any]) -> None:
    for name, value in unknown.items():
        if name in _SILENT and type(value) is type(_SILENT[name]) and value == _SILENT[name]:
            continue
        if name in _OURS:
            raise TypeError(f"flash_attn_with_kvcache() has no argument {name!r}: here it is {_OURS[name]}")
        if name in _ELSEWHERE:
            raise TypeError(f"flash_attn_with_kvcache() has no argument {name!r}: use {_ELSEWHERE[name]}")
        raise TypeError(f"flash_attn_with_kvcache() got an unexpected keyword argument {name!r}")
