"""Flash Decoding on CPUs: the chunk and reduce steps in Numba, as one kernel that several threads run at once."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Addresses
from functools import lru_cache
from functools import partial as bind
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flash_decoding.backends.cpu.chunk import PACKER, SIZE, make_kernel
from flash_decoding.backends.cpu.int4 import find_runs
from flash_decoding.backends.cpu.packing import place
from flash_decoding.backends.cpu.reduce import merge_partials
from flash_decoding.backends.cpu.scores import make_options
from flash_decoding.backends.cpu.simd import E4M3, E5M2, INT4, INT8, LANES
from flash_decoding.backends.cpu.threads import choose_cpu_splits, count_threads, run_shared
from flash_decoding.problem import Problem
from flash_decoding.quantization import CodeFormat
from flash_decoding.recorded import Start
from flash_decoding.split_plan import Plan, Tile
from flash_decoding.workspace import Partial

_log = logging.getLogger("flash_decoding")

# The NumPy type names the element kind to the compiler; see simd.py.
_KINDS = {torch.float32: np.float32(0), torch.float16: np.int16(0), torch.bfloat16: np.uint16(0)}
_CODES = {"fp8_e4m3": E4M3, "fp8_e5m2": E5M2, "int8": INT8, "int4": INT4}
# Even splits are cut between blocks of this many keys.
_BLOCK_N = 64
_NOWHERE = (0, 0, 0, 0)
# Where the packed numbers of a Call hold the addresses of q, k, v and out, of lse, and of the partial's acc, m and l.
_INPUTS_AND_OUT, _LSE, _PARTIAL = (0, 4, 8, 12), (16,), (17, 18, 19)

_kernel: Callable[..., Any] | None = None
# The dtype of q, and what K and V hold, by name.
_Kinds = tuple[torch.dtype, str | None, str | None]
_status: dict[_Kinds, str] = {}
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
    return _make_plan(num_splits, split_size, p.head_dim, p.value_dim)


@lru_cache(maxsize=1024)
def _make_plan(num_splits: int, split_size: int | None, head_dim: int, value_dim: int) -> Plan:
    return Plan(num_splits, split_size, Tile(4, _BLOCK_N, head_dim, value_dim, num_warps=1, num_stages=1))


def decode(problem: Problem, plan: Plan, partial: Partial | None, out: Tensor | None, lse: Tensor | None) -> None:
    """Fill out and, if it is not None, lse. partial is None exactly when the plan has one split.

    Without out, partial is filled and not merged.
    """
    kinds = _kinds_of(problem)
    kernel = _kernel if _kernel is not None and kinds in _status else _prepare(kinds)
    problems = problem.batch * problem.heads_kv
    memory = place(_describe(problem, plan, partial, out, lse), counters=1 + problems if plan.num_splits > 1 else 1)
    # `keep` lives as long as any thread works: an interrupt may take the caller away earlier.
    work = bind(_work, kernel, ctypes.addressof(memory), _scalars(kinds), (problem, partial, out, lse, memory))
    run_shared(work, min(count_threads(_elements(problem)), problems * plan.num_splits))


def decode_state(problem: Problem, plan: Plan, partial: Partial | None, state: Partial) -> None:
    """decode() that leaves the softmax over all keys unfinished: fill state, [B, Hq, Lq(, Dv)]."""
    decode(problem, plan, state if partial is None else partial, None, None)
    if partial is not None:
        merge_partials(partial, state.acc, state.m, state.l)


def record(
    problem: Problem, plan: Plan, partial: Partial | None, out: Tensor, lse: Tensor | None
) -> Start | None:  # fmt: skip
    """decode(), and how to do it again for a call without optional arrays."""
    decode(problem, plan, partial, out, lse)
    p = problem
    arrays = (
        p.kv_lens,
        p.kv_start,
        p.block_table,
        p.q_lens,
        p.alibi_slopes,
        p.sinks,
        p.key_mask,
        p.tree_mask,
        p.k_scale,
        p.v_scale,
    )
    if any(x is not None for x in arrays):
        return None
    numbers = list(PACKER.unpack(_describe(problem, plan, partial, out, lse)))
    places = [*_INPUTS_AND_OUT, *(_LSE if lse is not None else ()), *(_PARTIAL if partial is not None else ())]
    kernel, scalars = _prepare(_kinds_of(p)), _scalars(_kinds_of(p))
    problems = p.batch * p.heads_kv
    counters = 1 + problems if plan.num_splits > 1 else 1
    most_threads, elements = problems * plan.num_splits, _elements(p)

    def start(addresses: Addresses[int], _stream: int, owners: object) -> bool:
        for i, address in zip(places, addresses, strict=True):
            numbers[i] = address
        memory = place(PACKER.pack(*numbers), counters)
        work = bind(_work, kernel, ctypes.addressof(memory), scalars, (owners, memory))
        run_shared(work, min(count_threads(elements), most_threads))
        return True

    return start


def compile_status() -> dict[str, str]:
    """Per dtype: 'not loaded', or how long it took to compile the kernel or to load it from Numba's cache.

    And how long it took for the quantised caches that were used.
    """
    plain = dict.fromkeys([_name((dtype, None, None)) for dtype in _KINDS], "not loaded")
    return plain | {_name(kinds): text for kinds, text in _status.items()}


def _name(kinds: _Kinds) -> str:
    dtype, k, v = kinds
    name = str(dtype).removeprefix("torch.")
    return name if k is v is None else f"{name} over {k or name} and {v or name}"


def _kinds_of(problem: Problem) -> _Kinds:
    form = problem.kv_format
    return (problem.q.dtype, None, None) if form is None else (problem.q.dtype, _codes(form.k), _codes(form.v))


def _codes(side: CodeFormat | None) -> str | None:
    return None if side is None else side.codes


def _scalars(kinds: _Kinds) -> tuple[Any, Any, Any]:
    """What tells the compiler the kinds of q and out, of K and of V."""
    dtype, k, v = kinds
    plain = _KINDS[dtype]
    return plain, plain if k is None else _CODES[k], plain if v is None else _CODES[v]


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


def _work(kernel: Callable[..., Any], record: int, scalars: tuple[Any, ...], keep: tuple[object, ...]) -> None:
    kernel(record, *scalars)


def _describe(
    problem: Problem, plan: Plan, partial: Partial | None, out: Tensor | None, lse: Tensor | None
) -> bytes:  # fmt: skip
    """The packed fields of Call, in their order."""
    p = problem
    return PACKER.pack(
        *_view(p.q), *_view(p.k), *_view(p.v), *(_NOWHERE if out is None else _view(out)), _address(lse),
        *((0, 0, 0) if partial is None else (partial.acc.data_ptr(), partial.m.data_ptr(), partial.l.data_ptr())),
        *_sequence(p.kv_lens), *_sequence(p.kv_start), *_sequence(p.q_lens),
        *_view_table(p.block_table), *_view_table(p.key_mask), *_view_table(p.tree_mask), *_describe_scales(p),
        p.causal and p.tree_mask is None, p.kv_len if p.window is None else min(p.window, p.kv_len),
        p.batch, p.heads_q, p.heads_kv, p.q_len, p.kv_len, p.page_size or max(p.kv_len, 1), p.head_dim, p.value_dim,
        plan.num_splits, plan.split_size or 0, plan.tile.block_n,
        *make_options(p.scale, p.softcap, _address(p.alibi_slopes), _address(p.sinks)),
    )  # fmt: skip


def _describe_scales(problem: Problem) -> tuple[int, ...]:
    """k_scale, v_scale, channels, and the groups of both."""
    p = problem
    if p.kv_format is None:
        return (*_NOWHERE, *_NOWHERE, *_NOWHERE, *_groups(None, 0), *_groups(None, 0))
    k, v = p.kv_format.k, p.kv_format.v
    by_channel = k is not None and k.scale == "channel"
    return (
        *_view_scale(None if by_channel else p.k_scale), *_view_scale(p.v_scale),
        *_view_scale(p.k_scale if by_channel else None), *_groups(k, p.head_dim), *_groups(v, p.value_dim),
    )  # fmt: skip


def _view_scale(x: Tensor | None) -> tuple[int, int, int, int]:
    """[], [heads], [heads, width] or [batch, heads, length, ...]."""
    if x is None:
        return _NOWHERE
    size, strides = x.element_size(), x.stride()
    if x.ndim < 3:
        return x.data_ptr(), 0, strides[0] * size if x.ndim else 0, 0
    return x.data_ptr(), strides[0] * size, strides[1] * size, strides[2] * size


def _groups(side: CodeFormat | None, width: int) -> tuple[int, int, int, int]:
    """The numbers of Groups."""
    if side is None or side.group is None:
        return 0, 0, 0, 1
    runs = find_runs(width, side.group)
    return len(runs), runs.ctypes.data, int(side.zero_point), width // (2 * LANES)


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _view(x: Tensor) -> tuple[int, int, int, int]:
    """The numbers of a View."""
    size = x.element_size()
    batch, head, token, _ = x.stride()
    return x.data_ptr(), batch * size, head * size, token * size


def _view_table(x: Tensor | None) -> tuple[int, int, int, int]:
    """[batch, length] or [batch, tokens, length], whose tokens take the place of heads."""
    if x is None:
        return _NOWHERE
    size = x.element_size()
    batch, *tokens, length = x.stride()
    return x.data_ptr(), batch * size, tokens[0] * size if tokens else 0, length * size


def _sequence(x: Tensor | None) -> tuple[int, int, int]:
    """The numbers of a Sequence."""
    return (0, 0, 0) if x is None else (x.data_ptr(), x.stride(0) * x.element_size(), x.element_size())


def _prepare(kinds: _Kinds) -> Callable[..., Any]:
    """Compile the kernel of these kinds, or load it from Numba's cache; other threads wait."""
    global _kernel
    with _prepare_lock:
        if _kernel is None:
            _kernel = _make_kernel()
        if kinds not in _status:
            name = _name(kinds)
            _log.info("preparing the CPU kernel for %s: compiled once, some seconds, then kept in Numba's cache", name)
            start = time.perf_counter()
            no_work = place(bytes(SIZE), counters=1)
            _kernel(ctypes.addressof(no_work), *_scalars(kinds))
            how = "loaded from the cache" if sum(_kernel.stats.cache_hits.values()) > _cache_hits() else "compiled"
            _status[kinds] = f"{how} in {time.perf_counter() - start:.2f} s"
            _log.info("the CPU kernel for %s is ready: %s", name, _status[kinds])
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
