"""A shared prefix and what comes behind it: two runs of the kernel, whose partials are merged together."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_decoding.backends.cpu import decode
from flash_decoding.backends.cpu.reduce import merge_partials
from flash_decoding.problem import Problem
from flash_decoding.split_plan import Plan
from flash_decoding.workspace import Partial


def decode_shared(
    prefix: tuple[Problem, Plan, Partial], suffix: tuple[Problem, Plan, Partial], out: Tensor, lse: Tensor | None
) -> None:
    """Fill out and, if it is not None, lse. Both plans have two splits or more."""
    for problem, plan, partial in (prefix, suffix):
        decode(problem, plan, partial, None, None)
    p = suffix[0]
    shared = (_by_sequence(x, p, nothing) for x, nothing in zip(prefix[2], (0.0, -torch.inf, 0.0), strict=True))
    both = Partial(*map(torch.cat, zip(suffix[2], shared, strict=True)))  # [splits of both, B, Hq, Lq(, Dv)]
    merge_partials(both, out, lse, sinks=p.sinks)


def _by_sequence(x: Tensor, problem: Problem, nothing: float) -> Tensor:
    """Partials [splits, groups, Hq, length, ...] of groups of rows as [splits, B, Hq, Lq, ...].

    Rows past q_lens, and of sequences without keys, have seen nothing.
    """
    p = problem
    assert p.kv_lens is not None, "paged"
    x = x.transpose(2, 3).flatten(1, 2)[:, : p.batch * p.q_len].unflatten(1, (p.batch, p.q_len))
    idle = (p.kv_lens == 0)[:, None].expand(-1, p.q_len)
    if p.q_lens is not None:
        idle = idle | (torch.arange(p.q_len, device=p.q.device) >= p.q_lens[:, None])
    return x.masked_fill(idle.view(1, p.batch, p.q_len, *[1] * (x.ndim - 3)), nothing).transpose(2, 3)
