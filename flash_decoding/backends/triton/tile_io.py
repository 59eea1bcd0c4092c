"""Where a tile lives: addresses, split boundaries, page look-up, the loads of K and V, and their product."""

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
def clamped_length(lens_ptr, b, most):
    """Entry b of an array of lengths, kept inside [0, most] whatever it holds, int32; None means most."""
    length = most
    if lens_ptr is not None:
        length = tl.minimum(tl.maximum(tl.load(lens_ptr + b), 0), most).to(tl.int32)
    return length


@triton.jit
def visible_range(lens, b, Lq: tl.constexpr):
    """Keys [first, last) that some query of sequence b may see, its length and its query tokens; int32."""
    kv_lens_ptr, kv_start_ptr, q_lens_ptr, kv_len, window = lens
    kv_len = clamped_length(kv_lens_ptr, b, kv_len)
    q_len = clamped_length(q_lens_ptr, b, Lq)
    first, last = 0, kv_len
    if kv_start_ptr is not None:
        first = clamped_length(kv_start_ptr, b, kv_len)
    if window is not None:
        first = tl.maximum(first, kv_len - q_len - window)
    if q_lens_ptr is not None:
        last = tl.where(q_len > 0, last, first)  # nobody asks, so nothing is looked up
    return first, last, kv_len, q_len


@triton.jit
def split_range(first, last, split, num_splits, split_size, BLOCK_N: tl.constexpr):
    """Keys [start, stop) of a split of [first, last): split_size keys, or an even share of its tiles."""
    if split_size is None:
        tiles = tl.cdiv(tl.maximum(last - first, 0), BLOCK_N)
        each, more = tiles // num_splits, tiles % num_splits  # the first `more` splits have one tile more
        start = first + (split * each + tl.minimum(split, more)) * BLOCK_N
        stop = start + tl.where(split < more, each + 1, each) * BLOCK_N
    else:
        start = tl.minimum(first + split.to(tl.int64) * split_size, last).to(tl.int32)
        stop = start + tl.minimum(split_size, last - start)
    return tl.minimum(start, last), tl.minimum(stop, last)


@triton.jit
def locate_rows(table_ptr, n, first, in_n, PAGE_SIZE: tl.constexpr, ONE_PAGE: tl.constexpr):
    """Where the keys n from `first` on are: (page, start, pages, slot), for point_to_rows().

    Key i of the tile is in row start + slot[i] of page, or of pages[0][i] where that is there; a dense cache is one
    page. What all keys share is kept apart, since it is worked out once a tile. Never looks up a key not in_n.
    """
    page, start, pages = 0, 0, ()
    if table_ptr is None:
        start, slot = tl.zeros([], tl.int64) + first, n - first
    elif ONE_PAGE:
        page = tl.load(table_ptr + first // PAGE_SIZE).to(tl.int64)
        start, slot = tl.zeros([], tl.int64) + first % PAGE_SIZE, n - first
    else:
        if in_n is None:
            pages = (tl.load(table_ptr + n // PAGE_SIZE).to(tl.int64),)
        else:
            pages = (tl.load(table_ptr + n // PAGE_SIZE, mask=in_n, other=0).to(tl.int64),)
        slot = n % PAGE_SIZE
    return page, start, pages, slot


@triton.jit
def point_to_rows(ptr, stride, where, STEP: tl.constexpr):
    """(pointer, offsets [N]): where the keys' rows of an array are.

    With a STEP from row to row that the compiler knows most of an address is known; 0: what stride says.
    """
    page, start, pages, slot = where
    if STEP == 0:
        ptr += page * stride[0] + start * stride[2]
        rows = slot.to(tl.int64) * stride[2]
    else:
        ptr += page * stride[0] + start * STEP
        rows = slot * STEP
    if len(pages) > 0:
        rows += pages[0] * stride[0]
    return ptr, rows


@triton.jit
def by_row(x, TURNED: tl.constexpr):
    """x [M] beside a tile [M, ...], or a TURNED one, [..., M]."""
    return x[None, :] if TURNED else x[:, None]


@triton.jit
def by_column(x, TURNED: tl.constexpr):
    """x [N] beside a tile [..., N], or a TURNED one, [N, ...]."""
    return x[:, None] if TURNED else x[None, :]


@triton.jit
def load_rows(
    ptr, stride, where, in_n,
    STEP: tl.constexpr, START: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """Columns from START on of a head's rows of K or V; zero past WIDTH and where not in_n (None: all).

    A tile is [N, BLOCK], or [BLOCK, N] if TURNED: as the first factor of a product the compiler takes a tile straight
    from the pipeline only if it was loaded that way round.
    """
    d = START + tl.arange(0, BLOCK)
    ptr, rows = point_to_rows(ptr, stride, where, STEP)
    at = ptr + (by_row(rows, TURNED) + by_column(d, TURNED))
    if in_n is None:
        if START + BLOCK <= WIDTH:
            x = tl.load(at)
        else:
            x = tl.load(at, mask=by_column(d < WIDTH, TURNED), other=0.0)
    else:
        x = tl.load(at, mask=by_row(in_n, TURNED) & by_column(d < WIDTH, TURNED), other=0.0)
    return x


@triton.jit
def prefetch_rows(ptr, first, last, WIDTH: tl.constexpr):
    """Ask for rows [first, last) of a head's keys or values, which lie end to end, to be put into the L2 cache."""
    BYTES: tl.constexpr = WIDTH * ptr.dtype.element_ty.primitive_bitwidth // 8
    tl.static_assert(BYTES % 16 == 0)  # so must address and size be; one thread asks
    at = (ptr + first.to(tl.int64) * WIDTH).to(tl.int64) // 16 * 16
    tl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0; setp.gt.and.s32 p, $2, 0, p;"
        " @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r", [at, (last - first) * BYTES], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


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


@triton.jit
def add_product(c, a, b):
    """c + a b, likewise."""
    if a.dtype == tl.float32 or INTERPRETED:
        c += matmul(a, b)
    else:
        c = tl.dot(a, b, c)
    return c
