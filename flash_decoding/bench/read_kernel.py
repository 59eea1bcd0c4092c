"""A kernel that reads two arrays and does nothing else: the floor of every kernel that must read K and V.

Grid (programs,). A program holds a block of running sums and walks over every num_programs-th block of both arrays;
each word is read once, one word per program is written.
"""

import triton
import triton.language as tl


@triton.jit
def _read_kernel(
    k_ptr, v_ptr,  # [words] int32
    sum_ptr,  # [programs] int32
    words,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program: its share of the blocks of k and v."""
    first = tl.program_id(0).to(tl.int64) * BLOCK

    total = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(first, words, tl.num_programs(0) * BLOCK, num_stages=STAGES):
        n = start + tl.arange(0, BLOCK)
        total += tl.load(k_ptr + n, mask=n < words, other=0)
        total += tl.load(v_ptr + n, mask=n < words, other=0)

    tl.store(sum_ptr + tl.program_id(0), tl.sum(total))


def launch_read(k, v, total, block, num_warps, num_stages):
    """Read k and v, flat int32 arrays of one length, with as many programs as total has words."""
    _read_kernel[(total.numel(),)](k, v, total, k.numel(), BLOCK=block, STAGES=num_stages, num_warps=num_warps)
