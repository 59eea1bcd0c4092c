"""Cases that decode-attention libraries got wrong in public, by their number in the project's collection.

Each test says what went wrong elsewhere. Numbers in closed form follow from q = 0: every visible key then weighs the
same, so values that count keys show which were seen.
"""

import math
import os
import subprocess
import sys
import threading

import pytest
import torch
from helpers import DTYPES, LOOSE, assert_matches, decode_and_check, describe, make_inputs, max_error

from flash_decoding import flash_decode, merge_states, reference

LN = math.log


def zeros_and(v, heads_q=None, dtype=torch.float32):
    """q = 0 and k random for values v [B, Hkv, N, Dv]: every visible key weighs the same."""
    batch, heads_kv, kv_len, _ = v.shape
    q = torch.zeros(batch, heads_q or heads_kv, 1, 64, dtype=dtype, device=v.device)
    return q, torch.randn(batch, heads_kv, kv_len, 64, device=v.device).to(dtype), v.to(dtype).contiguous()


@pytest.mark.parametrize("dtype", DTYPES, ids=describe)
def test_c001_merging_empty_states_gives_no_nan(dtype):
    out_a, out_b = torch.randn(2, 3, 2, 64).to(dtype)
    lse_a, lse_b = (
        torch.tensor([[-math.inf] * 2, [1.5] * 2, [0.3] * 2]),
        torch.tensor([[-math.inf] * 2] * 2 + [[2.0] * 2]),
    )
    out_a[0], out_b[0], out_b[1] = 0, float("nan"), float("nan")
    out, lse = merge_states([out_a, out_b], [lse_a, lse_b])
    assert bool((out[0] == 0).all())
    assert bool((lse[0] == -math.inf).all())
    assert torch.equal(out[1], out_a[1])
    assert torch.equal(lse[1], lse_a[1])
    weight = torch.sigmoid(torch.tensor(0.3 - 2.0, dtype=torch.float64))
    assert max_error(out[2], weight * out_a[2].double() + (1 - weight) * out_b[2].double()) < LOOSE[dtype]
    swapped = merge_states([out_b, out_a], [lse_b, lse_a])
    assert torch.equal(out, swapped[0])
    assert torch.equal(lse, swapped[1])


@pytest.mark.interpreter
@pytest.mark.parametrize("num_splits", [1, 2, 4, 8])
def test_c002_empty_splits_do_not_poison_the_reduction(target, num_splits):
    q, k, v = make_inputs(3, 4, 2, 256, 64, torch.float16, target.device)
    kv_lens = torch.tensor([0, 5, 256], dtype=torch.int32, device=target.device)
    out = torch.full_like(q, float("nan"))
    lse = torch.full((3, 4, 1), float("nan"), device=target.device)
    flash_decode(
        q, k, v, kv_lens=kv_lens, num_splits=num_splits, out=out, lse=lse, return_lse=True, backend=target.backend
    )
    assert_matches(out, lse, q, k, v, kv_lens=kv_lens)


@pytest.mark.interpreter
@pytest.mark.parametrize("plan", [{}, {"num_splits": 1}, {"num_splits": 4}, {"split_size": 64}], ids=describe)
def test_c003_a_cache_without_keys(target, plan):
    q = torch.randn(2, 4, 1, 64, device=target.device)
    k = v = torch.empty(2, 2, 0, 64, device=target.device)
    kv_lens = torch.zeros(2, dtype=torch.int32, device=target.device)
    for options in ({}, {"kv_lens": kv_lens}):
        out, lse = flash_decode(q, k, v, return_lse=True, backend=target.backend, **plan, **options)
        assert torch.equal(out, torch.zeros_like(q))
        assert bool((lse == -math.inf).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=describe)
def test_c006_unused_capacity_changes_nothing(target, dtype):
    q, k, v = make_inputs(1, 32, 8, 4096, 128, dtype, target.device)
    kv_lens = torch.tensor([1000], dtype=torch.int32, device=target.device)
    for plan in ({"num_splits": 5}, {"split_size": 256}, {}):
        results = [
            flash_decode(q, k[:, :, :n], v[:, :, :n], kv_lens=kv_lens, return_lse=True, backend=target.backend, **plan)
            for n in (4096, 1000, 1024, 2048)
        ]
        for out, lse in results:
            assert_matches(out, lse, q, k[:, :, :1000], v[:, :, :1000])
            if plan:
                assert torch.equal(out, results[0][0])
                assert torch.equal(lse, results[0][1])
            else:
                assert max_error(out, results[0][0]) <= 2 * torch.finfo(dtype).eps * results[0][0].abs().max().item()


def test_c010_the_split_count_does_not_change_the_answer(target):
    q, k, v = make_inputs(1, 16, 8, 4096, 128, torch.bfloat16, target.device)
    _, first = decode_and_check(target, q, k, v)
    for num_splits in (1, 2, 3, 5, 8, 16, 32, 64, 128):
        _, lse = decode_and_check(target, q, k, v, plan={"num_splits": num_splits})
        assert max_error(lse, first) < 1e-4


@pytest.mark.interpreter
@pytest.mark.parametrize(("kv_len", "lens"), [(2, [2, 0]), (3, [3, 0]), (17, [17, 2])])
def test_c011_more_splits_than_keys(target, kv_len, lens):
    q, k, v = make_inputs(2, 4, 4, kv_len, 64, torch.float32, target.device)
    kv_lens = torch.tensor(lens, dtype=torch.int32, device=target.device)
    out, _ = decode_and_check(target, q, k, v, kv_lens=kv_lens, plan={"num_splits": 16})
    assert max_error(out, flash_decode(q, k, v, kv_lens=kv_lens, num_splits=1, backend=target.backend)) < 1e-6


def test_c012_no_setting_of_an_earlier_call_sticks(target):
    """Each call of a mixed sequence has the bits that it has as the first call of a process."""
    program = """if True:
        import sys, torch
        from flash_decoding import flash_decode
        for setting in sys.argv[2:]:
            torch.manual_seed(0)
            splits, dtype = setting.split(":")
            q, k, v = (torch.randn(2, h, n, 128, device=sys.argv[1]) for h, n in ((8, 1), (2, 5000), (2, 5000)))
            q, k, v = (x.to(getattr(torch, dtype)) for x in (q, k, v))
            out = flash_decode(q, k, v, num_splits=int(splits) or None)
            print(out.double().sum().item().hex(), out.double().abs().sum().item().hex())
    """
    settings = ["2:float16", "4:float16", "3:bfloat16", "1:float16", "2:bfloat16", "0:float16"]

    def run(*settings):
        command = [sys.executable, "-c", program, target.device, *settings]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")[:-1]

    assert run(*settings) == [run(setting)[0] for setting in settings]


@pytest.mark.interpreter
def test_c014_halves_of_one_interleaved_pool(target):
    q = torch.randn(2, 8, 1, 64, device=target.device, dtype=torch.float16)
    pool = torch.randn(2, 100, 2, 4, 64, device=target.device, dtype=torch.float16)  # [B, N, k or v, Hkv, D]
    k, v = pool.unbind(2)
    layers = torch.randn(2, 100, 3, 4, 64, device=target.device, dtype=torch.float16)  # one layer of three
    q = q.transpose(1, 2)
    for keys, values in ((k, v), (layers[:, :, 1], v)):
        got = flash_decode(q, keys, values, layout="bnhd", backend=target.backend)
        want = flash_decode(q, keys.contiguous(), values.contiguous(), layout="bnhd", backend=target.backend)
        assert torch.equal(got, want)


@pytest.mark.interpreter
def test_c015_broadcast_tensors_with_stride_0(target):
    q, k, v = make_inputs(1, 4, 1, 133, 64, torch.float16, target.device)
    expanded = [q.expand(5, 4, 1, 64), k.expand(5, 4, 133, 64), v.expand(5, 4, 133, 64)]
    for plan in ({"num_splits": 1}, {"num_splits": 3}):
        got = flash_decode(*expanded, backend=target.backend, **plan)
        assert torch.equal(got, flash_decode(*(x.contiguous() for x in expanded), backend=target.backend, **plan))


@pytest.mark.interpreter
def test_c016_strides_are_looked_at_on_every_call(target):
    q, k, v = make_inputs(3, 6, 2, 70, 64, torch.float16, target.device)
    fused = torch.randn(3, 10, 1, 64, device=target.device, dtype=torch.float16)
    transposed = torch.randn(6, 3, 1, 64, device=target.device, dtype=torch.float16).transpose(0, 1)
    k_nh = k.transpose(1, 2).contiguous().transpose(1, 2)
    for queries, keys in ((q, k), (fused[:, :6], k), (transposed, k), (q, k_nh)):
        got, _ = decode_and_check(target, queries, keys, v)
        assert torch.equal(got, flash_decode(queries.contiguous(), keys.contiguous(), v, backend=target.backend))


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype != torch.float32], ids=describe)
@pytest.mark.parametrize("heads", [(28, 4), (40, 8), (24, 4), (64, 4), (64, 1), (14, 2)], ids=str)
def test_c017_query_head_i_reads_kv_head_i_over_g(target, heads, dtype):
    heads_q, heads_kv = heads
    q, k, v = make_inputs(1, heads_q, heads_kv, 90, 128, dtype, target.device)
    decode_and_check(target, q, k, v)
    v = (torch.arange(heads_kv, device=target.device) + 1.0).to(dtype)[None, :, None, None].expand_as(v).contiguous()
    out = flash_decode(q, k, v, backend=target.backend)
    want = 1.0 + torch.arange(heads_q, device=target.device) // (heads_q // heads_kv)
    assert max_error(out, want[None, :, None, None].expand_as(out)) <= LOOSE[dtype] * heads_kv


def test_c018_a_group_of_seven_is_as_exact_as_its_expansion(target):
    seven, expanded, eight = [], [], []
    for seed in range(10):
        torch.manual_seed(seed)
        q, k, v = make_inputs(1, 32, 4, 256, 128, torch.bfloat16, target.device)
        want = reference(q, k, v)
        eight.append(max_error(flash_decode(q, k, v, backend=target.backend), want))
        q, want = (x.unflatten(1, (4, 8))[:, :, :7].flatten(1, 2) for x in (q, want))
        seven.append(max_error(flash_decode(q, k, v, backend=target.backend), want))
        k, v = (x.repeat_interleave(7, dim=1) for x in (k, v))
        expanded.append(max_error(flash_decode(q, k, v, backend=target.backend), want))
    assert max(seven) <= 1.25 * max(expanded)
    assert max(seven) <= 1.25 * max(eight)


@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=describe)
@pytest.mark.parametrize("head_dim", [80, 96, 192, 256])
def test_c019_head_sizes_that_are_no_power_of_two(target, head_dim, dtype, num_splits):
    q, k, v = make_inputs(1, 16, 4, 1030, head_dim, dtype, target.device)
    decode_and_check(target, q, k, v, plan={"num_splits": num_splits})
    explicit = flash_decode(q, k, v, scale=head_dim**-0.5, num_splits=num_splits, backend=target.backend)
    assert torch.equal(explicit, flash_decode(q, k, v, num_splits=num_splits, backend=target.backend))


@pytest.mark.interpreter
@pytest.mark.parametrize("heads_q", [16, 128])
def test_c020_latent_attention_with_values_inside_the_keys(target, heads_q):
    dtype = DTYPES[-1]  # bfloat16, but for the interpreter
    q = torch.randn(1, heads_q, 1, 576, device=target.device).to(dtype)
    pool = torch.randn(17, 1, 64, 576, device=target.device).to(dtype)
    table = torch.randperm(17, device=target.device)[:16].int()[None]
    kv_lens = torch.tensor([1000], dtype=torch.int32, device=target.device)
    shared = {"block_table": table, "kv_lens": kv_lens, "scale": 192**-0.5}
    out, _ = decode_and_check(target, q, pool, pool[..., :512], plan={"num_splits": 2}, **shared)
    apart = flash_decode(q, pool, pool[..., :512].contiguous(), num_splits=2, backend=target.backend, **shared)
    assert max_error(out, apart) <= torch.finfo(dtype).eps * apart.abs().max().item()


@pytest.mark.interpreter
@pytest.mark.parametrize("num_splits", [1, 4])
def test_c021_scores_of_a_million_do_not_overflow(target, num_splits):
    q = torch.full((1, 2, 1, 128), 300.0, dtype=torch.float16, device=target.device)
    k = torch.full((1, 2, 64, 128), 300.0, dtype=torch.float16, device=target.device)
    v = torch.randn(1, 2, 64, 128, device=target.device).half()
    out, lse = flash_decode(q, k, v, num_splits=num_splits, return_lse=True, backend=target.backend)
    assert max_error(out, v.double().mean(2, keepdim=True)) < LOOSE[torch.float16]
    assert max_error(lse, torch.full_like(lse, 1018237.92)) < 0.5


@pytest.mark.interpreter
@pytest.mark.parametrize(("dtype", "magnitude"), [(torch.float16, 100.0), (torch.bfloat16, 15000.0)], ids=describe)
def test_c022_a_real_score_below_any_finite_mask_value(target, dtype, magnitude):
    q, k = torch.zeros(1, 1, 1, 64, device=target.device), torch.zeros(1, 1, 64, 64, device=target.device)
    q[..., 0], k[:, :, 0, 0] = -200.0, magnitude
    v = torch.full_like(k, 1000.0)
    v[:, :, 0] = torch.randn(64, device=target.device)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    score = q[0, 0, 0, 0].double() * k[0, 0, 0, 0].double()
    kv_lens = torch.tensor([1], dtype=torch.int32, device=target.device)
    out, lse = flash_decode(q, k, v, scale=1.0, kv_lens=kv_lens, return_lse=True, backend=target.backend)
    assert torch.equal(out[0, 0, 0], v[0, 0, 0])
    assert abs(lse.item() - score.item()) <= max(0.01, 1e-6 * abs(score.item()))


@pytest.mark.interpreter
def test_c023_splits_whose_mass_underflows_weigh_nothing(target):
    q = torch.zeros(1, 4, 1, 64, device=target.device)
    q[..., 0] = 40.0
    k = torch.randn(1, 4, 1024, 64, device=target.device)
    k[..., 0] = torch.randn(1, 4, 1024, device=target.device) / 40
    k[:, :, 777] = 0.0
    k[:, :, 777, 0] = 40.0
    q, k, v = q.half(), k.half(), torch.randn(1, 4, 1024, 64, device=target.device).half()
    out, lse = flash_decode(q, k, v, num_splits=8, return_lse=True, backend=target.backend)
    assert max_error(out, v[:, :, 777:778]) <= torch.finfo(torch.float16).eps * v[:, :, 777].abs().max().item()
    assert max_error(lse, torch.full_like(lse, 200.0)) < 1e-3


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", DTYPES, ids=describe)
@pytest.mark.parametrize("num_splits", [1, 4])
def test_c024_the_lse_is_natural_float32_and_unpadded(target, num_splits, dtype):
    q, k, v = zeros_and(torch.randn(2, 2, 8, 64, device=target.device), heads_q=6, dtype=dtype)
    _, lse = flash_decode(q, k, v, num_splits=num_splits, return_lse=True, backend=target.backend)
    assert lse.shape == (2, 6, 1)
    assert lse.dtype == torch.float32
    assert max_error(lse, torch.full_like(lse, LN(8))) < 1e-5
    decode_and_check(target, *make_inputs(2, 6, 2, 16, 64, dtype, target.device), plan={"num_splits": num_splits})


@pytest.mark.parametrize("gain", [1.0, 1000.0])
def test_c025_splitting_costs_no_accuracy(target, gain):
    # Several draws, because the largest of one draw's errors is a matter of luck.
    mismatch, error = {1: 0.0, 16: 0.0}, {1: 0.0, 16: 0.0}
    for seed in range(8):
        torch.manual_seed(seed)
        q, k, v = make_inputs(1, 32, 8, 4096, 128, torch.bfloat16, target.device)
        v = v * gain
        want = reference(q, k, v)
        for num_splits in (1, 16):
            out = flash_decode(q, k, v, num_splits=num_splits, backend=target.backend)
            mismatch[num_splits] += (out != want.bfloat16()).double().mean().item() / 8
            error[num_splits] = max(error[num_splits], max_error(out, want))
    assert mismatch[16] <= mismatch[1] + 0.02
    assert error[16] <= 1.2 * error[1]


@pytest.mark.interpreter
def test_c026_a_long_and_a_short_part_are_weighed_by_their_mass(target):
    v = torch.cat([torch.zeros(1, 2, 64, 64), torch.ones(1, 2, 16, 64)], dim=2).to(target.device)
    q, k, v = zeros_and(v)
    parts = [
        flash_decode(q, k[:, :, a:b], v[:, :, a:b], return_lse=True, backend=target.backend)
        for a, b in ((0, 64), (64, 80))
    ]
    out, lse = merge_states(*zip(*parts, strict=True))
    assert max_error(out, torch.full_like(out, 0.2)) < 1e-6
    assert max_error(lse, torch.full_like(lse, LN(80))) < 1e-6
    whole, whole_lse = flash_decode(q, k, v, return_lse=True, backend=target.backend)
    assert max_error(out, whole) < 1e-6
    assert max_error(lse, whole_lse) < 1e-6
    exact = torch.logsumexp(torch.zeros(64, dtype=torch.float64), 0).float()
    assert (
        max_error(
            merge_states([parts[0][0], parts[1][0]], [exact.expand(1, 2, 1).to(target.device), parts[1][1]])[0], out
        )
        < 1e-6
    )


@pytest.mark.interpreter
@pytest.mark.parametrize("num_splits", [1, 4])
def test_c054_nan_past_the_length_changes_no_bit(target, num_splits):
    q, k, v = make_inputs(4, 8, 8, 128, 64, torch.bfloat16, target.device)
    kv_lens = torch.tensor([32, 64, 96, 48], dtype=torch.int32, device=target.device)
    unused = (torch.arange(128, device=target.device) >= kv_lens[:, None])[:, None, :, None]
    clean, dirty = (
        flash_decode(
            q, k.masked_fill(unused, fill), v.masked_fill(unused, fill), kv_lens=kv_lens, num_splits=num_splits,
            return_lse=True, backend=target.backend,
        )
        for fill in (0.0, float("nan"))
    )  # fmt: skip
    assert torch.equal(clean[0], dirty[0])
    assert torch.equal(clean[1], dirty[1])


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=describe)
def test_c056_lengths_of_both_integer_types(target, dtype):
    v = torch.arange(8.0, device=target.device)[None, None, :, None].expand(2, 1, 8, 64)
    kv_lens = torch.tensor([3, 5], dtype=dtype, device=target.device)
    out, lse = flash_decode(*zeros_and(v), kv_lens=kv_lens, return_lse=True, backend=target.backend)
    assert max_error(out[:, 0, 0, 0], torch.tensor([1.0, 2.0], device=target.device)) < 1e-6
    assert max_error(lse[:, 0, 0], torch.tensor([LN(3), LN(5)], device=target.device)) < 1e-6


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint8, torch.float32], ids=describe)
def test_c056_other_types_of_lengths_are_refused(target, dtype):
    q, k, v = make_inputs(2, 2, 1, 8, 64, torch.float32, target.device)
    with pytest.raises(TypeError, match="kv_lens must be int32 or int64"):
        flash_decode(q, k, v, kv_lens=torch.tensor([3, 5], device=target.device).to(dtype), backend=target.backend)


@pytest.mark.interpreter
def test_c057_an_empty_batch_launches_nothing(target):
    q, k, v = make_inputs(0, 8, 2, 100, 64, torch.float16, target.device)
    kv_lens = torch.empty(0, dtype=torch.int32, device=target.device)
    out, lse = flash_decode(q, k, v, kv_lens=kv_lens, return_lse=True, backend=target.backend)
    assert out.shape == (0, 8, 1, 64)
    assert (out.dtype, lse.dtype, out.device.type) == (torch.float16, torch.float32, target.device)
    assert lse.shape == (0, 8, 1)
    assert torch.ones(3, device=target.device).sum().item() == 3
    decode_and_check(target, *make_inputs(1, 8, 2, 100, 64, torch.float16, target.device))


def test_c064_importing_needs_no_gpu_no_triton_and_no_numba(target):
    program = """if True:
        import builtins, sys, os
        real = builtins.__import__
        def fake(name, *args, **kwargs):
            if name.split(".")[0] == "triton":
                raise ImportError("no triton here")
            return real(name, *args, **kwargs)
        import torch
        before = set(sys.modules)
        import flash_decoding
        loaded = {name.split(".")[0] for name in set(sys.modules) - before}
        assert not loaded & {"triton", "numba", "llvmlite", "transformers"}, loaded
        assert not torch.cuda.is_initialized()
        builtins.__import__ = fake
        q, k, v = torch.randn(1, 4, 1, 64), torch.randn(1, 2, 50, 64), torch.randn(1, 2, 50, 64)
        out = flash_decoding.flash_decode(q, k, v)
        assert (out - flash_decoding.reference(q, k, v)).abs().max() < 1e-6
        try:
            flash_decoding.flash_decode(q, k, v, backend="triton")
        except ValueError as error:
            print(error)
    """
    if target.device != "cpu" or target.backend != "cpu":
        pytest.skip("is about machines without a GPU")
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.startswith("backend 'triton' cannot run this call: q is on the CPU")


@pytest.mark.compiles
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("return_lse", [False, True])
def test_c065_compiles_without_a_graph_break(target, mode, return_lse):
    q, k, v = make_inputs(2, 4, 2, 100, 64, torch.float32, target.device)
    linear = torch.nn.Linear(64, 64, device=target.device)
    kv_lens = torch.tensor([100, 31], dtype=torch.int32, device=target.device)

    def step(q, k, v, kv_lens):
        result = flash_decode(linear(q), k, v, kv_lens=kv_lens, return_lse=return_lse)
        return (linear(result[0]), result[1]) if return_lse else linear(result)

    with torch.no_grad():
        compiled = torch.compile(step, fullgraph=True, mode=mode)
        for _ in range(3):
            got, want = compiled(q, k, v, kv_lens), step(q, k, v, kv_lens)
            for x, y in zip(*((r if return_lse else [r]) for r in (got, want)), strict=True):
                assert max_error(x, y) < 1e-5


@pytest.mark.compiles
@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
def test_c065_compiled_with_out_given_and_a_growing_cache(target, layout):
    out = torch.zeros(1, 4, 1, 64, device=target.device)
    if layout == "bnhd":
        out = out.transpose(1, 2).contiguous()

    @torch.compile(fullgraph=True, dynamic=True)
    def step(q, k, v, out):
        return flash_decode(q * 2.0, k, v, layout=layout, out=out) + 1.0

    for kv_len in (40, 41, 97):
        q, k, v = make_inputs(1, 4, 2, kv_len, 64, torch.float32, target.device, layout=layout)
        with torch.no_grad():
            got = step(q, k, v, out)
        want = reference(q * 2.0, k, v, layout=layout)
        assert max_error(got, want + 1.0) < 1e-5
        assert max_error(out, want) < 1e-5


def test_c066_eight_threads_make_the_first_call_at_once(target):
    program = """if True:
        import sys, threading, torch
        from flash_decoding import flash_decode, reference
        def work(i, same):
            gen = torch.Generator(device=sys.argv[1]).manual_seed(i)
            kv_len = 500 if same else 100 * i + 1
            shapes = ((1, 4, 1, 64), (1, 2, kv_len, 64), (1, 2, kv_len, 64))
            q, k, v = (torch.randn(shape, device=sys.argv[1], generator=gen) for shape in shapes)
            barrier.wait()
            for _ in range(5):
                out = flash_decode(q, k, v, num_splits=4)
                if (out - reference(q, k, v)).abs().max() > 1e-5:
                    failures.append(i)
        failures = []
        for same in (True, False):
            barrier = threading.Barrier(8)
            threads = [threading.Thread(target=work, args=(i, same)) for i in range(8)]
            [t.start() for t in threads]; [t.join() for t in threads]
        print("failures", failures)
    """
    run = subprocess.run([sys.executable, "-c", program, target.device], capture_output=True, text=True)
    assert run.stdout.strip() == "failures []", run.stdout + run.stderr


def test_c067_many_processes_share_one_empty_cache(target, tmp_path):
    program = """if True:
        import sys, torch
        from flash_decoding import flash_decode, reference
        q, k, v = (torch.randn(1, h, n, 64, device=sys.argv[1]) for h, n in ((4, 1), (2, 300), (2, 300)))
        assert (flash_decode(q, k, v, num_splits=3) - reference(q, k, v)).abs().max() < 1e-5
    """
    # One round, which compiles in every process at once: five would take minutes on two cores.
    env = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path), "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", program, target.device]
    running = [subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) for _ in range(8)]
    for process in running:
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors


def test_threads_that_share_a_stream_do_not_share_scratch(target):
    """Two launches make one call; another thread's must not come between them with the same scratch."""
    failures = []

    def work(seed):
        gen = torch.Generator(device=target.device).manual_seed(seed)
        q, k, v = (
            torch.randn(1, h, n, 64, device=target.device, generator=gen) for h, n in ((8, 1), (2, 700), (2, 700))
        )
        want = reference(q, k, v)
        for _ in range(30):
            if max_error(flash_decode(q, k, v, num_splits=8, backend=target.backend), want) > 1e-5:
                failures.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
