"""Checks a call once and gives every array and option one meaning. All refusals are worded here."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain
from numbers import Real
from typing import NamedTuple

import torch
from torch import Tensor

from flash_decoding.accepted import Accepted
from flash_decoding.quantization import (
    KVFormat,
    Side,
    element_width,
    find_code_errors,
    find_scale_errors,
    find_value_errors,
    is_number,
    place_scale,
    resolve_side,
    side_of_dtype,
    split_sides,
)

LAYOUTS = ("bhnd", "bnhd")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MIN_HEAD_DIM, MAX_HEAD_DIM, MAX_VALUE_DIM, HEAD_DIM_STEP = 16, 576, 512, 8
MAX_Q_LEN = 64
# What a second grid axis holds, with room to spare; far beyond any useful count.
MAX_SPLITS = 16384
# Positions are 32-bit integers in the kernels, and a tile may reach past the last one.
MAX_KV_LEN = 2**31 - 2**16
# The scale is multiplied by log2(e) in float32.
_MAX_SCALE = 2.0**126


class Problem(NamedTuple):
    """One call with its arrays as [batch, heads, length, width] views, whatever the layout was."""

    q: Tensor  # [B, Hq, Lq, D]
    k: Tensor  # [B, Hkv, N, D]; with a block_table [pages, Hkv, page_size, D]; int4 codes are D / 2 wide
    v: Tensor  # likewise, Dv wide
    kv_lens: Tensor | None  # [B] int32 or int64
    kv_start: Tensor | None  # [B] int32 or int64
    block_table: Tensor | None  # [B, max_pages] int32
    q_lens: Tensor | None  # [B] int32 or int64
    key_mask: Tensor | None  # [B, N] bool
    tree_mask: Tensor | None  # [B, Lq, Lq] bool
    alibi_slopes: Tensor | None  # [Hq] float32
    sinks: Tensor | None  # [Hq] float32
    # Per tensor [], head [Hkv], channel [Hkv, D], token [B, Hkv, N] or group [B, Hkv, N, groups(, 2)]; with a
    # block_table pages and page_size for B and N. None without codes, and where fp8 codes have no scale.
    k_scale: Tensor | None
    v_scale: Tensor | None
    scale: float
    causal: bool
    window: int | None
    softcap: float | None
    kv_format: KVFormat | None  # None: k and v have the dtype of q
    batch: int
    heads_q: int
    heads_kv: int
    group: int
    q_len: int
    kv_len: int  # keys the cache can hold per sequence
    page_size: int | None  # keys per page; None: a dense cache
    head_dim: int  # of q
    value_dim: int  # of out


class Call(NamedTuple):
    """The arguments of flash_decode() as they came."""

    q: Tensor
    k: Tensor
    v: Tensor
    layout: str = "bhnd"
    kv_lens: Tensor | None = None
    kv_start: Tensor | None = None
    block_table: Tensor | None = None
    q_lens: Tensor | None = None
    scale: float | None = None
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    key_mask: Tensor | None = None
    tree_mask: Tensor | None = None
    kv_format: KVFormat | str | None = None
    k_scale: Tensor | float | None = None
    v_scale: Tensor | float | None = None
    num_splits: int | None = None
    split_size: int | None = None
    out: Tensor | None = None
    lse: Tensor | None = None
    check: bool = False


_accepted = Accepted()


def make_problem(call: Call) -> Problem:
    """The checked call; raises the first reason to refuse it."""
    _accepted.refuse(call, find_errors, _state_errors)
    q, k, v = call.q, call.k, call.v
    sides = sides_of(call)
    if call.layout == "bnhd":
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    batch, heads_q, q_len, head_dim = q.shape
    _, heads_kv, kv_len, value_dim = v.shape
    kv_format = k_scale = v_scale = None
    if sides != (None, None):
        value_dim = element_width(sides[1], v)
        kv_format = _resolve(call, sides, value_dim)
        k_scale, v_scale = (
            view_scale(place_scale(scale, q.device), call.layout) for scale in (call.k_scale, call.v_scale)
        )
    page_size = None
    if call.block_table is not None:
        page_size, kv_len = kv_len, kv_len * call.block_table.shape[1]
    return Problem(
        q, k, v, call.kv_lens, call.kv_start, call.block_table, call.q_lens, call.key_mask, call.tree_mask,
        call.alibi_slopes, call.sinks, k_scale, v_scale, head_dim**-0.5 if call.scale is None else float(call.scale),
        call.causal, call.window, float(call.softcap) if call.softcap else None, kv_format,
        batch, heads_q, heads_kv, heads_q // heads_kv, q_len, kv_len, page_size, head_dim, value_dim,
    )  # fmt: skip


def sides_of(call: Call) -> tuple[Side, Side]:
    """What the call says of its keys and of its values: a format, codes whose scales it leaves open, or no codes."""
    if call.kv_format is None:
        return side_of_dtype(call.k.dtype), side_of_dtype(call.v.dtype)
    return split_sides(call.kv_format)


def has_codes(call: Call) -> bool:
    """Whether the cache is quantised, as far as a call that may be wrong tells."""
    if isinstance(call.k, Tensor) and isinstance(call.v, Tensor) and not list(_format_errors(call)):
        return sides_of(call) != (None, None)
    return False


def _resolve(call: Call, sides: tuple[Side, Side], value_dim: int) -> KVFormat:
    """The format with the scales that the call has; raises where they cannot be told."""
    widths, scales = (call.q.shape[3], value_dim), (call.k_scale, call.v_scale)
    return KVFormat(*[
        None if side is None else resolve_side(name, side, scale, width)
        for name, side, scale, width in zip("kv", sides, scales, widths, strict=True)
    ])  # fmt: skip


def view_scale(scale: Tensor | None, layout: str) -> Tensor | None:
    """Scales as Problem has them."""
    if scale is None or scale.ndim == 0:
        return scale
    if scale.shape == (1,):
        return scale[0]
    return scale.transpose(1, 2) if layout == "bnhd" and scale.ndim > 2 else scale


def find_errors(call: Call) -> Iterator[Exception]:
    """Every reason to refuse the call that can be told; reads no device memory unless call.check."""
    yield from find_option_errors(call)
    yield from _kind_errors(call)
    arrays = [getattr(call, name) for name in ("q", "k", "v", *_ARRAYS, *_SCALES)]
    if not all(isinstance(x, Tensor) for x in arrays[:3]) or any(_is_sparse(x) for x in arrays):
        return
    yield from _single_errors(call)
    if list(_format_errors(call)):
        return  # what k and v hold cannot be told
    yield from _dtype_errors(call)
    if call.layout not in LAYOUTS:
        return
    ranks = list(_rank_errors(call))
    yield from ranks
    if not ranks:
        yield from _shape_errors(call)
    yield from _scale_errors(call)
    if not ranks:
        yield from _joint_errors(call)


_ARRAYS = (
    "kv_lens", "kv_start", "block_table", "q_lens", "alibi_slopes", "sinks", "key_mask", "tree_mask", "out", "lse"
)  # fmt: skip


_INTEGERS = (torch.int32, torch.int64)
_LENGTHS = ("kv_lens", "kv_start", "q_lens")
_SCALES = ("k_scale", "v_scale")


def _is_sparse(x: object) -> bool:
    return isinstance(x, Tensor) and x.layout != torch.strided


def find_option_errors(call: Call) -> Iterator[Exception]:
    """Options that are wrong whatever the arrays are."""
    if call.layout not in LAYOUTS:
        yield ValueError(f"layout must be one of {list(LAYOUTS)}, got {call.layout!r}")
    for name in ("scale", "softcap"):
        x = getattr(call, name)
        if x is None:
            continue
        if isinstance(x, bool) or not isinstance(x, Real):
            yield TypeError(f"{name} must be a number or None, got {type(x).__name__}")
            continue
        try:
            x = float(x)
        except OverflowError:
            x = math.inf
        if not math.isfinite(x):
            yield ValueError(f"{name} must be finite, got {x}")
        elif abs(x) > _MAX_SCALE:
            yield ValueError(f"{name} must be at most {_MAX_SCALE:.3g} in magnitude, got {x}")
        elif name == "softcap" and x < 0:
            yield ValueError(f"softcap must be at least 0, where 0 means off, got {x}")
    window = call.window
    if window is not None:
        if isinstance(window, bool) or not isinstance(window, int):
            yield TypeError(f"window must be an int or None, got {type(window).__name__}")
        elif window < 0:
            yield ValueError(f"window must be at least 0 keys left of the query's own, got {window}; None means off")
    for name in ("causal", "check"):
        x = getattr(call, name)
        if not isinstance(x, bool):
            yield TypeError(f"{name} must be a bool, got {type(x).__name__}")
    if call.tree_mask is not None and call.causal is False:
        yield ValueError("causal must be True with tree_mask, which takes its place among the new tokens, got False")
    for name, most in (("num_splits", MAX_SPLITS), ("split_size", MAX_KV_LEN)):
        x = getattr(call, name)
        if x is not None and (isinstance(x, bool) or not isinstance(x, int)):
            yield TypeError(f"{name} must be an int or None, got {type(x).__name__}")
        elif x is not None and not 1 <= x <= most:
            yield ValueError(f"{name} must be from 1 to {most}, got {x}; None means automatic")
    if call.num_splits is not None and call.split_size is not None:
        yield ValueError(f"split_size must be None when num_splits is given, got {call.split_size}")
    yield from _format_errors(call)
    for name, scale in (("k_scale", call.k_scale), ("v_scale", call.v_scale)):
        if scale is not None and is_number(scale):
            yield from find_value_errors(name, scale)


def _format_errors(call: Call) -> Iterator[Exception]:
    try:
        split_sides(call.kv_format)
    except (TypeError, ValueError) as error:
        yield error


def _kind_errors(call: Call) -> Iterator[Exception]:
    for name in ("q", "k", "v"):
        x = getattr(call, name)
        if not isinstance(x, Tensor):
            yield TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    for name in ("q", "k", "v", *_ARRAYS, *_SCALES):
        x = getattr(call, name)
        if _is_sparse(x):
            yield TypeError(f"{name} must be a dense tensor, got layout {x.layout}")
    for name in _ARRAYS:
        x = getattr(call, name)
        if x is not None and not isinstance(x, Tensor):
            hint = "; torch.tensor([...], dtype=torch.int32, device=q.device)" if name in _LENGTHS else ""
            yield TypeError(f"{name} must be a torch.Tensor or None, got {type(x).__name__}{hint}")
    for name in ("k_scale", "v_scale"):
        x = getattr(call, name)
        if x is not None and not isinstance(x, Tensor) and not is_number(x):
            yield TypeError(f"{name} must be a torch.Tensor, a number or None, got {type(x).__name__}")


def _dtype_errors(call: Call) -> Iterator[Exception]:
    q = call.q
    if q.dtype not in DTYPES:
        yield TypeError(f"q must be float16, bfloat16 or float32, got {q.dtype}")
    sides = sides_of(call)
    for name, side in zip("kv", sides, strict=True):
        yield from _side_errors(call, name, side)
    if call.kv_format is None and (sides[0] is None) != (sides[1] is None):
        yield TypeError(
            f"v must have the dtype of k, {call.k.dtype}, got {call.v.dtype}; a kv_format can name a format for each"
        )


def _side_errors(call: Call, name: str, side: Side) -> Iterator[Exception]:
    """The dtype of the keys or the values."""
    x = getattr(call, name)
    if side is not None:
        yield from find_code_errors(name, side, x.dtype)
    elif x.dtype == torch.uint8 and call.kv_format is None:
        yield TypeError(f"kv_format must name the codes that {name} holds as uint8, such as 'int4', got None")
    elif x.dtype != call.q.dtype:
        yield TypeError(f"{name} must have the dtype of q, {call.q.dtype}, got {x.dtype}")


def _rank_errors(call: Call) -> Iterator[Exception]:
    shape = "[B, H, L, D]" if call.layout == "bhnd" else "[B, L, H, D]"
    for name in ("q", "k", "v"):
        x = getattr(call, name)
        if x.ndim != 4:
            yield ValueError(f"{name} must have shape {shape} for layout {call.layout!r}, got {list(x.shape)}")


def _shape_errors(call: Call) -> Iterator[Exception]:
    q, k, v = call.q, call.k, call.v
    heads, length = (1, 2) if call.layout == "bhnd" else (2, 1)
    batch, heads_q, heads_kv, q_len = q.shape[0], q.shape[heads], k.shape[heads], q.shape[length]
    k_side, v_side = sides_of(call)
    kv_len, head_dim, value_dim = k.shape[length], q.shape[3], element_width(v_side, v)

    if call.block_table is None:
        for name, x in (("k", k), ("v", v)):
            if x.shape[0] != batch:
                yield ValueError(f"{name} must have the batch of q, {batch}, got {x.shape[0]}")
    elif v.shape[0] != k.shape[0]:
        yield ValueError(f"v must have the pages of k, {k.shape[0]}, got {v.shape[0]}")
    if heads_q == 0 or heads_kv == 0 or heads_q % heads_kv != 0:
        yield ValueError(
            f"heads_q must be a positive multiple of heads_kv, got {heads_q} and {heads_kv}{_other_layout(call)}"
        )
    if v.shape[heads] != heads_kv:
        yield ValueError(f"v must have the heads of k, {heads_kv}, got {v.shape[heads]}")
    if v.shape[length] != kv_len:
        yield ValueError(f"v must have the length of k, {kv_len}, got {v.shape[length]}")
    if not 1 <= q_len <= MAX_Q_LEN:
        yield ValueError(
            f"q must hold 1 to {MAX_Q_LEN} query tokens per sequence, got {q_len}; prefill is for SDPA"
            f"{_other_layout(call)}"
        )
    if element_width(k_side, k) != head_dim:
        packed = f", two in a byte, {head_dim / 2:g}" if k.shape[3] != element_width(k_side, k) else ""
        yield ValueError(f"k must have the head_dim of q, {head_dim}{packed}, got {k.shape[3]}")
    yield from find_dim_errors(head_dim, value_dim)
    capacity = _capacity(call)
    if capacity > MAX_KV_LEN:
        yield ValueError(f"k must hold at most {MAX_KV_LEN} keys, got {capacity}")
    split_size = call.split_size
    if isinstance(split_size, int) and split_size >= 1 and capacity > split_size * MAX_SPLITS:
        yield ValueError(f"split_size must cut {capacity} keys into at most {MAX_SPLITS} splits, got {split_size}")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.numel() and x.stride(3) != 1:
            yield ValueError(f"{name} must have a contiguous last axis, got strides {list(x.stride())}")
        if x.device != q.device:
            yield ValueError(f"{name} must be on the device of q, {q.device}, got {x.device}")

    yield from _array_errors(call, batch, heads_q, q_len, kv_len)
    out_shape, lse_shape = (*q.shape[:3], value_dim), (batch, heads_q, q_len)
    yield from find_result_errors(q, call.out, call.lse, out_shape, lse_shape)


def find_result_errors(
    q: Tensor, out: object, lse: object, out_shape: tuple[int, ...], lse_shape: tuple[int, ...]
) -> Iterator[Exception]:
    """The caller's out and lse, as far as they are tensors, held against what comes out."""
    if isinstance(out, Tensor):
        if out.dtype != q.dtype:
            yield TypeError(f"out must have the dtype of q, {q.dtype}, got {out.dtype}")
        if out.shape != out_shape:
            yield ValueError(f"out must have shape {list(out_shape)}, got {list(out.shape)}")
        if out.device != q.device:
            yield ValueError(f"out must be on the device of q, {q.device}, got {out.device}")
        if out.ndim and out.numel() and out.stride(-1) != 1:
            yield ValueError(f"out must have a contiguous last axis, got strides {list(out.stride())}")
        if any(size > 1 and step == 0 for size, step in zip(out.shape, out.stride(), strict=True)):
            yield ValueError(f"out must not overlap itself, got strides {list(out.stride())}")
    if isinstance(lse, Tensor):
        if lse.dtype != torch.float32:
            yield TypeError(f"lse must be float32, got {lse.dtype}")
        if lse.shape != lse_shape or not lse.is_contiguous():
            yield ValueError(f"lse must be contiguous with shape {list(lse_shape)}, got {list(lse.shape)}")
        if lse.device != q.device:
            yield ValueError(f"lse must be on the device of q, {q.device}, got {lse.device}")


def find_dim_errors(head_dim: int, value_dim: int) -> Iterator[ValueError]:
    """Widths that no kernel takes."""
    for name, width, most in (("head_dim", head_dim, MAX_HEAD_DIM), ("value_dim", value_dim, MAX_VALUE_DIM)):
        if width % HEAD_DIM_STEP != 0 or not MIN_HEAD_DIM <= width <= most:
            yield ValueError(f"{name} must be a multiple of {HEAD_DIM_STEP} from {MIN_HEAD_DIM} to {most}, got {width}")


def _other_layout(call: Call) -> str:
    """A hint for the likeliest mistake: shapes that fit the layout that was not named."""
    other = LAYOUTS[1 - LAYOUTS.index(call.layout)]
    q, k, v = call.q, call.k, call.v
    heads, length = (1, 2) if other == "bhnd" else (2, 1)
    fits = k.shape[heads] > 0 and q.shape[heads] % k.shape[heads] == 0 and k.shape[:3] == v.shape[:3]
    if not fits or q.shape[length] > MAX_Q_LEN:
        return ""
    return f"; the shapes {list(q.shape)} and {list(k.shape)} of q and k fit layout={other!r}"


def _array_errors(call: Call, batch: int, heads_q: int, q_len: int, length: int) -> Iterator[Exception]:
    """The optional arrays: dtype, shape, device, and which of them go together."""
    table = call.block_table
    if isinstance(table, Tensor) and table.ndim == 2:
        length *= table.shape[1]
        if call.k.shape[2 if call.layout == "bhnd" else 1] == 0:
            yield ValueError("k must have pages of at least one key, got 0")
        if call.kv_lens is None:
            yield ValueError("kv_lens must be given with block_table, got None")
    expected: dict[str, tuple[tuple[torch.dtype, ...], tuple[int | None, ...]]] = {
        "kv_lens": (_INTEGERS, (batch,)),
        "kv_start": (_INTEGERS, (batch,)),
        "q_lens": (_INTEGERS, (batch,)),
        "block_table": ((torch.int32,), (batch, None)),
        "alibi_slopes": ((torch.float32,), (heads_q,)),
        "sinks": ((torch.float32,), (heads_q,)),
        "key_mask": ((torch.bool,), (batch, length)),
        "tree_mask": ((torch.bool,), (batch, q_len, q_len)),
    }
    for name, (dtypes, shape) in expected.items():
        x = getattr(call, name)
        if not isinstance(x, Tensor):
            continue
        if x.dtype not in dtypes:
            names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            yield TypeError(f"{name} must be {names}, got {x.dtype}")
        if x.ndim != len(shape) or any(want not in (None, have) for want, have in zip(shape, x.shape, strict=True)):
            wanted = str([want if want is not None else "max_pages" for want in shape]).replace("'", "")
            yield ValueError(f"{name} must have shape {wanted}, got {list(x.shape)}")
        elif x.ndim == 1 and x.numel() > 1 and x.stride(0) != 1:
            yield ValueError(f"{name} must be contiguous, got stride {x.stride(0)}")
        elif name == "block_table" and x.shape[1] > 1 and x.stride(1) != 1:
            yield ValueError(f"{name} must have a contiguous last axis, got strides {list(x.stride())}")
        if x.device != call.q.device:
            yield ValueError(f"{name} must be on the device of q, {call.q.device}, got {x.device}")


def _scale_errors(call: Call) -> Iterator[Exception]:
    """Scales that do not belong to the codes, held against these alone; nothing where these are wrong themselves."""
    for name, side in zip("kv", sides_of(call), strict=True):
        x, scale = getattr(call, name), getattr(call, f"{name}_scale")
        known = scale is None or isinstance(scale, Tensor) or is_number(scale)
        if not known or x.ndim != 4 or list(_side_errors(call, name, side)):
            continue
        if side is None:
            if scale is not None:
                yield ValueError(f"{name}_scale must be None where {name} has the dtype of q, got one")
            continue
        width = element_width(side, x)
        try:
            form = resolve_side(name, side, scale, width)
        except ValueError as error:
            yield error
            continue
        yield from find_scale_errors(f"{name}_scale", form, scale, x, width, call.layout)


def _is_int4(call: Call) -> bool:
    """Whether the values are int4 codes, of a call whose format can be told."""
    side = sides_of(call)[1]
    return (side if isinstance(side, str) or side is None else side.codes) == "int4"


def _state_errors(call: Call) -> Iterator[Exception]:
    """What may differ between calls of one signature."""
    return chain(_single_errors(call), _joint_errors(call))


def _single_errors(call: Call) -> Iterator[Exception]:
    """Flags of tensors, and scales where looking costs no wait: each by itself."""
    if torch.is_grad_enabled():
        for name in ("q", "k", "v", "alibi_slopes", "sinks", "k_scale", "v_scale"):
            x = getattr(call, name)
            if isinstance(x, Tensor) and x.requires_grad:
                yield ValueError(
                    f"{name} must not require a gradient, there is no backward; use torch.no_grad() or detach()"
                )
    for name, x in (("q", call.q), ("k", call.k), ("v", call.v)):
        if x.is_neg():
            yield ValueError(f"{name} must not be a negated view; use resolve_neg()")
    for name, scale in (("k_scale", call.k_scale), ("v_scale", call.v_scale)):
        if isinstance(scale, Tensor) and _may_read(scale, call):
            yield from find_value_errors(name, scale)


def _joint_errors(call: Call) -> Iterator[Exception]:
    """Where values begin, and lengths and pages where looking costs no wait: held against what there is."""
    inside = call.v.numel() > 0 and call.v.data_ptr() == call.k.data_ptr() and call.v.shape[-1] < call.k.shape[-1]
    if inside and _is_int4(call):
        yield ValueError(
            "v must not begin inside k where it holds int4 codes and is less wide: their order depends on the width"
        )
    outside = False
    for name, lens in (("kv_lens", call.kv_lens), ("kv_start", call.kv_start), ("q_lens", call.q_lens)):
        if not isinstance(lens, Tensor) or lens.dtype not in _INTEGERS or lens.numel() == 0:
            continue
        if not _may_read(lens, call):
            continue
        length = 2 if call.layout == "bhnd" else 1
        most, what = (
            (call.q.shape[length], "query tokens") if name == "q_lens" else (_capacity(call), "the cache's keys")
        )
        low, high = (int(y) for y in torch.aminmax(lens))
        if low < 0 or high > most:
            outside = True
            yield ValueError(f"{name} must lie from 0 to {most}, {what}, got values from {low} to {high}")
    if not outside:
        yield from _page_errors(call)


def _may_read(x: Tensor, call: Call) -> bool:
    """Whether the host looks at an array: on a CPU, where that costs nothing, and where it is asked to."""
    return x.device.type == "cpu" or (call.check is True and x.device == call.q.device)


def _page_errors(call: Call) -> Iterator[Exception]:
    """Page ids outside the pool among those that are looked up."""
    table, lens = call.block_table, call.kv_lens
    if not isinstance(table, Tensor) or not isinstance(lens, Tensor) or table.ndim != 2 or not _may_read(table, call):
        return
    if table.dtype not in _INTEGERS:
        return
    length = 2 if call.layout == "bhnd" else 1
    page_size, pages = call.k.shape[length], call.k.shape[0]
    start = torch.zeros_like(lens) if call.kv_start is None else call.kv_start
    tokens = torch.full_like(lens, call.q.shape[length]) if call.q_lens is None else call.q_lens
    if not all(
        isinstance(x, Tensor) and x.shape == table.shape[:1] and x.device == table.device and x.dtype in _INTEGERS
        for x in (lens, start, tokens)
    ):
        return  # named by others
    if isinstance(call.window, int):
        start = torch.maximum(start, lens - tokens - min(call.window, MAX_KV_LEN))
    first = torch.arange(table.shape[1], device=table.device) * page_size
    reached = (first < lens[:, None]) & (first + page_size > start[:, None]) & ((start < lens) & (tokens > 0))[:, None]
    bad = reached & ((table < 0) | (table >= pages))
    if bool(bad.any()):
        b, column = (int(i) for i in bad.nonzero()[0])
        yield ValueError(
            f"block_table must hold pages from 0 to {pages - 1} where kv_lens reaches, "
            f"got {int(table[b, column])} at [{b}, {column}]"
        )


def _capacity(call: Call) -> int:
    """Keys the cache can hold per sequence."""
    length = call.k.shape[2 if call.layout == "bhnd" else 1]
    table = call.block_table
    return length * table.shape[1] if isinstance(table, Tensor) and table.ndim == 2 else length
