"""cascade_decode(): a prefix that the whole batch shares is attended once, and merged with each sequence's suffix.

The prefix pass takes the query rows of all sequences as tokens of a few long "sequences", groups of at most 64, so that
its keys are read once per tile of rows and not once per sequence. The suffix pass is plain decoding from the page
behind the prefix. Both leave their splits unfinished, in float32, in one scratch array, and one reduce merges them all:
nothing is rounded in between, and a sink joins the denominator once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_decoding import backends
from flash_decoding.cost_model import CHUNK_EXTRA_US, LAUNCH_US, REACHABLE_SHARE
from flash_decoding.hardware import present_gpu
from flash_decoding.op import is_traced, make_traced_outputs, op_arguments, register_op, run
from flash_decoding.problem import MAX_Q_LEN, Call, Problem, make_problem, view_scale
from flash_decoding.quantization import KVFormat, find_scale_errors, find_value_errors, is_number, place_scale
from flash_decoding.split_plan import Plan, next_power_of_2
from flash_decoding.workspace import Partial, Workspace, take_partial

# What sharing launches besides: a second chunk kernel, and one that subtracts the prefix from the lengths.
_EXTRA_US = 2 * LAUNCH_US + CHUNK_EXTRA_US


class PrefixScales(NamedTuple):
    """Scales of the prefix that are not those of the whole cache."""

    k: Tensor | float | None
    v: Tensor | float | None


class Pass(NamedTuple):
    """One of the two passes: a problem, how it is cut, and where its splits go."""

    problem: Problem
    plan: Plan
    partial: Partial


def cascade_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    block_table: Tensor,
    kv_lens: Tensor,
    prefix_len: int,
    layout: str = "bhnd",
    q_lens: Tensor | None = None,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    tree_mask: Tensor | None = None,
    kv_format: KVFormat | str | None = None,
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
    shared_k_scale: Tensor | float | None = None,
    shared_v_scale: Tensor | float | None = None,
    shared: bool | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    workspace: Workspace | None = None,
    backend: str = "auto",
    check: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """flash_decode() over a paged cache whose sequences begin with the same pages, which are then read for all at once.

    The result is that of flash_decode() on the same arguments. The first prefix_len keys of every sequence must be
    those of the first row of block_table. They are attended for the query rows of the whole batch together; what comes
    behind them, for each sequence by itself; and the two are merged exactly.

    Args:
        q: [B, Hq, Lq, D], as for flash_decode().
        k: [pages, Hkv, page_size, D], likewise.
        v: [pages, Hkv, page_size, Dv], likewise.
        block_table: [B, max_pages] int32. The first prefix_len / page_size entries of its first row name the prefix,
            also where kv_lens[0] is 0.
        kv_lens: [B], keys per sequence, the prefix included: 0, or the prefix and the new tokens at least
            (prefix_len + q_lens). Never read on the host, so a captured CUDA graph is right for every later content.
        prefix_len: keys that all sequences share, a multiple of page_size and less than max_pages * page_size; 0 for
            none. It belongs to a captured graph.
        layout, q_lens, scale, causal, softcap, sinks, tree_mask: as for flash_decode().
        window, alibi_slopes: as for flash_decode(); where they are given, decoding is plain, because the prefix then
            weighs differently in sequences of different length.
        kv_format, k_scale, v_scale: as for flash_decode().
        shared_k_scale, shared_v_scale: scales of the prefix where they are others than k_scale and v_scale, in the same
            form; None means those. They make decoding shared.
        shared: None shares on a GPU where the reads that it spares take longer than its extra kernels, and never on a
            CPU, whose passes over the keys hold too few rows to spare any. True always does and raises where it cannot;
            False never does.
        return_lse: return (out, lse) instead of out.
        out, lse: where to write, as for flash_decode(); None allocates.
        workspace, backend: as for flash_decode(). Besides the workspace, sharing allocates B integers, and a copy of q
            where Lq > 1 in layout "bhnd", or where the B * Lq rows don't fill groups of 1, 2, 4, 8, 16, 24 ... 64.
        check: also read lengths and page ids on a GPU, and refuse what would be wrong; synchronises. On the CPU, where
            looking costs nothing, they always are.

    Returns:
        out: [B, Hq, Lq, Dv] ([B, Lq, Hq, Dv] for "bnhd"), dtype of q. lse, with return_lse: [B, Hq, Lq] float32,
        without the sink. A row that sees no key has out 0 and lse -inf.

    Raises:
        ValueError: shapes, devices, layouts or values that do not fit, or a backend that cannot run the call.
        TypeError: a wrong Python type or dtype. All are raised before any launch.

    Example:
        >>> cache = PagedKVCache(32, 16, 4, 64, dtype=torch.float32)
        >>> prompt = cache.allocate()
        >>> cache.append([prompt], torch.randn(1, 4, 32, 64), torch.randn(1, 4, 32, 64))
        >>> both = [cache.fork(prompt), cache.fork(prompt)]
        >>> cache.append(both, torch.randn(2, 4, 3, 64), torch.randn(2, 4, 3, 64))
        >>> q, pages = torch.randn(2, 8, 1, 64), dict(block_table=cache.block_table(both), kv_lens=cache.kv_lens(both))
        >>> out = cascade_decode(q, cache.k, cache.v, prefix_len=32, shared=True, **pages)
        >>> torch.allclose(out, flash_decode(q, cache.k, cache.v, **pages), atol=1e-5)
        True

    Source: J. Juravsky et al., "Hydragen: High-Throughput LLM Inference with Shared Prefixes", 2024.
    """
    call = Call(
        q=q, k=k, v=v, layout=layout, kv_lens=kv_lens, block_table=block_table, q_lens=q_lens, scale=scale,
        causal=causal, window=window, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks, tree_mask=tree_mask,
        kv_format=kv_format, k_scale=k_scale, v_scale=v_scale, out=out, lse=lse, check=check,
    )  # fmt: skip
    scales = PrefixScales(shared_k_scale, shared_v_scale)
    for name, x in (("block_table", block_table), ("kv_lens", kv_lens)):
        if x is None:
            raise TypeError(f"{name} must be a torch.Tensor, got NoneType")
    if is_traced(q, k, v):
        return _traced(call, scales, prefix_len, shared, return_lse, workspace, backend)
    problem = _checked(call, scales, prefix_len, shared, backend)
    if workspace is not None and not isinstance(workspace, Workspace):
        raise TypeError(f"workspace must be a Workspace or None, got {type(workspace).__name__}")
    if out is None:
        out = torch.empty((*q.shape[:3], problem.value_dim), dtype=q.dtype, device=q.device)
    if return_lse and lse is None:
        lse = torch.empty((problem.batch, problem.heads_q, problem.q_len), dtype=torch.float32, device=q.device)
    _run(problem, call, scales, prefix_len, shared, backend, workspace, out, lse)
    return (out, lse) if return_lse and lse is not None else out


def saves_time(plain_reads: int, shared_reads: int, prefix_bytes: int, gb_per_s: float) -> bool:
    """The rule: whether reading the prefix fewer times spares more than the extra kernels take.

    Every tile of query rows of a KV head reads the keys once. All reads count as reads from memory: the rule does not
    know what the L2 cache answers, on either side.

    Args:
        plain_reads: tiles of rows per KV head when each sequence is decoded by itself.
        shared_reads: likewise when the rows of all sequences are packed into tiles.
        prefix_bytes: of K and V of all KV heads.
        gb_per_s: reachable bandwidth.
    """
    return (plain_reads - shared_reads) * prefix_bytes > _EXTRA_US * gb_per_s * 1e3


def group_rows(rows: int) -> tuple[int, int]:
    """How many groups the batch's query rows make, and rows in each; the last rows may be padding.

    Few distinct lengths, because each compiles a kernel: 1, 2, 4 and multiples of 8.
    """
    groups = -(-rows // MAX_Q_LEN)
    length = -(-rows // groups)
    return groups, next_power_of_2(length) if length <= 8 else -(-length // 8) * 8


def _checked(call: Call, scales: PrefixScales, prefix_len: int, shared: bool | None, backend: str) -> Problem:
    """The plain problem; raises the first reason to refuse the call."""
    problem = make_problem(call)
    for error in _cascade_errors(problem, call, prefix_len, shared):
        raise error
    for error in _scale_errors(problem, call, scales, shared):
        raise error
    over_codes = None if problem.kv_format is None else call.q.dtype
    for error in backends.find_backend_errors(backend, call.q.device, over_codes):
        raise error
    for error in backends.find_problem_errors(backend, problem):
        raise error
    return problem


def _cascade_errors(problem: Problem, call: Call, prefix_len: int, shared: bool | None) -> Iterator[Exception]:
    """What flash_decode() does not refuse."""
    if shared is not None and not isinstance(shared, bool):
        yield TypeError(f"shared must be a bool or None, got {type(shared).__name__}")
    if isinstance(prefix_len, bool) or not isinstance(prefix_len, int):
        yield TypeError(f"prefix_len must be an int, got {type(prefix_len).__name__}")
        return
    page_size = problem.page_size or 1
    if prefix_len % page_size or not 0 <= prefix_len < max(problem.kv_len, 1):
        yield ValueError(
            f"prefix_len must be a multiple of the page size, {page_size}, from 0 to less than the table's "
            f"{problem.kv_len} keys, got {prefix_len}"
        )
        return
    if shared:
        for name in ("window", "alibi_slopes"):
            if getattr(call, name) is not None:
                yield ValueError(
                    f"{name} must be None with shared=True, got one: the prefix would weigh differently by sequence"
                )
        if prefix_len == 0:
            yield ValueError("prefix_len must be at least one page with shared=True, got 0")
    if problem.batch and prefix_len and (call.check or call.q.device.type == "cpu"):
        yield from _value_errors(problem, prefix_len)


def _scale_errors(
    problem: Problem, call: Call, scales: PrefixScales, shared: bool | None
) -> Iterator[Exception]:  # fmt: skip
    """Scales of the prefix that do not belong to its codes."""
    forms = (None, None) if problem.kv_format is None else (problem.kv_format.k, problem.kv_format.v)
    widths = problem.head_dim, problem.value_dim
    for side, form, codes, width, scale in zip("kv", forms, (call.k, call.v), widths, scales, strict=True):
        name = f"shared_{side}_scale"
        if scale is None:
            continue
        if not isinstance(scale, Tensor) and not is_number(scale):
            yield TypeError(f"{name} must be a torch.Tensor, a number or None, got {type(scale).__name__}")
            continue
        if form is None:
            yield ValueError(f"{name} must be None where {side} has the dtype of q, got one")
            continue
        if shared is False or call.window is not None or call.alibi_slopes is not None:
            yield ValueError(f"{name} must be None with shared=False, a window or alibi_slopes, got one")
        yield from find_scale_errors(name, form, scale, codes, width, call.layout)
        if not isinstance(scale, Tensor) or scale.device.type == "cpu" or call.check:
            yield from find_value_errors(name, scale)


def _value_errors(problem: Problem, prefix_len: int) -> Iterator[Exception]:
    """Sequences that do not begin with the prefix; reads lengths and the table."""
    p = problem
    table, kv_lens, page_size = _paged(p)
    tokens = torch.full_like(kv_lens, p.q_len) if p.q_lens is None else p.q_lens
    asks = (kv_lens > 0) & (tokens > 0)
    short = asks & (kv_lens - tokens < prefix_len)
    if bool(short.any()):
        b = int(short.nonzero()[0])
        yield ValueError(
            f"kv_lens must be 0 or hold the prefix and the new tokens, {prefix_len} + {int(tokens[b])}, "
            f"got {int(kv_lens[b])} at [{b}]"
        )
    pages = table[:, : prefix_len // page_size]
    if bool(((pages[0] < 0) | (pages[0] >= p.k.shape[0])).any()):
        yield ValueError(f"block_table must name the prefix in its first row, pages from 0 to {p.k.shape[0] - 1}")
    other = asks & (pages != pages[0]).any(dim=1)
    if bool(other.any()):
        yield ValueError(
            f"block_table must begin with the same {pages.shape[1]} pages in all rows, got others in row "
            f"{int(other.nonzero()[0])}"
        )


def _paged(problem: Problem) -> tuple[Tensor, Tensor, int]:
    """block_table, kv_lens and page_size, which a cascade's problem has."""
    table, kv_lens, page_size = problem.block_table, problem.kv_lens, problem.page_size
    assert table is not None, "an argument that must be given"
    assert kv_lens is not None, "likewise"
    assert page_size, "goes with the table"
    return table, kv_lens, page_size


def _run(
    problem: Problem, call: Call, scales: PrefixScales, prefix_len: int, shared: bool | None, backend: str,
    workspace: Workspace | None, out: Tensor, lse: Tensor | None,
) -> None:  # fmt: skip
    """Decode a checked call one way or the other. out has the layout of the call."""
    name = backends.resolve(backend, problem.q.device)
    if scales != (None, None):
        shared = True
    possible = prefix_len > 0 and problem.window is None and problem.alibi_slopes is None and out.numel() > 0
    if not possible or shared is False or not (shared or _is_faster(problem, prefix_len, name)):
        run(problem, call, backend, workspace, out, lse)
        return
    if call.layout == "bnhd":
        out = out.transpose(1, 2)
    module = backends.load(name)
    prefix = _with_scales(_gathered(_prefix_of(problem, prefix_len)), scales, call.layout)
    problems = prefix, _suffix_of(problem, prefix_len)
    plans = [module.plan(p, None, None) for p in problems]
    if name == "cpu":  # which leaves partials where there are two splits or more
        plans = [
            plan if plan.num_splits > 1 else module.plan(p, 2, None) for p, plan in zip(problems, plans, strict=True)
        ]
    partials = _take_partials(workspace, problems, plans)
    passes = [Pass(*parts) for parts in zip(problems, plans, partials, strict=True)]
    backends.load(f"{name}.cascade").decode_shared(*passes, out, lse)


def _prefix_of(problem: Problem, prefix_len: int) -> Problem:
    """The problem of the prefix, q as it was: groups of rows are sequences of as many tokens that see every key."""
    p = problem
    table, _, page_size = _paged(p)
    groups, length = group_rows(p.batch * p.q_len)
    pages = table[:1, : prefix_len // page_size].expand(groups, -1)
    return p._replace(
        kv_lens=None, block_table=pages, q_lens=None, tree_mask=None, sinks=None, causal=False, batch=groups,
        q_len=length, kv_len=prefix_len,
    )  # fmt: skip


def _with_scales(prefix: Problem, scales: PrefixScales, layout: str) -> Problem:
    """The prefix's problem with scales of its own."""
    k, v = (view_scale(place_scale(scale, prefix.q.device), layout) for scale in scales)
    return prefix._replace(k_scale=prefix.k_scale if k is None else k, v_scale=prefix.v_scale if v is None else v)


def _gathered(prefix: Problem) -> Problem:
    """The prefix's problem with q [groups, Hq, length, D]: a view where strides allow it and no row is padding."""
    q, groups, length = prefix.q, prefix.batch, prefix.q_len
    tokens = q.transpose(1, 2)  # [B, Lq, Hq, D]
    shape = (groups, length, *tokens.shape[2:])
    rows = tokens.shape[0] * tokens.shape[1]
    if groups * length == rows:
        grouped = tokens.reshape(shape)
    else:
        # Padding may hold anything: what a row gives depends on that row alone.
        grouped = torch.empty(shape, dtype=q.dtype, device=q.device)
        grouped.flatten(0, 1)[:rows].view(tokens.shape).copy_(tokens)
    return prefix._replace(q=grouped.transpose(1, 2))


def _suffix_of(problem: Problem, prefix_len: int) -> Problem:
    """The problem of what comes behind the prefix. Sequences that hold nothing get lengths of 0 or less."""
    p = problem
    table, kv_lens, page_size = _paged(p)
    lens = kv_lens - prefix_len
    if lens.device.type == "cpu":
        lens.clamp_(min=0)  # kernels on a GPU do that
    return p._replace(kv_lens=lens, block_table=table[:, prefix_len // page_size :], kv_len=p.kv_len - prefix_len)


def _take_partials(
    workspace: Workspace | None, problems: tuple[Problem, Problem], plans: list[Plan]
) -> tuple[Partial, Partial]:
    """Scratch for the splits of the prefix and of the suffix, in one: the suffix's, then the prefix's."""
    prefix, suffix = (
        plan.partial_shape(p.batch, p.heads_kv, p.group, p.q_len) or (1, p.batch, p.heads_q, p.q_len)
        for p, plan in zip(problems, plans, strict=True)
    )
    rows, behind = math.prod(suffix), math.prod(prefix)
    width = problems[0].value_dim
    both = take_partial(workspace, (rows + behind,), width, problems[0].q.device)
    assert both is not None, "there is a shape"
    acc, m, l = both
    return (
        Partial(acc[rows:].view(*prefix, width), m[rows:].view(prefix), l[rows:].view(prefix)),
        Partial(acc[:rows].view(*suffix, width), m[:rows].view(suffix), l[:rows].view(suffix)),
    )


def _is_faster(problem: Problem, prefix_len: int, name: str) -> bool:
    """saves_time() for a call on its device."""
    p = problem
    if p.q.device.type != "cuda":
        return False
    plain, shared = (
        x.batch * -(-x.group * x.q_len // backends.load(name).plan(x, None, None).tile.block_m)
        for x in (p, _prefix_of(p, prefix_len))
    )
    row_bytes = p.k.shape[3] * p.k.element_size() + p.v.shape[3] * p.v.element_size()
    prefix_bytes = p.heads_kv * prefix_len * row_bytes
    return saves_time(plain, shared, prefix_bytes, _bandwidth(p.q.device.index))


@lru_cache(maxsize=64)
def _bandwidth(device_index: int) -> float:
    """GB/s that reads reach."""
    gpu = present_gpu(device_index)
    assert gpu is not None, "the tensors are on it"
    return REACHABLE_SHARE * gpu.gb_per_s


def _traced(
    call: Call, scales: PrefixScales, prefix_len: int, shared: bool | None, return_lse: bool,
    workspace: Workspace | None, backend: str,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """The call as a tracer sees it: outputs made in the graph, and one op that fills them and checks the rest."""
    out, lse = make_traced_outputs(call, return_lse, workspace)
    fields = dict(zip(Call._fields, op_arguments(call), strict=False))
    options = [fields[name] for name in _OP_FIELDS]
    placed = [place_scale(scale, call.q.device) if is_number(scale) else scale for scale in scales]
    torch.ops.flash_decoding.cascade(*options, *placed, prefix_len, shared, backend, out, lse)
    return (out, lse) if return_lse and lse is not None else out


# The fields of Call that the op takes, in its order.
_OP_FIELDS = (
    "q", "k", "v", "layout", "kv_lens", "block_table", "q_lens", "scale", "causal", "window", "softcap",
    "alibi_slopes", "sinks", "tree_mask", "kv_format", "k_scale", "v_scale",
)  # fmt: skip


def _cascade(*arguments: Any) -> None:
    *options, shared_k_scale, shared_v_scale, prefix_len, shared, backend, out, lse = arguments
    scales = PrefixScales(shared_k_scale, shared_v_scale)
    call = Call(**dict(zip(_OP_FIELDS, options, strict=True)), out=out, lse=lse)
    problem = _checked(call, scales, prefix_len, shared, backend)
    _run(problem, call, scales, prefix_len, shared, backend, None, out, lse)


register_op(
    "cascade(Tensor q, Tensor k, Tensor v, str layout, Tensor kv_lens, Tensor block_table, Tensor? q_lens, "
    "float? scale, bool causal, int? window, float? softcap, Tensor? alibi_slopes, Tensor? sinks, Tensor? tree_mask, "
    "str? kv_format, Tensor? k_scale, Tensor? v_scale, Tensor? shared_k_scale, Tensor? shared_v_scale, "
    "int prefix_len, bool? shared, str backend, Tensor(a!) out, Tensor(b!)? lse) -> ()",
    _cascade,
)
