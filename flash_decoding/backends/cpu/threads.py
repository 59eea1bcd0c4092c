"""Threads over one call: a lazily made pool, the caller working too, units taken from a shared counter inside the kernel.

Numba's own parallel loops are not used: one of its threading layers aborts the process when two Python threads enter it, another after a
fork. Here any number of Python threads may call, and a forked child makes its own pool.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

# Below this many K and V elements per block of query rows the hand-off to a thread (about 20 us) costs more than it saves.
MIN_ELEMENTS_TO_SHARE = 400_000
# Splits shorter than this many keys spend more on their own state than threads gain from sharing them.
MIN_KEYS_PER_SPLIT = 256
UNITS_PER_THREAD = 4

_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None
_pool_size = 0


def choose_cpu_splits(batch: int, heads_kv: int, kv_len: int, threads: int) -> int:
    """Splits per sequence so that every thread finds work until the end: one if heads and sequences are many enough."""
    units = batch * heads_kv
    if threads <= 1 or units == 0 or units >= UNITS_PER_THREAD * threads:
        return 1
    return max(1, min(-(-UNITS_PER_THREAD * threads // units), kv_len // MIN_KEYS_PER_SPLIT))


def count_threads(elements: int) -> int:
    """How many threads a call that reads this many elements is worth."""
    return 1 if elements < MIN_ELEMENTS_TO_SHARE else torch.get_num_threads()


def run_shared(work: Callable[[], Any], threads: int) -> None:
    """Run `work` in this thread and, as far as the pool has room, in others; returns when all of them are done."""
    helpers = _start(work, threads - 1) if threads > 1 else []
    try:
        work()
    finally:
        # A helper that has not begun has nothing left to do.
        started = [helper for helper in helpers if not helper.cancel()]
    for helper in started:
        helper.result()


def _start(work: Callable[[], Any], count: int) -> list[Future[Any]]:
    helpers: list[Future[Any]] = []
    try:
        pool = _pool_of(count)
        helpers.extend(pool.submit(work) for _ in range(count))
    except RuntimeError:
        # The interpreter is shutting down, has no thread left to give, or the pool was just replaced: the caller alone is enough.
        pass
    return helpers


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
