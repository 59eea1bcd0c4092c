"""Flash Decoding on GPUs: a chunk kernel and a reduce kernel in Triton."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from flash_decoding.backends.triton.chunk import launch_chunk, view_words
from flash_decoding.backends.triton.codes import parts_of, scales_by_key
from flash_decoding.backends.triton.launch import Launch, recording, start_again
from flash_decoding.backends.triton.reduce import launch_reduce
from flash_decoding.problem import Problem
from flash_decoding.recorded import Start
from flash_decoding.split_plan import MIN_SHARED_MEMORY, Plan, choose_plan
from flash_decoding.tuning import find_table
from flash_decoding.workspace import Partial


def plan(problem: Problem, num_splits: int | None, split_size: int | None) -> Plan:
    """How many splits, and which tile."""
    p = problem
    sides = () if p.kv_format is None else (p.kv_format.k, p.kv_format.v)
    k_parts, v_parts = (parts_of(x) for x in sides or (None, None))
    return choose_plan(
        batch=p.batch, heads_kv=p.heads_kv, group=p.group, q_len=p.q_len, kv_len=p.kv_len,
        head_dim=p.head_dim // k_parts, value_dim=p.value_dim // v_parts, parts=max(k_parts, v_parts),
        scales=max((scales_by_key(*x) for x in zip(sides, (p.head_dim, p.value_dim), strict=False)), default=0),
        element_size=p.q.element_size(), paged=p.page_size is not None,
        window=p.window, ragged=p.batch > 1 and p.kv_lens is not None, num_splits=num_splits, split_size=split_size,
        **_device_facts(p.q.device.index),
    )  # fmt: skip


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
        return start_again([Launch(*call, tensors) for call in started])
    except ValueError:
        return None


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
