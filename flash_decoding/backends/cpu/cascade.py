"""A shared prefix and what comes behind it: two runs of the kernel, whose partials are merged here.

    M = max m_i,   out = sum 2**(m_i - M) acc_i / sum 2**(m_i - M) l_i,   lse = ln 2 * M + ln(sum 2**(m_i - M) l_i)

as in reduce.py, over the splits of both.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_decoding.backends.cpu import decode
from flash_decoding.backends.cpu.scores import LN_2, LOG2_E
from flash_decoding.problem import Problem
from flash_decoding.split_plan import Plan
from flash_decoding.workspace import Partial


def decode_shared(
    prefix: tuple[Problem, Plan, Partial], suffix: tuple[Problem, Plan, Partial], out: Tensor, lse: Tensor | None
) -> None:
    """Fill out and, if it is not None, lse. Both plans have two splits or more."""
    for problem, plan, partial in (prefix, suffix):
        # What a pass makes of its splits alone is nobody's.
        alone = torch.empty((*problem.q.shape[:3], problem.value_dim), dtype=out.dtype)
        decode(problem, plan, partial, alone, None)
    p = suffix[0]
    shared = (_by_sequence(x, p, nothing) for x, nothing in zip(prefix[2], (0.0, -torch.inf, 0.0), strict=True))
    acc, m, l = map(torch.cat, zip(suffix[2], shared, strict=True))  # [splits of both, B, Hq, Lq(, Dv)]
    top = m.amax(dim=0)
    shift = top.masked_fill(top == -torch.inf, 0.0)  # -inf - -inf would be NaN
    w = torch.exp2(m - shift)
    total = (w * l).sum(dim=0)
    if lse is not None:
        lse.copy_(shift * LN_2 + total.log())
    if p.sinks is not None:
        total = torch.where(total > 0, total + torch.exp2(p.sinks[:, None] * LOG2_E - shift), total)
    out.copy_((w[..., None] * acc).sum(dim=0) / total.masked_fill(total == 0, 1.0)[..., None])


def _by_sequence(x: Tensor, problem: Problem, nothing: float) -> Tensor:
    """Partials [splits, groups, Hq, length, ...] of groups of rows as [splits, B, Hq, Lq, ...].

    Rows past q_lens, and of sequences without keys, have seen nothing.
    """
    p = problem
    assert p.kv_lens is not None, "paged"
    x = x.transpose(2, 3).flatten(1, 2)[:, : p.batch * p.q_len].unflatten(1, (p.batch, p.q_len))
    idle = (p.kv_lens == 0)[:, None].expand(-1, p.q_len)
    if p.q_lens is not None:
        idle = idle | (torch.arange(p.q_len) >= p.q_lens[:, None])
    return x.masked_fill(idle.view(1, p.batch, p.q_len, *[1] * (x.ndim - 3)), nothing).transpose(2, 3)
