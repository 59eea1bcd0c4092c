"""Runs a checked call, and registers that with torch.library for torch.compile and other tracers.

The one op writes into out and lse and returns nothing; its schema declares the mutation. The dispatcher costs several
microseconds, so an eager call does not go through it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from flash_decoding import backends
from flash_decoding.problem import Call, Problem, find_option_errors, make_problem, sides_of
from flash_decoding.quantization import KVFormat, element_width, place_scale
from flash_decoding.recorded import Recorded
from flash_decoding.split_plan import Plan
from flash_decoding.workspace import Partial, Workspace, take_partial


def run(
    problem: Problem, call: Call, backend: str, workspace: Workspace | None, out: Tensor, lse: Tensor | None
) -> None:
    """Plan, take scratch, start the backend. out has the layout of the call."""
    if out.numel() == 0:
        return
    module, plan, partial, view = _prepare(problem, call, backend, workspace, out)
    module.decode(problem, plan, partial, view, lse)


def run_and_record(
    problem: Problem, call: Call, backend: str, workspace: Workspace | None, out: Tensor, lse: Tensor | None
) -> Recorded | None:
    """run(), and how to do it again, where the backend knows."""
    if out.numel() == 0:
        return None
    module, plan, partial, view = _prepare(problem, call, backend, workspace, out)
    start = module.record(problem, plan, partial, view, lse)
    if start is None:
        return None
    lse_shape = (problem.batch, problem.heads_q, problem.q_len)
    scratch_shape = None if partial is None else tuple(partial.m.shape)
    return Recorded(start, out.device, tuple(out.shape), lse_shape, scratch_shape, call.q)


def _prepare(
    problem: Problem, call: Call, backend: str, workspace: Workspace | None, out: Tensor
) -> tuple[ModuleType, Plan, Partial | None, Tensor]:
    """The backend, its plan, scratch, and out as [B, Hq, Lq, Dv]."""
    module = backends.load(backends.resolve(backend, problem.q.device))
    plan = module.plan(problem, call.num_splits, call.split_size)
    shape = plan.partial_shape(problem.batch, problem.heads_kv, problem.group, problem.q_len)
    partial = take_partial(workspace, shape, problem.value_dim, problem.q.device)
    return module, plan, partial, out.transpose(1, 2) if call.layout == "bnhd" else out


# The types whose memory a kernel may touch; anything else belongs to the dispatcher.
_PLAIN = (Tensor, torch.nn.Parameter)


def is_traced(*tensors: Tensor) -> bool:
    """Whether the call is being recorded, or its tensors have no memory of their own: then it goes through the op."""
    return is_watched() or any(isinstance(x, Tensor) and type(x) not in _PLAIN for x in tensors)


def is_watched() -> bool:
    """Whether somebody records or rewrites what is called: then calls go through the dispatcher."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._get_tracing_state() is not None
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def make_traced_outputs(call: Call, return_lse: bool, workspace: Workspace | None) -> tuple[Tensor, Tensor | None]:
    """(out, lse) as a tracer sees them: made in the graph. Refuses what a graph cannot do; the op checks the rest."""
    if workspace is not None:
        raise ValueError("workspace must be None where the call is traced: graphs own their scratch")
    for error in find_option_errors(call):
        raise error
    if call.check:
        raise ValueError("check must be False where the call is traced: it reads lengths on the host")
    q, k, v, out, lse = call.q, call.k, call.v, call.out, call.lse
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise ValueError(
            "q, k and v must not require a gradient, there is no backward; use torch.no_grad() or detach()"
        )
    if out is None:
        out = q.new_empty((*q.shape[:-1], element_width(sides_of(call)[1], v)))
    if return_lse and lse is None:
        heads, length = (1, 2) if call.layout == "bhnd" else (2, 1)
        lse = q.new_empty((q.shape[0], q.shape[heads], q.shape[length]), dtype=torch.float32)
    return out, lse


def op_arguments(call: Call) -> list[Any]:
    """The fields of Call up to out as the op takes them: a format by its name, scales as tensors."""
    fields: dict[str, Any] = dict(zip(Call._fields[: Call._fields.index("out")], call, strict=False))
    if isinstance(call.kv_format, KVFormat):
        fields["kv_format"] = str(call.kv_format)
    for name in ("k_scale", "v_scale"):
        scale = fields[name]
        if scale is not None and not isinstance(scale, Tensor):
            fields[name] = place_scale(scale, call.q.device)
    return list(fields.values())


_library = torch.library.Library("flash_decoding", "DEF")


def register_op(schema: str, function: Callable[..., None]) -> None:
    """An op that writes to arguments, as its schema says, and returns nothing: there is nothing for a fake to infer."""
    name = schema[: schema.index("(")]
    _library.define(schema)
    for key in ("CPU", "CUDA"):
        _library.impl(name, function, key)
    torch.library.register_fake(f"flash_decoding::{name}", lambda *_arguments: None, lib=_library)


def _decode(*arguments: Any) -> None:
    *options, backend, out, lse = arguments
    call = Call._make((*options, out, lse, False))
    problem = make_problem(call)
    over_codes = None if problem.kv_format is None else call.q.dtype
    for error in backends.find_backend_errors(backend, call.q.device, over_codes):
        raise error
    for error in backends.find_problem_errors(backend, problem):
        raise error
    run(problem, call, backend, None, out, lse)


# The fields of Call up to out, then the backend and the outputs.
register_op(
    "decode(Tensor q, Tensor k, Tensor v, str layout, Tensor? kv_lens, Tensor? kv_start, Tensor? block_table, "
    "Tensor? q_lens, float? scale, bool causal, int? window, float? softcap, Tensor? alibi_slopes, Tensor? sinks, "
    "Tensor? key_mask, Tensor? tree_mask, str? kv_format, Tensor? k_scale, Tensor? v_scale, int? num_splits, "
    "int? split_size, str backend, Tensor(a!) out, Tensor(b!)? lse) -> ()",
    _decode,
)
