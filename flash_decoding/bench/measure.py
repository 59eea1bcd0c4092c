"""Measures peers on a case, in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from flash_decoding.bench.peers import Peer, Prepared, one_line
from flash_decoding.bench.read_floor import Floor, measure_floor
from flash_decoding.bench.results import OK, Row, empty_row
from flash_decoding.bench.timing import (
    LAYOUTS_HELD,
    Inputs,
    Method,
    capture,
    check_output,
    count_copies,
    least_copies,
    make_inputs,
    reference_by_head,
    time_cpu,
    time_eager,
    time_graph,
    tolerance_of,
)
from flash_decoding.bench.workloads import Case


class DeviceLost(Exception):
    """The GPU answers no more calls of this process; the row that did it is in args[0]."""


@dataclass(slots=True)
class Stage:
    """A case made ready: its inputs, the right answers for the first and last copy, and its floor."""

    case: Case
    copies: list[Inputs]
    wants: list[Tensor]
    floor: Floor


def free_bytes(device: str) -> int:
    """Memory that a case may use."""
    if device == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return 1 << 62


def make_stage(case: Case, method: Method, floors: dict[int, Floor]) -> Stage:
    """Inputs, answers and floor of a case.

    Args:
        floors: floors by bytes that this run knows already; a new one is added.

    Raises:
        MemoryError: one copy of the inputs does not fit.
    """
    free = free_bytes(case.device)
    count = count_copies(case, free, method)
    if count < 1:
        least = least_copies(case, method)
        raise MemoryError(
            f"needs {least * LAYOUTS_HELD * case.cache_bytes / 1e9:.1f} GB, {least} copies of the cache in "
            f"{LAYOUTS_HELD} layouts, and {free / 1e9:.1f} GB are free"
        )
    copies = make_inputs(case, count, method.seed)
    wants = [reference_by_head(case, copies[0]), reference_by_head(case, copies[-1])]
    if case.kv_bytes not in floors:
        floors[case.kv_bytes] = measure_floor(copies, method, case.kv_bytes)
    return Stage(case, copies, wants, floors[case.kv_bytes])


def measure_peer(peer: Peer, stage: Stage, method: Method) -> Row:
    """The row of one peer: each variant checked, the fastest timed in full."""
    case = stage.case
    row = empty_row(case, peer.name, OK) | {"read_floor_us": round(stage.floor.us, 3)}
    reason = peer.available()
    if reason is not None:
        return row | {"status": f"unavailable: {reason}"}
    reason = peer.refuses(case)
    if reason is not None:
        return row | {"status": f"unsupported: {reason}"}

    measure = _measure_on_gpu if case.device == "cuda" else _measure_on_cpu
    best: Row | None = None
    failures: list[str] = []
    try:
        for make in peer.variants(case, stage.copies):
            found = _try_variant(make, stage, method, measure, failures)
            if found is not None and (best is None or _quick_us(found) < _quick_us(best)):
                best = found
    except Exception as error:  # whatever a peer raises is its row's reason
        failures.append(f"error: {one_line(error)}")
        _raise_if_lost(case, row | {"status": failures[-1]})
    if best is None:
        return row | {"status": failures[0] if failures else "error: no variant ran"}
    finish: Callable[[], Row] = best.pop("finish")
    best.pop("quick_us")
    return row | best | finish()


def _quick_us(found: Row) -> float:
    return found["quick_us"]


def _try_variant(
    make: Callable[[], Prepared],
    stage: Stage,
    method: Method,
    measure: Callable[[Prepared, Stage, Method], Row],
    failures: list[str],
) -> Row | None:
    """Check and time one variant; None when it fails, its reason added to failures."""
    try:
        prepared = make()
        with prepared.context():
            _, wrong = _check(prepared, prepared.calls[0](), stage, 0)
            if wrong is not None:
                failures.append(f"wrong: {wrong}")
                return None
            found = measure(prepared, stage, method)
        return found | {
            "variant": prepared.variant or None,
            "plan_us": _rounded(prepared.plan_us),
            "tolerance": prepared.tolerance or tolerance_of(stage.case.dtype),
        }
    except Exception as error:  # likewise
        failures.append(f"error: {one_line(error)}")
        row = empty_row(stage.case, "", failures[-1])
        _raise_if_lost(stage.case, row)
        return None


def _check(prepared: Prepared, out: Tensor, stage: Stage, at: int) -> tuple[float, str | None]:
    """check_output() of a peer's own output for the first (0) or last (-1) copy."""
    return check_output(prepared.to_bhnd(out), stage.wants[at], stage.case.dtype, prepared.tolerance)


def _measure_on_gpu(prepared: Prepared, stage: Stage, method: Method) -> Row:
    """A quick graph time, and how to measure in full if this variant wins."""
    copies = len(prepared.calls)
    graph, outs = capture(prepared.calls)
    for out in outs:
        out.fill_(float("nan"))
    quick = time_graph(graph, copies, method, repeats=2)
    # What the graph wrote, not what the first plain call did: the first and the last copy.
    checks = [_check(prepared, outs[at], stage, at) for at in (0, -1)]
    for _, wrong in checks:
        if wrong is not None:
            raise RuntimeError(f"the CUDA graph's result is wrong: {wrong}")

    def finish() -> Row:
        with prepared.context():
            timed = time_graph(graph, copies, method)
            wall, host = time_eager(prepared.calls, timed.median, method)
        return {
            "us_graph": _rounded(timed.median),
            "us_graph_spread": _rounded(timed.spread),
            "us_graph_repeats": [_rounded(us) for us in timed.repeats],
            "us_eager": _rounded(wall.median),
            "us_eager_spread": _rounded(wall.spread),
            "us_eager_repeats": [_rounded(us) for us in wall.repeats],
            "us_host": _rounded(host.median),
            "max_abs_err": max(error for error, _ in checks),
        }

    return {"quick_us": quick.median, "finish": finish}


def _measure_on_cpu(prepared: Prepared, stage: Stage, method: Method) -> Row:
    timed = time_cpu(prepared.calls, method)
    error, _ = _check(prepared, prepared.calls[-1](), stage, -1)

    def finish() -> Row:
        return {
            "us_eager": _rounded(timed.median),
            "us_eager_spread": _rounded(timed.spread),
            "us_eager_repeats": [_rounded(us) for us in timed.repeats],
            "max_abs_err": error,
        }

    return {"quick_us": timed.median, "finish": finish}


def _rounded(us: float | None) -> float | None:
    return None if us is None else round(us, 3)


def _raise_if_lost(case: Case, row: Row) -> None:
    """Some errors of a kernel end the process's use of the GPU: every later call fails."""
    if case.device != "cuda":
        return
    try:
        torch.cuda.synchronize()
    except Exception:
        raise DeviceLost(row) from None


def measure_case(case: Case, peers: Sequence[Peer], method: Method, floors: dict[int, Floor], emit: Callable) -> None:
    """Rows of all peers on a case; emit("start", impl) before and emit("row", row) after each."""
    emit("stage", case.name)
    try:
        stage = make_stage(case, method, floors)
    except (MemoryError, torch.OutOfMemoryError) as error:
        for peer in peers:
            emit("row", empty_row(case, peer.name, f"skipped: {one_line(error)}"))
        return
    emit("floor", stage.floor)
    for peer in peers:
        emit("start", peer.name)
        try:
            emit("row", measure_peer(peer, stage, method))
        except DeviceLost as lost:
            emit("row", lost.args[0] | {"impl": peer.name, "read_floor_us": round(stage.floor.us, 3)})
            raise
        if case.device == "cuda":
            torch.cuda.empty_cache()
