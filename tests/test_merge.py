"""merge_states(): the definition of every merge, and the kernel that must equal it."""

import math

import pytest
import torch
from conftest import INTERPRETED, NO_GPU
from helpers import DTYPES, describe, make_inputs, max_error

from flash_decoding import backends, merge_states, reference
from flash_decoding.workspace import Partial


@pytest.fixture
def device(target, monkeypatch):
    """Where states live so that the target's merge runs: the formula on a CPU, the kernel on a GPU or interpreted."""
    if target.backend == "triton":
        from flash_decoding.backends.triton import reduce

        calls, launch_merge = [], reduce.launch_merge
        monkeypatch.setattr(backends, "resolve", lambda backend, device: "triton")
        monkeypatch.setattr(reduce, "launch_merge", lambda *args: calls.append(launch_merge(*args)))
        yield target.device
        assert calls, "the kernel ran"
    else:
        yield target.device


def in_float64(outs, lses, base="e"):
    """The merge written another way: weights by softmax, with everything empty taken out."""
    lses = lses.double() * (1.0 if base == "e" else math.log(2))
    empty = lses.isinf()
    log_w = lses.masked_fill(empty, -math.inf)
    w = torch.softmax(log_w, dim=0).nan_to_num(nan=0.0)
    out = (w[..., None] * outs.double().masked_fill(empty[..., None], 0.0)).sum(dim=0)
    return out, torch.logsumexp(log_w, dim=0) / (1.0 if base == "e" else math.log(2))


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


@pytest.mark.interpreter
def test_partials_merge_to_the_same_bits_whatever_lies_beside_them(target):
    """Or the two ways in which ranks communicate would differ: each merges other heads at once.

    States begin at multiples of 64 bytes, as in their messages: others are read otherwise, and summed in another order.
    """
    acc, m, l = (torch.randn(8, 3, 24, 1, *width).to(target.device) for width in ((32,), (), ()))
    merge = backends.load(target.backend).merge_partials

    def merged(heads):
        partial = Partial(*[x[:, :, heads].contiguous() for x in (acc, m, l.abs())])
        out, lse = torch.empty(partial.acc.shape[1:]), torch.empty(partial.m.shape[1:])
        out, lse = out.to(target.device), lse.to(target.device)
        merge(partial, out, lse)
        return out, lse

    whole = merged(slice(None))
    for at in range(0, 24, 3):
        heads = slice(at, at + 3)
        assert all(torch.equal(part, x[:, heads]) for part, x in zip(merged(heads), whole, strict=True))


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", DTYPES, ids=describe)
@pytest.mark.parametrize("base", ["e", "2"])
@pytest.mark.parametrize("form", ["stack", "list"])
@pytest.mark.parametrize(
    ("count", "width"), [(1, 64), (2, 128), (2, 80), (3, 16), (5, 512), (40, 24), (2, 1), (2, 700)]
)
def test_against_float64(device, count, width, form, base, dtype):
    out, lse = (x.to(device) for x in random_states(count, (2, 3), width, dtype))
    lse[torch.rand(lse.shape) < 0.2] = math.inf
    lse[torch.rand(lse.shape) < 0.2] = -math.inf
    out[lse.isinf()] = math.nan
    want, want_lse = in_float64(out, lse, base)
    got, got_lse = merge_states(*((out, lse) if form == "stack" else (list(out), list(lse))), base=base)
    assert got.dtype == dtype
    assert max_error(got, want) <= torch.finfo(dtype).eps * 4 * max(1.0, want.abs().max().item())
    assert max_error(got_lse, want_lse) < 1e-5
    assert bool((got[want_lse == -math.inf] == 0).all())


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", DTYPES, ids=describe)
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("form", ["stack", "list"])
def test_in_place(device, form, place, count, dtype):
    out, lse = (x.to(device) for x in random_states(count, (4, 5), 1024, dtype))  # wide: several warps share a row
    want, want_lse = merge_states(out, lse)
    others = [x.clone() for i, x in enumerate(out) if i != place]
    states, logs = (out, lse) if form == "stack" else ([x.clone() for x in out], [x.clone() for x in lse])
    got, got_lse = merge_states(states, logs, out=states[place], lse=logs[place])
    assert got.data_ptr() == states[place].data_ptr()
    assert torch.equal(got, want)
    assert torch.equal(got_lse, want_lse)
    assert torch.equal(logs[place], want_lse)
    assert all(torch.equal(x, y) for x, y in zip([x for i, x in enumerate(states) if i != place], others, strict=True))


@pytest.mark.interpreter
def test_two_states_merge_to_the_same_bits_in_either_order(device):
    (a, b), (la, lb) = (x.to(device) for x in random_states(2, (7, 9), 128))
    lb[0] = -math.inf
    out, lse = merge_states([a, b], [la, lb])
    swapped, swapped_lse = merge_states([b, a], [lb, la])
    assert torch.equal(out, swapped)
    assert torch.equal(lse, swapped_lse)
    assert torch.equal(out[0], a[0])
    assert torch.equal(lse[0], la[0])


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", DTYPES, ids=describe)
def test_float32_states_become_a_16_bit_result_that_is_rounded_once(device, dtype):
    out, lse = (x.to(device) for x in random_states(3))
    exact, _ = merge_states(out, lse)
    result = torch.full(exact.shape, math.nan, dtype=dtype, device=device)
    assert merge_states(out, lse, out=result)[0] is result
    assert torch.equal(result, exact.to(dtype))


@pytest.mark.interpreter
def test_strides(device):
    """Whatever is not contiguous, and states that lie apart in one tensor or in several."""
    base, lse = (x.to(device) for x in random_states(6, (3, 4), 32))
    want, want_lse = merge_states(base[::2].clone(), lse[::2].clone())
    for outs, lses in (
        (base[::2], lse[::2]),
        (list(base[::2]), list(lse[::2])),
        (base[::2].transpose(1, 2).contiguous().transpose(1, 2), lse[::2].transpose(1, 2).contiguous().transpose(1, 2)),
    ):
        out, got_lse = torch.zeros(4, 3, 32, device=device).transpose(0, 1), torch.zeros(4, 3, device=device).T
        merge_states(outs, lses, out=out, lse=got_lse)
        assert torch.equal(out, want)
        assert torch.equal(got_lse, want_lse)
    pair = merge_states([base[4], base[0]], [lse[4], lse[0]])  # the second lies before the first
    assert torch.equal(pair[0], merge_states(base[[4, 0]], lse[[4, 0]])[0])


@pytest.mark.interpreter
@pytest.mark.parametrize("shape", [(0, 3), (2, 0), ()])
def test_rows_may_be_none_or_one(target, shape):
    out, lse = merge_states(
        torch.ones(2, *shape, 16, device=target.device), torch.zeros(2, *shape, device=target.device)
    )
    assert torch.equal(out, torch.ones(*shape, 16, device=target.device))
    assert max_error(lse, torch.full(shape, math.log(2), device=target.device)) < 1e-6


@pytest.mark.compiles
def test_compiled_and_in_place(target):
    out, lse = (x.to(target.device) for x in random_states(2))
    want, want_lse = merge_states(out, lse)

    def step(a, b, la, lb):
        merged, logs = merge_states([a, b], [la, lb], out=a, lse=la)
        return merged * 2.0, logs

    a, la = out[0].clone(), lse[0].clone()
    doubled, logs = torch.compile(step, fullgraph=True)(a, out[1], la, lse[1])
    assert max_error(a, want) < 1e-6
    assert max_error(doubled, 2.0 * want) < 1e-6
    assert max_error(la, want_lse) < 1e-6
    assert max_error(logs, want_lse) < 1e-6


def test_gradients_flow(target):
    out, lse = (x.to(target.device).requires_grad_() for x in random_states(2))
    merge_states(out, lse)[0].sum().backward()
    w = torch.softmax(lse.detach(), dim=0)
    assert max_error(out.grad, w[..., None].expand_as(out)) < 1e-6
    assert lse.grad.abs().max() > 0


@pytest.mark.gpu
@NO_GPU
@pytest.mark.parametrize("form", ["pair", "stack"])
def test_it_is_one_kernel_and_a_graph_holds_it(form):
    out, lse = (x.cuda() for x in random_states(2, (64, 32), 128, torch.bfloat16))
    states = (out, lse) if form == "stack" else (list(out), list(lse))
    result, result_lse = torch.empty_like(out[0]), torch.empty_like(lse[0])

    def call():
        return merge_states(*states, out=result, lse=result_lse)

    call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    kernels = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len(kernels) == 1, kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    out.normal_()
    lse.normal_()
    graph.replay()
    want, want_lse = in_float64(out, lse)
    assert max_error(result, want) <= torch.finfo(torch.bfloat16).eps * max(1.0, want.abs().max().item())
    assert max_error(result_lse, want_lse) < 1e-5


@pytest.mark.skipif(INTERPRETED, reason="the interpreter does not compile")
@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=describe)
@pytest.mark.parametrize(("count", "width"), [(2, 128), (8, 80), (64, 512), (2, 16384)])
def test_the_kernel_compiles_and_does_not_spill(count, width, dtype, arch):
    pytest.importorskip("triton")
    from compiling import compile_merge

    built = compile_merge(dtype, width, count, arch)
    assert built.spills == 0
    assert built.stack_bytes == 0
    assert built.shared_bytes <= 48 * 1024


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
    ((torch.zeros(2, 3, 8), [torch.zeros(3)]), {}, ValueError, "lses must have the shape of outs without"),
    ((torch.zeros(2), torch.zeros(2)), {}, ValueError, "lses must have the shape of outs without the last axis"),
    ((torch.zeros(2, 3, 8), torch.zeros(2, 3)), {"out": 1.0}, TypeError, "out must be a torch.Tensor or None"),
    ((torch.zeros(2, 3, 8), torch.zeros(2, 3)), {"out": torch.zeros(2, 8)}, ValueError, "out must have shape"),
    ((torch.zeros(2, 3, 8), torch.zeros(2, 3)), {"out": torch.zeros(3, 8).double()}, TypeError, "out must be one of"),
    (
        (torch.zeros(2, 3, 8), torch.zeros(2, 3)),
        {"out": torch.zeros(8).expand(3, 8)},
        ValueError,
        "out must not overlap",
    ),
    (
        (torch.zeros(2, 3, 8), torch.zeros(2, 3)),
        {"lse": torch.zeros(3).half()},
        TypeError,
        "lse must be one of float32",
    ),
    (
        (torch.zeros(2, 3, 8), torch.zeros(2, 3)),
        {"lse": torch.zeros(3, device="meta")},
        ValueError,
        "lse must be on the device of outs, cpu, got meta",
    ),
]


@pytest.mark.parametrize(("arguments", "options", "kind", "message"), REFUSED, ids=[x[3][:40] for x in REFUSED])
def test_bad_input_is_refused_by_name(arguments, options, kind, message):
    with pytest.raises(kind, match=message):
        merge_states(*arguments, **options)
