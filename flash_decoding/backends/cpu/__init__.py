"""Flash Decoding on CPUs: the chunk and reduce steps in Numba, as one kernel that several threads run at once."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable
from functools import partial as bind
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flash_decoding.backends.cpu.chunk import Call, Sequence, View, make_kernel
from flash_decoding.backends.cpu.scores import make_options
from flash_decoding.backends.cpu.threads import choose_cpu_splits, count_threads, run_shared
from flash_decoding.problem import Problem
from flash_decoding.split_plan import Plan, Tile
from flash_decoding.workspace import Partial

_log = logging.getLogger("flash_decoding")

# The NumPy type names the element kind to the compiler; see simd.py.
_KINDS = {torch.float32: np.float32(0), torch.float16: np.int16(0), torch.bfloat16: np.uint16(0)}
# Even splits are cut between blocks of this many keys.
_BLOCK_N = 64
_NOWHERE = View(0, 0, 0, 0)

_kernel: Callable[..., Any] | None = None
_status: dict[torch.dtype, str] = {}
_prepare_lock = threading.RLock()
if hasattr(os, "register_at_fork"):
    # A child forked while another thread compiles would wait for ever for a lock that nobody holds there.
    os.register_at_fork(
        before=_prepare_lock.acquire,
        after_in_parent=_prepare_lock.release,
        after_in_child=_prepare_lock.release,
    )


def plan(problem: Problem, num_splits: int | None, split_size: int | None) -> Plan:
    """How many splits; the tile only says where even splits may be cut."""
    p = problem
    keys = _most_keys(p)
    if split_size is not None:
        num_splits = max(1, -(-keys // split_size))
    elif num_splits is None:
        # Of a ragged batch, one sequence may be nearly all the work.
        batch = p.batch if p.kv_lens is None else 1
        num_splits = choose_cpu_splits(batch, p.heads_kv, keys, count_threads(_elements(p)), _row_blocks(p))
    return Plan(num_splits, split_size, Tile(4, _BLOCK_N, p.head_dim, p.value_dim, num_warps=1, num_stages=1))


def decode(problem: Problem, plan: Plan, partial: Partial | None, out: Tensor, lse: Tensor | None) -> None:
    """Fill out and, if it is not None, lse. partial is None exactly when the plan has one split."""
    dtype = problem.q.dtype
    kernel = _kernel if _kernel is not None and dtype in _status else _prepare(dtype)
    counters = np.zeros(1 + (problem.batch * problem.heads_kv if plan.num_splits > 1 else 0), np.int64)
    call = _describe(problem, plan, partial, out, lse, counters.ctypes.data)
    # `keep` lives as long as any thread works: an interrupt may take the caller away earlier.
    work = bind(_work, kernel, call, _KINDS[dtype], (problem, partial, out, lse, counters))
    run_shared(work, min(count_threads(_elements(problem)), problem.batch * problem.heads_kv * plan.num_splits))


def compile_status() -> dict[str, str]:
    """Per dtype: 'not loaded', or how long it took to compile the kernel or to load it from Numba's cache."""
    return {str(dtype).removeprefix("torch."): _status.get(dtype, "not loaded") for dtype in _KINDS}


def _most_keys(problem: Problem) -> int:
    """How many keys the tokens of one sequence can see between them, whatever its length."""
    return problem.kv_len if problem.window is None else min(problem.kv_len, problem.window + problem.q_len)


def _row_blocks(problem: Problem) -> int:
    """Blocks of four query rows per KV head; each passes over the keys once."""
    return -(-problem.group * problem.q_len // 4)


def _elements(problem: Problem) -> int:
    """K and V elements, once per block of query rows: a measure of the work that needs no read of kv_lens."""
    p = problem
    return p.batch * p.heads_kv * _most_keys(p) * (p.head_dim + p.value_dim) * _row_blocks(p)


def _work(kernel: Callable[..., Any], call: Call, kind: Any, keep: tuple[object, ...]) -> None:
    kernel(call, kind)


def _describe(
    problem: Problem, plan: Plan, partial: Partial | None, out: Tensor, lse: Tensor | None, counters: int
) -> Call:
    p = problem
    return Call(
        q=_view(p.q),
        k=_view(p.k),
        v=_view(p.v),
        out=_view(out),
        lse=_address(lse),
        partial_acc=0 if partial is None else partial.acc.data_ptr(),
        partial_m=0 if partial is None else partial.m.data_ptr(),
        partial_l=0 if partial is None else partial.l.data_ptr(),
        kv_lens=_sequence(p.kv_lens),
        kv_start=_sequence(p.kv_start),
        q_lens=_sequence(p.q_lens),
        block_table=_view_table(p.block_table),
        key_mask=_view_table(p.key_mask),
        tree_mask=_view_table(p.tree_mask),
        causal=p.causal and p.tree_mask is None,
        window=p.kv_len if p.window is None else min(p.window, p.kv_len),
        batch=p.batch,
        heads_q=p.heads_q,
        heads_kv=p.heads_kv,
        q_len=p.q_len,
        kv_len=p.kv_len,
        page_size=p.page_size or max(p.kv_len, 1),
        head_dim=p.head_dim,
        value_dim=p.value_dim,
        num_splits=plan.num_splits,
        split_size=plan.split_size or 0,
        block_n=plan.tile.block_n,
        next_unit=counters,
        arrived=counters + 8,
        score=make_options(p.scale, p.softcap, _address(p.alibi_slopes), _address(p.sinks)),
    )


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _view(x: Tensor) -> View:
    size = x.element_size()
    batch, head, token, _ = x.stride()
    return View(x.data_ptr(), batch * size, head * size, token * size)


def _view_table(x: Tensor | None) -> View:
    """[batch, length] or [batch, tokens, length], whose tokens take the place of heads."""
    if x is None:
        return _NOWHERE
    size = x.element_size()
    batch, *tokens, length = x.stride()
    return View(x.data_ptr(), batch * size, tokens[0] * size if tokens else 0, length * size)


def _sequence(x: Tensor | None) -> Sequence:
    return Sequence(0, 0, 0) if x is None else Sequence(x.data_ptr(), x.stride(0) * x.element_size(), x.element_size())


def _prepare(dtype: torch.dtype) -> Callable[..., Any]:
    """Compile the kernel of a dtype, or load it from Numba's cache; other threads wait."""
    global _kernel
    with _prepare_lock:
        if _kernel is None:
            _kernel = _make_kernel()
        if dtype not in _status:
            name = str(dtype).removeprefix("torch.")
            _log.info("preparing the CPU kernel for %s: compiled once, some seconds, then kept in Numba's cache", name)
            start = time.perf_counter()
            counter = np.zeros(1, np.int64)
            _kernel(_empty_call(counter.ctypes.data), _KINDS[dtype])
            how = "loaded from the cache" if sum(_kernel.stats.cache_hits.values()) > _cache_hits() else "compiled"
            _status[dtype] = f"{how} in {time.perf_counter() - start:.2f} s"
            _log.info("the CPU kernel for %s is ready: %s", name, _status[dtype])
    return _kernel


def _cache_hits() -> int:
    return sum(text.startswith("loaded") for text in _status.values())


def _make_kernel() -> Callable[..., Any]:
    sources = sorted(Path(__file__).parent.glob("*.py"))
    stamp = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    try:
        return make_kernel(stamp, cache=True)
    except RuntimeError:
        # Numba found no directory that it may write to.
        _log.info("no writable cache directory for Numba: the CPU kernels are compiled in every process")
        return make_kernel(stamp, cache=False)


def _empty_call(counter: int) -> Call:
    """A call without work."""
    none = Sequence(0, 0, 0)
    sizes = {"batch": 0, "heads_q": 1, "heads_kv": 1, "q_len": 1, "kv_len": 0, "head_dim": 16, "value_dim": 16}
    return Call(
        q=_NOWHERE, k=_NOWHERE, v=_NOWHERE, out=_NOWHERE, lse=0, partial_acc=0, partial_m=0, partial_l=0, kv_lens=none,
        kv_start=none, q_lens=none, block_table=_NOWHERE, key_mask=_NOWHERE, tree_mask=_NOWHERE, causal=True, window=0,
        **sizes, page_size=1, num_splits=1, split_size=0, block_n=1, next_unit=counter, arrived=counter,
        score=make_options(1.0, None, 0, 0),
    )  # fmt: skip
