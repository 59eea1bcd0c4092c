"""Whether other programs use the cores, and how threads that wait should then do it; imports no torch."""

from __future__ import annotations

import os

# Of the cores; a machine that only runs a shell and a desktop stays below it.
_BUSY_SHARE = 0.25


def find_load() -> tuple[float, int] | None:
    """(load of the last minute, cores) when other programs take a good part of the cores, else None."""
    if not hasattr(os, "getloadavg"):
        return None
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    return (load, cores) if load >= _BUSY_SHARE * cores else None


def choose_wait_policy() -> dict[str, str]:
    """What to add to the environment of a process that times OpenMP's threads; a choice of the user's is kept.

    Beside a busy program, threads that spin while they wait took SDPA from 0.02 to 0.6 ms per call on average (2 cores,
    one of them busy). On an idle machine sleeping threads cost it 0.06 ms per call in place of 0.01, and would flatter
    us, so there the default stays.
    """
    if "OMP_WAIT_POLICY" in os.environ or find_load() is None:
        return {}
    return {"OMP_WAIT_POLICY": "passive"}
