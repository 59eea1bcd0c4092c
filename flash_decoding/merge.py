"""The merge of partial attention results: the definition that every other merge must equal."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_LN_2 = math.log(2.0)


def merge_states(
    outs: Tensor | Sequence[Tensor],
    lses: Tensor | Sequence[Tensor],
    *,
    base: str | int = "e",
) -> tuple[Tensor, Tensor]:
    """Merge attention over disjoint sets of keys into attention over their union, exactly.

    With M = max lse_i and w_i = exp(lse_i - M): out = sum w_i out_i / sum w_i and lse = M + ln sum w_i. The merge is
    commutative and associative; the state without keys, (anything, -inf), is its identity. See docs/algebra.md.

    Args:
        outs: the partial outputs, a sequence of [..., Dv] or one tensor [S, ..., Dv] whose first axis counts states;
            float16, bfloat16 or float32.
        lses: their log-sum-exp, a sequence of [...] or one tensor [S, ...]; float32. An entry of -inf or +inf means
            that the state saw no key (both conventions are in use); its output is then ignored, NaN included.
        base: "e" if the lses are natural logarithms (ours, flash-attn's), "2" if binary ones (FlashInfer's).

    Returns:
        out: [..., Dv], dtype of outs; lse: [...] float32 in the same base. Where no state saw a key: 0 and -inf.

    Raises:
        ValueError: shapes, counts, devices or a base that do not fit. TypeError: dtypes.

    Example:
        >>> out = torch.ones(2, 3, 64), torch.zeros(2, 3, 64)
        >>> lse = torch.zeros(2, 3), torch.zeros(2, 3)
        >>> merge_states(out, lse)[0].mean().item()
        0.5
    """
    out, lse = _stacked("outs", outs), _stacked("lses", lses)
    if base not in ("e", "2", 2):
        raise ValueError(f"base must be 'e' or '2', got {base!r}")
    if out.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise TypeError(f"outs must be float16, bfloat16 or float32, got {out.dtype}")
    if lse.dtype != torch.float32:
        raise TypeError(f"lses must be float32, got {lse.dtype}")
    if out.ndim < 2 or out.shape[:-1] != lse.shape:
        raise ValueError(
            f"lses must have the shape of outs without the last axis, got {list(lse.shape)} and {list(out.shape)}"
        )
    if out.device != lse.device:
        raise ValueError(f"lses must be on the device of outs, got {lse.device} and {out.device}")

    lse = lse.masked_fill(lse == math.inf, -math.inf)
    empty = lse == -math.inf
    top = lse.amax(dim=0)
    shift = top.masked_fill(top == -math.inf, 0.0)  # -inf - -inf would be NaN
    w = torch.exp((lse - shift) * (1.0 if base == "e" else _LN_2))
    total = w.sum(dim=0)
    w = w / total.masked_fill(total == 0, 1.0)
    merged = (w[..., None] * out.float().masked_fill(empty[..., None], 0.0)).sum(dim=0)
    log_total = torch.log(total) if base == "e" else torch.log2(total)
    return merged.to(out.dtype), shift + log_total


def _stacked(name: str, states: Tensor | Sequence[Tensor]) -> Tensor:
    """One tensor whose first axis counts the states."""
    if isinstance(states, Tensor):
        stacked = states
    elif isinstance(states, Sequence) and all(isinstance(x, Tensor) for x in states):
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
        stacked = torch.stack(tuple(states))
    else:
        raise TypeError(f"{name} must be a tensor or a sequence of tensors, got {type(states).__name__}")
    if stacked.ndim == 0 or stacked.shape[0] == 0:
        raise ValueError(f"{name} must hold at least one state, got shape {list(stacked.shape)}")
    return stacked
