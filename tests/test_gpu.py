"""What only a real device shows: graphs, streams, other devices, launches, large offsets."""

import pytest
import torch
from helpers import assert_matches, make_inputs, max_error

from flash_decoding import Workspace, flash_decode, reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def capture(call):
    """A CUDA graph of call(), warmed up on a side stream as torch asks for."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


@pytest.mark.parametrize("own_workspace", [False, True])
def test_c042_one_graph_is_right_for_every_later_length(own_workspace):
    q, k, v = make_inputs(2, 16, 4, 8192, 128, torch.bfloat16, "cuda")
    kv_lens = torch.tensor([1, 1], dtype=torch.int32, device="cuda")
    workspace = Workspace(64 << 20, "cuda") if own_workspace else None
    graph, (out, lse) = capture(lambda: flash_decode(q, k, v, kv_lens=kv_lens, return_lse=True, workspace=workspace))
    for lens in ([1, 4096], [8192, 17], [0, 300], [16, 16]):
        for x in (q, k, v):
            x.normal_()
        kv_lens.copy_(torch.tensor(lens))
        out.fill_(float("nan"))
        # Eager calls between replays must not disturb the graph's scratch, however much they need.
        flash_decode(*make_inputs(3, 16, 4, 4096, 128, torch.bfloat16, "cuda"), num_splits=64, workspace=None)
        graph.replay()
        assert_matches(out, lse, q, k, v, kv_lens=kv_lens)


def test_a_workspace_too_small_for_a_capture_is_refused():
    q, k, v = make_inputs(1, 8, 2, 4096, 64, torch.float16, "cuda")
    workspace = Workspace()
    torch.cuda.synchronize()
    refusal = pytest.raises(ValueError, match=r"workspace must hold .* before a CUDA graph is captured")
    with refusal, torch.cuda.graph(torch.cuda.CUDAGraph()):
        flash_decode(q, k, v, num_splits=8, workspace=workspace)
    assert_matches(flash_decode(q, k, v, num_splits=8, workspace=workspace), None, q, k, v)


def test_a_graph_survives_the_growth_of_its_workspace():
    q, k, v = make_inputs(1, 8, 2, 4096, 64, torch.float16, "cuda")
    workspace = Workspace(Workspace.size(batch=1, heads_q=8, value_dim=64, num_splits=8), "cuda")
    graph, out = capture(lambda: flash_decode(q, k, v, num_splits=8, workspace=workspace))
    flash_decode(*make_inputs(4, 8, 2, 4096, 64, torch.float16, "cuda"), num_splits=64, workspace=workspace)
    filler = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(16)]
    q.normal_()
    graph.replay()
    assert_matches(out, None, q, k, v)
    assert len(filler) == 16


@pytest.mark.parametrize(("num_splits", "launches"), [(1, 1), (8, 2)])
def test_c061_one_kernel_unsplit_two_split(num_splits, launches):
    q, k, v = make_inputs(1, 32, 8, 2048, 128, torch.float16, "cuda")
    out = torch.zeros_like(q)
    flash_decode(q, k, v, num_splits=num_splits, out=out)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        flash_decode(q, k, v, num_splits=num_splits, out=out)
        torch.cuda.synchronize()
    kernels = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len(kernels) == launches, kernels


def test_c062_a_growing_cache_compiles_a_bounded_number_of_kernels():
    from flash_decoding.backends.triton.chunk import _chunk_kernel
    from flash_decoding.backends.triton.launch import _compiled
    from flash_decoding.backends.triton.reduce import _reduce_kernel

    def count():
        return sum(
            len(caches[0]) for kernel in (_chunk_kernel, _reduce_kernel) for caches in kernel.device_caches.values()
        )

    for head_dim in (64, 72):
        cache_k, cache_v = (torch.randn(1, 2, 1200, head_dim, device="cuda", dtype=torch.float16) for _ in "kv")
        q = torch.randn(1, 8, 1, head_dim, device="cuda", dtype=torch.float16)
        before, started_before = count(), len(_compiled)
        for kv_len in range(1, 1201, 7):
            flash_decode(q, cache_k[:, :, :kv_len], cache_v[:, :, :kv_len])
            flash_decode(q, cache_k[:, :, :kv_len].contiguous(), cache_v[:, :, :kv_len].contiguous())
        assert 0 < count() - before <= 8
        assert 0 < len(_compiled) - started_before <= 12


def test_addresses_that_are_not_aligned_get_a_kernel_of_their_own():
    """The same shape and strides, then K and V moved by 8 bytes: nothing of the aligned kernel may be reused."""
    q, k, v = make_inputs(1, 8, 2, 500, 64, torch.float16, "cuda")
    for shift in (0, 4, 0, 4):
        moved = [
            torch.zeros(x.numel() + 8, dtype=x.dtype, device="cuda")[shift : shift + x.numel()].view(x.shape)
            for x in (k, v)
        ]
        for x, y in zip(moved, (k, v), strict=True):
            x.copy_(y)
        for num_splits in (1, 4):
            assert_matches(flash_decode(q, *moved, num_splits=num_splits), None, q, k, v)


def test_c049_a_thousand_replays_give_the_same_bits():
    q, k, v = make_inputs(7, 8, 2, 8192, 128, torch.bfloat16, "cuda")
    workspace = Workspace(64 << 20, "cuda")
    graph, out = capture(lambda: flash_decode(q, k, v, num_splits=16, workspace=workspace))
    graph.replay()
    first = out.clone()
    for _ in range(1000):
        workspace._buffer.fill_(float("nan"))
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, first)


def test_streams_do_not_share_scratch():
    inputs = [make_inputs(1, 8, 2, 8192, 64, torch.float16, "cuda") for _ in range(4)]
    wants = [reference(*x) for x in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    outs = [[] for _ in inputs]
    for _ in range(20):
        for x, stream, out in zip(inputs, streams, outs, strict=True):
            with torch.cuda.stream(stream):
                out.append(flash_decode(*x, num_splits=32))
    torch.cuda.synchronize()
    for out, want in zip(outs, wants, strict=True):
        assert all(max_error(x, want) < 2e-3 for x in out)


def test_c009_more_sequences_than_a_grid_axis_holds():
    q, k, v = make_inputs(70000, 1, 1, 1, 64, torch.float16, "cuda")
    assert torch.equal(flash_decode(q, k, v), v)
    q, k, v = make_inputs(8192, 16, 16, 1, 64, torch.float16, "cuda")
    assert torch.equal(flash_decode(q, k, v), v)
    assert torch.equal(flash_decode(q, k, v, num_splits=2), v)


@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
def test_c008_offsets_beyond_32_bits(layout):
    """The second sequence, and the last keys of the first, start past 2**31 elements."""
    kv_len = 2**31 // (16 * 64) + 1000
    shape = (1, 16, kv_len, 64) if layout == "bhnd" else (1, kv_len, 16, 64)
    k = torch.zeros(shape, dtype=torch.float16, device="cuda")
    last = torch.randn(1, 16, 100, 64, dtype=torch.float16, device="cuda")
    view = k if layout == "bhnd" else k.transpose(1, 2)
    view[:, :, -100:] = last
    q = torch.randn(1, 16, 1, 64, dtype=torch.float16, device="cuda")
    start = torch.tensor([kv_len - 100], dtype=torch.int32, device="cuda")
    queries = q if layout == "bhnd" else q.transpose(1, 2)
    got = flash_decode(queries, k, k, layout=layout, kv_start=start, num_splits=2)
    want = flash_decode(q, last, last, num_splits=2)
    assert torch.equal(got if layout == "bhnd" else got.transpose(1, 2), want)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_c045_the_device_of_the_tensors_is_used():
    for _ in range(20):
        for device in ("cuda:1", "cuda:0"):
            q, k, v = make_inputs(1, 8, 2, 3000, 64, torch.float16, device)
            for num_splits in (1, 8):
                out = flash_decode(q, k, v, num_splits=num_splits)
                assert out.device == torch.device(device)
                assert_matches(out, None, q, k, v)
    assert torch.cuda.current_device() == 0


def test_host_time_does_not_depend_on_length_or_batch():
    """C061: no work per key or per sequence on the host, and no allocation that grows."""
    import time

    times = []
    for batch, kv_len in ((1, 256), (64, 256), (1, 65536)):
        q, k, v = make_inputs(batch, 32, 8, kv_len, 128, torch.float16, "cuda")
        for _ in range(20):
            flash_decode(q, k, v)
        samples = []
        for _ in range(50):
            torch.cuda.synchronize()
            start = time.perf_counter()
            flash_decode(q, k, v)
            samples.append(time.perf_counter() - start)
        times.append(sorted(samples)[len(samples) // 2])
    assert max(times) < 2 * min(times) + 20e-6
