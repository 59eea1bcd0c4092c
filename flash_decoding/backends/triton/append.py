"""The append kernel: new keys and values into the cache, keys and queries rotated and quantised on the way.

    k_cache[kv_lens[b] + i] = R k_new[i]    v_cache[kv_lens[b] + i] = v_new[i]    q_out[t] = R q[t]

R turns pairs of the first ROTARY_DIM entries by the angles of the row's position; without tables it is left out. A
quantised cache gets codes(R k_new[i] / scale), or codes(R k_new[i] / scale + zero) for int4, of the rotated row rounded
to its dtype, by the rules of quantization.py. Scales of single rows and groups are made here from the row itself.
Grid: (sequence and tile of rows, flattened; 0: keys, 1: values, 2: queries). The rows of a sequence are its tokens
times its heads; a program copies BLOCK_R of them. A row whose position is not in the cache, or whose page is not in the
pool, is not written.
"""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from flash_decoding.backends.triton.launch import launch, variant
from flash_decoding.backends.triton.tile_io import locate_rows
from flash_decoding.quantization import LARGEST_CODE

if TYPE_CHECKING:
    from torch import Tensor

    from flash_decoding.append import Append, Codes
    from flash_decoding.quantization import CodeFormat

# Entries per program: 16 bytes a thread in 16 bits.
_ENTRIES = 1024
_WARPS = 4


@triton.jit(
    do_not_specialize=[
        "block_table_step", "cos_step", "sin_step", "L", "Lq", "Hkv", "Hq", "capacity", "pages", "positions", "q_step",
        "tiles",
    ],
    do_not_specialize_on_alignment=["block_table_ptr", "kv_lens_ptr", "new_lens_ptr", "cos_ptr", "sin_ptr"],
)  # fmt: skip
def _append_kernel(
    k_new_ptr, k_new_stride,  # [B, Hkv, L, D]; strides without the last, contiguous axis, here and below
    v_new_ptr, v_new_stride,  # [B, Hkv, L, Dv]
    k_ptr, k_stride,  # [B, Hkv, N, D], or pages [pages, Hkv, PAGE_SIZE, D]
    v_ptr, v_stride,  # likewise, Dv wide; both as bytes where they hold codes
    k_scale_ptr, k_scale_stride,  # [B, Hkv, N, parts], or pages, with all four strides; None: 1
    v_scale_ptr, v_scale_stride,  # likewise
    block_table_ptr, block_table_step,  # [B, max_pages]; None: a dense cache
    kv_lens_ptr, new_lens_ptr,  # [B]; new_lens None: L
    cos_ptr, cos_step, sin_ptr, sin_step,  # [positions, ROTARY_DIM / 2]; None: no rotation
    q_ptr, q_stride, q_out_ptr, q_out_stride,  # [B, Hq, Lq, D]; None: no queries
    L, Lq, Hkv, Hq, capacity, pages, positions, q_step, tiles,
    D: tl.constexpr, DV: tl.constexpr, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr, PAGE_SIZE: tl.constexpr,
    K_FORM: tl.constexpr, V_FORM: tl.constexpr,  # CodeFormat; None: as k_new
    K_PART: tl.constexpr, V_PART: tl.constexpr,  # elements of a row that get a scale; None: scales are given
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_R rows of one sequence, of its keys, values or queries."""
    pid, part = tl.program_id(0), tl.program_id(1)
    b, row = (pid // tiles).to(tl.int64), (pid % tiles).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    # A length beyond the cache is as good as that of a full one, and keeps the sums below in range.
    length = tl.minimum(tl.load(kv_lens_ptr + b).to(tl.int64), capacity)

    if part < 2:
        h, i = row % Hkv, row // Hkv
        position = tl.where(length < 0, capacity, length) + i  # a negative length is as good as a full cache
        in_row = (i < L) & (position < capacity)
        if new_lens_ptr is not None:
            in_row &= i < tl.load(new_lens_ptr + b)
        page, slot = b, position
        if block_table_ptr is not None:
            table = block_table_ptr + b * block_table_step
            _, _, by_key, slot = locate_rows(table, position, 0, in_row, PAGE_SIZE, False)
            page = by_key[0]
            in_row &= (page >= 0) & (page < pages)
        if part == 0:
            d = _columns(D, K_FORM, BLOCK_D)
            k_new_at = k_new_ptr + b * k_new_stride[0] + h * k_new_stride[1] + i * k_new_stride[2]
            k = _load_rows(
                k_new_at, d, in_row, position, cos_ptr, cos_step, sin_ptr, sin_step, D, ROTARY_DIM, INTERLEAVED
            )  # fmt: skip
            _store_rows(
                k_ptr, k_stride, k_scale_ptr, k_scale_stride, page, h, slot, k, d, in_row, D, K_FORM, K_PART
            )  # fmt: skip
        else:
            d = _columns(DV, V_FORM, BLOCK_D)
            v_new_at = v_new_ptr + b * v_new_stride[0] + h * v_new_stride[1] + i * v_new_stride[2]
            v = _load_rows(v_new_at, d, in_row, position, None, 0, None, 0, DV, 0, False)
            _store_rows(
                v_ptr, v_stride, v_scale_ptr, v_scale_stride, page, h, slot, v, d, in_row, DV, V_FORM, V_PART
            )  # fmt: skip
    else:
        if q_ptr is not None:
            h, t = row % Hq, row // Hq
            d, in_row = _columns(D, None, BLOCK_D), t < Lq
            position = tl.minimum(tl.maximum(length, 0) + t * q_step, positions - 1)
            q_at = q_ptr + b * q_stride[0] + h * q_stride[1] + t * q_stride[2]
            q = _load_rows(q_at, d, in_row, position, cos_ptr, cos_step, sin_ptr, sin_step, D, ROTARY_DIM, INTERLEAVED)
            _store_rows(q_out_ptr, q_out_stride, None, None, b, h, t, q, d, in_row, D, None, None)


@triton.constexpr_function
def _has_pairs(FORM):
    """Whether two codes share a byte."""
    return FORM is not None and FORM.codes == "int4"


@triton.constexpr_function
def _largest_code(FORM):
    return LARGEST_CODE[FORM.codes]


@triton.jit
def _columns(WIDTH: tl.constexpr, FORM: tl.constexpr, BLOCK: tl.constexpr):
    """The columns that a row's tile holds, [BLOCK]: in order, and for int4 a quarter of the row in a quarter of it."""
    d = tl.arange(0, BLOCK)
    if _has_pairs(FORM):
        QUARTER: tl.constexpr = BLOCK // 4
        d = tl.where(d % QUARTER < WIDTH // 4, d // QUARTER * (WIDTH // 4) + d % QUARTER, WIDTH)
    return d


@triton.jit
def _load_rows(
    at, d, in_row, position, cos_ptr, cos_step, sin_ptr, sin_step,
    WIDTH: tl.constexpr, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """The columns d of the rows at `at`, rotated by their positions if there are tables; 0 where there are none."""
    x = tl.load(at[:, None] + d[None, :], mask=in_row[:, None] & (d < WIDTH)[None, :], other=0.0)  # [R, BLOCK]
    if cos_ptr is not None:
        HALF: tl.constexpr = ROTARY_DIM // 2
        if INTERLEAVED:
            pair, partner, is_first = d // 2, d ^ 1, d % 2 == 0
        else:
            pair, partner, is_first = d % HALF, tl.where(d < HALF, d + HALF, d - HALF), d < HALF
        turned = in_row[:, None] & (d < ROTARY_DIM)[None, :]
        y = tl.load(at[:, None] + partner[None, :], mask=turned, other=0.0).to(tl.float32)
        cos = tl.load(cos_ptr + position[:, None] * cos_step + pair[None, :], mask=turned, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + position[:, None] * sin_step + pair[None, :], mask=turned, other=0.0).to(tl.float32)
        z = x.to(tl.float32) * cos + y * tl.where(is_first[None, :], -sin, sin)
        x = tl.where((d < ROTARY_DIM)[None, :], z.to(x.dtype), x)
    return x


@triton.jit
def _store_rows(
    ptr, stride, scale_ptr, scale_stride, page, h, slot, x, d, in_row,
    WIDTH: tl.constexpr, FORM: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """The columns d of rows x [R, BLOCK] to their places, as codes if there are any, with the scales made of them."""
    at = ptr + page * stride[0] + h * stride[1] + slot * stride[2]
    in_rd = in_row[:, None] & (d < WIDTH)[None, :]
    if FORM is None:
        tl.store(at[:, None] + d[None, :], x, mask=in_rd)
    else:
        x = x.to(tl.float32)
        y, zero = tl.where(x == x, x, 0.0), 8.0  # NaN is stored as 0
        if scale_ptr is not None:
            scale_at = scale_ptr + page * scale_stride[0] + h * scale_stride[1] + slot * scale_stride[2]
            if PART is None:
                scale = tl.load(scale_at[:, None] + d[None, :] * scale_stride[3], mask=in_rd, other=1.0)
            else:
                scale, zero = _make_scales(scale_at, scale_stride[3], x, d, in_row, WIDTH, FORM, PART)
            y = tl.div_rn(y, scale)
        if _has_pairs(FORM):
            codes = _round(tl.minimum(tl.maximum(y + zero, 0.0), 15.0))
            d, codes = _pack(codes, x.shape[0], x.shape[1] // 4)
            in_rd = in_row[:, None] & (d < WIDTH // 2)[None, :]
        else:
            LARGEST: tl.constexpr = _largest_code(FORM)
            y = tl.minimum(tl.maximum(y, -LARGEST), LARGEST)
            if FORM.codes == "int8":
                codes = _round(y)
            elif FORM.codes == "fp8_e4m3":
                codes = _round_fp8(y, 3, 7)
            else:
                codes = _round_fp8(y, 2, 15)
        tl.store(at[:, None] + d[None, :], (codes & 255).to(tl.uint8), mask=in_rd)


@triton.jit
def _make_scales(
    at, step, x, d, in_row, WIDTH: tl.constexpr, FORM: tl.constexpr, PART: tl.constexpr
):  # fmt: skip
    """(scale, zero) that just cover each part of the rows x [R, BLOCK], stored at `at` [R] and spread to [R, BLOCK]."""
    x = tl.where(tl.abs(x) < float("inf"), x, 0.0)  # finite values alone count
    scale, zero = tl.full(x.shape, 1.0, tl.float32), tl.full(x.shape, 8.0, tl.float32)
    for part in range(WIDTH // PART):
        in_part = (d // PART == part)[None, :]
        y = tl.where(in_part, x, 0.0)
        high, low = tl.max(y, axis=1), tl.min(y, axis=1)  # [R]; 0 is between them
        if FORM.zero_point:
            s = tl.div_rn(high, 15.0) - tl.div_rn(low, 15.0)
        else:
            s = tl.div_rn(tl.maximum(high, -low), _largest_code(FORM))
        # Neither 0 nor infinite in the dtype of the scales, float16 for groups.
        fits = tl.minimum(tl.maximum(s, 2.0**-24), 65504.0) if FORM.scale == "group" else tl.maximum(s, 2.0**-126)
        stored = tl.where(s > 0.0, fits, 1.0).to(at.dtype.element_ty)
        tl.store(at + part * step, stored, mask=in_row)
        s = stored.to(tl.float32)
        scale = tl.where(in_part, s[:, None], scale)
        if FORM.zero_point:
            z = tl.minimum(tl.div_rn(-low, s), 15.0).to(tl.float16)
            tl.store(at + part * step + 1, z, mask=in_row)
            zero = tl.where(in_part, z.to(tl.float32)[:, None], zero)
    return scale, zero


@triton.jit
def _round(x):
    """The nearest whole number, ties to even, int32; for magnitudes below 2**22."""
    # Added to 1.5 * 2**23, a number is rounded, and lies in the lowest bits.
    return (x + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000


@triton.jit
def _round_fp8(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """The bits of the nearest number with so many bits of mantissa, ties to even, int32; for |x| up to the largest one.

    By integers, because GPUs before compute capability 8.9 have no instruction for it.
    """
    SHIFT: tl.constexpr = 23 - MANTISSA
    REBIAS: tl.constexpr = 127 - BIAS
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    odd = (magnitude >> SHIFT) & 1
    normal = (magnitude - (REBIAS << 23) + (1 << (SHIFT - 1)) - 1 + odd) >> SHIFT
    # The last bit of a float32 of this size is the smallest number of the format: adding rounds to it.
    LARGE: tl.constexpr = (REBIAS + 1 + SHIFT) << 23
    tiny = (tl.abs(x) + 2.0 ** (REBIAS + 1 + SHIFT - 127)).to(tl.int32, bitcast=True) - LARGE
    return tl.where(magnitude < ((REBIAS + 1) << 23), tiny, normal) | ((bits >> 24) & 0x80)


@triton.jit
def _pack(codes, R: tl.constexpr, QUARTER: tl.constexpr):
    """The bytes of int4 codes [R, 4 * QUARTER], four quarters of a row, and their columns: [R, 2 * QUARTER]."""
    shifted = tl.reshape(codes, [R, 4, QUARTER]) << (tl.arange(0, 4) * 4)[None, :, None]
    words = tl.sum(shifted, axis=1)  # [R, QUARTER], 16 bits
    return tl.arange(0, 2 * QUARTER), tl.interleave(words & 255, words >> 8)


def choose_rows(head_dim: int, value_dim: int) -> tuple[int, int]:
    """Rows per program, and the width that they are padded to."""
    block_d = triton.next_power_of_2(max(head_dim, value_dim))
    return max(1, _ENTRIES // block_d), block_d


def append(call: "Append") -> None:
    """Write the new keys and values of a checked call, and its rotated queries."""
    device = call.k_new.device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return append(call)
    a = call
    batch, heads_kv, new, head_dim = a.k_new.shape
    value_dim = a.v_new.shape[3]
    heads_q, q_len = (0, 0) if a.q is None else a.q.shape[1:3]
    block_r, block_d = choose_rows(head_dim, value_dim)
    tiles = -(-max(heads_kv * new, heads_q * q_len) // block_r)

    tensors = [x for x in (a.k_new, a.v_new, a.k_cache, a.v_cache, a.q, a.q_out) if x is not None]
    strides = [x.stride()[:3] for x in tensors]
    q_arguments = (None, (0, 0, 0), None, (0, 0, 0)) if a.q is None else (a.q, strides[4], a.q_out, strides[5])
    (k_cache, k_scale, *k_codes), (v_cache, v_scale, *v_codes) = (
        _describe(*side) for side in ((a.k_cache, a.k_codes), (a.v_cache, a.v_codes))
    )
    for scale, stride in (k_scale, v_scale):
        if scale is not None:
            tensors.append(scale)
            strides.append(stride)
    cos, sin, table = a.rotary_cos, a.rotary_sin, a.block_table
    key = (
        variant(tensors, strides), a.k_new.dtype,
        tuple([x if x is None else x.dtype for x in (table, a.kv_lens, a.new_lens, cos, a.q, k_scale[0], v_scale[0])]),
        any(x is not None and max(x.stride()) >= 2**31 for x in (table, cos, sin)),
    )  # fmt: skip
    launch(
        _append_kernel,
        key,
        (batch * tiles, 2 if a.q is None else 3),
        (
            a.k_new, strides[0], a.v_new, strides[1], k_cache, strides[2], v_cache, strides[3], *k_scale, *v_scale,
            table, 0 if table is None else table.stride(0), a.kv_lens, a.new_lens,
            cos, 0 if cos is None else cos.stride(0), sin, 0 if sin is None else sin.stride(0), *q_arguments,
            new, q_len, heads_kv, heads_q, a.capacity, a.k_cache.shape[0], 0 if cos is None else cos.shape[0],
            a.q_step, tiles,
        ),
        (
            head_dim, value_dim, 0 if cos is None else 2 * cos.shape[1], a.rotary_interleaved, a.page_size,
            k_codes[0], v_codes[0], k_codes[1], v_codes[1], block_r, block_d,
        ),
        (_WARPS, 1),
    )  # fmt: skip


def _describe(
    cache: "Tensor", codes: "Codes | None"
) -> tuple["Tensor", tuple["Tensor | None", tuple[int, ...]], "CodeFormat | None", int | None]:
    """A side of the cache as the kernel has it, its scales with their strides, and what the compiler knows of them."""
    if codes is None:
        return cache, (None, (0, 0, 0, 0)), None, None
    scale = (None, (0, 0, 0, 0)) if codes.scale is None else (codes.scale, codes.scale.stride())
    return cache.view(torch.uint8), scale, codes.form, codes.part
