"""Where a tile lives: addresses, split boundaries, the loads of K and V, and their product."""

import os

import triton
import triton.language as tl

# Triton's interpreter multiplies the bit patterns of bfloat16 in tl.dot, so there 16-bit operands are widened.
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")


@triton.jit
def address(ptr, stride, index):
    """ptr + sum(index * stride), one index per dimension; the last one, contiguous, may lack its stride."""
    for axis in tl.static_range(len(stride)):
        ptr += index[axis] * stride[axis]
    if len(index) > len(stride):
        ptr += index[len(stride)]
    return ptr


@triton.jit
def visible_range(kv_lens_ptr, kv_start_ptr, b, kv_len):
    """Keys [first, last) of sequence b, kept inside the cache whatever the arrays hold; int32."""
    first, last = 0, kv_len
    if kv_lens_ptr is not None:
        last = tl.minimum(tl.maximum(tl.load(kv_lens_ptr + b), 0), kv_len).to(tl.int32)
    if kv_start_ptr is not None:
        first = tl.minimum(tl.maximum(tl.load(kv_start_ptr + b), 0), last).to(tl.int32)
    return first, last


@triton.jit
def split_range(first, last, split, num_splits, split_size, BLOCK_N: tl.constexpr):
    """Keys [start, stop) of a split of [first, last): split_size keys, or an even share of its tiles."""
    if split_size is None:
        tiles = tl.cdiv(last - first, BLOCK_N).to(tl.int64)
        start = first + (tiles * split // num_splits).to(tl.int32) * BLOCK_N
        stop = first + (tiles * (split + 1) // num_splits).to(tl.int32) * BLOCK_N
    else:
        start = tl.minimum(first + split.to(tl.int64) * split_size, last).to(tl.int32)
        stop = start + tl.minimum(split_size, last - start)
    return tl.minimum(start, last), tl.minimum(stop, last)


@triton.jit
def load_rows(ptr, row_stride, n, in_n, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Rows n of one head's K or V, [N, BLOCK]: zero past WIDTH, and where not in_n (None: every row is there)."""
    d = tl.arange(0, BLOCK)
    at = ptr + n.to(tl.int64)[:, None] * row_stride + d[None, :]
    if in_n is None:
        if WIDTH == BLOCK:
            x = tl.load(at)
        else:
            x = tl.load(at, mask=(d < WIDTH)[None, :], other=0.0)
    else:
        x = tl.load(at, mask=in_n[:, None] & (d < WIDTH)[None, :], other=0.0)
    return x


@triton.jit
def matmul(a, b):
    """a b in float32: on tensor cores for 16-bit operands; float32 is multiplied out exactly, never through TF32."""
    if a.dtype == tl.float32:
        c = tl.sum(a[:, :, None] * b[None, :, :], 1)
    elif INTERPRETED:
        c = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        c = tl.dot(a, b)
    return c
