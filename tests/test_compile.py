"""The kernels compile for every architecture that they are for, without a GPU, and stay within its limits."""

import os

import pytest
import torch
from helpers import DTYPES, describe

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter does not compile", allow_module_level=True)
pytest.importorskip("triton")

from compiling import compile_append, compile_chunk, compile_reduce

from flash_decoding.backends.triton.codes import parts_of, scales_per_key
from flash_decoding.backends.triton.reduce import WIDE_SLICE, block_of_splits
from flash_decoding.quantization import KVFormat
from flash_decoding.split_plan import choose_tile, enlarge_tile, programs_per_processor, stand_alone

# Shared memory per program, bytes, by architecture: A100; RTX 40; H100 and H200.
SHARED = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024}


@pytest.mark.parametrize("arch", SHARED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=describe)  # float16 is compiled as bfloat16 is
@pytest.mark.parametrize(
    ("group", "head_dim", "value_dim"),
    [
        (1, 64, 64),
        (4, 128, 128),
        (7, 80, 80),
        (8, 256, 256),
        (32, 64, 128),
        (32, 256, 64),
        (64, 64, 64),
        (64, 128, 128),
        (3, 24, 16),
    ],
)
def test_chunk_kernel_fits_and_does_not_spill(group, head_dim, value_dim, dtype, arch):
    tile = choose_tile(group, 1, head_dim, value_dim, dtype.itemsize, SHARED[arch])
    built = compile_chunk(dtype, group, head_dim, value_dim, tile, arch)
    assert built.spills == 0
    assert built.stack_bytes == 0
    assert built.shared_bytes <= SHARED[arch]
    assert built.registers <= 255
    if dtype == torch.float32:
        assert "mma" not in built.ptx, "exact float32 uses no tensor cores"
    else:
        assert "cp.async" in built.ptx, "K and V are on their way while the last tile is worked on"
        assert "mma" in built.ptx


@pytest.mark.parametrize("arch", SHARED)
def test_the_shapes_that_matter_most_keep_their_resources(arch):
    """D 64 and 128 in 16 bits: loads of 16 bytes a thread, and programs small enough to share a processor."""
    for head_dim in (64, 128):
        tile = choose_tile(4, 1, head_dim, head_dim, 2, SHARED[arch])
        built = compile_chunk(torch.bfloat16, 4, head_dim, head_dim, tile, arch)
        assert built.registers <= 168, "of 65536 a processor has enough for its four schedulers' three warps"
        assert "cp.async.cg.shared.global" in built.ptx
        assert "ldmatrix" in built.ptx


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("arch", SHARED)
def test_the_tile_of_problems_that_stand_alone_fits_and_does_not_spill(arch, head_dim):
    tile = stand_alone(choose_tile(4, 1, head_dim, head_dim, 2, SHARED[arch]), 2, SHARED[arch], (1, 1))
    built = compile_chunk(torch.bfloat16, 4, head_dim, head_dim, tile, arch, split=False, prefetch=arch >= 90)
    assert (built.spills, built.stack_bytes) == (0, 0)
    assert built.shared_bytes <= SHARED[arch]
    assert "cp.async.cg.shared.global" in built.ptx


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=describe)
def test_masked_and_unsplit_variants_compile(dtype, split):
    tile = choose_tile(4, 1, 128, 128, dtype.itemsize, SHARED[89])
    built = compile_chunk(dtype, 4, 128, 128, tile, 89, split=split, masked=True)
    assert built.spills == 0
    assert built.shared_bytes <= SHARED[89]


@pytest.mark.parametrize("arch", SHARED)
@pytest.mark.parametrize("page_size", [16, 64, 256])
@pytest.mark.parametrize(("group", "head_dim"), [(1, 64), (4, 128), (8, 80)])
def test_paged_chunk_kernel_keeps_its_pipeline(group, head_dim, page_size, arch):
    tile = choose_tile(group, 1, head_dim, head_dim, 2, SHARED[arch], paged=True)
    built = compile_chunk(torch.bfloat16, group, head_dim, head_dim, tile, arch, page_size=page_size)
    assert built.shared_bytes <= SHARED[arch]
    assert "cp.async.cg.shared.global" in built.ptx
    assert "cp.async.ca.shared.global" in built.ptx, "page ids are on their way as well"
    # Two tiles of K and of V at least: one in work, one on its way.
    assert built.shared_bytes >= 2 * tile.block_n * 2 * tile.block_d * 2
    assert built.spills <= 16, "what spills does so once, outside the loop"


@pytest.mark.parametrize("arch", SHARED)
@pytest.mark.parametrize(("group", "q_len", "page_size"), [(4, 4, None), (4, 4, 16), (1, 16, None)])
def test_every_option_at_once_compiles(group, q_len, page_size, arch):
    tile = choose_tile(group, q_len, 128, 128, 2, SHARED[arch], paged=page_size is not None)
    built = compile_chunk(
        torch.float16, group, 128, 128, tile, arch, masked=True, page_size=page_size, q_len=q_len, options=True
    )
    assert built.shared_bytes <= SHARED[arch]
    assert "cp.async" in built.ptx


@pytest.mark.parametrize("arch", SHARED)
@pytest.mark.parametrize("heads", [16, 128])
def test_latent_attention_fits(heads, arch):
    tile = choose_tile(heads, 1, 576, 512, 2, SHARED[arch], paged=True)
    built = compile_chunk(torch.bfloat16, heads, 576, 512, tile, arch, page_size=64)
    assert built.shared_bytes <= SHARED[arch]
    assert "mma" in built.ptx


@pytest.mark.parametrize("arch", SHARED)
@pytest.mark.parametrize("page_size", [None, 16])
def test_caches_of_unusual_strides_keep_their_pipeline(page_size, arch):
    tile = choose_tile(4, 1, 128, 128, 2, SHARED[arch], paged=page_size is not None)
    built = compile_chunk(torch.bfloat16, 4, 128, 128, tile, arch, page_size=page_size, fixed=False)
    assert built.spills <= 16, "what spills does so once, outside the loop"
    assert "cp.async.cg.shared.global" in built.ptx


@pytest.mark.parametrize("arch", SHARED)
@pytest.mark.parametrize(
    "name", ["fp8_e4m3", "int8", "int8:channel/fp8_e5m2:head", "int4:group32+zero", "none/int4", "fp8/int4"]
)
def test_codes_fit_and_keep_their_pipeline(name, arch):
    """Also e4m3 on sm_80, which has no instruction for it."""
    kv_format = KVFormat.parse(name)
    sides = (kv_format.k, kv_format.v)
    parts, scales = [parts_of(side) for side in sides], max(scales_per_key(128, side) for side in sides)
    tile = choose_tile(4, 1, 128 // parts[0], 128 // parts[1], 2, SHARED[arch], parts=tuple(parts), scales=scales)
    larger = enlarge_tile(tile, 2, SHARED[arch], paged=False, parts=tuple(parts), scales=scales)
    for one in (tile, larger) if larger else (tile,):
        built = compile_chunk(torch.bfloat16, 4, 128, 128, one, arch, kv_format=kv_format)
        assert built.spills <= 16, "what spills does so once, outside the loop"
        assert built.shared_bytes <= SHARED[arch]
        assert "cp.async.cg.shared.global" in built.ptx, "codes are on their way while the last tile is worked on"
        assert "ldmatrix" in built.ptx


@pytest.mark.parametrize(
    ("name", "width"), [("int8", 128), ("int4", 128), ("int8/int4:group32+zero", 128), ("int4:group32", 256)]
)
def test_as_many_programs_as_are_planned_fit_on_a_processor(name, width):
    kv_format = KVFormat.parse(name)
    sides = (kv_format.k, kv_format.v)
    parts, scales = tuple(parts_of(side) for side in sides), max(scales_per_key(width, side) for side in sides)
    tile = choose_tile(4, 1, width // parts[0], width // parts[1], 2, SHARED[90], parts=parts, scales=scales)
    programs = programs_per_processor(tile, 2, shared_memory=SHARED[90], parts=parts, scales=scales)
    built = compile_chunk(torch.bfloat16, 4, width, width, tile, 90, kv_format=kv_format)
    # CUDA keeps 1 KB for each program, and a processor has 1 KB more than a program may use.
    assert programs * (built.shared_bytes + 1024) <= SHARED[90] + 1024


@pytest.mark.parametrize("arch", SHARED)
def test_the_reduce_kernel_starts_early_where_it_can(arch):
    """From Hopper on it waits on the device for a chunk kernel of which every program has started."""
    tile, can = choose_tile(4, 1, 128, 128, 2, SHARED[arch]), arch >= 90
    chunk = compile_chunk(torch.bfloat16, 4, 128, 128, tile, arch)
    assert ("griddepcontrol.launch_dependents" in chunk.ptx) == can
    assert "griddepcontrol" not in compile_chunk(torch.bfloat16, 4, 128, 128, tile, arch, split=False).ptx
    for ragged, before in ((False, 0), (True, 3)):
        reduce = compile_reduce(torch.bfloat16, 128, 8, 1, arch, ragged=ragged).ptx
        assert ("griddepcontrol.wait" in reduce) == can
        if can:
            waits = reduce.index("griddepcontrol.wait")
            assert reduce[:waits].count("ld.global") == before, "nothing is read before, of ragged batches the lengths"


@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
def test_the_first_tile_is_asked_for_before_the_queries_are_waited_for(head_dim):
    tile = choose_tile(4, 1, head_dim, head_dim, 2, SHARED[90])
    built = compile_chunk(torch.bfloat16, 4, head_dim, head_dim, tile, 90, prefetch=True)
    assert built.ptx.count("cp.async.bulk.prefetch.L2.global") == 2, "keys and values"
    body = built.ptx[built.ptx.index("griddepcontrol") :]
    assert body.index("ld.global") < body.index("cp.async.bulk") < body.index("cp.async.cg"), "while q is on its way"
    assert built.spills == 0


@pytest.mark.parametrize("skip_empty", [False, True])
@pytest.mark.parametrize("arch", SHARED)
@pytest.mark.parametrize("num_splits", [2, 16, 1000])
@pytest.mark.parametrize("value_dim", [16, 80, 256])
def test_reduce_kernel_fits_and_does_not_spill(value_dim, num_splits, arch, skip_empty):
    block_s, warps = block_of_splits(num_splits, 100 if skip_empty else None)
    built = compile_reduce(torch.float16, value_dim, block_s, warps, arch, skip_empty=skip_empty)
    assert built.spills == 0
    assert built.stack_bytes == 0
    assert built.shared_bytes <= 48 * 1024


@pytest.mark.parametrize("arch", SHARED)
@pytest.mark.parametrize("page_size", [None, 16, 64])
@pytest.mark.parametrize(("group", "head_dim"), [(1, 64), (4, 128), (64, 128), (8, 256)])
def test_kernels_of_a_ragged_batch(group, head_dim, page_size, arch):
    paged = page_size is not None
    tile = choose_tile(group, 1, head_dim, head_dim, 2, SHARED[arch], paged=paged, ragged=True)
    chunk = compile_chunk(torch.bfloat16, group, head_dim, head_dim, tile, arch, page_size=page_size, ragged=True)
    reduce = compile_reduce(torch.bfloat16, head_dim, 8, 1, arch, ragged=True, block_dv=min(WIDE_SLICE, head_dim))
    assert chunk.spills <= 16, "what spills does so once, outside the loop"
    assert reduce.spills == 0
    assert chunk.shared_bytes <= SHARED[arch]
    assert "cp.async" in chunk.ptx


@pytest.mark.parametrize("arch", SHARED)
@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("rotary", [None, "halves", "interleaved"])
def test_append_kernel(rotary, page_size, arch):
    built = compile_append(torch.bfloat16, 128, arch, page_size=page_size, rotary=rotary, queries=rotary is not None)
    assert built.spills == 0
    assert "st.global.v" in built.ptx, "several entries are written at a time"
