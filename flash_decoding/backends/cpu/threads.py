"""Threads over one call: the caller and a lazily made pool take units of work from one counter inside the kernel.

Numba's own parallel loops are not used: one of its threading layers aborts the process when two Python threads enter
it, another after a fork. Here any number of Python threads may call, and a forked child makes its own pool.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import torch

# K and V elements, times blocks of query rows, that are worth a thread: fewer take no longer than its start, 20 us.
ELEMENTS_PER_THREAD = 300_000
# Splits shorter than this many keys, times blocks of query rows, cost more to start than threads gain from sharing
# them; splits of fewer keys than LEAST_KEYS spend much of their time on merging.
MIN_KEYS_PER_SPLIT = 256
LEAST_KEYS = 64
UNITS_PER_THREAD = 4

_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None
_pool_size = 0


def choose_cpu_splits(batch: int, heads_kv: int, kv_len: int, threads: int, row_blocks: int = 1) -> int:
    """Splits per sequence so that every thread finds work until the end: one if heads and sequences are many enough."""
    units = batch * heads_kv
    if threads <= 1 or units == 0 or units >= UNITS_PER_THREAD * threads:
        return 1
    keys = max(MIN_KEYS_PER_SPLIT // row_blocks, LEAST_KEYS)
    return max(1, min(-(-UNITS_PER_THREAD * threads // units), kv_len // keys))


def count_threads(elements: int) -> int:
    """How many threads a call that reads this many elements is worth."""
    return max(1, min(torch.get_num_threads(), elements // ELEMENTS_PER_THREAD))


def run_shared(work: Callable[[], Any], threads: int) -> None:
    """Run `work` in this thread and in as many more as the pool has free; returns when all of them are done."""
    if threads <= 1:
        work()
        return
    helpers: list[Future[Any]] = []

    def join(others: int) -> None:
        # Every thread wakes two more before it works itself, so that the last of many starts soon.
        start(others - others // 2)
        start(others // 2)
        work()

    def start(count: int) -> None:
        # RuntimeError: the interpreter shuts down, has no thread to give, or the pool was just replaced. Go on without.
        if count > 0:
            with suppress(RuntimeError):
                helpers.append(_pool_of(threads - 1).submit(join, count - 1))

    try:
        join(threads - 1)
    finally:
        # The list grows while its first entries start. A helper that has not begun by now has nothing left to do.
        for helper in helpers:
            if not helper.cancel():
                helper.result()


def _pool_of(size: int) -> ThreadPoolExecutor:
    global _pool, _pool_size
    pool = _pool
    if pool is None or _pool_size < size:
        with _lock:
            if _pool is None or _pool_size < size:
                if _pool is not None:
                    _pool.shutdown(wait=False)
                _pool, _pool_size = ThreadPoolExecutor(size, thread_name_prefix="flash_decoding"), size
            pool = _pool
    return pool


def _forget_pool() -> None:
    """A forked child has the pool object but none of its threads, and perhaps a lock that nobody will release."""
    global _pool, _pool_size, _lock
    _pool, _pool_size, _lock = None, 0, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)
