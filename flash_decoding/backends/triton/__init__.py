"""Flash Decoding on GPUs: a chunk kernel and a reduce kernel in Triton."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from flash_decoding.backends.triton.chunk import find_word_errors, launch_chunk, view_words
from flash_decoding.backends.triton.codes import parts_of, scales_per_key
from flash_decoding.backends.triton.exchange import launch_exchange
from flash_decoding.backends.triton.launch import Launch, recording, start_again
from flash_decoding.backends.triton.reduce import launch_partials, launch_reduce
from flash_decoding.problem import Problem
from flash_decoding.recorded import Start
from flash_decoding.split_plan import MIN_SHARED_MEMORY, Plan, choose_plan
from flash_decoding.tuning import find_table
from flash_decoding.workspace import Inbox, Partial


def plan(problem: Problem, num_splits: int | None, split_size: int | None) -> Plan:
    """How many splits, and which tile."""
    p = problem
    sides = () if p.kv_format is None else (p.kv_format.k, p.kv_format.v)
    k_parts, v_parts = (parts_of(x) for x in sides or (None, None))
    return choose_plan(
        batch=p.batch, heads_kv=p.heads_kv, group=p.group, q_len=p.q_len, kv_len=p.kv_len,
        head_dim=p.head_dim // k_parts, value_dim=p.value_dim // v_parts, parts=(k_parts, v_parts),
        scales=max((scales_per_key(*x) for x in zip((p.head_dim, p.value_dim), sides, strict=False)), default=0),
        element_size=p.q.element_size(), paged=p.page_size is not None,
        window=p.window, ragged=p.batch > 1 and p.kv_lens is not None, num_splits=num_splits, split_size=split_size,
        **_device_facts(p.q.device.index),
    )  # fmt: skip


def find_errors(problem: Problem) -> Iterator[Exception]:
    """What these kernels cannot do of a call that is right by itself."""
    index = problem.q.device.index
    # The interpreter has no shared memory to run out of.
    yield from find_word_errors(problem, math.inf if index is None else _device_facts(index)["shared_memory"])


def decode(problem: Problem, plan: Plan, partial: Partial | None, out: Tensor, lse: Tensor | None) -> None:
    """Fill out and, if it is not None, lse. partial is None exactly when the plan has one split."""
    device = problem.q.device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return decode(problem, plan, partial, out, lse)
    problem = view_words(problem)
    launch_chunk(problem, plan, partial, out, lse)
    if partial is not None:
        launch_reduce(problem, plan, partial, out, lse)


def decode_state(problem: Problem, plan: Plan, partial: Partial | None, state: Partial) -> None:
    """decode() that leaves the softmax over all keys unfinished: fill state, [B, Hq, Lq(, Dv)]."""
    with _current(problem.q.device):
        problem = view_words(problem)
        launch_chunk(problem, plan, state if partial is None else partial, state.acc, None)
        if partial is not None:
            launch_reduce(problem, plan, partial, state.acc, state.m, l=state.l)


def merge_partials(
    partial: Partial, out: Tensor, lse: Tensor | None, l: Tensor | None = None, *, sinks: Tensor | None = None
) -> None:  # fmt: skip
    """Merge partials [S, B, Hq, Lq(, Dv)], each contiguous, into out [B, Hq, Lq, Dv] and, if it is not None, lse.

    With l the result is a partial too, not finished: out becomes its acc, lse its m. They may not be parts of partial.
    """
    with _current(out.device):
        launch_partials(partial, out, lse, l, sinks)


def exchange_states(
    own: Partial, inbox: Inbox, out: Tensor, lse: Tensor | None, *, sinks: Tensor | None, scatter: bool, signature: int
) -> None:  # fmt: skip
    """Merge the states [B, Hq, Lq(, Dv)] of all ranks into out [B, heads, Lq, Dv] and, if it is not None, lse.

    scatter: rank r keeps Hq / ranks heads, from the r-th such part on; otherwise each rank keeps all.
    signature: which call it is; a rank that merges another one ends with an error.
    """
    with _current(out.device):
        processors = _device_facts(out.device.index)["processors"]
        launch_exchange(own, inbox, out, lse, sinks, scatter, signature, processors)


def record(
    problem: Problem, plan: Plan, partial: Partial | None, out: Tensor, lse: Tensor | None
) -> Start | None:  # fmt: skip
    """decode(), and how to start its kernels again.

    None where addresses make them others than common ones, where one array stands for two, which later calls need not
    repeat, and where Triton's launcher does more than Launch knows.
    """
    p = view_words(problem)
    with recording() as started:
        decode(p, plan, partial, out, lse)
    arrays = (
        p.kv_lens, p.kv_start, p.block_table, p.q_lens, p.alibi_slopes, p.sinks, p.key_mask, p.tree_mask, p.k_scale,
        p.v_scale,
    )  # fmt: skip
    tensors = [x for x in (p.q, p.k, p.v, *arrays, out, lse, *(partial or ())) if x is not None]
    if (
        p.q.device.type != "cuda"
        or any(x.data_ptr() & 15 for x in (p.q, p.k, p.v, out))
        or len({id(x) for x in tensors}) < len(tensors)
    ):
        return None
    try:
        start = start_again([Launch(*call, tensors) for call in started])
    except ValueError:
        return None
    # Scales that view_words() took for words of 32 bits; later ones may lie where no such word may.
    words = [i for i, x in enumerate(tensors) if x.dtype == torch.int32 and (x is p.k_scale or x is p.v_scale)]
    if not words:
        return start
    return lambda addresses, stream, owners: (
        not any(addresses[i] & 3 for i in words) and start(addresses, stream, owners)
    )


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Kernels start on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@lru_cache(maxsize=64)
def _device_facts(device_index: int | None) -> dict[str, Any]:
    """What the planner wants to know of a device; the interpreter, which has none, counts as a small one."""
    if device_index is None:
        return {"processors": 1, "shared_memory": MIN_SHARED_MEMORY}
    facts = torch.cuda.get_device_properties(device_index)
    return {
        "processors": facts.multi_processor_count,
        "shared_memory": facts.shared_memory_per_block_optin,
        "table": find_table(facts.name),
    }
