"""The merge of partial attention results: the definition that every other merge must equal."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from flash_decoding import backends
from flash_decoding.op import is_traced
from flash_decoding.problem import DTYPES

_LN_2 = math.log(2.0)
# Columns that one program of the kernel holds; attention needs 512.
_MAX_WIDTH = 16384


def merge_states(
    outs: Tensor | Sequence[Tensor],
    lses: Tensor | Sequence[Tensor],
    *,
    base: str | int = "e",
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Merge attention over disjoint sets of keys into attention over their union, exactly.

    With M = max lse_i and w_i = exp(lse_i - M): out = sum w_i out_i / sum w_i and lse = M + ln sum w_i. The merge is
    commutative and associative; the state without keys, (anything, -inf), is its identity. See docs/algebra.md.

    On a GPU that is one kernel, the reduce kernel of flash_decode(). More than two states in a sequence are stacked
    first, and what is not contiguous (apart from the first axis of a stack) is copied. Elsewhere, under torch.compile
    and where a gradient is wanted, the formula runs in PyTorch.

    Args:
        outs: the partial outputs, a sequence of [..., Dv] or one tensor [S, ..., Dv] whose first axis counts states;
            float16, bfloat16 or float32. Dv up to 16384 on a GPU.
        lses: their log-sum-exp, a sequence of [...] or one tensor [S, ...]; float32. An entry of -inf or +inf means
            that the state saw no key (both conventions are in use); its output is then ignored, NaN included.
        base: "e" if the lses are natural logarithms (ours, flash-attn's), "2" if binary ones (FlashInfer's).
        out: [..., Dv], where to write; float16, bfloat16 or float32, whatever outs are: float32 states can become a
            16-bit result that is rounded once. It may be one of outs (or a slice of the stack), which merges in place;
            otherwise it shares no memory with them. None allocates.
        lse: [...] float32, likewise.

    Returns:
        out: [..., Dv], the one given or a new one with the dtype of outs; lse: [...] float32 in the same base. Where no
        state saw a key: 0 and -inf.

    Raises:
        ValueError: shapes, counts, devices or a base that do not fit. TypeError: dtypes.

    Example:
        >>> out = torch.ones(2, 3, 64), torch.zeros(2, 3, 64)
        >>> lse = torch.zeros(2, 3), torch.zeros(2, 3)
        >>> merge_states(out, lse)[0].mean().item()
        0.5
        >>> merged, _ = merge_states(out, lse, out=out[0], lse=lse[0])
        >>> merged is out[0], lse[0][0, 0].item() == torch.tensor(2.0).log().item()
        (True, True)
    """
    first, first_lse = _first("outs", outs), _first("lses", lses)
    _refuse(first, first_lse, len(outs), len(lses), base, out, lse)
    natural = base == "e"
    if not _has_kernel(outs, lses, first.device):
        merged, merged_lse = _merge(_stacked(outs), _stacked(lses), natural)
        merged = merged.to(first.dtype) if out is None else out.copy_(merged)
        return merged, merged_lse if lse is None else lse.copy_(merged_lse)

    if first.shape[-1] > _MAX_WIDTH:
        raise ValueError(f"outs must be at most {_MAX_WIDTH} wide on a GPU, got {first.shape[-1]}")
    if out is None:
        out = torch.empty(first.shape, dtype=first.dtype, device=first.device)
    if lse is None:
        lse = torch.empty(first_lse.shape, dtype=torch.float32, device=first.device)
    if first_lse.numel():
        _launch(outs, lses, natural, out, lse)
    return out, lse


def _merge(outs: Tensor, lses: Tensor, natural: bool) -> tuple[Tensor, Tensor]:
    """The definition, in float32; the first axis counts states."""
    lses = lses.masked_fill(lses == math.inf, -math.inf)
    empty = lses == -math.inf
    top = lses.amax(dim=0)
    shift = top.masked_fill(top == -math.inf, 0.0)  # -inf - -inf would be NaN
    w = torch.exp((lses - shift) * (1.0 if natural else _LN_2))
    total = w.sum(dim=0)
    w = w / total.masked_fill(total == 0, 1.0)
    merged = (w[..., None] * outs.float().masked_fill(empty[..., None], 0.0)).sum(dim=0)
    return merged, shift + (torch.log(total) if natural else torch.log2(total))


def _has_kernel(outs: Tensor | Sequence[Tensor], lses: Tensor | Sequence[Tensor], device: torch.device) -> bool:
    """Whether the states lie in memory that the kernel may read, and nobody wants a gradient."""
    tensors = [x for states in (outs, lses) for x in ([states] if isinstance(states, Tensor) else states)]
    if is_traced(*tensors):  # first: a tracer must not see how backends are found
        return False
    if backends.resolve("auto", device) != "triton" or any(backends.find_backend_errors("auto", device)):
        return False
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    return not wanted and not any(x.is_neg() for x in tensors)


def _launch(
    outs: Tensor | Sequence[Tensor], lses: Tensor | Sequence[Tensor], natural: bool, out: Tensor, lse: Tensor
) -> None:
    device = out.device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return _launch(outs, lses, natural, out, lse)
    acc, acc_step = _spaced(outs)
    m, m_step = _spaced(lses)
    merged, merged_lse = (x if x.is_contiguous() else torch.empty(x.shape, dtype=x.dtype, device=device)
                          for x in (out, lse))  # fmt: skip
    backends.load("triton.reduce").launch_merge(
        acc, m, (acc_step, m_step), len(outs), natural, merged.view(lse.numel(), out.shape[-1]), merged_lse
    )
    for x, y in ((out, merged), (lse, merged_lse)):
        if x is not y:
            x.copy_(y)


def _spaced(states: Tensor | Sequence[Tensor]) -> tuple[Tensor, int]:
    """The first state, contiguous like all, and how many elements further the next one is; a copy if need be."""
    if not isinstance(states, Tensor) and len(states) == 2 and all(x.is_contiguous() for x in states):
        step, rest = divmod(states[1].data_ptr() - states[0].data_ptr(), states[0].element_size())
        if rest == 0:
            return states[0], step
    stacked = _stacked(states)
    if not stacked[0].is_contiguous():
        stacked = stacked.contiguous()
    return stacked[0], stacked.stride(0)


def _stacked(states: Tensor | Sequence[Tensor]) -> Tensor:
    """One tensor whose first axis counts the states."""
    return states if isinstance(states, Tensor) else torch.stack(tuple(states))


def _first(name: str, states: Tensor | Sequence[Tensor]) -> Tensor:
    """The first state; all others are like it."""
    if isinstance(states, Tensor):
        if states.ndim == 0 or states.shape[0] == 0:
            raise ValueError(f"{name} must hold at least one state, got shape {list(states.shape)}")
        return states[0]
    if not isinstance(states, Sequence) or not all(isinstance(x, Tensor) for x in states):
        raise TypeError(f"{name} must be a tensor or a sequence of tensors, got {type(states).__name__}")
    if not states:
        raise ValueError(f"{name} must hold at least one state, got none")
    first = states[0]
    for x in states[1:]:
        if x.shape != first.shape or x.device != first.device:
            raise ValueError(
                f"{name} must agree in shape and device, got {list(first.shape)} on {first.device} and "
                f"{list(x.shape)} on {x.device}"
            )
        if x.dtype != first.dtype:
            raise TypeError(f"{name} must agree in dtype, got {first.dtype} and {x.dtype}")
    return first


def _refuse(
    first: Tensor, first_lse: Tensor, count: int, count_lse: int, base: object, out: Tensor | None, lse: Tensor | None
) -> None:
    """Raise the first reason not to merge."""
    if base not in ("e", "2", 2):
        raise ValueError(f"base must be 'e' or '2', got {base!r}")
    if first.dtype not in DTYPES:
        raise TypeError(f"outs must be float16, bfloat16 or float32, got {first.dtype}")
    if first_lse.dtype != torch.float32:
        raise TypeError(f"lses must be float32, got {first_lse.dtype}")
    if first.ndim < 1 or (count, *first.shape[:-1]) != (count_lse, *first_lse.shape):
        raise ValueError(
            "lses must have the shape of outs without the last axis, got "
            f"{[count_lse, *first_lse.shape]} and {[count, *first.shape]}"
        )
    if first.device != first_lse.device:
        raise ValueError(f"lses must be on the device of outs, got {first_lse.device} and {first.device}")
    for name, x, dtypes, shape in (("out", out, DTYPES, first.shape), ("lse", lse, (torch.float32,), first_lse.shape)):
        if x is None:
            continue
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor or None, got {type(x).__name__}")
        if x.dtype not in dtypes:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise TypeError(f"{name} must be one of {names}, got {x.dtype}")
        if x.shape != shape:
            raise ValueError(f"{name} must have shape {list(shape)}, got {list(x.shape)}")
        if x.device != first.device:
            raise ValueError(f"{name} must be on the device of outs, {first.device}, got {x.device}")
        if any(size > 1 and step == 0 for size, step in zip(x.shape, x.stride(), strict=True)):
            raise ValueError(f"{name} must not overlap itself, got strides {list(x.stride())}")
