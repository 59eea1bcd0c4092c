"""Public cases that need a GPU, or two. What only takes time is in test_cases_speed.py; see test_gpu.py as well."""

import os
import shutil
import subprocess
import sys

import pytest
import torch
from helpers import assert_matches, make_inputs
from paging import to_pages

from flash_decoding import flash_decode, workspace

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
SANITIZER = shutil.which("compute-sanitizer")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("paged", [False, True], ids=["dense", "paged"])
def test_c045_everything_belongs_to_the_device_of_the_tensors(paged, monkeypatch):
    """Kernels, scratch and what the planner knows of the device, while another device is the current one."""
    from flash_decoding.backends import triton as triton_backend

    asked, facts = [], triton_backend._device_facts
    monkeypatch.setattr(triton_backend, "_device_facts", lambda index: asked.append(index) or facts(index))

    def call_on(device, plan):
        q, k, v = make_inputs(2, 8, 2, 3000, 64, torch.float16, device)
        dense, options = (k, v), {"kv_lens": torch.tensor([3000, 17], dtype=torch.int32, device=device)}
        if paged:
            k, v, options["block_table"] = to_pages(k, v, 16, options["kv_lens"])
        out, lse = flash_decode(q, k, v, return_lse=True, **options, **plan)
        assert torch.cuda.current_device() == 0
        assert (out.device, lse.device) == (torch.device(device), torch.device(device))
        assert asked[-1] == torch.device(device).index
        assert_matches(out, lse, q, *dense, kv_lens=options["kv_lens"])

    assert torch.cuda.current_device() == 0
    for num_splits in (1, 8):
        call_on("cuda:1", {"num_splits": num_splits})
    for _ in range(20):
        for device in ("cuda:0", "cuda:1"):
            call_on(device, {})
            call_on(device, {"num_splits": 8})
    held = {(index, scratch._buffer.device.index) for (_, index, _), scratch in workspace._owned.by_stream.items()}
    assert held == {(0, 0), (1, 1)}


@pytest.mark.skipif(SANITIZER is None, reason="needs compute-sanitizer of the CUDA toolkit on the PATH")
def test_c055_stale_page_ids_under_compute_sanitizer():
    program = """if True:
        import torch
        from flash_decoding import flash_decode
        q = torch.randn(3, 4, 1, 64, device="cuda", dtype=torch.float16)
        k, v = (torch.randn(7, 2, 16, 64, device="cuda", dtype=torch.float16) for _ in "kv")
        kv_lens = torch.tensor([33, 1, 16], dtype=torch.int32, device="cuda")
        for stale in (-1, 2**31 - 1, 7):
            table = torch.full((3, 8), stale, dtype=torch.int32, device="cuda")
            table[0, :3], table[1, 0], table[2, 0] = torch.tensor([4, 2, 6], dtype=torch.int32, device="cuda"), 0, 5
            for options in ({"num_splits": 1}, {"num_splits": 4}, {"split_size": 32}, {"window": 20}):
                flash_decode(q, k, v, kv_lens=kv_lens, block_table=table, **options)
        torch.cuda.synchronize()
    """
    # Without torch's caching every tensor is an allocation of its own, so that what lies beside it is out of bounds.
    command = [SANITIZER, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-c", program]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
