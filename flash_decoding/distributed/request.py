"""The arguments of a call of context_parallel_decode(): what ranks agree on, and every reason to refuse them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_decoding import backends
from flash_decoding.distributed.agreement import Members, describe, find_device_errors
from flash_decoding.distributed.cost import WAYS
from flash_decoding.distributed.sharding import (
    Contiguous,
    Interleaved,
    Sequences,
    arrays_of,
    find_position_errors,
    parse_shard,
)
from flash_decoding.problem import Call, find_errors, find_result_errors, has_codes, sides_of
from flash_decoding.quantization import element_width
from flash_decoding.workspace import Workspace

OUTPUTS = ("replicated", "heads")
COMMUNICATE = ("auto", *WAYS)
# Options of a call on the whole that no rank needs to agree on: where its own keys lie, and how it goes about them.
_OWN = (
    "k", "v", "block_table", "key_mask", "k_scale", "v_scale", "num_splits", "split_size", "out", "lse", "check",
)  # fmt: skip
_FIELDS = frozenset(Call._fields)
# What ranks do agree on besides what is said of sequences, with what it is when not given.
_COMMON = {
    name: default for name, default in Call._field_defaults.items() if name not in (*_OWN, *Sequences._fields, "sinks")
}


class Request(NamedTuple):
    """The arguments of one call."""

    q: Tensor
    k: Tensor
    v: Tensor
    sequence: dict[str, Any]  # what is said of whole sequences
    sinks: Tensor | None
    shard: Any
    output: str
    communicate: str
    return_lse: bool
    out: Tensor | None
    lse: Tensor | None
    workspace: Any
    backend: str
    options: dict[str, Any]  # the other fields of Call

    @property
    def layout(self) -> str:
        return self.options.get("layout", "bhnd")


def signature_of(request: Request) -> tuple:
    """All that the ranks agree on; changes on every rank at once or not at all."""
    r = request
    own = () if needs_no_positions(r) or knows_positions(r) else (describe(capacity_of(r)),)
    compared = (*r.sequence.values(), r.sinks, r.shard, r.output, r.communicate, r.backend)
    return (
        describe(r.q), getattr(r.q, "device", None), *[_kind(x, r.layout) for x in (r.k, r.v)],
        *[describe(x) for x in (*compared, *_common_options(r).values())],
        bool(r.return_lse), r.out is None, r.lse is None, *[name for name in r.options if name not in _FIELDS], own,
    )  # fmt: skip


def _common_options(request: Request) -> dict[str, Any]:
    """The options that every rank must give alike, those that are not given included."""
    return {name: request.options.get(name, default) for name, default in _COMMON.items()}


def _kind(x: object, layout: object) -> object:
    """What ranks have in common of K or V: dtype, heads and width; lengths and numbers of pages differ."""
    if not isinstance(x, Tensor) or x.ndim != 4:
        return describe(x)
    return x.dtype, x.shape[2 if layout == "bnhd" else 1], x.shape[3]


def needs_no_positions(request: Request) -> bool:
    """Whether the one query token sees every key of every shard, wherever it lies."""
    s, length = request.sequence, 2 if request.layout == "bhnd" else 1
    positional = ("kv_lens", "kv_start", "window", "alibi_slopes", "tree_mask")
    one = isinstance(request.q, Tensor) and request.q.ndim == 4 and request.q.shape[length] == 1
    return one and all(s[name] is None for name in positional)


def knows_positions(request: Request) -> bool:
    """Whether lengths and positions follow from the arguments, whatever the shards can hold."""
    shard = request.shard
    rule = isinstance(shard, Interleaved) or shard == "interleaved"
    given = isinstance(shard, Contiguous) and shard.start is not None
    return request.sequence["kv_lens"] is not None and (rule or given)


def capacity_of(request: Request) -> int | None:
    """Keys that this rank's shard can hold per sequence."""
    table, length = request.options.get("block_table"), 2 if request.layout == "bhnd" else 1
    if not isinstance(request.k, Tensor) or request.k.ndim != 4:
        return None
    pages = table.shape[1] if isinstance(table, Tensor) and table.ndim == 2 else 1
    return request.k.shape[length] * pages


def value_dim_of(request: Request) -> int:
    """The width of out; codes may lie two in a byte."""
    sides = sides_of(Call(request.q, request.k, request.v, kv_format=request.options.get("kv_format")))
    return element_width(sides[1], request.v)


def facts_of(request: Request) -> dict[str, Any]:
    """What must be the same on all ranks, by the names that a caller knows."""
    q, k, v = request.q, request.k, request.v
    named = request.sequence | {"sinks": request.sinks} | _common_options(request)
    return {
        "q.shape": list(q.shape), "q.dtype": q.dtype, "q.device": q.device.type,
        "heads_kv": v.shape[1 if request.layout == "bhnd" else 2], "value_dim": value_dim_of(request),
        "k.dtype": k.dtype, "v.dtype": v.dtype, "shard": parse_shard(request.shard), "output": request.output,
        "communicate": request.communicate, "return_lse": bool(request.return_lse),
    } | {name: _fact(x) for name, x in named.items()}  # fmt: skip


def _fact(x: object) -> object:
    return list(x.shape) if isinstance(x, Tensor) else x


def find_refusals(members: Members, request: Request) -> Iterator[Exception]:
    """Every reason to refuse the call that this rank can tell alone."""
    fields = set(Call._fields) - set(request.sequence) - {"q", "k", "v", "sinks", "out", "lse"}
    for name in request.options:
        if name not in fields:
            yield TypeError(f"options must be arguments of flash_decode(), got {name}")
            return
    choices = ("output", request.output, OUTPUTS), ("communicate", request.communicate, COMMUNICATE)
    for name, value, allowed in choices:
        if value not in allowed:
            yield ValueError(f"{name} must be one of {list(allowed)}, got {value!r}")
    try:
        shard = parse_shard(request.shard)
    except (TypeError, ValueError) as error:
        yield error
        return
    # Lengths of the whole may be beyond this shard; they are held against all shards in every call on a CPU.
    whole: dict[str, Any] = {
        name: torch.zeros_like(x) if name in ("kv_lens", "kv_start") and isinstance(x, Tensor) else x
        for name, x in (request.sequence | request.options).items()
    }
    q = request.q
    call = Call(q, request.k, request.v, sinks=request.sinks, **whole)
    reasons = list(find_errors(call))
    yield from reasons
    if reasons:
        return
    if request.workspace is not None and not isinstance(request.workspace, Workspace):
        yield TypeError(f"workspace must be a Workspace or None, got {type(request.workspace).__name__}")
    yield from backends.find_backend_errors(request.backend, q.device, q.dtype if has_codes(call) else None)
    yield from find_device_errors(members, q.device)
    for name, x in arrays_of(shard).items():
        if x is None:
            continue
        yield from _find_array_errors(name, x, q.device, q.shape[0])
        if request.sequence["kv_lens"] is None:
            yield ValueError(f"kv_lens must be given with {name}, got None")
    heads_q, q_len = (q.shape[i] for i in ((1, 2) if request.layout == "bhnd" else (2, 1)))
    if heads_q % members.ranks and (request.output == "heads" or request.communicate == "reduce_scatter"):
        yield ValueError(f"heads_q must be a multiple of the {members.ranks} ranks to be split, got {heads_q}")
    yield from find_position_errors(shard, members.ranks, Sequences(q_len=q_len, **request.sequence))
    yield from find_output_errors(request, heads_q // (members.ranks if request.output == "heads" else 1))


def _find_array_errors(name: str, x: object, device: torch.device, batch: int) -> Iterator[Exception]:
    if not isinstance(x, Tensor):
        yield TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        return
    if x.dtype not in (torch.int32, torch.int64):
        yield TypeError(f"{name} must be int32 or int64, got {x.dtype}")
    if x.shape != (batch,):
        yield ValueError(f"{name} must have shape [{batch}], got {list(x.shape)}")
    if x.device != device:
        yield ValueError(f"{name} must be on the device of q, {device}, got {x.device}")


def find_output_errors(request: Request, heads: int) -> Iterator[Exception]:
    """out and lse, held against what comes out, and sinks; what may differ between calls of one signature."""
    if request.sinks is not None and not request.sinks.is_contiguous():
        yield ValueError(f"sinks must be contiguous, got stride {request.sinks.stride(0)}")
    if request.out is request.lse is None:
        return
    batch, q_len = request.q.shape[0], request.q.shape[2 if request.layout == "bhnd" else 1]
    middle = (heads, q_len) if request.layout == "bhnd" else (q_len, heads)
    for name, x in (("out", request.out), ("lse", request.lse)):
        if x is not None and not isinstance(x, Tensor):
            yield TypeError(f"{name} must be a torch.Tensor or None, got {type(x).__name__}")
    out_shape = batch, *middle, value_dim_of(request)
    yield from find_result_errors(request.q, request.out, request.lse, out_shape, (batch, heads, q_len))
