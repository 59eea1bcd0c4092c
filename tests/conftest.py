"""Which backend runs on which device, and scratch that starts as NaN.

Plain `pytest` runs the CPU backend, and the Triton backend where there is a GPU. With TRITON_INTERPRET=1 the Triton
kernels run in the interpreter on CPU tensors instead; `make test` does that for the tests marked `interpreter`.
"""

import os
from typing import NamedTuple

import pytest
import torch

from flash_decoding import backends, recorded, split_plan, workspace

os.environ["FLASH_DECODING_TUNED_DIR"] = os.devnull  # plans must not depend on what was tuned on this machine
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Target(NamedTuple):
    """A backend and the device its tensors live on."""

    backend: str
    device: str


if INTERPRETED:
    TARGETS = [pytest.param(Target("triton", "cpu"), id="interpreter")]
else:
    TARGETS = [
        pytest.param(Target("cpu", "cpu"), id="cpu"),
        pytest.param(Target("triton", "cuda"), id="gpu", marks=[pytest.mark.gpu, NO_GPU]),
    ]
TRITON_TARGETS = TARGETS[-1:]


@pytest.fixture(params=TARGETS)
def target(request):
    return request.param


@pytest.fixture
def plans_in_pieces(monkeypatch):
    """Ragged batches are cut into pieces, however short they are; grows by the plans that the Triton backend made."""
    triton, plans = backends.load("triton"), []

    def planned(**sizes):
        plans.append(split_plan.choose_plan.__wrapped__(**sizes))
        return plans[-1]

    monkeypatch.setattr(split_plan, "_RAGGED_TILES", 0)
    monkeypatch.setattr(triton, "choose_plan", planned)
    monkeypatch.setattr(recorded, "_records", recorded._Records())  # whose plans are others
    return plans


@pytest.fixture(autouse=True)
def poisoned_scratch(request, monkeypatch):
    """torch.empty and empty_like give NaN, so that reading what nobody wrote shows."""
    if request.node.get_closest_marker("compiles"):
        return  # torch.compile would trace the poisoning into its graph

    def poison(make):
        def poisoned(*args, **kwargs):
            x = make(*args, **kwargs)
            return x.fill_(float("nan")) if x.is_floating_point() else x

        return poisoned

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poison(getattr(torch, name)))
    monkeypatch.setattr(workspace, "_owned", workspace._Owned())  # nothing is left over from another test
    partial = workspace.Workspace.partial

    def poisoned_partial(self, shape, value_dim, device):
        views = partial(self, shape, value_dim, device)
        if device.type == "cpu":  # on a GPU this would be one more kernel to count and to capture
            for view in views:
                view.fill_(float("nan"))
        return views

    monkeypatch.setattr(workspace.Workspace, "partial", poisoned_partial)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
