"""The exchange kernel: ranks that reach each other's memory push their states there, and merge what arrives.

    all ranks' (acc, m, l) of a query row  ->  out and lse of that row, as the reduce kernel merges splits

It takes the place of a collective and of the merge behind it. A word of an inbox is 64 bits: a number of the state
below, and above it the number of the call. So a word says by itself that it has arrived, no order among words matters,
and one way over the link is all the waiting (the idea of NCCL's protocol LL). Calls write the two halves of the inboxes
in turn: who pushes call n + 2 has received call n + 1 of every rank, which each pushed behind its own merge of call n.
Behind each row goes a word that says which call it belongs to, lest ranks that make different calls merge them.

Grid: no more programs than surely run at the same time. Each pushes all of its rows before it waits for any, so ranks
never wait for each other in a circle.
"""

import triton
import triton.language as tl
from torch import Tensor

from flash_decoding.backends.triton.launch import launch, may_overlap, variant
from flash_decoding.backends.triton.online_softmax import finish_softmax, fold_partials
from flash_decoding.backends.triton.tile_io import INTERPRETED, address
from flash_decoding.split_plan import next_power_of_2
from flash_decoding.workspace import INBOX_PROGRAMS, INBOX_ROW_WORDS, Inbox, Partial

_ROW_WORDS = tl.constexpr(INBOX_ROW_WORDS)
# Warps per processor that every supported GPU holds at once.
_PROCESSOR_WARPS = 8
# Words that a warp waits for at a time.
_WARP_WORDS = 256


@triton.jit(
    do_not_specialize=["half", "rank", "rows", "heads", "Hq", "timeout_ms", "signature"],
    do_not_specialize_on_alignment=["m_ptr", "l_ptr", "addresses_ptr", "counters_ptr", "lse_ptr", "sinks_ptr"],
)  # fmt: skip
def _exchange_kernel(
    acc_ptr, m_ptr, l_ptr,  # this rank's state, [B, Hq, Lq(, Dv)] float32
    addresses_ptr, half, counters_ptr,  # as Inbox has them; a half holds int64 [ranks, rows, Dv + 3]
    out_ptr, out_stride,  # [B, heads, Lq, Dv]; strides without the last, contiguous axis
    lse_ptr,  # [B, heads, Lq] float32; None: not wanted
    sinks_ptr,  # [Hq] float32; None: off
    rank, rows, heads, Hq, timeout_ms, signature,
    Lq: tl.constexpr, RANKS: tl.constexpr,
    SCATTER: tl.constexpr,  # whether rank r keeps heads from r * heads on, and not every rank all
    DV: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_DV: tl.constexpr,
    COUNTERS: tl.constexpr, COUNTERS_EACH: tl.constexpr,
    EARLY: tl.constexpr,  # whether it starts while the kernel before runs, for whose end it waits then
):  # fmt: skip
    """One program: every so many query rows."""
    dv, r = tl.arange(0, BLOCK_DV), tl.arange(0, BLOCK_R)
    in_dv, in_r = dv < DV, r < RANKS
    WIDTH: tl.constexpr = DV + _ROW_WORDS
    pid, programs = tl.program_id(0), tl.num_programs(0)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    call = tl.load(counters_ptr + pid) + 1
    at = (call & 1).to(tl.int64) * half

    for row in range(pid, rows, programs):
        b, h, t = row // (heads * Lq), row // Lq % heads, row % Lq
        for to in tl.static_range(RANKS):
            if SCATTER or to == 0:
                h_q = h + to * heads if SCATTER else h
                state = (b * Hq + h_q) * Lq + t
                acc = tl.load(acc_ptr + state.to(tl.int64) * DV + dv, mask=in_dv)
                m, l = tl.load(m_ptr + state), tl.load(l_ptr + state)
            box = _inbox(addresses_ptr, to) + at + (rank.to(tl.int64) * rows + row) * WIDTH
            tl.store(box + dv, _mark(acc, call), mask=in_dv)
            tl.store(box + DV, _mark(m, call))
            tl.store(box + DV + 1, _mark(l, call))
            tl.store(box + DV + 2, _tag(call) | signature)

    for row in range(pid, rows, programs):
        b, h, t = row // (heads * Lq), row // Lq % heads, row % Lq
        boxes = _inbox(addresses_ptr, rank) + at + (r.to(tl.int64) * rows + row) * WIDTH
        m, l, acc = _receive(boxes, dv, in_r, in_dv, call, timeout_ms, signature, DV)
        m, l, acc = fold_partials(float("-inf"), 0.0, tl.zeros([BLOCK_DV], tl.float32), m, l, acc, 1.0)
        sink = None
        if sinks_ptr is not None:
            sink = tl.load(sinks_ptr + (rank * heads + h if SCATTER else h))
        norm, lse = finish_softmax(m, l, sink)
        to = address(out_ptr, out_stride, (b.to(tl.int64), h, t, dv))
        tl.store(to, (acc * norm).to(out_ptr.dtype.element_ty), mask=in_dv)
        if lse_ptr is not None:
            tl.store(lse_ptr + row, lse)

    counter = pid + programs * tl.arange(0, COUNTERS_EACH)
    tl.store(counters_ptr + counter, tl.zeros([COUNTERS_EACH], tl.int32) + call, mask=counter < COUNTERS)


@triton.jit
def _inbox(addresses_ptr, rank):
    return tl.load(addresses_ptr + rank).to(tl.pointer_type(tl.int64))


@triton.jit
def _mark(x, call):
    """A float32 under the number of its call, as one word, which is written and read whole."""
    return _tag(call) | (x.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def _tag(call):
    return call.to(tl.int64) << 32


@triton.jit
def _receive(boxes, dv, in_r, in_dv, call, timeout_ms, signature, DV: tl.constexpr):
    """m, l [ranks] and acc [ranks, Dv] of a row, once all of it is there; ranks that don't exist have no keys."""
    at, there = boxes[:, None] + dv[None, :], in_r[:, None] & in_dv[None, :]
    m = tl.zeros_like(boxes.to(tl.int64))
    l, theirs, acc = m, m, tl.zeros_like(at.to(tl.int64))
    missing = 1
    if not INTERPRETED:
        start = tl.extra.cuda.globaltimer()
    while missing > 0:
        # volatile: from memory, and not from a cache that does not see what another GPU writes
        acc = tl.load(at, mask=there, other=0, volatile=True)
        m = tl.load(boxes + DV, mask=in_r, other=0, volatile=True)
        l = tl.load(boxes + DV + 1, mask=in_r, other=0, volatile=True)
        theirs = tl.load(boxes + DV + 2, mask=in_r, other=0, volatile=True)
        late = in_r & (_is_late(m, call) | _is_late(l, call) | _is_late(theirs, call))
        missing = tl.max(tl.max((there & _is_late(acc, call)).to(tl.int32), 1) | late.to(tl.int32), 0)
        if not INTERPRETED:
            if missing > 0:
                if tl.extra.cuda.globaltimer() - start > timeout_ms.to(tl.int64) * 1000000:
                    _trap()  # a rank is lost
    strange = tl.max((in_r & (theirs.to(tl.int32) != signature)).to(tl.int32), 0)
    m, l = tl.where(in_r, _payload(m), float("-inf")), _payload(l)
    if INTERPRETED:  # where nothing can be trapped
        m = tl.where(strange > 0, float("nan"), m)
    else:
        if strange > 0:
            _trap()  # the ranks made different calls
    # A state without keys may have an acc that nobody wrote.
    return m, l, tl.where((l > 0.0)[:, None], _payload(acc), 0.0)


@triton.jit
def _is_late(word, call):
    return (word >> 32).to(tl.int32) != call


@triton.jit
def _trap():
    """CUDA reports an error, now and for everything that follows."""
    tl.inline_asm_elementwise("trap; mov.u32 $0, 0;", "=r", [], tl.int32, is_pure=False, pack=1)


@triton.jit
def _payload(word):
    return word.to(tl.int32).to(tl.float32, bitcast=True)


def block_of_words(ranks: int, width: int) -> tuple[int, int, int]:
    """Ranks and columns that a program waits for at a time, all of them, and warps."""
    block_r, block_dv = next_power_of_2(ranks), next_power_of_2(width)
    return block_r, block_dv, min(max(block_r * block_dv // _WARP_WORDS, 1), 8)


def launch_exchange(
    own: Partial, inbox: Inbox, out: Tensor, lse: Tensor | None, sinks: Tensor | None, scatter: bool, signature: int,
    processors: int,
) -> None:  # fmt: skip
    """Merge the states of all ranks, this one's [B, Hq, Lq(, Dv)], into out [B, heads, Lq, Dv] and lse.

    Args:
        scatter: whether a rank keeps its Hq / ranks heads alone.
        signature: a number that calls have in common when all ranks make them alike, from 0 to 2^31.
        processors: of the device.
    """
    batch, heads_q, q_len, width = own.acc.shape
    heads, ranks = out.shape[1], inbox.addresses.shape[0]
    rows, stride = batch * heads * q_len, out.stride()[:3]
    block_r, block_dv, num_warps = block_of_words(ranks, width)
    programs = min(rows, INBOX_PROGRAMS, processors * _PROCESSOR_WARPS // num_warps)
    counters_each = next_power_of_2(-(-INBOX_PROGRAMS // programs))
    early = may_overlap(out.device.index)
    launch(
        _exchange_kernel,
        (variant((own.acc, out), (stride,)), out.dtype, lse is None, sinks is None),
        (programs, 1),
        (
            *own, inbox.addresses, inbox.half, inbox.counters, out, stride, lse, sinks, inbox.rank, rows, heads,
            heads_q, inbox.timeout_ms, signature,
        ),
        (
            q_len, ranks, scatter, width, block_r, block_dv, INBOX_PROGRAMS, counters_each, early,
        ),
        (num_warps, 1),
        early=early,
    )  # fmt: skip
