"""Scratch: made once, reused, owned by the caller or by device, stream and thread."""

import pytest
import torch
from helpers import make_inputs

from flash_decoding import Workspace, flash_decode, workspace
from flash_decoding.workspace import make_partial


@pytest.fixture
def allocations(monkeypatch):
    """Shapes of what torch.empty and empty_like make while the test runs."""
    shapes = []

    def counted(make):
        def counting(*args, **kwargs):
            x = make(*args, **kwargs)
            shapes.append(tuple(x.shape))
            return x

        return counting

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, counted(getattr(torch, name)))
    return shapes


def test_one_split_never_allocates_scratch(target, allocations, monkeypatch):
    monkeypatch.setattr(workspace, "_owned", workspace._Owned())
    q, k, v = make_inputs(2, 4, 2, 100, 64, torch.float32, target.device)
    flash_decode(q, k, v, num_splits=1, backend=target.backend)
    assert allocations == [(2, 4, 1, 64)], "only the output"
    assert not workspace._owned.by_stream


def test_scratch_is_made_once(target, allocations, monkeypatch):
    monkeypatch.setattr(workspace, "_owned", workspace._Owned())
    q, k, v = make_inputs(2, 4, 2, 100, 64, torch.float32, target.device)
    flash_decode(q, k, v, num_splits=4, backend=target.backend)
    allocations.clear()
    for splits in (4, 3, 2):
        flash_decode(q, k, v, num_splits=splits, backend=target.backend)
    assert allocations == [(2, 4, 1, 64)] * 3, "only outputs"


def test_with_a_workspace_and_out_nothing_is_allocated(target, allocations):
    q, k, v = make_inputs(2, 4, 2, 100, 64, torch.float32, target.device)
    out, lse = torch.zeros_like(q), torch.zeros(2, 4, 1, device=target.device)
    own = Workspace(Workspace.size(batch=2, heads_q=4, value_dim=64, num_splits=4), target.device)
    allocations.clear()
    flash_decode(q, k, v, num_splits=4, out=out, lse=lse, workspace=own, backend=target.backend)
    assert allocations == []
    assert torch.equal(out, flash_decode(q, k, v, num_splits=4, backend=target.backend))


def test_grows_when_a_call_needs_more_and_keeps_when_it_needs_less(target):
    own = Workspace()
    assert own.size_bytes == 0
    q, k, v = make_inputs(2, 4, 2, 100, 64, torch.float32, target.device)
    flash_decode(q, k, v, num_splits=2, workspace=own, backend=target.backend)
    small = own.size_bytes
    assert small == Workspace.size(batch=2, heads_q=4, value_dim=64, num_splits=2) == 2 * 2 * 4 * 66 * 4
    flash_decode(q, k, v, num_splits=8, workspace=own, backend=target.backend)
    assert own.size_bytes == 4 * small
    flash_decode(q, k, v, num_splits=2, workspace=own, backend=target.backend)
    assert own.size_bytes == 4 * small


def test_size_of_one_split_is_nothing_and_the_device_is_asked_for():
    assert Workspace.size(batch=9, heads_q=9, value_dim=64, num_splits=1) == 0
    with pytest.raises(ValueError, match="device must be given with size_bytes, got None"):
        Workspace(1024)


def test_partials_do_not_overlap():
    buffer = torch.zeros(3 * 2 * 4 * 66)
    acc, m, l = make_partial(buffer, (3, 2, 4, 1), 64)
    assert (acc.shape, m.shape, l.shape) == ((3, 2, 4, 1, 64), (3, 2, 4, 1), (3, 2, 4, 1))
    acc += 1.0
    m += 10.0
    l += 100.0
    assert buffer.unique().tolist() == [1.0, 10.0, 100.0]
    assert (buffer == 10.0).sum() == (buffer == 100.0).sum() == 24


def test_views_are_kept_but_not_without_bound(target):
    own = Workspace(1 << 20, target.device)
    device = own._buffer.device
    first = own.partial((2, 1, 4, 1), 64, device)
    assert own.partial((2, 1, 4, 1), 64, device) is first
    for batch in range(1, 200):
        own.partial((2, batch, 4, 1), 64, device)
    assert len(own._partials) <= 64
