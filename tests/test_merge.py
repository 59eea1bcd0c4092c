"""merge_states(): the definition of every merge."""

import math

import pytest
import torch
from helpers import DTYPES, describe, make_inputs, max_error

from flash_decoding import merge_states, reference


def random_states(count, shape=(2, 3), width=16, dtype=torch.float32):
    return torch.randn(count, *shape, width).to(dtype), 5 * torch.randn(count, *shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=describe)
def test_parts_of_a_softmax_make_the_whole(dtype):
    q, k, v = make_inputs(2, 4, 2, 100, 64, torch.float32, "cpu")
    parts = [reference(q, k[:, :, a:b], v[:, :, a:b], return_lse=True) for a, b in ((0, 7), (7, 60), (60, 100))]
    out, lse = merge_states([out.to(dtype) for out, _ in parts], [lse.float() for _, lse in parts])
    want, want_lse = reference(q, k, v, return_lse=True)
    assert out.dtype == dtype
    assert max_error(out, want) <= torch.finfo(dtype).eps * 4
    assert max_error(lse, want_lse) < 1e-6


def test_commutative_associative_and_with_an_identity():
    (a, b, c), (la, lb, lc) = random_states(3)
    ab, lab = merge_states([a, b], [la, lb])
    bc, lbc = merge_states([b, c], [lb, lc])
    all_at_once, lse = merge_states([a, b, c], [la, lb, lc])
    for out, other in (merge_states([ab, c], [lab, lc]), merge_states([a, bc], [la, lbc])):
        assert max_error(out, all_at_once) < 1e-6
        assert max_error(other, lse) < 1e-5
    assert torch.equal(merge_states([b, a], [lb, la])[0], ab)
    same, lse = merge_states([a, torch.full_like(a, math.nan)], [la, torch.full_like(la, -math.inf)])
    assert torch.equal(same, a)
    assert torch.equal(lse, la)


@pytest.mark.parametrize("empty", [-math.inf, math.inf])
def test_both_conventions_of_empty(empty):
    out, lse = random_states(3)
    lse[1], out[1] = empty, math.nan
    want = merge_states(out[[0, 2]], lse[[0, 2]])
    got = merge_states(out, lse)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])
    nothing = merge_states(out[1:2], lse[1:2])
    assert bool((nothing[0] == 0).all())
    assert bool((nothing[1] == -math.inf).all())


def test_base_2_is_the_same_merge_in_other_units():
    out, lse = random_states(4)
    natural, natural_lse = merge_states(out, lse)
    binary, binary_lse = merge_states(out, lse / math.log(2), base="2")
    assert max_error(binary, natural) < 1e-5
    assert max_error(binary_lse * math.log(2), natural_lse) < 1e-5


def test_masses_far_apart_do_not_overflow():
    out, _ = random_states(2)
    lse = torch.stack([torch.full((2, 3), 3e5), torch.full((2, 3), -3e5)])
    assert torch.equal(merge_states(out, lse)[0], out[0])


REFUSED = [
    (([], []), {}, ValueError, "outs must hold at least one state"),
    (
        (torch.zeros(2, 3, 8), torch.zeros(2, 4)),
        {},
        ValueError,
        "lses must have the shape of outs without the last axis",
    ),
    ((torch.zeros(2, 3, 8), torch.zeros(2, 3).half()), {}, TypeError, "lses must be float32"),
    ((torch.zeros(2, 3, 8).double(), torch.zeros(2, 3)), {}, TypeError, "outs must be float16, bfloat16 or float32"),
    ((torch.zeros(2, 3, 8), torch.zeros(2, 3, device="meta")), {}, ValueError, "lses must be on the device of outs"),
    (([torch.zeros(3, 8), torch.zeros(4, 8)], torch.zeros(2, 3)), {}, ValueError, "outs must agree in shape"),
    (([torch.zeros(3, 8), torch.zeros(3, 8).half()], torch.zeros(2, 3)), {}, TypeError, "outs must agree in dtype"),
    ((1.0, torch.zeros(2, 3)), {}, TypeError, "outs must be a tensor or a sequence of tensors, got float"),
    ((torch.zeros(2, 3, 8), torch.zeros(2, 3)), {"base": 10}, ValueError, "base must be 'e' or '2', got 10"),
]


@pytest.mark.parametrize(("arguments", "options", "kind", "message"), REFUSED, ids=[x[3][:40] for x in REFUSED])
def test_bad_input_is_refused_by_name(arguments, options, kind, message):
    with pytest.raises(kind, match=message):
        merge_states(*arguments, **options)
