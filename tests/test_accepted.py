"""Accepted: a call like an earlier one is only asked what may have changed."""

import pytest
import torch

from flash_decoding import KVFormat, accepted


def make_checks():
    """(accepted calls, a function that checks one, the calls that were looked at as a whole)."""
    calls, looked_at = accepted.Accepted(), []

    def find_errors(call):
        looked_at.append(call)
        yield from find_state_errors(call)

    def find_state_errors(call):
        if isinstance(call[0], torch.Tensor) and call[0].requires_grad:
            yield ValueError("no gradient")

    return calls, lambda *call: calls.refuse(call, find_errors, find_state_errors), looked_at


def test_like_calls_are_looked_at_once():
    _, check, looked_at = make_checks()
    for _ in range(3):
        check(torch.zeros(2, 3), "bhnd", None, KVFormat.parse("int8"), 1)
    assert len(looked_at) == 1


def test_what_differs_is_looked_at():
    _, check, looked_at = make_checks()
    x = torch.zeros(4, 4)
    calls = [(x,), (x[:2],), (x.t(),), (x.half(),), (x.to("meta"),), (None,), (1,), (1.0,), (True,), ("1",),
             (KVFormat.parse("int8"),), (KVFormat.parse("fp8"),)]  # fmt: skip
    for call in calls * 2:
        check(*call)
    # A square's transpose differs in its strides alone, and True, 1 and 1.0 in their types.
    assert len(looked_at) == len(calls)


def test_state_is_looked_at_every_time():
    _, check, looked_at = make_checks()
    check(torch.zeros(2))
    with pytest.raises(ValueError, match="no gradient"):
        check(torch.zeros(2, requires_grad=True))
    assert len(looked_at) == 1


def test_refused_calls_and_unknown_kinds_are_never_accepted():
    _, check, looked_at = make_checks()
    for _ in range(2):
        with pytest.raises(ValueError, match="no gradient"):
            check(torch.zeros(2, requires_grad=True))
        check([1])
    assert len(looked_at) == 4


def test_there_is_an_end_to_what_is_kept(monkeypatch):
    monkeypatch.setattr(accepted, "_MOST", 3)
    calls, check, looked_at = make_checks()
    for number in (1, 2, 3, 4, 4, 1):
        check(number)
    assert len(looked_at) == 5
    assert len(calls._signatures) == 2
