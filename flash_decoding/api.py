"""What people call: flash_decode() and explain()."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_decoding import backends, recorded
from flash_decoding.op import is_traced, is_watched, make_traced_outputs, op_arguments, run, run_and_record
from flash_decoding.problem import Call, find_errors, has_codes, make_problem
from flash_decoding.quantization import KVFormat
from flash_decoding.workspace import Workspace

# Optional tensors as they came; scales may be numbers, and anything may be wrong.
_Arrays = tuple[Any, ...]


def flash_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layout: str = "bhnd",
    kv_lens: Tensor | None = None,
    kv_start: Tensor | None = None,
    block_table: Tensor | None = None,
    q_lens: Tensor | None = None,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    key_mask: Tensor | None = None,
    tree_mask: Tensor | None = None,
    kv_format: KVFormat | str | None = None,
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
    num_splits: int | None = None,
    split_size: int | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    workspace: Workspace | None = None,
    backend: str = "auto",
    check: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of a few new query tokens per sequence against a long key/value cache, parallel over the keys.

    The keys are cut into splits, every split gives a partial softmax, and the partials are merged exactly: the result
    is that of softmax(scale q k^T) v. Query head i reads KV head i // (Hq / Hkv), and K and V are read once for all
    query heads of their group (on a GPU up to 64 of them at a time, 32 for heads wider than 128, 8 in float32). There
    is no backward.

    Args:
        q: [B, Hq, Lq, D], float16, bfloat16 or float32 (over codes on a GPU not float32); Lq from 1 to 64 tokens, the
            last ones of each sequence. D a multiple of 8 from 16 to 576.
        k: [B, Hkv, N, D], dtype of q, or codes of a quantised cache. Any strides with the last axis contiguous; never
            copied.
        v: [B, Hkv, N, Dv], likewise. Dv, up to 512, may differ from D, and v may be a view into k.
        layout: "bhnd" as above (SDPA, Transformers), or "bnhd" (flash-attn): q [B, Lq, Hq, D], k [B, N, Hkv, D],
            v [B, N, Hkv, Dv].
        kv_lens: [B] int32 or int64 on the device of q, keys to use per sequence, 0 allowed; None means N. Never read on
            the host, so a captured CUDA graph is right for every later content. Values outside 0 to N are clamped on a
            GPU and refused on the CPU, where looking costs nothing.
        kv_start: [B], the first key to use per sequence (left padding), likewise; None means 0.
        block_table: [B, max_pages] int32, the pages of each sequence in a paged cache: k is then
            [pages, Hkv, page_size, D] ([pages, page_size, Hkv, D] for "bnhd"), v likewise, and kv_lens must be given.
            Any page_size; sequences may share pages; entries past a sequence's end may hold anything.
        q_lens: [B], query tokens per sequence, where they differ: the first q_lens[b] rows of q count, and sequence b's
            last key belongs to the last of them. None means Lq. Rows past q_lens get out 0 and lse -inf.
        scale: multiplies q·k; None means 1/sqrt(D).
        causal: query t sees keys up to its own position, kv_lens - q_lens + t. Changes nothing for a single token.
        window: how many keys left of its own position a query sees, itself besides; None means all. Shortens what is
            loaded.
        softcap: a score becomes softcap * tanh(score / softcap), before masking; None and 0 mean off.
        alibi_slopes: [Hq] float32; slope * |own position - key| is taken from each score. None means off.
        sinks: [Hq] float32, one more logit per head in the denominator, neither scaled nor capped; None means off.
        key_mask: [B, N] bool, True for a visible key; None means all. Combines with kv_lens and kv_start, which spare
            loading what they exclude. N is max_pages * page_size for a paged cache.
        tree_mask: [B, Lq, Lq] bool, which of the new tokens (the last q_lens keys) each query sees, in place of causal;
            None means causal.
        kv_format: how k and v are quantised: a KVFormat, or a name as in KVFormat.parse(), which leaves the kind of
            scales to the shapes of k_scale and v_scale where it names none. None reads it off dtypes float8_e4m3fn,
            float8_e5m2 and int8; uint8 needs a format.
        k_scale: what the codes of k are multiplied with: float32 [] or [1] or a number for all; [Hkv] per head;
            [Hkv, D] per channel; [B, Hkv, N] per token ([B, N, Hkv] for "bnhd", [pages, Hkv, page_size] with pages),
            any strides; for int4 float16 [B, Hkv, N, D / group], with a zero point [B, Hkv, N, D / group, 2]. None
            means 1 for fp8 codes. On a CPU those of up to two axes are refused where one is 0 or not finite. A number
            becomes a tensor on every call, which a tensor on the device spares.
        v_scale: likewise, Dv wide and not per channel.
        num_splits: how many splits per sequence; None lets the planner choose, 1 takes no scratch and one kernel.
        split_size: keys per split instead; a sequence's result then has the same bits whatever else is in the batch.
        return_lse: return (out, lse) instead of out.
        out, lse: where to write; None allocates. out has the shape and dtype of the result, with any strides whose last
            is 1, and overlaps neither itself nor an input; lse is [B, Hq, Lq] float32 and contiguous.
        workspace: scratch owned by the caller; None uses the library's own, one per device, stream and thread. Must be
            None under torch.compile and other tracers, whose graphs own their scratch.
        backend: "auto", "triton" (CUDA devices) or "cpu"; a backend named here never falls back to another.
        check: also read lengths, page ids and scales on a GPU and refuse what would be refused on a CPU; synchronises.

    Returns:
        out: [B, Hq, Lq, Dv] ([B, Lq, Hq, Dv] for "bnhd"), dtype of q. lse, with return_lse: [B, Hq, Lq] float32, the
        natural log of the sum of exp of the scaled (and capped) scores, without the sink. A row that sees no key has
        out 0 and lse -inf.

    Raises:
        ValueError: shapes, devices, layouts or values that do not fit, or a backend that cannot run the call.
        TypeError: a wrong Python type or dtype. All are raised before any launch; explain() lists every reason.

    Example:
        >>> q, k, v = torch.randn(2, 8, 1, 64), torch.randn(2, 2, 1000, 64), torch.randn(2, 2, 1000, 64)
        >>> out, lse = flash_decode(q, k, v, return_lse=True)
        >>> out.shape, lse.shape
        (torch.Size([2, 8, 1, 64]), torch.Size([2, 8, 1]))

    Source: T. Dao, D. Haziza, F. Massa, G. Sizov, "Flash-Decoding for long-context inference", 2023.
    """
    arrays: _Arrays = (
        kv_lens, kv_start, block_table, q_lens, alibi_slopes, sinks, key_mask, tree_mask, k_scale, v_scale
    )  # fmt: skip
    given = [x for x in arrays if x is not None]
    key = record = None
    if check is False and _may_be_recorded(q, k, v, given):
        addresses = [q.data_ptr(), k.data_ptr(), v.data_ptr()]
        key = (
            q.shape, q.stride(), q.dtype, q.device, k.shape, k.stride(), k.dtype, k.device, v.shape, v.stride(),
            v.dtype, v.device, (addresses[0] | addresses[1] | addresses[2]) & 15, addresses[1] == addresses[2], layout,
            kv_format, scale, type(scale), causal, type(causal), window, type(window), softcap, type(softcap),
            num_splits, type(num_splits), split_size, type(split_size), return_lse, backend,
            _facts(arrays) if given else None, None if out is lse is None else _facts((out, lse)),
            0 if q.is_cuda else torch.get_num_threads(),
        )  # fmt: skip
        try:
            record = recorded.find(key)
        except TypeError:  # something unhashable is none of the types allowed, which the checks below say by name
            record = key = None
        if record is not None and _has_plain_flags(q, k, v, given, workspace):
            addresses += [x.data_ptr() for x in given]
            done = record.repeat((q, k, v, *arrays), addresses, out, lse, return_lse, workspace)
            if done is not None:
                return done

    call = Call(
        q=q, k=k, v=v, layout=layout, kv_lens=kv_lens, kv_start=kv_start, block_table=block_table, q_lens=q_lens,
        scale=scale, causal=causal, window=window, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks,
        key_mask=key_mask, tree_mask=tree_mask, kv_format=kv_format, k_scale=k_scale, v_scale=v_scale,
        num_splits=num_splits, split_size=split_size, out=out, lse=lse, check=check,
    )  # fmt: skip
    if is_traced(q, k, v):
        return _traced(call, return_lse, workspace, backend)
    problem = make_problem(call)
    for error in backends.find_backend_errors(backend, q.device, None if problem.kv_format is None else q.dtype):
        raise error
    for error in backends.find_problem_errors(backend, problem):
        raise error
    if workspace is not None and not isinstance(workspace, Workspace):
        raise TypeError(f"workspace must be a Workspace or None, got {type(workspace).__name__}")
    if out is None:
        out = recorded.make_out(q, (*q.shape[:3], problem.value_dim))
    if return_lse and lse is None:
        lse = torch.empty((problem.batch, problem.heads_q, problem.q_len), dtype=torch.float32, device=q.device)
    if key is None or record is not None:
        run(problem, call, backend, workspace, out, lse)
    else:
        recorded.add(key, run_and_record(problem, call, backend, workspace, out, lse))
    return (out, lse) if return_lse and lse is not None else out


def _may_be_recorded(q: Tensor, k: Tensor, v: Tensor, given: list[Any]) -> bool:
    """Whether these are plain tensors in memory.

    On a CPU, arrays are looked at on every call and take the long way, as do scales that are no tensors on the device.
    """
    return (
        type(q) is Tensor and type(k) is Tensor and type(v) is Tensor and not is_watched()
        and q.layout is k.layout is v.layout is torch.strided
        and (not given or (q.is_cuda and all(isinstance(x, Tensor) and x.is_cuda for x in given)))
    )  # fmt: skip


def _facts(arrays: _Arrays) -> tuple:
    """What a signature holds of optional tensors; anything else stands for itself."""
    return tuple([
        (x.shape, x.stride(), x.dtype, x.device) if isinstance(x, Tensor) and x.layout is torch.strided else x
        for x in arrays
    ])  # fmt: skip


def _has_plain_flags(q: Tensor, k: Tensor, v: Tensor, given: list[Any], workspace: Workspace | None) -> bool:
    """Whether nothing that a signature does not tell would have the call refused."""
    if torch.is_grad_enabled():
        for x in (q, k, v, *given):  # integers never require one
            if x.requires_grad:
                return False
    return not (q.is_neg() or k.is_neg() or v.is_neg()) and (workspace is None or type(workspace) is Workspace)


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layout: str = "bhnd",
    kv_lens: Tensor | None = None,
    kv_start: Tensor | None = None,
    block_table: Tensor | None = None,
    q_lens: Tensor | None = None,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    key_mask: Tensor | None = None,
    tree_mask: Tensor | None = None,
    kv_format: KVFormat | str | None = None,
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
    num_splits: int | None = None,
    split_size: int | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    workspace: Workspace | None = None,
    backend: str = "auto",
    check: bool = False,
) -> list[str]:
    """Every reason why flash_decode() would refuse these arguments; an empty list means that it accepts them.

    Args: those of flash_decode(). Nothing is computed.

    Example:
        >>> q, k, v = torch.randn(2, 6, 1, 64), torch.randn(2, 4, 100, 64), torch.randn(2, 4, 100, 64)
        >>> explain(q, k, v)
        ['heads_q must be a positive multiple of heads_kv, got 6 and 4']
    """
    call = Call(
        q=q, k=k, v=v, layout=layout, kv_lens=kv_lens, kv_start=kv_start, block_table=block_table, q_lens=q_lens,
        scale=scale, causal=causal, window=window, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks,
        key_mask=key_mask, tree_mask=tree_mask, kv_format=kv_format, k_scale=k_scale, v_scale=v_scale,
        num_splits=num_splits, split_size=split_size, out=out, lse=lse, check=check,
    )  # fmt: skip
    reasons = [str(error) for error in find_errors(call)]
    if isinstance(q, Tensor):
        over_codes = q.dtype if has_codes(call) else None
        reasons += [str(error) for error in backends.find_backend_errors(backend, q.device, over_codes)]
    if not reasons:
        reasons += [str(error) for error in backends.find_problem_errors(backend, make_problem(call))]
    if workspace is not None and not isinstance(workspace, Workspace):
        reasons.append(f"workspace must be a Workspace or None, got {type(workspace).__name__}")
    return reasons


def _traced(call: Call, return_lse: bool, workspace: Workspace | None, backend: str) -> Tensor | tuple[Tensor, Tensor]:
    """The call as a tracer sees it: outputs made in the graph, and one op that fills them and checks the rest."""
    out, lse = make_traced_outputs(call, return_lse, workspace)
    torch.ops.flash_decoding.decode(*op_arguments(call), backend, out, lse)
    return (out, lse) if return_lse and lse is not None else out
