"""The process that touches the GPU: reads jobs from stdin, writes one JSON event per line to stdout.

A peer can end its process (a crash while it is imported, an error after which the GPU answers no call), so the
process that keeps the results is another one: run.py.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TextIO

LOST = 75  # exit status: the GPU is lost to this process, a new one may go on


def main() -> int:
    """Run the jobs on stdin."""
    # Whatever a library prints goes to stderr; only events go to the real stdout.
    events = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    jobs = json.load(sys.stdin)
    emit = _emitter(events)

    from flash_decoding.bench.measure import DeviceLost, measure_case
    from flash_decoding.bench.peers import peers_for
    from flash_decoding.bench.read_floor import Floor
    from flash_decoding.bench.results import describe_environment
    from flash_decoding.bench.timing import Method
    from flash_decoding.bench.workloads import Case

    if not jobs["build_only"]:
        devices = {job["case"]["device"] for job in jobs["cases"]}
        packages = dict.fromkeys(peer.package for device in devices for peer in peers_for(device) if peer.package)
        emit("environment", describe_environment(packages))
    method = Method(**jobs["method"])
    floors = {entry["bytes"]: Floor(**entry) for entry in jobs["floors"]}
    for job in jobs["cases"]:
        case = Case.from_json(job["case"])
        peers = [peer for peer in peers_for(case.device) if peer.name in job["impls"]]
        if jobs["build_only"]:
            _build(case, peers, emit)
            continue
        try:
            measure_case(case, peers, method, floors, emit)
        except DeviceLost:
            os._exit(LOST)  # tearing down a lost device can end in an abort
    return 0


def _emitter(events: TextIO) -> Callable[[str, Any], None]:
    def emit(kind: str, value: Any) -> None:
        events.write(json.dumps({"kind": kind, "value": asdict(value) if kind == "floor" else value}) + "\n")
        events.flush()

    return emit


def _build(case: Any, peers: list[Any], emit: Callable[[str, Any], None]) -> None:
    """Call each variant once, so that what it compiles lies in its cache on disk."""
    from flash_decoding.bench.timing import make_inputs

    copies = make_inputs(case, 1, seed=0)
    for peer in peers:
        if peer.available() or peer.refuses(case):
            continue
        for make in peer.variants(case, copies):
            try:
                prepared = make()
                with prepared.context():
                    prepared.calls[0]()
            except Exception:
                # The measuring run meets the same error and reports it.
                traceback.print_exc()
        emit("built", peer.name)


if __name__ == "__main__":
    sys.exit(main())
