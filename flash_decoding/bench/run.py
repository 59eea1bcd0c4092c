"""A whole run: cases × peers in a worker process that may die, results kept in this one, which never uses the GPU."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import IO, Any

from flash_decoding.bench.load import choose_wait_policy
from flash_decoding.bench.peers import Peer, one_line, peers_on
from flash_decoding.bench.results import empty_row
from flash_decoding.bench.timing import Method
from flash_decoding.bench.worker import LOST
from flash_decoding.bench.workloads import Case

JOB_SECONDS = 240.0  # no peer needs longer for one shape, compiling included; one that does hangs
END: dict[str, Any] = {"kind": "end", "value": None}
Event = tuple[str, Any]


@dataclass
class Work:
    """What is left to do, and what was learnt on the way."""

    method: Method
    left: list[tuple[Case, list[str]]]
    threads: int | None = None
    floors: list[dict[str, Any]] = field(default_factory=list)
    environment: dict[str, Any] | None = None


def run(
    cases: Sequence[Case], method: Method, names: Sequence[str] | None = None, threads: int | None = None
) -> Iterator[Event]:
    """Measure every peer on every case.

    Args:
        names: peers besides ours; None means all.
        threads: CPU threads of torch and of Numba; None means as many as they take by themselves.

    Yields:
        ("environment", the machine) once, ("doing", a progress text) and ("row", a finished row).
        Every peer of every case gets a row, whatever happens.
    """
    asked = None if names is None else list(names)
    left = [(case, [peer.name for peer in peers_on(case, asked)]) for case in cases]
    work = Work(method, [(case, impls) for case, impls in left if impls], threads)
    while work.left:
        yield from _run_worker(work)


def _run_worker(work: Work) -> Iterator[Event]:
    """One worker's life: rows as they come, then a row for whatever it died of."""
    with tempfile.TemporaryFile() as log, _start(work, log) as worker:
        events = _read_events(worker)
        running: str | None = None
        between_peers = False
        while True:
            try:
                event = events.get(timeout=JOB_SECONDS)
            except queue.Empty:
                worker.kill()
                yield from _blame(work, running, f"error: no result within {JOB_SECONDS:.0f} s")
                return
            kind, value = event["kind"], event["value"]
            if kind == "end":
                break
            between_peers = kind == "row"
            if kind == "environment":
                if work.environment is None:
                    work.environment = value
                    yield "environment", value
            elif kind == "floor":
                if value not in work.floors:
                    work.floors.append(value)
            elif kind == "stage":
                yield "doing", f"{value}: inputs, float64 reference, read floor"
            elif kind == "start":
                running = value
                yield "doing", f"{work.left[0][0].name}: {value}"
            elif kind == "row":
                running = None
                _strike(work, value["impl"])
                yield "row", value
        code = worker.wait()
        # After a row there is nobody to blame: what ended the process has its row already, and a new one goes on.
        if work.left and code != LOST and not between_peers:
            yield from _blame(work, running, f"error: {_last_words(code, log)}")


@contextlib.contextmanager
def _start(work: Work, log: IO[bytes], build_only: bool = False, **extra: str) -> Iterator[subprocess.Popen]:
    """A worker on the work; extra goes into its environment."""
    jobs = {
        "method": asdict(work.method),
        "floors": work.floors,
        "build_only": build_only,
        "cases": [{"case": case.to_json(), "impls": impls} for case, impls in work.left],
    }
    worker = subprocess.Popen(
        [sys.executable, "-m", "flash_decoding.bench.worker"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=_environment(work.threads) | extra, text=True,
    )  # fmt: skip
    try:
        assert worker.stdin is not None, "stdin is a pipe"
        with contextlib.suppress(BrokenPipeError):
            worker.stdin.write(json.dumps(jobs))
            worker.stdin.close()
        yield worker
    finally:
        if worker.poll() is None:
            worker.kill()
        worker.wait()


def _environment(threads: int | None) -> dict[str, str]:
    """The worker must import this very package, wherever it was started from; its threads must not fight for cores."""
    here = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    path = os.environ.get("PYTHONPATH")
    counts = {"OMP_NUM_THREADS": str(threads), "NUMBA_NUM_THREADS": str(threads)} if threads else {}
    return os.environ | counts | choose_wait_policy() | {"PYTHONPATH": here + (os.pathsep + path if path else "")}


def _read_events(worker: subprocess.Popen) -> queue.Queue[dict[str, Any]]:
    """The worker's events through a thread, so that waiting for one can end; END after the last."""
    events: queue.Queue[dict[str, Any]] = queue.Queue()

    def read() -> None:
        assert worker.stdout is not None, "stdout is a pipe"
        for line in worker.stdout:
            with contextlib.suppress(ValueError):  # a line cut short by the worker's death
                events.put(json.loads(line))
        events.put(END)

    threading.Thread(target=read, daemon=True).start()
    return events


def _strike(work: Work, impl: str) -> None:
    """Take a finished row off the list."""
    impls = work.left[0][1]
    impls.remove(impl)
    if not impls:
        work.left.pop(0)


def _blame(work: Work, running: str | None, status: str) -> Iterator[Event]:
    """Give the failure to the peer that was running; to the whole case when it was between peers."""
    case, impls = work.left[0]
    for impl in [running] if running else list(impls):
        _strike(work, impl)
        yield "row", empty_row(case, impl, status)


def _last_words(code: int, log: IO[bytes]) -> str:
    log.seek(0)
    lines = [line.strip() for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    how = f"ended by signal {-code}" if code < 0 else f"ended with status {code}"
    return f"the process {how}" + (f": {one_line(lines[-1])}" if lines else "")


def build_peers(
    cases: Sequence[Case],
    method: Method,
    names: Sequence[str] | None = None,
    parallel: int | None = None,
    done: Callable[[int, int], None] = lambda finished, total: None,
) -> None:
    """Let the peers that compile at first use do so now, several processes at a time.

    Args:
        parallel: processes at a time; None takes a third of the cores, for each of them starts compilers of its own.
        done: called with (finished, total) after each.
    """
    jobs = _build_jobs(cases, None if names is None else list(names))
    cores = os.cpu_count() or 1
    workers = parallel or max(1, cores // 3)
    # Each worker starts compilers of its own; as many in all as there are cores, or memory runs out.
    share = str(cores // workers + 1)

    def build(job: tuple[Case, Peer]) -> None:
        case, peer = job
        work = Work(method, [(case, [peer.name])])
        with (
            contextlib.suppress(subprocess.TimeoutExpired),
            tempfile.TemporaryFile() as log,
            _start(work, log, build_only=True, MAX_JOBS=share, TORCHINDUCTOR_COMPILE_THREADS="1") as worker,
        ):
            worker.wait(timeout=JOB_SECONDS)

    with ThreadPoolExecutor(workers) as pool:
        for finished, _ in enumerate(pool.map(build, jobs), 1):
            done(finished, len(jobs))


def _build_jobs(cases: Sequence[Case], names: list[str] | None) -> list[tuple[Case, Peer]]:
    """One (case, peer) per thing to compile, the peers taking turns so that long and short builds overlap."""
    jobs: dict[tuple, tuple[Case, Peer]] = {}
    for case in cases:
        for peer in peers_on(case, names):
            if peer.build_key is not None and peer.installed() and peer.refuses(case) is None:
                jobs.setdefault((peer.name, peer.build_key(case)), (case, peer))
    slow_first = {"flashinfer_tc": 0, "xqa": 1, "flashinfer": 2}
    return sorted(jobs.values(), key=lambda job: slow_first.get(job[1].name, 3))
