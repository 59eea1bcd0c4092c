"""What an adapter is: one way to call one library on a decode step, as that library's documentation advises."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flash_decoding.bench.timing import Call, Inputs
from flash_decoding.bench.workloads import DENSE, Case
from flash_decoding.quantization import CodeFormat


def _same(out: Tensor) -> Tensor:
    return out


@dataclass(slots=True)
class Prepared:
    """One variant of a peer on one case, ready to call on each rotated copy."""

    variant: str  # the choices made, in words; empty when there was none
    calls: Sequence[Call]
    to_bhnd: Callable[[Tensor], Tensor] = _same  # the peer's output as [B, Hq, Lq, D]
    context: Callable[[], AbstractContextManager] = nullcontext  # entered around all calls
    plan_us: float | None = None  # host time of a plan that each new set of lengths needs
    tolerance: float | None = None  # of a kernel that computes in 8 bits, where None would be that of the case's dtype


@dataclass(frozen=True)
class Peer:
    """One row of the tables. The fastest of its variants counts, and the row says which it was."""

    name: str
    label: str
    device: str
    variants: Callable[[Case, Sequence[Inputs]], Iterator[Callable[[], Prepared]]]
    module: str | None = None  # imported to see whether the peer is there
    package: str | None = None  # the distribution whose version goes into the results
    refuses: Callable[[Case], str | None] = field(default=lambda case: None)
    build_key: Callable[[Case], Hashable] | None = None  # cases with one key share what the peer compiles

    def installed(self) -> bool:
        """Whether the peer's package is there, without importing it."""
        return self.module is None or importlib.util.find_spec(self.module.split(".")[0]) is not None

    def available(self) -> str | None:
        """Why the peer cannot run here, or None."""
        if self.device == "cuda" and not torch.cuda.is_available():
            return "no CUDA device"
        if self.module is None:
            return None
        try:
            importlib.import_module(self.module)
        except ModuleNotFoundError as error:
            if error.name is not None and self.module.split(".")[0] == error.name.split(".")[0]:
                return f"{self.module} is not installed"
            return f"importing {self.module} needs {error.name}"
        except Exception as error:
            return f"importing {self.module} failed: {one_line(error)}"
        return None


# Queries and weights rounded to e4m3 are a few per cent off, each on its own; this is one unit in its last place.
E4M3_TOLERANCE = 2.0**-3
FP8 = CodeFormat("fp8_e4m3", "tensor")


def needs_numbers(case: Case) -> str | None:
    """Why an adapter that passes no scales refuses the case, or None."""
    return None if case.form is None else "takes no quantised cache of these formats"


def needs_fp8(case: Case) -> str | None:
    """Why a library whose only codes are e4m3 with a scale per tensor refuses the case, or None."""
    return None if case.form in (None, FP8) else f"of these formats it takes {FP8} only"


def scale_numbers(copy: Inputs) -> tuple[float, float]:
    """The scales per tensor of K and of V, which most libraries want as numbers."""
    k_scale, v_scale = (scale.item() for scale in (copy.k_scale, copy.v_scale) if scale is not None)
    return k_scale, v_scale


def needs_plain(case: Case) -> str | None:
    """Why an adapter that passes neither pages nor masks nor scales refuses the case, or None."""
    if case.form is not None:
        return needs_numbers(case)
    plain = case.options == DENSE
    return None if plain else "called here with a dense cache, one query token and no window only"


def needs_half(case: Case) -> str | None:
    """Why a library of 16-bit kernels refuses the case, or None."""
    return None if case.dtype in ("float16", "bfloat16") else f"takes float16 and bfloat16, not {case.dtype}"


def one_line(error: BaseException | str) -> str:
    """The first line of an error that says something, short enough for a table."""
    text = str(error) or type(error).__name__
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    line = lines[0] if lines else type(error).__name__
    return line if len(line) <= 200 else line[:197] + "..."


def split_heads(q: Tensor, heads_kv: int) -> Tensor:
    """[B, Hq, 1, D] as [B, Hkv, G, D]: the query heads of one KV head become query rows."""
    return q.view(q.shape[0], heads_kv, -1, q.shape[3])
