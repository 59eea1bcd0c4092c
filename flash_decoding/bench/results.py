"""The result file: one schema for every suite, written after each row, read back without a GPU."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from flash_decoding import __version__
from flash_decoding.bench.timing import Method
from flash_decoding.bench.workloads import Case

SCHEMA = 1
OK = "ok"

Row = dict[str, Any]
Results = dict[str, Any]


def empty_row(case: Case, impl: str, status: str) -> Row:
    """A row with no measurement: what is known before, and why there is no more."""
    return {
        "suite": case.suite,
        "case": case.name,
        "shape": asdict(case.shape),
        "options": case.options.to_json(),
        "baseline": case.baseline,
        "device": case.device,
        "dtype": case.dtype,
        "kv_dtype": case.kv_dtype,
        "impl": impl,
        "variant": None,
        "bytes": case.kv_bytes,
        "us_graph": None,
        "us_graph_spread": None,
        "us_graph_repeats": None,
        "us_eager": None,
        "us_eager_spread": None,
        "us_eager_repeats": None,
        "us_host": None,
        "plan_us": None,
        "read_floor_us": None,
        "max_abs_err": None,
        "tolerance": None,
        "status": status,
    }


def time_us(row: Row) -> float | None:
    """The time that tables and plots compare: inside a graph, or the plain call where there is no graph."""
    return row["us_graph"] if row["us_graph"] is not None else row["us_eager"]


def over_floor(row: Row) -> float | None:
    """Time over the read floor of the same bytes."""
    us = time_us(row)
    return us / row["read_floor_us"] if us is not None and row["read_floor_us"] else None


def describe_environment(packages: Iterable[str] = ()) -> dict[str, Any]:
    """Versions, devices and clocks of this machine, for the head of a result file."""
    import torch

    environment: dict[str, Any] = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_name(),
        "cpu_threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "gpu": None,
    }
    for name in ("triton", "numba", "numpy", *packages):
        environment[name] = package_version(name)
    if torch.cuda.is_available():
        device = torch.cuda.get_device_properties(0)
        environment |= {
            "gpu": device.name,
            "gpu_processors": device.multi_processor_count,
            "gpu_l2_bytes": device.L2_cache_size,
            "gpu_memory_bytes": device.total_memory,
            "gpu_compute_capability": f"{device.major}.{device.minor}",
        } | query_clocks()
    return environment


def query_clocks() -> dict[str, str]:
    """Driver, clocks and power as nvidia-smi reports them of a working GPU; empty where it does not answer."""
    fields = {
        "driver": "driver_version",
        "gpu_clock_mhz": "clocks.sm",
        "gpu_clock_max_mhz": "clocks.max.sm",
        "memory_clock_mhz": "clocks.mem",
        "power_limit_w": "power.limit",
    }
    command = ["nvidia-smi", "--query-gpu=" + ",".join(fields.values()), "--format=csv,noheader,nounits", "--id=0"]
    try:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as asking:
            _work_while(asking, seconds=20)
            answer, _ = asking.communicate(timeout=1)
    except (OSError, subprocess.SubprocessError):
        return {}
    values = [value.strip() for value in answer.splitlines()[0].split(",")] if answer.strip() else []
    return dict(zip(fields, values, strict=True)) if len(values) == len(fields) else {}


def _work_while(process: subprocess.Popen, seconds: float) -> None:
    """Keep the GPU at matrix products until the process ends: an idle one reports idle clocks."""
    import torch

    end = time.monotonic() + seconds
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.float16)
    while process.poll() is None and time.monotonic() < end:
        torch.matmul(a, a)
        torch.cuda.synchronize()
    if process.poll() is None:
        process.kill()


def package_version(name: str) -> str | None:
    """None where it is not installed; this library may run from its source, and knows its version itself."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return __version__ if name == "flash-decoding" else None


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def device_folder(environment: dict[str, Any], device: str) -> str:
    """The folder of benchmarks/results a machine's numbers go to, as nvidia-h200."""
    name = environment.get("gpu") if device == "cuda" else environment.get("cpu")
    words = "".join(c.lower() if c.isalnum() else " " for c in name or device).split()
    return "-".join(words)


def new_results(environment: dict[str, Any], method: Method, rows: Iterable[Row] = ()) -> Results:
    return {"schema": SCHEMA, "environment": environment, "method": method.to_json(), "rows": list(rows)}


def write_results(path: Path, results: Results) -> None:
    """Write the file in one step, so that an interrupted run leaves the last whole one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(dump(results))
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def dump(results: Results) -> str:
    """JSON with one row per line: readable, and a change shows as the lines that changed."""
    head = {key: value for key, value in results.items() if key != "rows"}
    rows = ",\n".join("  " + json.dumps(row) for row in results["rows"])
    text = json.dumps(head, indent=1)
    return f'{text[:-2]},\n "rows": [\n{rows}\n ]\n}}\n'


def merge_environments(environments: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The first, with the days of all in place of its date where they differ."""
    days = sorted({environment.get("date", "")[:10] for environment in environments})
    return environments[0] if len(days) == 1 else environments[0] | {"date": " and ".join(days)}


def read_results(path: Path) -> Results:
    """A result file, checked: the schema's number, and every row's fields."""
    try:
        results = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(results, dict) or results.get("schema") != SCHEMA:
        raise ValueError(f"{path} must be a result file of schema {SCHEMA}")
    if not isinstance(results.get("rows"), list):
        raise ValueError(f"{path} must have rows, as the result files of bench do; accuracy --report shows its own")
    needed = {"suite", "case", "shape", "dtype", "kv_dtype", "impl", "bytes", "us_graph", "us_graph_spread",
              "us_eager", "us_host", "read_floor_us", "max_abs_err", "status"}  # fmt: skip
    for number, row in enumerate(results["rows"]):
        missing = needed - row.keys()
        if missing:
            raise ValueError(f"{path} must have {', '.join(sorted(missing))} in row {number}")
    return results


def find_result_files(paths: Sequence[Path]) -> list[Path]:
    """The named files, and the result files below the named folders; other JSON files there are passed over."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            found += [file for file in sorted(path.rglob("*.json")) if '"rows"' in file.read_text()]
        elif path.exists():
            found.append(path)
        else:
            raise ValueError(f"{path} does not exist")
    if not found:
        raise ValueError(f"no result files in {', '.join(map(str, paths))}")
    return found
