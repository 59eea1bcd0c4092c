"""flash-decoding check: is this installation as exact as SDPA? Shapes x dtypes x backends against float64."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from flash_decoding import flash_decode, reference
from flash_decoding.backends import find_backend_errors, resolve
from flash_decoding.cli import fail
from flash_decoding.cli.common import find_device, find_versions, require_writable, write_json
from flash_decoding.problem import DTYPES

# The contract: what rounding costs SDPA on the same inputs, with some room, or one unit in the last place.
_MAX_RATIO = 1.5
_SHORT = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}


@dataclass(frozen=True)
class Case:
    batch: int
    heads_q: int
    heads_kv: int
    kv_len: int
    head_dim: int
    value_dim: int
    layout: str = "bhnd"
    kv_lens: tuple[int, ...] | None = None
    num_splits: tuple[int | None, ...] = (None, 1, 5)  # each is run, the worst counts

    @property
    def name(self) -> str:
        width = str(self.head_dim) if self.head_dim == self.value_dim else f"{self.head_dim}/{self.value_dim}"
        return f"{self.batch}, {self.heads_q}/{self.heads_kv}, {self.kv_len}, {width}"


# Every group size and head size of note; lengths on, beside and far from the tiles' edges.
CASES = (
    Case(1, 8, 8, 1, 64, 64),
    Case(2, 8, 8, 1000, 64, 64),
    Case(2, 8, 8, 1024, 128, 128),
    Case(1, 9, 3, 257, 64, 64),
    Case(1, 9, 3, 4097, 64, 64, "bnhd"),
    Case(2, 10, 2, 777, 128, 128),
    Case(1, 28, 4, 2049, 128, 128),
    Case(1, 28, 4, 511, 64, 64, "bnhd"),
    Case(1, 32, 4, 8192, 128, 128, num_splits=(None, 1, 2, 16, 64)),
    Case(2, 16, 1, 3000, 64, 64),
    Case(2, 16, 1, 3000, 128, 128, "bnhd"),
    Case(3, 6, 2, 333, 16, 16),
    Case(3, 6, 2, 333, 40, 40),
    Case(2, 8, 2, 515, 80, 80),
    Case(2, 8, 4, 515, 96, 96, "bnhd"),
    Case(2, 6, 1, 300, 192, 128),
    Case(1, 4, 2, 640, 256, 256),
    Case(4, 8, 2, 1030, 64, 64, kv_lens=(0, 1, 517, 1030)),
    Case(4, 14, 2, 1030, 128, 128, "bnhd", kv_lens=(1030, 64, 0, 129)),
)


@dataclass(frozen=True)
class Row:
    shape: str
    layout: str
    kv_lens: tuple[int, ...] | None
    num_splits: tuple[int | None, ...]
    dtype: str
    backend: str
    error: float | None  # largest absolute error over the split counts
    sdpa_error: float
    bound: float
    ok: bool
    reason: str | None = None  # why there is no error to show


def check(
    device: Annotated[str, typer.Option(help="auto (the CPU, and the GPU if there is one), cpu or cuda.")] = "auto",
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the rows here.")] = None,
) -> None:
    """Compare every backend with float64, beside SDPA's own error; exit code 1 when a bound breaks."""
    require_writable("--json", json_file)
    devices = [find_device(device)]
    if device == "auto" and devices[0].type == "cuda":
        devices.insert(0, torch.device("cpu"))
    for target in devices:
        for error in find_backend_errors("auto", target):
            fail(str(error))
    jobs = [(case, dtype, target) for target in devices for case in CASES for dtype in DTYPES]
    rows = [
        check_case(case, dtype, target)
        for case, dtype, target in track(jobs, "Checking", console=Console(stderr=True), transient=True)
    ]
    broken = [row for row in rows if not row.ok]
    _print_table(rows, broken)
    if json_file is not None:
        versions = find_versions("triton", "numba", "numpy")
        write_json(json_file, {"ok": not broken, "versions": versions, "rows": [asdict(row) for row in rows]})
    if broken:
        raise typer.Exit(1)


@torch.no_grad()
def check_case(case: Case, dtype: torch.dtype, device: torch.device) -> Row:
    """One shape and dtype on the backend of a device."""
    q, k, v, kv_lens = _make_inputs(case, dtype, device)
    want = reference(q, k, v, layout=case.layout, kv_lens=kv_lens)
    assert isinstance(want, Tensor), "no lse was asked for"
    sdpa_error = _largest_error(_sdpa(case, q, k, v, kv_lens), want)
    bound = max(_MAX_RATIO * sdpa_error, _last_place(want, dtype))
    error, reason = None, None
    try:
        for num_splits in case.num_splits:
            out = flash_decode(q, k, v, layout=case.layout, kv_lens=kv_lens, num_splits=num_splits)
            assert isinstance(out, Tensor), "no lse was asked for"
            error = max(error or 0.0, _largest_error(out, want))
    except Exception as problem:  # whatever a backend raises is a finding, and the other rows still count
        error, reason = None, f"{type(problem).__name__}: {problem}"
    return Row(
        case.name, case.layout, case.kv_lens, case.num_splits, str(dtype).removeprefix("torch."),
        resolve("auto", device), error, sdpa_error, bound, error is not None and error <= bound, reason,
    )  # fmt: skip


def _make_inputs(case: Case, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(0)

    def make(heads: int, length: int, width: int) -> Tensor:
        x = torch.randn(case.batch, heads, length, width, generator=generator).to(device, dtype)
        return x if case.layout == "bhnd" else x.transpose(1, 2).contiguous()

    q = make(case.heads_q, 1, case.head_dim)
    k = make(case.heads_kv, case.kv_len, case.head_dim)
    v = make(case.heads_kv, case.kv_len, case.value_dim)
    kv_lens = None if case.kv_lens is None else torch.tensor(case.kv_lens, dtype=torch.int32, device=device)
    return q, k, v, kv_lens


def _sdpa(case: Case, q: Tensor, k: Tensor, v: Tensor, kv_lens: Tensor | None) -> Tensor:
    """SDPA with KV heads repeated, which its most exact kernels take; rows without a key are 0 as in the contract."""
    if case.layout == "bnhd":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(case.heads_q // case.heads_kv, dim=1) for x in (k, v))
    mask = None
    if kv_lens is not None:
        mask = (torch.arange(case.kv_len, device=q.device) < kv_lens[:, None])[:, None, None, :]
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    if kv_lens is not None:
        out = out.masked_fill((kv_lens == 0)[:, None, None, None], 0.0)
    return out if case.layout == "bhnd" else out.transpose(1, 2)


def _largest_error(out: Tensor, want: Tensor) -> float:
    """max |out - want|; NaN counts as infinite."""
    return float((out.double() - want).abs().nan_to_num(nan=math.inf).max())


def _last_place(want: Tensor, dtype: torch.dtype) -> float:
    """One unit in the last place of the largest output."""
    return torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(float(want.abs().max())))


def _print_table(rows: list[Row], broken: list[Row]) -> None:
    # Without padding a row fits into 80 columns.
    table = Table(title="Largest absolute error against float64, over several split counts", box=box.SIMPLE, padding=0)
    for name in ("B, Hq/Hkv, N, D", "layout", "dtype", "backend"):
        table.add_column(name, no_wrap=True)
    for name in ("error", "SDPA's", "bound"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for row in rows:
        table.add_row(
            row.shape,
            row.layout if row.kv_lens is None else f"{row.layout}, ragged",
            _SHORT[row.dtype],
            row.backend,
            "-" if row.error is None else f"{row.error:.1e}",
            f"{row.sdpa_error:.1e}",
            f"{row.bound:.1e}",
            "ok" if row.ok else "[red]BROKEN[/red]",
        )
    console = Console(highlight=False)
    console.print(table)
    for row in broken:
        if row.reason is not None:
            console.print(f"{row.shape} {row.dtype} {row.backend}: {row.reason}", markup=False, soft_wrap=True)
    console.print(f"bound: {_MAX_RATIO} times SDPA's error, or one last place of the largest output where that is more")
    console.print(f"{len(rows) - len(broken)} of {len(rows)} within the bound")
