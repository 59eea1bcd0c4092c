"""The read-only kernel compiles for every GPU, reads 16 bytes at a time and keeps its loads."""

from __future__ import annotations

import pytest

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from flash_decoding.bench.read_kernel import _read_kernel  # noqa: E402

NAMES = ("k_ptr", "v_ptr", "sum_ptr", "words", "BLOCK", "STAGES")


def compile_read_kernel(capability: int, block: int, num_warps: int, stages: int):
    signature = dict(zip(NAMES, ("*i32", "*i32", "*i32", "i32", "constexpr", "constexpr"), strict=True))
    aligned = {(at,): [["tt.divisibility", 16]] for at in (0, 1, 3)}
    source = ASTSource(_read_kernel, signature, {(4,): block, (5,): stages}, aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": num_warps})


@pytest.mark.parametrize("capability", [80, 89, 90])
def test_plain_loads_are_16_bytes_wide(capability: int):
    ptx = compile_read_kernel(capability, block=2048, num_warps=4, stages=1).asm["ptx"]
    loads = [line.split()[-2] if "@" in line else line for line in ptx.splitlines() if "ld.global" in line]
    assert len(loads) == 2 * 2048 // (4 * 32 * 4)  # both arrays, a block over 128 threads of 4 words
    assert all(".v4." in line for line in ptx.splitlines() if "ld.global" in line)


def test_pipelined_loads_are_16_bytes_wide():
    ptx = compile_read_kernel(90, block=2048, num_warps=4, stages=4).asm["ptx"]
    assert "cp.async.cg.shared.global" in ptx
    assert "cp.async.ca.shared.global" not in ptx
