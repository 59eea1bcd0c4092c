"""A rank's own part: its shard decoded into a state in float32."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_decoding import backends
from flash_decoding.api import flash_decode
from flash_decoding.distributed.request import Request, capacity_of
from flash_decoding.distributed.sharding import LocalCall
from flash_decoding.merge import merge_states
from flash_decoding.problem import Call, make_problem
from flash_decoding.workspace import take_partial

_LN_2 = math.log(2.0)


class State(NamedTuple):
    """out [B, H, Lq, Dv] and lse [B, H, Lq] of float32, finished over some keys."""

    out: Tensor
    lse: Tensor


def decode_shard(request: Request, calls: list[LocalCall], own: State) -> None:
    """This rank's state over its keys."""
    for number, call in enumerate(calls):
        state = own if number == 0 else State(torch.empty_like(own.out), torch.empty_like(own.lse))
        options = request.sequence | request.options | call.options
        if call.by_token:
            _decode_by_token(request, options, state)
        else:
            out = state.out.transpose(1, 2) if request.layout == "bnhd" else state.out
            _decode_float32(request, request.q, request.k, request.v, options, State(out, state.lse))
        if call.distance is not None:
            slopes = request.sequence["alibi_slopes"]
            state.lse.sub_(slopes[:, None] * call.distance[:, None, :].to(torch.float32))
        if number:
            merge_states([own.out, state.out], [own.lse, state.lse], out=own.out, lse=own.lse)


def _decode_by_token(request: Request, options: dict[str, Any], state: State) -> None:
    """Every query token as a sequence of its own over the same keys: a dense cache is a page per sequence."""
    batch, heads, q_len, value_dim = state.out.shape
    if capacity_of(request) == 0:
        state.out.zero_()
        state.lse.fill_(-math.inf)
        return
    table = options.get("block_table")
    if table is None:
        table = torch.arange(batch, dtype=torch.int32, device=request.q.device)[:, None]
    mask = options.get("key_mask")
    options = options | {
        "block_table": table.repeat_interleave(q_len, 0),
        "key_mask": None if mask is None else mask.repeat_interleave(q_len, 0),
    }
    tokens = request.q.transpose(1, 2) if request.layout == "bhnd" else request.q  # [B, Lq, Hq, D]
    rows = tokens.reshape(batch * q_len, 1, heads, -1)
    out = torch.empty((batch * q_len, 1, heads, value_dim), dtype=torch.float32, device=request.q.device)
    lse = torch.empty((batch * q_len, heads, 1), dtype=torch.float32, device=request.q.device)
    if request.layout == "bhnd":
        _decode_float32(request, rows.transpose(1, 2), request.k, request.v, options, State(out.transpose(1, 2), lse))
    else:
        _decode_float32(request, rows, request.k, request.v, options, State(out, lse))
    state.out.copy_(out.view(batch, q_len, heads, value_dim).transpose(1, 2))
    state.lse.copy_(lse.view(batch, q_len, heads).transpose(1, 2))


def _decode_float32(
    request: Request, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any], state: State
) -> None:  # fmt: skip
    """flash_decode() into float32 out, in the layout of the call, and lse.

    flash_decode() rounds its output to the dtype of q. For a 16-bit q its parts are called one by one: the reduce
    kernel of a GPU writes any dtype, and the partials of a CPU are merged here.
    """
    if q.dtype == torch.float32:
        flash_decode(
            q, k, v, return_lse=True, out=state.out, lse=state.lse, workspace=request.workspace,
            backend=request.backend, **options,
        )  # fmt: skip
        return
    call = Call(q, k, v, **options)
    problem = make_problem(call)
    over_codes = None if problem.kv_format is None else q.dtype
    for error in backends.find_backend_errors(request.backend, q.device, over_codes):
        raise error
    name = backends.resolve(request.backend, q.device)
    module = backends.load(name)
    plan = module.plan(problem, call.num_splits, call.split_size)
    if plan.num_splits == 1:  # which writes the finished output at once, in the dtype of q
        plan = module.plan(problem, 2, None)
    shape = plan.partial_shape(problem.batch, problem.heads_kv, problem.group, problem.q_len)
    partial = take_partial(request.workspace, shape, problem.value_dim, q.device)
    assert partial is not None, "there are splits"
    out = state.out.transpose(1, 2) if call.layout == "bnhd" else state.out
    if name == "triton":
        module.decode(problem, plan, partial, out, state.lse)
        return
    rounded = torch.empty(out.shape, dtype=q.dtype, device=q.device)
    module.decode(problem, plan, partial, rounded, None)
    merge_states(
        partial.acc / partial.l[..., None], partial.m * _LN_2 + partial.l.log(), out=out, lse=state.lse
    )  # fmt: skip
