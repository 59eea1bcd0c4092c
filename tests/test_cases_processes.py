"""Public cases: what happens once per process or per cache directory: compiling, importing, first calls of threads."""

import os
import subprocess
import sys
import threading

import pytest
import torch
from helpers import make_inputs, max_error
from paging import to_pages

from flash_decoding import flash_decode, reference


def run(program, *arguments, **environment):
    """The output of a fresh interpreter."""
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_c012_no_setting_of_an_earlier_call_sticks(target):
    """Each call of a mixed sequence has the bits that it has as the first call of a process."""
    program = """if True:
        import hashlib, multiprocessing, sys, torch
        from flash_decoding import flash_decode

        device, settings = sys.argv[1], [{"num_splits": n} for n in (2, 4, 3, 1, 2, None)]
        for change in {"window": 99}, {}, {"softcap": 5.0}, {}, {"page": 16}, {"page": 32}, {"dtype": "float16"}, {}:
            settings.append({"num_splits": 2} | change)
        settings = [tuple(setting.items()) for setting in settings]
        unique = list(dict.fromkeys(settings))

        def bits(setting):
            setting = dict(setting)
            dtype, page = getattr(torch, setting.pop("dtype", "bfloat16")), setting.pop("page", None)
            torch.manual_seed(0)
            q, k, v = (torch.randn(2, h, n, 128).to(dtype) for h, n in ((8, 1), (2, 5024), (2, 5024)))
            options = setting | {"kv_lens": torch.tensor([5000, 5000])}
            if page is not None:
                k, v = (x.unflatten(2, (-1, page)).transpose(1, 2).flatten(0, 1) for x in (k, v))
                options["block_table"] = torch.arange(len(k), dtype=torch.int32).view(2, -1)
            q, k, v = (x.to(device) for x in (q, k, v))
            options = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
            result = flash_decode(q, k, v, return_lse=True, **options)
            return tuple(hashlib.sha256(x.cpu().view(torch.uint8).numpy()).hexdigest() for x in result)

        # Nothing was called before the fork, so each child is a process whose first call this is.
        with multiprocessing.get_context("fork").Pool(4, maxtasksperchild=1) as pool:
            fresh = dict(zip(unique, pool.map(bits, unique, chunksize=1)))
        for setting in settings:
            if bits(setting) != fresh[setting]:
                print(setting, "is not what a fresh process gives")
        print(len(unique), len(set(fresh.values())))
    """
    settings, results = run(program, target.device).split()
    assert int(settings) == 10
    # Window, soft cap, dtype and none of them at least: results that were all the same would compare nothing.
    assert int(results) >= 4


@pytest.mark.parametrize("triton", ["with triton", "without triton"])
def test_c064_importing_needs_no_gpu_no_triton_and_compiles_nothing(triton):
    program = """if True:
        import sys
        if sys.argv[1] == "without triton":
            sys.modules["triton"] = None  # as if it were not installed
        import torch
        before = set(sys.modules)
        import flash_decoding
        loaded = {name.split(".")[0] for name in set(sys.modules) - before}
        assert not loaded & {"triton", "numba", "llvmlite", "transformers"}, loaded
        assert not torch.cuda.is_available() and not torch.cuda.is_initialized()
        q, k, v = torch.randn(1, 4, 1, 64), torch.randn(1, 2, 50, 64), torch.randn(1, 2, 50, 64)
        out = flash_decoding.flash_decode(q, k, v)
        assert (out - flash_decoding.reference(q, k, v)).abs().max() < 1e-6
        try:
            flash_decoding.flash_decode(q, k, v, backend="triton")
        except ValueError as error:
            print(error)
    """
    message = run(program, triton, CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="0")
    reason = "q is on the CPU; backend='cpu' can" if triton == "with triton" else "triton is not installed"
    assert message.startswith(f"backend 'triton' cannot run this call: {reason}")


@pytest.mark.compiles
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("paged", [False, True], ids=["dense", "paged"])
@pytest.mark.parametrize("return_lse", [False, True])
def test_c065_compiles_without_a_graph_break(target, mode, paged, return_lse):
    q, k, v = make_inputs(2, 4, 2, 100, 64, torch.float32, target.device)
    linear = torch.nn.Linear(64, 64, device=target.device)
    kv_lens = torch.tensor([100, 31], dtype=torch.int32, device=target.device)
    table = None
    if paged:
        k, v, table = to_pages(k, v, 16, kv_lens)

    def step(q, k, v, kv_lens, table):
        result = flash_decode(linear(q), k, v, kv_lens=kv_lens, block_table=table, return_lse=return_lse)
        return (linear(result[0]), result[1]) if return_lse else (linear(result),)

    with torch.no_grad():
        compiled = torch.compile(step, fullgraph=True, mode=mode)
        for _ in range(3):
            for x, y in zip(compiled(q, k, v, kv_lens, table), step(q, k, v, kv_lens, table), strict=True):
                assert max_error(x, y) < 1e-5
            q = torch.randn_like(q)
            kv_lens = kv_lens - 3


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


def test_c066_eight_threads_make_the_first_call_at_once(target, tmp_path):
    """First with one shape, then with eight; on all GPUs that are there. test_cpu_backend.py has the empty cache."""
    program = """if True:
        import sys, threading, torch
        from flash_decoding import flash_decode, reference
        devices = [f"cuda:{i}" for i in range(torch.cuda.device_count())] if sys.argv[1] == "cuda" else ["cpu"]
        def work(i, same):
            try:
                device = devices[i % len(devices)]
                gen = torch.Generator(device=device).manual_seed(i)
                kv_len, width = (500, 64) if same else (100 * i + 1, 32 + 16 * (i % 4))
                shapes = ((1, 4, 1, width), (1, 2, kv_len, width), (1, 2, kv_len, width))
                q, k, v = (torch.randn(shape, device=device, generator=gen) for shape in shapes)
                want = reference(q, k, v)
                barrier.wait()
                for _ in range(5):
                    error = (flash_decode(q, k, v, num_splits=4) - want).abs().max().item()
                    if not error < 1e-5:
                        failures.append((i, error))
            except BaseException as error:
                barrier.abort()
                failures.append((i, repr(error)))
        failures = []
        for same in (True, False):
            barrier = threading.Barrier(8)
            threads = [threading.Thread(target=work, args=(i, same)) for i in range(8)]
            [t.start() for t in threads]; [t.join() for t in threads]
        print("failures", failures)
    """
    environment = {"TRITON_CACHE_DIR": str(tmp_path)} if target.device == "cuda" else {}
    assert run(program, target.device, **environment) == "failures []"


def test_c067_many_processes_share_one_empty_cache(target, tmp_path):
    """Eight processes and five rounds on a GPU; on a CPU, where each compiles for seconds, what its cores can bear."""
    program = """if True:
        import multiprocessing, os, sys, torch
        from flash_decoding import flash_decode, reference
        device, cache, processes, rounds = *sys.argv[1:3], int(sys.argv[3]), int(sys.argv[4])

        def first_call(cache):
            os.environ.update(NUMBA_CACHE_DIR=cache, TRITON_CACHE_DIR=cache)
            q, k, v = (torch.randn(1, h, n, 64, device=device) for h, n in ((4, 1), (2, 300), (2, 300)))
            barrier.wait()
            assert (flash_decode(q, k, v, num_splits=3) - reference(q, k, v)).abs().max() < 1e-5

        assert "numba" not in sys.modules, "which reads its variable when it is imported"
        context = multiprocessing.get_context("fork")
        for i in range(rounds):
            barrier = context.Barrier(processes, timeout=120)
            running = [context.Process(target=first_call, args=(f"{cache}/{i}",)) for _ in range(processes)]
            for process in running:
                process.start()
            for process in running:
                process.join()
            print([process.exitcode for process in running])
    """
    processes, rounds = (8, 5) if target.device == "cuda" else (min(8, os.cpu_count()), 1)
    codes = run(program, target.device, str(tmp_path), str(processes), str(rounds))
    assert codes.split("\n") == [str([0] * processes)] * rounds


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
