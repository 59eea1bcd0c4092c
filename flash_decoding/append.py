"""append_kv(): new keys and values into a dense or paged cache, quantised or not, in one kernel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_decoding import backends
from flash_decoding.accepted import Accepted
from flash_decoding.op import is_traced, register_op
from flash_decoding.problem import (
    DTYPES,
    LAYOUTS,
    MAX_KV_LEN,
    find_dim_errors,
)
from flash_decoding.quantization import (
    CodeFormat,
    KVFormat,
    Side,
    find_code_errors,
    find_scale_errors,
    find_value_errors,
    is_number,
    place_scale,
    resolve_side,
    side_of_dtype,
    split_sides,
)


class Codes(NamedTuple):
    """How one side of the cache, the keys or the values, is quantised."""

    form: CodeFormat
    scale: Tensor | None  # [B or pages, Hkv, N, parts], whatever the format has one of; None: 1
    part: int | None  # elements of a row that get a scale, which is written; None: scales are given, one per element


class Append(NamedTuple):
    """One checked call with its arrays as [batch, heads, length, width] views, whatever the layout was."""

    k_new: Tensor  # [B, Hkv, L, D]
    v_new: Tensor  # [B, Hkv, L, Dv]
    k_cache: Tensor  # [B, Hkv, N, D]; with a block_table [pages, Hkv, page_size, D]; int4 codes are D / 2 wide
    v_cache: Tensor  # likewise, Dv wide
    kv_lens: Tensor  # [B] int32 or int64
    block_table: Tensor | None  # [B, max_pages] int32
    new_lens: Tensor | None  # [B] int32 or int64
    rotary_cos: Tensor | None  # [positions, rotary_dim / 2]
    rotary_sin: Tensor | None  # likewise
    rotary_interleaved: bool
    q: Tensor | None  # [B, Hq, Lq, D]
    q_out: Tensor | None  # likewise
    q_step: int  # from one query token's position to the next: 1, or 0 where all have the first one's
    capacity: int  # keys the cache can hold per sequence
    page_size: int | None  # keys per page; None: a dense cache
    k_codes: Codes | None = None  # None: k_cache has the dtype of k_new
    v_codes: Codes | None = None


class AppendCall(NamedTuple):
    """The arguments of append_kv() as they came."""

    k_new: Tensor
    v_new: Tensor
    k_cache: Tensor
    v_cache: Tensor
    kv_lens: Tensor
    layout: str = "bhnd"
    block_table: Tensor | None = None
    new_lens: Tensor | None = None
    rotary_cos: Tensor | None = None
    rotary_sin: Tensor | None = None
    rotary_interleaved: bool = False
    q: Tensor | None = None
    q_advances: bool = True
    kv_format: KVFormat | str | None = None
    k_scale: Tensor | float | None = None
    v_scale: Tensor | float | None = None
    check: bool = False


def append_kv(
    k_new: Tensor,
    v_new: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_lens: Tensor,
    *,
    layout: str = "bhnd",
    block_table: Tensor | None = None,
    new_lens: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = False,
    q: Tensor | None = None,
    q_advances: bool = True,
    kv_format: KVFormat | str | None = None,
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
    backend: str = "auto",
    check: bool = False,
) -> Tensor | None:
    """Write new keys and values behind those that a cache holds, in place, rotated and quantised on the way if wanted.

    New token i of sequence b goes to position kv_lens[b] + i. One kernel does all of it, and rotates the queries as
    well. kv_lens stays as it is: decode with kv_lens + L (or kv_lens + new_lens).

    A quantised cache gets the codes that quantize_kv(check=False) makes of the rows that would be written otherwise, in
    the dtype of k_new. Scales per token and per group are made of the new rows and written to k_scale and v_scale in
    the place that belongs to the token; the others are given, and what they do not cover saturates.

    Args:
        k_new: [B, Hkv, L, D], float16, bfloat16 or float32; any L. D a multiple of 8 from 16 to 576.
        v_new: [B, Hkv, L, Dv], dtype of k_new; Dv likewise, up to 512.
        k_cache: [B, Hkv, N, D], written in place; dtype of k_new, or codes of a quantised cache; any strides with the
            last axis contiguous. Shares no memory with the other arrays.
        v_cache: [B, Hkv, N, Dv], likewise.
        kv_lens: [B] int32 or int64 on the device of k_new, keys that each sequence holds before. Never read on the
            host, so a captured CUDA graph is right for every later content. On a GPU, a token whose position is not in
            the cache is dropped, and so are all tokens of a sequence with a negative length; on the CPU, where looking
            costs nothing, both are refused.
        layout: "bhnd" as above, or "bnhd" (flash-attn): k_new [B, L, Hkv, D], k_cache [B, N, Hkv, D], and so on.
        block_table: [B, max_pages] int32, the pages of each sequence in a paged cache: k_cache is then
            [pages, Hkv, page_size, D] ([pages, page_size, Hkv, D] for "bnhd"), v_cache likewise. No two sequences may
            write to the same page; where two new tokens would get the same place of one, the CPU refuses the call.
            Entries that no new token reaches may hold anything; a token whose page is not in the pool is dropped on a
            GPU and refused on the CPU.
        new_lens: [B], new tokens per sequence where they differ: the first new_lens[b] of L count. None means L.
        rotary_cos: [positions, rotary_dim / 2], dtype of k_new or float32, at least as many positions as the cache
            holds: the key at position n is rotated by row n, in its first rotary_dim entries. None means no rotation.
        rotary_sin: likewise.
        rotary_interleaved: which entries make a pair: False for d and d + rotary_dim / 2 (GPT-NeoX, Llama in
            Transformers), True for 2 d and 2 d + 1 (GPT-J, Llama as published).
        q: [B, Hq, Lq, D], queries to rotate like the keys, token i by position kv_lens[b] + i (at most the last one of
            the tables); needs rotary_cos. None means none.
        q_advances: False rotates all query tokens of a sequence by position kv_lens[b].
        kv_format: how k_cache and v_cache are quantised, as for flash_decode(); None reads it off their dtypes.
        k_scale: as for flash_decode(). Those per token or group are written, and must not overlap themselves. None
            means 1 for fp8 codes.
        v_scale: likewise.
        backend: "auto", "triton" (CUDA devices) or "cpu"; a backend named here never falls back to another.
        check: also read lengths, page ids and given scales on a GPU and refuse what the CPU refuses; synchronises.

    Returns:
        The rotated queries, a new tensor like q, or None without q.

    Raises:
        ValueError: shapes, devices, layouts or values that do not fit, or a backend that cannot run the call.
        TypeError: a wrong Python type or dtype. All are raised before any launch.

    Example:
        >>> k_cache, v_cache = torch.zeros(2, 4, 100, 64), torch.zeros(2, 4, 100, 64)
        >>> k_new, v_new = torch.randn(2, 4, 1, 64), torch.randn(2, 4, 1, 64)
        >>> kv_lens = torch.tensor([7, 99])
        >>> append_kv(k_new, v_new, k_cache, v_cache, kv_lens)
        >>> torch.equal(k_cache[1, :, 99], k_new[1, :, 0])
        True
    """
    call = AppendCall(
        k_new, v_new, k_cache, v_cache, kv_lens, layout, block_table, new_lens, rotary_cos, rotary_sin,
        rotary_interleaved, q, q_advances, kv_format, k_scale, v_scale, check,
    )  # fmt: skip
    if is_traced(k_new, k_cache, kv_lens):
        return _traced(call, backend)
    _refuse(call, backend)
    q_out = None if q is None else torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _run(call, q_out, backend)
    return q_out


_accepted = Accepted()


def _refuse(call: AppendCall, backend: str) -> None:
    """Raise the first reason to refuse the call."""
    _accepted.refuse(call, find_append_errors, _state_errors)
    for error in backends.find_backend_errors(backend, call.k_new.device):
        raise error


def _run(call: AppendCall, q_out: Tensor | None, backend: str) -> None:
    """Start the backend on a checked call. q_out has the layout of the call."""
    arrays: list[Any] = [*call[:4], call.q, q_out]
    if call.layout == "bnhd":
        arrays = [x if x is None else x.transpose(1, 2) for x in arrays]
    k_new, v_new, k_cache, v_cache, q, q_out = arrays
    table, page_size, capacity = call.block_table, None, k_cache.shape[2]
    if table is not None:
        page_size, capacity = capacity, capacity * table.shape[1]
    append = Append(
        k_new, v_new, k_cache, v_cache, call.kv_lens, table, call.new_lens, call.rotary_cos, call.rotary_sin,
        call.rotary_interleaved, q, q_out, int(call.q_advances), capacity, page_size,
        *_make_codes(call, k_cache, v_cache),
    )  # fmt: skip
    if k_new.numel() or (q is not None and q.numel()):
        backends.load(f"{backends.resolve(backend, k_new.device)}.append").append(append)


def _make_codes(call: AppendCall, k_cache: Tensor, v_cache: Tensor) -> Iterator[Codes | None]:
    """How keys and values are quantised; caches as Append has them."""
    for name, side, cache in zip("kv", _sides(call), (k_cache, v_cache), strict=True):
        if side is None:
            yield None
            continue
        scale, width = getattr(call, f"{name}_scale"), getattr(call, f"{name}_new").shape[3]
        form = resolve_side(name, side, scale, width)
        part = (form.group or width) if _is_made(scale) else None
        scale = place_scale(scale, cache.device)
        if scale is not None:
            scale = _view_scale(scale, form, call.layout, (*cache.shape[:3], width))
        yield Codes(form, scale, part)


def _view_scale(scale: Tensor, form: CodeFormat, layout: str, elements: tuple[int, ...]) -> Tensor:
    """Scales as Codes has them: [B, Hkv, N, parts], or as many as there are elements."""
    if form.scale == "tensor":
        return scale.reshape(()).expand(elements)
    if form.scale == "head":
        return scale[:, None, None].expand(elements)
    if form.scale == "channel":
        return scale[:, None].expand(elements)
    scale = scale.transpose(1, 2) if layout == "bnhd" else scale
    if form.scale == "token":
        return scale[..., None]
    return scale[..., 0] if form.zero_point else scale


def _is_made(scale: Tensor | float | None) -> bool:
    """Whether scales belong to single tokens, so that they are made of new rows."""
    return isinstance(scale, Tensor) and scale.ndim > 2


def _sides(call: AppendCall) -> tuple[Side, Side]:
    """What the call says of the two caches: a format, codes whose scales it leaves open, or no codes."""
    if call.kv_format is None:
        return side_of_dtype(call.k_cache.dtype), side_of_dtype(call.v_cache.dtype)
    return split_sides(call.kv_format)


def find_append_errors(call: AppendCall) -> Iterator[Exception]:
    """Every reason to refuse the call that can be told; reads no device memory unless call.check."""
    if call.layout not in LAYOUTS:
        yield ValueError(f"layout must be one of {list(LAYOUTS)}, got {call.layout!r}")
        return
    for name in ("rotary_interleaved", "q_advances", "check"):
        if not isinstance(getattr(call, name), bool):
            yield TypeError(f"{name} must be a bool, got {type(getattr(call, name)).__name__}")
    kinds = list(_kind_errors(call))
    yield from kinds
    if kinds:
        return
    dtypes = list(_dtype_errors(call))
    yield from dtypes
    shapes = list(_shape_errors(call))
    yield from shapes
    if not dtypes and not shapes:
        yield from _scale_errors(call)
        yield from _state_errors(call)


_ARRAYS = ("k_new", "v_new", "k_cache", "v_cache")
_OPTIONAL = ("block_table", "new_lens", "rotary_cos", "rotary_sin", "q")
_SCALES = ("k_scale", "v_scale")


def _kind_errors(call: AppendCall) -> Iterator[Exception]:
    for name in (*_ARRAYS, "kv_lens", *_OPTIONAL):
        x = getattr(call, name)
        if x is None and name in _OPTIONAL:
            continue
        if not isinstance(x, Tensor):
            yield TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        elif x.layout != torch.strided:
            yield TypeError(f"{name} must be a dense tensor, got layout {x.layout}")
    for name in _SCALES:
        x = getattr(call, name)
        if x is not None and not isinstance(x, Tensor) and not is_number(x):
            yield TypeError(f"{name} must be a torch.Tensor, a number or None, got {type(x).__name__}")
    try:
        split_sides(call.kv_format)
    except (TypeError, ValueError) as error:
        yield error


def _dtype_errors(call: AppendCall) -> Iterator[Exception]:
    dtype = call.k_new.dtype
    if dtype not in DTYPES:
        yield TypeError(f"k_new must be float16, bfloat16 or float32, got {dtype}")
    for name, side in zip(("k_cache", "v_cache", "v_new", "q"), (*_sides(call), None, None), strict=True):
        x = getattr(call, name)
        if side is not None:
            yield from find_code_errors(name, side, x.dtype)
        elif x is not None and x.dtype != dtype:
            yield TypeError(f"{name} must have the dtype of k_new, {dtype}, got {x.dtype}")
    for name in ("rotary_cos", "rotary_sin"):
        x = getattr(call, name)
        if x is not None and x.dtype not in (dtype, torch.float32):
            yield TypeError(f"{name} must be float32 or have the dtype of k_new, {dtype}, got {x.dtype}")
    if call.rotary_cos is not None and call.rotary_sin is not None and call.rotary_cos.dtype != call.rotary_sin.dtype:
        yield TypeError(f"rotary_sin must have the dtype of rotary_cos, {call.rotary_cos.dtype}, got "
                        f"{call.rotary_sin.dtype}")  # fmt: skip
    for name in ("kv_lens", "new_lens"):
        x = getattr(call, name)
        if x is not None and x.dtype not in (torch.int32, torch.int64):
            yield TypeError(f"{name} must be int32 or int64, got {x.dtype}")
    if call.block_table is not None and call.block_table.dtype != torch.int32:
        yield TypeError(f"block_table must be int32, got {call.block_table.dtype}")


def _shape_errors(call: AppendCall) -> Iterator[Exception]:
    order = "[B, H, L, D]" if call.layout == "bhnd" else "[B, L, H, D]"
    ranks = {**dict.fromkeys((*_ARRAYS, "q"), 4), "kv_lens": 1, "new_lens": 1, "block_table": 2, "rotary_cos": 2,
             "rotary_sin": 2}  # fmt: skip
    wanted = {4: order, 1: "[B]", 2: "two dimensions"}
    bad = False
    for name, rank in ranks.items():
        x = getattr(call, name)
        if x is not None and x.ndim != rank:
            bad = True
            yield ValueError(f"{name} must have shape {wanted[rank]}, got {list(x.shape)}")
    if bad:
        return
    yield from _array_errors(call)
    yield from _rotary_errors(call)


def _array_errors(call: AppendCall) -> Iterator[Exception]:
    heads, length = _axes(call)
    k_new, k_cache, table, q = call.k_new, call.k_cache, call.block_table, call.q
    batch, heads_kv, new, head_dim = k_new.shape[0], k_new.shape[heads], k_new.shape[length], k_new.shape[3]
    value_dim = call.v_new.shape[3]
    packed = [2 if str(side).startswith("int4") else 1 for side in _sides(call)]  # elements in a byte
    first, keys = k_cache.shape[0], k_cache.shape[length]
    shapes: dict[str, tuple[int, int, int, int]] = {
        "v_new": (batch, heads_kv, new, value_dim),
        "k_cache": (batch if table is None else first, heads_kv, keys, head_dim // packed[0]),
        "v_cache": (first, heads_kv, keys, value_dim // packed[1]),
    }
    if q is not None:
        shapes["q"] = (batch, q.shape[heads], q.shape[length], head_dim)
    for name, (first, middle, last, width) in shapes.items():
        shape = [first, middle, last, width] if call.layout == "bhnd" else [first, last, middle, width]
        x = getattr(call, name)
        if list(x.shape) != shape:
            yield ValueError(f"{name} must have shape {shape}, got {list(x.shape)}")
    yield from find_dim_errors(head_dim, value_dim)
    if table is not None and k_cache.shape[length] == 0:
        yield ValueError("k_cache must have pages of at least one key, got 0")
    if _capacity(call) > MAX_KV_LEN:
        yield ValueError(f"k_cache must hold at most {MAX_KV_LEN} keys per sequence, got {_capacity(call)}")
    for name in ("kv_lens", "new_lens", "block_table"):
        x = getattr(call, name)
        if x is not None and x.shape[0] != batch:
            yield ValueError(f"{name} must have one entry per sequence, {batch}, got {x.shape[0]}")
        if x is not None and x.ndim == 1 and x.numel() > 1 and x.stride(0) != 1:
            yield ValueError(f"{name} must be contiguous, got stride {x.stride(0)}")
        if x is not None and x.ndim == 2 and x.shape[1] > 1 and x.stride(1) != 1:
            yield ValueError(f"{name} must have a contiguous last axis, got strides {list(x.stride())}")
    for name in (*_ARRAYS, "q", "rotary_cos", "rotary_sin"):
        x = getattr(call, name)
        if x is not None and x.numel() and x.stride(-1) != 1:
            yield ValueError(f"{name} must have a contiguous last axis, got strides {list(x.stride())}")
    for name in ("k_cache", "v_cache"):
        x = getattr(call, name)
        if _overlaps_itself(x):
            yield ValueError(f"{name} must not overlap itself, got strides {list(x.stride())}")
    for name in (*_ARRAYS[1:], "kv_lens", *_OPTIONAL):
        x = getattr(call, name)
        if x is not None and x.device != k_new.device:
            yield ValueError(f"{name} must be on the device of k_new, {k_new.device}, got {x.device}")


def _scale_errors(call: AppendCall) -> Iterator[Exception]:
    """Scales that do not belong to the codes, of a call whose arrays go together otherwise."""
    for name, side in zip("kv", _sides(call), strict=True):
        scale, cache = getattr(call, f"{name}_scale"), getattr(call, f"{name}_cache")
        width = getattr(call, f"{name}_new").shape[3]
        if side is None:
            if scale is not None:
                yield ValueError(f"{name}_scale must be None where {name}_cache has the dtype of {name}_new, got one")
            continue
        if scale is None and isinstance(side, CodeFormat) and side.scale == "token":
            yield ValueError(f"{name}_scale must be given with scales per token, which are written to it, got None")
        try:
            form = resolve_side(name, side, scale, width)
        except ValueError as error:
            yield error
            continue
        yield from find_scale_errors(f"{name}_scale", form, scale, cache, width, call.layout)
        if isinstance(scale, Tensor) and _is_made(scale) and _overlaps_itself(scale):
            yield ValueError(f"{name}_scale must not overlap itself, got strides {list(scale.stride())}")


def _overlaps_itself(x: Tensor) -> bool:
    return any(size > 1 and step == 0 for size, step in zip(x.shape, x.stride(), strict=True))


def _rotary_errors(call: AppendCall) -> Iterator[Exception]:
    cos, sin = call.rotary_cos, call.rotary_sin
    if (cos is None) != (sin is None):
        missing, given = ("rotary_cos", "rotary_sin") if cos is None else ("rotary_sin", "rotary_cos")
        yield ValueError(f"{missing} must be given with {given}, got None")
        return
    if cos is None or sin is None:
        if call.q is not None:
            yield ValueError("rotary_cos must be given with q, which is only rotated, got None")
        return
    if sin.shape != cos.shape:
        yield ValueError(f"rotary_sin must have the shape of rotary_cos, {list(cos.shape)}, got {list(sin.shape)}")
    if not 1 <= cos.shape[1] <= call.k_new.shape[3] // 2:
        yield ValueError(
            f"rotary_cos must have from 1 to head_dim / 2 = {call.k_new.shape[3] // 2} columns, got {cos.shape[1]}"
        )
    if cos.shape[0] < max(_capacity(call), 1):
        yield ValueError(
            f"rotary_cos must have a row for each of the {_capacity(call)} positions of the cache, got {cos.shape[0]}"
        )


def _state_errors(call: AppendCall) -> Iterator[Exception]:
    """What may differ between calls of one signature: flags of tensors, and values where looking costs no wait."""
    recording = torch.is_grad_enabled()
    for name in (*_ARRAYS, "q", *_SCALES):
        x = getattr(call, name)
        if not isinstance(x, Tensor):
            continue
        if recording and x.requires_grad:
            yield ValueError(
                f"{name} must not require a gradient, there is no backward; use torch.no_grad() or detach()"
            )
        if x.is_neg():
            yield ValueError(f"{name} must not be a negated view; use resolve_neg()")
    for what, lost in (("cache", "keys"), ("scale", "scales of keys")):
        keys, values = getattr(call, f"k_{what}"), getattr(call, f"v_{what}")
        if (what == "cache" or (_is_made(keys) and _is_made(values))) and _is_same_memory(keys, values):
            yield ValueError(f"v_{what} must not be k_{what}: {lost} would be overwritten, got the same memory twice")
    for name in _SCALES:
        x = getattr(call, name)
        if x is not None and (call.check or not isinstance(x, Tensor) or x.device.type == "cpu"):
            yield from find_value_errors(name, x)
    if call.kv_lens.numel() and (call.check or call.kv_lens.device.type == "cpu"):
        yield from _value_errors(call)


def _is_same_memory(x: Tensor, y: Tensor) -> bool:
    """Whether two arrays are one."""
    return x.data_ptr() == y.data_ptr() and x.numel() > 0 and x.shape == y.shape and x.stride() == y.stride()


def _value_errors(call: AppendCall) -> Iterator[Exception]:
    """Positions and pages outside the cache, and places given twice; reads lengths and the table."""
    capacity, new = _capacity(call), call.k_new.shape[_axes(call)[1]]
    for name, lens, most in (("kv_lens", call.kv_lens, capacity), ("new_lens", call.new_lens, new)):
        if lens is None:
            continue
        low, high = (int(x) for x in torch.aminmax(lens))
        if low < 0 or high > most:
            yield ValueError(f"{name} must lie from 0 to {most}, got values from {low} to {high}")
            return
    ends = call.kv_lens + (new if call.new_lens is None else call.new_lens)
    end = int(ends.max())
    if end > capacity:
        yield ValueError(f"kv_lens must leave room for the new keys in a cache of {capacity}, got an end of {end}")
        return
    table = call.block_table
    if table is not None:
        page_size, pages = capacity // max(table.shape[1], 1), call.k_cache.shape[0]
        first = torch.arange(table.shape[1], device=table.device) * page_size
        reached = (first < ends[:, None]) & (first + page_size > call.kv_lens[:, None]) & (ends > call.kv_lens)[:, None]
        bad = reached & ((table < 0) | (table >= pages))
        if bool(bad.any()):
            b, column = (int(i) for i in bad.nonzero()[0])
            yield ValueError(
                f"block_table must hold pages from 0 to {pages - 1} where new keys go, "
                f"got {int(table[b, column])} at [{b}, {column}]"
            )
            return
        written = table[reached].tolist()
        if len(set(written)) < len(written):
            yield from _place_errors(call.kv_lens, ends, new, table, page_size)


def _place_errors(lens: Tensor, ends: Tensor, new: int, table: Tensor, page_size: int) -> Iterator[Exception]:
    """Two new tokens in one place: new ones go to positions from lens [B] to ends [B], all in the cache."""
    position = lens[:, None].long() + torch.arange(new, device=lens.device)
    written = position < ends[:, None]
    sequence, position = written.nonzero()[:, 0], position[written]
    place = table[sequence, position // page_size].long() * page_size + position % page_size
    places, counts = place.unique(return_counts=True)
    if len(places) < len(place):
        twice = int(places[counts > 1][0])
        page, slot = divmod(twice, page_size)
        yield ValueError(
            f"block_table must have a place of its own for every new token, got slot {slot} of page {page} for "
            f"tokens of sequences {sequence[place == twice].tolist()}"
        )


def _axes(call: AppendCall) -> tuple[int, int]:
    """The axes of heads and of tokens."""
    return (1, 2) if call.layout == "bhnd" else (2, 1)


def _capacity(call: AppendCall) -> int:
    """Keys the cache can hold per sequence."""
    length = call.k_cache.shape[_axes(call)[1]]
    return length if call.block_table is None else length * call.block_table.shape[1]


def _append(*arguments: Any) -> None:
    """What the op does."""
    *options, k_given, v_given, k_made, v_made, q_out, backend = arguments
    scales = k_given if k_made is None else k_made, v_given if v_made is None else v_made
    call = AppendCall._make((*options, *scales, False))
    _refuse(call, backend)
    if (q_out is None) != (call.q is None) or (q_out is not None and call.q is not None and (
        q_out.shape != call.q.shape or q_out.dtype != call.q.dtype or q_out.device != call.q.device
        or q_out.stride(-1) != 1
    )):  # fmt: skip
        raise ValueError("q_out must be like q, or None as well")
    _run(call, q_out, backend)


def _traced(call: AppendCall, backend: str) -> Tensor | None:
    """The call as a tracer sees it: one op that writes, and checks when it runs."""
    if call.check:
        raise ValueError("check must be False where the call is traced: it reads lengths on the host")
    q = call.q
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (*call[:4], q)):
        raise ValueError(
            "k_new, v_new, the cache and q must not require a gradient, there is no backward; use torch.no_grad()"
        )
    q_out = None if q is None else q.new_empty(q.shape)
    kv_format = str(call.kv_format) if isinstance(call.kv_format, KVFormat) else call.kv_format
    scales = [place_scale(x, call.k_new.device) for x in (call.k_scale, call.v_scale)]
    given, made = ([x if _is_made(x) is want else None for x in scales] for want in (False, True))
    torch.ops.flash_decoding.append(
        *call[: call._fields.index("kv_format")], kv_format, *given, *made, q_out, backend
    )  # fmt: skip
    return q_out


# The fields of AppendCall up to check, then scales that are written in place of given ones, the output, the backend.
register_op(
    "append(Tensor k_new, Tensor v_new, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor kv_lens, str layout, "
    "Tensor? block_table, Tensor? new_lens, Tensor? rotary_cos, Tensor? rotary_sin, bool rotary_interleaved, "
    "Tensor? q, bool q_advances, str? kv_format, Tensor? k_scale, Tensor? v_scale, Tensor(c!)? k_scales_made, "
    "Tensor(d!)? v_scales_made, Tensor(e!)? q_out, str backend) -> ()",
    _append,
)
