"""A rank's own part: its shard decoded into a state, the softmax over its keys, not yet finished."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from flash_decoding import backends
from flash_decoding.distributed.request import Request, capacity_of
from flash_decoding.distributed.sharding import LocalCall
from flash_decoding.problem import Call, make_problem
from flash_decoding.workspace import Partial, make_partial, take_partial

_LOG2_E = math.log2(math.e)


def find_backend(request: Request) -> ModuleType:
    """Who decodes the shard and merges the states."""
    return backends.load(backends.resolve(request.backend, request.q.device))


def decode_shard(request: Request, calls: list[LocalCall], own: Partial) -> None:
    """Fill this rank's state, [B, Hq, Lq(, Dv)], over its keys."""
    if len(calls) == 1:
        _decode_call(request, calls[0], own)
        return
    *shape, value_dim = own.acc.shape
    floats = len(calls) * math.prod(shape) * (value_dim + 2)
    states = make_partial(own.acc.new_empty(floats), (len(calls), *shape), value_dim)
    for i, call in enumerate(calls):
        _decode_call(request, call, Partial(*[x[i] for x in states]))
    find_backend(request).merge_partials(states, *own)


def _decode_call(request: Request, call: LocalCall, state: Partial) -> None:
    options = request.sequence | request.options | call.options
    if call.by_token:
        _decode_by_token(request, options, state)
    else:
        _decode(request, request.q, options, state)
    if call.distance is not None:
        slopes = request.sequence["alibi_slopes"].double()
        state.m.sub_(slopes[:, None] * call.distance[:, None, :] * _LOG2_E)


def _decode_by_token(request: Request, options: dict[str, Any], state: Partial) -> None:
    """Every query token as a sequence of its own over the same keys: a dense cache is a page per sequence."""
    batch, heads, q_len, value_dim = state.acc.shape
    if capacity_of(request) == 0:
        for x, nothing in zip(state, (0.0, -math.inf, 0.0), strict=True):
            x.fill_(nothing)
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
    shape = batch * q_len, heads, 1
    each = make_partial(state.acc.new_empty(math.prod(shape) * (value_dim + 2)), shape, value_dim)
    _decode(request, rows.transpose(1, 2) if request.layout == "bhnd" else rows, options, each)
    for x, y in zip(state, each, strict=True):
        x.copy_(y.view(batch, q_len, heads, *y.shape[3:]).transpose(1, 2))


def _decode(request: Request, q: Tensor, options: dict[str, Any], state: Partial) -> None:
    """flash_decode() up to its end, which is for all ranks together."""
    call = Call(q, request.k, request.v, **options)
    problem = make_problem(call)
    for error in backends.find_problem_errors(request.backend, problem):
        raise error
    module = find_backend(request)
    plan = module.plan(problem, call.num_splits, call.split_size)
    shape = plan.partial_shape(problem.batch, problem.heads_kv, problem.group, problem.q_len)
    partial = take_partial(request.workspace, shape, problem.value_dim, q.device)
    module.decode_state(problem, plan, partial, state)
