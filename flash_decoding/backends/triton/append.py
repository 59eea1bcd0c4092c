"""The append kernel: new keys and values into the cache, keys and queries rotated on the way.

    k_cache[kv_lens[b] + i] = R k_new[i]    v_cache[kv_lens[b] + i] = v_new[i]    q_out[t] = R q[t]

R turns pairs of the first ROTARY_DIM entries by the angles of the row's position; without tables it is left out.
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

if TYPE_CHECKING:
    from flash_decoding.append import Append

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
    v_ptr, v_stride,  # likewise, Dv wide
    block_table_ptr, block_table_step,  # [B, max_pages]; None: a dense cache
    kv_lens_ptr, new_lens_ptr,  # [B]; new_lens None: L
    cos_ptr, cos_step, sin_ptr, sin_step,  # [positions, ROTARY_DIM / 2]; None: no rotation
    q_ptr, q_stride, q_out_ptr, q_out_stride,  # [B, Hq, Lq, D]; None: no queries
    L, Lq, Hkv, Hq, capacity, pages, positions, q_step, tiles,
    D: tl.constexpr, DV: tl.constexpr, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr, PAGE_SIZE: tl.constexpr,
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
            page, slot = locate_rows(table, position, 0, in_row, PAGE_SIZE, False)
            in_row &= (page >= 0) & (page < pages)
        if part == 0:
            k_new_at = k_new_ptr + b * k_new_stride[0] + h * k_new_stride[1] + i * k_new_stride[2]
            k_at = k_ptr + page * k_stride[0] + h * k_stride[1] + slot * k_stride[2]
            _copy_rows(
                k_new_at, k_at, in_row, position, cos_ptr, cos_step, sin_ptr, sin_step,
                D, ROTARY_DIM, INTERLEAVED, BLOCK_D,
            )  # fmt: skip
        else:
            v_new_at = v_new_ptr + b * v_new_stride[0] + h * v_new_stride[1] + i * v_new_stride[2]
            v_at = v_ptr + page * v_stride[0] + h * v_stride[1] + slot * v_stride[2]
            _copy_rows(v_new_at, v_at, in_row, position, None, 0, None, 0, DV, 0, False, BLOCK_D)
    else:
        if q_ptr is not None:
            h, t = row % Hq, row // Hq
            position = tl.minimum(tl.maximum(length, 0) + t * q_step, positions - 1)
            q_at = q_ptr + b * q_stride[0] + h * q_stride[1] + t * q_stride[2]
            q_out_at = q_out_ptr + b * q_out_stride[0] + h * q_out_stride[1] + t * q_out_stride[2]
            _copy_rows(
                q_at, q_out_at, t < Lq, position, cos_ptr, cos_step, sin_ptr, sin_step,
                D, ROTARY_DIM, INTERLEAVED, BLOCK_D,
            )  # fmt: skip


@triton.jit
def _copy_rows(
    from_at, to_at, in_row, position, cos_ptr, cos_step, sin_ptr, sin_step,
    WIDTH: tl.constexpr, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy the rows at from_at [R] to to_at [R] where in_row, rotated by their positions if there are tables."""
    d = tl.arange(0, BLOCK)
    in_rd = in_row[:, None] & (d < WIDTH)[None, :]
    x = tl.load(from_at[:, None] + d[None, :], mask=in_rd, other=0.0)  # [R, BLOCK]
    if cos_ptr is not None:
        HALF: tl.constexpr = ROTARY_DIM // 2
        if INTERLEAVED:
            pair, partner, is_first = d // 2, d ^ 1, d % 2 == 0
        else:
            pair, partner, is_first = d % HALF, tl.where(d < HALF, d + HALF, d - HALF), d < HALF
        turned = in_row[:, None] & (d < ROTARY_DIM)[None, :]
        y = tl.load(from_at[:, None] + partner[None, :], mask=turned, other=0.0).to(tl.float32)
        cos = tl.load(cos_ptr + position[:, None] * cos_step + pair[None, :], mask=turned, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + position[:, None] * sin_step + pair[None, :], mask=turned, other=0.0).to(tl.float32)
        z = x.to(tl.float32) * cos + y * tl.where(is_first[None, :], -sin, sin)
        x = tl.where((d < ROTARY_DIM)[None, :], z.to(x.dtype), x)
    tl.store(to_at[:, None] + d[None, :], x, mask=in_rd)


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
    cos, sin, table = a.rotary_cos, a.rotary_sin, a.block_table
    key = (
        variant(tensors, strides), a.k_new.dtype,
        tuple([x if x is None else x.dtype for x in (table, a.kv_lens, a.new_lens, cos, a.q)]),
        any(x is not None and max(x.stride()) >= 2**31 for x in (table, cos, sin)),
    )  # fmt: skip
    launch(
        _append_kernel,
        key,
        (batch * tiles, 2 if a.q is None else 3),
        (
            a.k_new, strides[0], a.v_new, strides[1], a.k_cache, strides[2], a.v_cache, strides[3],
            table, 0 if table is None else table.stride(0), a.kv_lens, a.new_lens,
            cos, 0 if cos is None else cos.stride(0), sin, 0 if sin is None else sin.stride(0), *q_arguments,
            new, q_len, heads_kv, heads_q, a.capacity, a.k_cache.shape[0], 0 if cos is None else cos.shape[0],
            a.q_step, tiles,
        ),
        (
            head_dim, value_dim, 0 if cos is None else 2 * cos.shape[1], a.rotary_interleaved, a.page_size,
            block_r, block_d,
        ),
        (_WARPS, 1),
    )  # fmt: skip
