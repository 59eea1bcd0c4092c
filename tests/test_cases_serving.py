"""Public cases: graphs, scratch, devices, and arguments that do not fit."""

import math

import pytest
import torch
from cases import (
    INTERPRETED,
    LN,
    NAN,
    assert_same_bits,
    decode,
    dense_of,
    forbid_launches,
    int32,
    reference_of_large,
    repeatable,
    zeros_and,
)
from helpers import LOOSE, assert_matches, describe, make_inputs, max_error

from flash_decoding import Workspace, explain, flash_decode, reference, workspace

# Graphs. How fast a graph is at another length than it was captured at is in test_cases_speed.py.


@pytest.mark.parametrize("own_workspace", [False, True])
def test_c042_one_graph_of_a_paged_cache_is_right_for_every_later_length(target, own_workspace):
    """On the CPU, which has no graphs, the same tensors with other contents."""
    q = torch.randn(2, 16, 1, 128, device=target.device).bfloat16()
    k, v = torch.randn(2, 1030, 4, 16, 128, device=target.device).bfloat16()
    kv_lens = int32([1, 1], target)
    table = torch.zeros(2, 512, dtype=torch.int32, device=target.device)
    out, lse = torch.empty_like(q), torch.empty(2, 16, 1, device=target.device)
    scratch = Workspace(64 << 20, target.device) if own_workspace else None
    replay = repeatable(
        target,
        lambda: decode(target, q, k, v, block_table=table, kv_lens=kv_lens, out=out, lse=lse, workspace=scratch),
    )
    for lens in ([1, 4096], [8192, 17], [0, 300], [16, 16]):
        for x in (q, k, v):
            x.normal_()
        table.copy_(torch.randperm(1030)[:1024].view(2, 512))
        kv_lens.copy_(torch.tensor(lens))
        out.fill_(NAN), lse.fill_(NAN)
        # Other calls between replays must not disturb the graph's scratch, however much they need.
        decode(target, *make_inputs(3, 16, 4, 500, 128, torch.bfloat16, target.device), num_splits=64)
        replay()
        for b, length in enumerate(lens):
            pages = table[b : b + 1, : -(-length // 16)]
            keys, values = (dense_of(x, pages)[:, :, :length] for x in (k, v))
            want, want_lse = reference_of_large(q[b : b + 1], keys, values)
            assert max_error(out[b], want[0]) <= torch.finfo(q.dtype).eps * want.abs().max().item()
            assert max_error(lse[b], want_lse[0]) <= 1e-3


@pytest.mark.interpreter
def test_c044_padding_rows_of_a_captured_batch(target):
    q = torch.randn(8, 8, 1, 64, device=target.device).half()
    k, v = torch.randn(2, 60, 2, 16, 64, device=target.device).half()
    pages = torch.randperm(60, device=target.device)[:56].int().view(8, 7)
    kv_lens = int32([20, 100, 1, 16, 77, 0, 0, 0], target)
    table = pages.clone()
    q[5:], table[5:] = NAN, -1
    out, lse = torch.full_like(q, NAN), torch.full((8, 8, 1), NAN, device=target.device)
    replay = repeatable(
        target, lambda: decode(target, q, k, v, block_table=table, kv_lens=kv_lens, out=out, lse=lse, num_splits=2)
    )

    def replay_and_check(real):
        out.fill_(NAN), lse.fill_(NAN)
        replay()
        options = {"block_table": table[:real], "kv_lens": kv_lens[:real]}
        assert_matches(out[:real], lse[:real], q[:real], k, v, atol=4 * LOOSE[q.dtype], **options)
        assert torch.equal(out[real:], torch.zeros_like(out[real:]))
        assert bool((lse[real:] == -math.inf).all())
        return out.clone(), lse.clone()

    before = replay_and_check(5)
    q[5:7], table[5:7] = q[:2], pages[5:7]
    kv_lens[5:7] = int32([112, 3], target)
    after = replay_and_check(7)
    assert_same_bits([x[:5] for x in after], [x[:5] for x in before])


# Scratch.


@pytest.mark.interpreter
@pytest.mark.parametrize("own_workspace", [False, True])
def test_c043_dirty_scratch_and_an_aborted_call(target, own_workspace, monkeypatch):
    splits, many = (8, 3) if INTERPRETED else (64, 512)
    calls = [
        (make_inputs(1, 8, 2, 8 * splits, 64, torch.float16, target.device), splits),
        (make_inputs(many, 4, 2, 70, 64, torch.float16, target.device), 2),
    ]
    wants = [reference(*inputs) for inputs, _ in calls]
    scratch = Workspace() if own_workspace else None

    def make_dirty():
        for x in [scratch] if own_workspace else workspace._owned.by_stream.values():
            if x._buffer is not None:
                x._buffer.view(torch.uint8).fill_(0xFF)

    def check_all():
        for (inputs, num_splits), want in zip(calls, wants, strict=True):
            make_dirty()
            out, _ = decode(target, *inputs, num_splits=num_splits, workspace=scratch)
            assert max_error(out, want) <= 4 * LOOSE[out.dtype]

    check_all()
    for inputs, num_splits in calls:
        with monkeypatch.context() as patch:
            _abort_midway(target, patch)
            with pytest.raises(KeyboardInterrupt):
                decode(target, *inputs, num_splits=num_splits, workspace=scratch)
        check_all()


def _abort_midway(target, patch):
    """The next call is interrupted: between its kernels, or on the CPU, which has one, when the first thread ends."""

    def interrupted(*args):
        raise KeyboardInterrupt

    def end_first_thread(work, _):
        work()
        raise KeyboardInterrupt

    if target.backend == "cpu":
        patch.setattr("flash_decoding.backends.cpu.run_shared", end_first_thread)
        return
    patch.setattr("flash_decoding.backends.triton.launch_reduce", interrupted)
    if target.device == "cuda":  # a call that was made before is started from its record
        patch.setattr("flash_decoding.recorded.Recorded.repeat", lambda *args: None)


# Devices. What needs two GPUs is in test_cases_gpu.py.


@pytest.mark.parametrize("name", ["kv_lens", "block_table", "v", "sinks"])
def test_c047_an_array_on_another_device_is_named(target, name, monkeypatch):
    q = torch.zeros(2, 4, 1, 64, device=target.device)
    pool = torch.zeros(6, 2, 16, 64, device=target.device)
    arguments = dict(
        k=pool, v=pool, kv_lens=int32([5, 20], target), block_table=int32([[0, 1], [2, 3]], target),
        sinks=torch.zeros(4, device=target.device),
    )  # fmt: skip
    elsewhere = "meta" if target.device == "cpu" else "cpu"
    if name == "v" and torch.cuda.device_count() > 1 and target.device == "cuda":
        elsewhere = "cuda:1"
    arguments[name] = arguments[name].to(elsewhere)
    forbid_launches(monkeypatch)
    message = f"^{name} must be on the device of q, {q.device}, got {elsewhere}$"
    with pytest.raises(ValueError, match=message):
        flash_decode(q, backend=target.backend, **arguments)


@pytest.mark.interpreter
def test_c047_all_on_the_cpu_is_the_cpu_backend(target):
    device = "cpu"
    q, k, v = make_inputs(2, 4, 2, 50, 64, torch.float32, device)
    backend = "auto" if target.device == "cuda" else target.backend
    kv_lens, sinks = torch.tensor([50, 3], dtype=torch.int32), torch.randn(4)
    out, lse = flash_decode(q, k, v, kv_lens=kv_lens, sinks=sinks, return_lse=True, backend=backend)
    assert_matches(out, lse, q, k, v, kv_lens=kv_lens, sinks=sinks, atol=1e-5)


# Arguments.


@pytest.mark.interpreter
@pytest.mark.parametrize("paged", [False, True], ids=["dense", "paged"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=describe)
def test_c056_lengths_of_both_integer_types(target, dtype, paged):
    v = torch.arange(8.0, device=target.device)[None, None, :, None].expand(2, 1, 8, 64)
    q, k, v = zeros_and(v)
    options = {"kv_lens": torch.tensor([3, 5], dtype=dtype, device=target.device)}
    if paged:
        k, v = (x.view(4, 1, 4, 64) for x in (k, v))
        options["block_table"] = int32([[0, 1], [2, 3]], target)
    out, lse = decode(target, q, k, v, **options)
    assert max_error(out[:, 0, 0], torch.tensor([[1.0], [2.0]], device=target.device).expand(2, 64)) < 1e-6
    assert max_error(lse[:, 0, 0], torch.tensor([LN(3), LN(5)], device=target.device)) < 1e-6


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint8, torch.float32], ids=describe)
def test_c056_other_types_of_lengths_are_refused(target, dtype, monkeypatch):
    q, k, v = make_inputs(2, 2, 1, 8, 64, torch.float32, target.device)
    forbid_launches(monkeypatch)
    with pytest.raises(TypeError, match=f"^kv_lens must be int32 or int64, got {dtype}$"):
        decode(target, q, k, v, kv_lens=torch.tensor([3, 5], device=target.device).to(dtype))


@pytest.mark.parametrize("lens_dtype", [torch.int32, torch.int64], ids=describe)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int16, torch.uint8], ids=describe)
def test_c056_a_block_table_is_int32(target, dtype, lens_dtype, monkeypatch):
    """What is not read as what it is must not be read at all."""
    q, pool = torch.zeros(2, 2, 1, 64, device=target.device), torch.zeros(4, 1, 4, 64, device=target.device)
    kv_lens = torch.tensor([3, 5], dtype=lens_dtype, device=target.device)
    forbid_launches(monkeypatch)
    with pytest.raises(TypeError, match=f"^block_table must be int32, got {dtype}$"):
        decode(target, q, pool, pool, kv_lens=kv_lens, block_table=int32([[0, 1], [2, 3]], target).to(dtype))


DOES_NOT_FIT = {
    "heads": (dict(q=(2, 6, 1, 64), k=(2, 4, 9, 64), v=(2, 4, 9, 64)), "heads_q must be .* of heads_kv, got 6 and 4"),
    "head_dim": (dict(k=(2, 2, 9, 32)), "k must have the head_dim of q, 64, got 32"),
    "length": (dict(v=(2, 2, 8, 64)), "v must have the length of k, 9, got 8"),
    "page-size": (
        dict(k=(7, 2, 16, 64), v=(7, 2, 32, 64), block_table=[[0], [1]]),
        "v must have the length of k, 16, got 32",
    ),
    "kv_lens": (dict(kv_lens=[5, 5, 5]), r"kv_lens must have shape \[2\], got \[3\]"),
    "num_splits-0": (dict(num_splits=0), "num_splits must be from 1 to .*, got 0"),
    "num_splits-negative": (dict(num_splits=-1), "num_splits must be from 1 to .*, got -1"),
    "num_splits-float": (dict(num_splits=2.5), "num_splits must be an int or None, got float"),
    "scale": (dict(scale=NAN), "scale must be finite, got nan"),
}  # fmt: skip


@pytest.mark.parametrize("name", DOES_NOT_FIT)
def test_c058_arguments_that_do_not_fit_are_named(target, name, monkeypatch):
    change, message = DOES_NOT_FIT[name]
    arguments = dict(q=(2, 4, 1, 64), k=(2, 2, 9, 64), v=(2, 2, 9, 64), kv_lens=[5, 5]) | change
    for key, x in arguments.items():
        if isinstance(x, tuple):
            arguments[key] = torch.zeros(x, device=target.device, dtype=torch.float16)
        elif isinstance(x, list):
            arguments[key] = int32(x, target)
    assert_refused(target, arguments, (ValueError, TypeError), message, monkeypatch)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_c058_an_array_with_gaps_or_of_another_type_is_named(target, name, monkeypatch):
    arguments = dict(zip("qkv", make_inputs(2, 4, 2, 9, 64, torch.bfloat16, target.device), strict=True))
    x = arguments[name]
    gaps = torch.stack([x, x], dim=-1).flatten(3)[..., ::2]
    assert gaps.stride(3) == 2
    message = f"^{name} must have a contiguous last axis, got strides"
    assert_refused(target, arguments | {name: gaps}, ValueError, message, monkeypatch)
    if name != "q":
        message = f"^{name} must have the dtype of q, torch.bfloat16, got torch.float16$"
        assert_refused(target, arguments | {name: x.half()}, TypeError, message, monkeypatch)


def assert_refused(target, arguments, kinds, message, monkeypatch):
    """flash_decode() raises before anything is launched, and explain() has the same reason."""
    forbid_launches(monkeypatch)
    with pytest.raises(kinds, match=message) as caught:
        flash_decode(**arguments, backend=target.backend)
    assert str(caught.value) in explain(**arguments, backend=target.backend)
