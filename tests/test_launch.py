"""A kernel's parameters, packed as its PTX declares them, without a GPU; and records of calls on one."""

import ctypes
import os
import re
import struct
import weakref
from types import SimpleNamespace

import pytest
import torch
from helpers import LOOSE, assert_matches, make_inputs

from flash_decoding import Workspace, flash_decode, recorded
from flash_decoding.backends import cpu

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter does not launch", allow_module_level=True)
pytest.importorskip("triton")

import triton
from compiling import build
from triton import language as tl

from flash_decoding.backends.triton import launch
from flash_decoding.backends.triton.chunk import are_end_to_end, fixed_step, is_turned
from flash_decoding.backends.triton.launch import Launch, _parameter_offsets, pack_parameters
from flash_decoding.split_plan import choose_tile

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@triton.jit
def _kernel(x_ptr, stride, nothing_ptr, scale, count, y_ptr, far, BLOCK: tl.constexpr):
    n = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + n * stride[0], mask=n < count, other=0.0)
    if nothing_ptr is not None:
        x += 1.0
    tl.store(y_ptr + n.to(tl.int64) * far + stride[1], x * scale, mask=n < count)


SIGNATURE = {
    "x_ptr": "*fp16", "stride": ("i32", "i64", "constexpr"), "scale": "fp32", "count": "i32", "y_ptr": "*fp32",
    "far": "i64",
}  # fmt: skip


def test_parameters_lie_where_the_ptx_wants_them():
    compiled = build(_kernel, SIGNATURE, {"BLOCK": 16, ("stride", 2): 1}, 90)
    x, y = torch.zeros(4, dtype=torch.float16), torch.zeros(4)
    packed = pack_parameters(compiled, (x, (3, 2**40, 1), None, 0.5, -7, y, 2**33, 16))
    # x at 0; strides 3 at 8 and 2^40 at 16, aligned to its size; scale at 24, count at 28; y at 32; far at 40.
    assert [at for at, _ in packed.tensors] == [0, 32]
    assert packed.tensors[0][1] is x
    assert packed.tensors[1][1] is y
    assert struct.unpack_from("=i", packed.buffer, 8) == (3,)
    assert struct.unpack_from("=q", packed.buffer, 16) == (2**40,)
    assert struct.unpack_from("=fi", packed.buffer, 24) == (0.5, -7)
    assert struct.unpack_from("=q", packed.buffer, 40) == (2**33,)
    assert len(packed.buffer) >= _parameter_offsets(compiled.asm["ptx"])[1]


@pytest.mark.parametrize("early", [False, True])
def test_what_the_driver_is_handed(monkeypatch, early):
    """As CUDA's headers lay it out: a configuration of 56 bytes, attributes of 72 with their value at byte 8."""
    compiled = build(_kernel, SIGNATURE, {"BLOCK": 16, ("stride", 2): 1}, 90)
    metadata = compiled.metadata._replace(launch_pdl=early, shared=4096)
    facts = SimpleNamespace(asm=compiled.asm, src=compiled.src, metadata=metadata, function=1234)
    started = []

    def start(config, function, parameters, extra):
        raw, words = bytes(config._obj), struct.unpack_from("=5Q", extra._obj)
        attributes, count = struct.unpack_from("=QI", raw, 40)
        size = ctypes.cast(words[3], ctypes.POINTER(ctypes.c_size_t))[0]
        started.append((
            struct.unpack_from("=7I", raw), struct.unpack_from("=Q", raw, 32)[0], function.value, parameters,
            [struct.unpack("=i4xI", ctypes.string_at(attributes + 72 * i, 12)) for i in range(count)],
            (words[0], words[2], words[4]), struct.unpack_from("=Q", ctypes.string_at(words[1], size), 32)[0],
        ))  # fmt: skip
        return 0

    monkeypatch.setattr(launch, "_driver", lambda: SimpleNamespace(cuLaunchKernelEx=start))
    x, y = torch.zeros(4, dtype=torch.float16), torch.zeros(4)
    kernel = Launch(facts, (5, 12), (x, (3, 2**40, 1), None, 0.5, -7, y, 2**33, 16), [y, x])
    kernel(77, [640, 320])
    kernel(78, [960, 320])
    overlap = [(6, 1)] if early else []  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    threads = 32 * metadata.num_warps
    head = (5, 12, 1, threads, 1, 1, 4096)
    assert started == [
        (head, 77, 1234, None, overlap, (1, 2, 0), 640),
        (head, 78, 1234, None, overlap, (1, 2, 0), 960),
    ]


def test_an_error_of_the_driver_is_raised(monkeypatch):
    compiled = build(_kernel, SIGNATURE, {"BLOCK": 16, ("stride", 2): 1}, 90)
    facts = SimpleNamespace(asm=compiled.asm, src=compiled.src, metadata=compiled.metadata, function=1234)
    monkeypatch.setattr(launch, "_driver", lambda: SimpleNamespace(cuLaunchKernelEx=lambda *_: 700))
    x, y = torch.zeros(4, dtype=torch.float16), torch.zeros(4)
    kernel = Launch(facts, (5, 12), (x, (3, 2**40, 1), None, 0.5, -7, y, 2**33, 16), [x, y])
    with pytest.raises(RuntimeError, match="700"):
        kernel(77, [320, 640])


class TestWhatDoesNotFitIsNotPacked:
    ARGS = torch.zeros(4), (3, 2**40, 1), None, 0.5, -7, torch.zeros(4), 2**33, 16

    @pytest.fixture
    def compiled(self):
        built = build(_kernel, SIGNATURE, {"BLOCK": 16, ("stride", 2): 1}, 90)
        pack_parameters(built, self.ARGS)
        return SimpleNamespace(asm={"ptx": built.asm["ptx"]}, src=built.src, metadata=built.metadata)

    def refuse(self, compiled, args=ARGS):
        with pytest.raises(ValueError, match="cannot be packed"):
            pack_parameters(compiled, args)

    def test_other_arguments(self, compiled):
        self.refuse(compiled, self.ARGS[:3])
        self.refuse(compiled, (*self.ARGS, 16))

    @pytest.mark.parametrize(("name", "x"), [("num_ctas", 2), ("global_scratch_size", 64)])
    def test_a_kernel_that_wants_more_from_its_launcher(self, compiled, name, x):
        compiled.metadata = compiled.metadata._replace(**{name: x})
        self.refuse(compiled)

    @pytest.mark.parametrize("change", [-3, 3])
    def test_other_parameters(self, compiled, change):
        """Two more than arguments are Triton's own."""
        parameter, ptx = re.compile(r"\.param \.u64"), compiled.asm["ptx"]
        if change > 0:
            compiled.asm["ptx"] = parameter.sub(change * ".param .u64 more, " + ".param .u64", ptx, count=1)
        else:
            compiled.asm["ptx"] = parameter.sub("", ptx, count=-change)
        self.refuse(compiled)

    def test_a_type_without_a_format(self, compiled):
        compiled.src = SimpleNamespace(signature={**compiled.src.signature, "scale": "fp8e5"})
        self.refuse(compiled)

    def test_an_interpreted_kernel(self):
        self.refuse(None)


class TestRecords:
    """The second call of a signature takes the short way, and is as right as the first."""

    @pytest.fixture
    def repeats(self, monkeypatch):
        """Grows by what every try of the short way gave."""
        results = []
        repeat = recorded.Recorded.repeat

        def counted(*args):
            results.append(repeat(*args))
            return results[-1]

        monkeypatch.setattr(recorded.Recorded, "repeat", counted)
        monkeypatch.setattr(recorded, "_records", recorded._Records())
        return results

    @pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
    @pytest.mark.parametrize("num_splits", [None, 1, 4])
    def test_other_addresses_other_contents(self, target, repeats, layout, num_splits):
        options = {}
        for seed in range(4):
            torch.manual_seed(seed)
            q, k, v = make_inputs(3, 8, 2, 700, 64, torch.float16, target.device, layout=layout)
            if target.device == "cuda":  # on a CPU, arrays take the long way
                lens = torch.randint(0, 701, (3,), dtype=torch.int32, device="cuda")
                options = {"kv_lens": lens, "sinks": torch.randn(8, device="cuda")}
            out, lse = flash_decode(q, k, v, layout=layout, num_splits=num_splits, return_lse=True, **options)
            assert_matches(out, lse, q, k, v, layout=layout, **options)
        assert len(repeats) == 3
        assert all(result is not None for result in repeats)

    def test_outputs_and_workspaces_may_change(self, target, repeats):
        q, k, v = make_inputs(1, 8, 2, 3000, 64, torch.bfloat16, target.device)
        want = flash_decode(q, k, v, num_splits=8)
        for workspace in (None, Workspace(), Workspace(), None):
            out = torch.full_like(want, float("nan"))
            for _ in range(2):
                assert flash_decode(q, k, v, num_splits=8, workspace=workspace, out=out) is out
                assert torch.equal(out, want)
        larger = make_inputs(4, 8, 2, 3000, 64, torch.bfloat16, target.device)
        flash_decode(*larger, num_splits=64)  # the library's own scratch grows, and moves
        assert torch.equal(flash_decode(q, k, v, num_splits=8), want)
        assert all(result is not None for result in repeats)

    def test_what_a_signature_does_not_tell_is_still_refused_or_heeded(self, target):
        q, k, v = make_inputs(1, 8, 2, 300, 64, torch.float16, target.device)
        want = flash_decode(q, k, v)
        flash_decode(q, k, v)
        with pytest.raises(ValueError, match="gradient"):
            flash_decode(q.clone().requires_grad_(), k, v)
        with pytest.raises(TypeError, match="causal"):
            flash_decode(q, k, v, causal=1)
        with pytest.raises(TypeError, match="workspace"):
            flash_decode(q, k, v, workspace="mine")
        with pytest.raises(TypeError, match=r"^window must be"):
            flash_decode(q, k, v, window=[5])
        with pytest.raises(TypeError, match=r"^kv_lens must be"):
            flash_decode(q, k, v, kv_lens=[300])
        with pytest.raises(TypeError, match=r"^k must be a dense tensor"):
            flash_decode(q, k.to_sparse(), v)
        # Addresses that are no multiple of 16 belong to another compiled kernel.
        shifted = torch.empty(q.numel() + 1, dtype=q.dtype, device=q.device)[1:].view(q.shape).copy_(q)
        assert torch.equal(flash_decode(shifted, k, v), want)
        out = torch.empty(q.numel() + 1, dtype=q.dtype, device=q.device)[1:].view(q.shape)
        assert torch.equal(flash_decode(q, k, v, out=out), want)
        # Values that are the keys, where before they were not.
        assert_matches(flash_decode(q, k, k), None, q, k, k)

    def test_check_must_be_a_bool_every_time(self, target, repeats):
        q, k, v = make_inputs(1, 8, 2, 300, 64, torch.float16, target.device)
        for _ in range(2):
            with pytest.raises(TypeError, match="check must be a bool, got int"):
                flash_decode(q, k, v, check=0)
            flash_decode(q, k, v)
        assert len(repeats) == 1

    def test_an_empty_cache(self, target, repeats):
        q, k, v = make_inputs(1, 4, 1, 0, 64, torch.float16, target.device)
        for lse in (None, None, torch.full((1, 4, 1), float("nan"), device=target.device)):
            out, lse = flash_decode(q, k, v, return_lse=True, lse=lse)
            assert_matches(out, lse, q, k, v)
            assert bool((flash_decode(q, k, v) == 0).all())

    def test_one_tensor_for_two_and_then_two(self, target, repeats):
        x, y, z = (torch.randn(2, 4, 4, 64, device=target.device).half() for _ in range(3))
        for q, k, v in ((x, x, x), (y, z, z), (x, x, x), (z, y, y), (x, y, x), (y, z, x)):
            out, lse = flash_decode(q, k, v, return_lse=True)
            assert_matches(out, lse, q, k, v, atol=LOOSE[q.dtype] * 4)

    @pytest.mark.parametrize("names", [("alibi_slopes", "sinks"), ("kv_lens", "q_lens")], ids=" ".join)
    def test_one_array_for_two_and_then_two(self, target, repeats, names):
        torch.manual_seed(1)
        q = torch.randn(4, 4, 4, 64, device=target.device).half()
        k, v = torch.randn(2, 4, 2, 100, 64, device=target.device).half()
        if names[0] == "kv_lens":
            x, y, z = torch.tensor([[4, 0, 2, 1], [4, 77, 100, 9], [1, 3, 4, 0]], dtype=torch.int32).to(target.device)
        else:
            x, y, z = torch.rand(3, 4, device=target.device)
        for arrays in ((x, x), (y, z), (x, x), (y, z), (x, z)):
            options = dict(zip(names, arrays, strict=True))
            out, lse = flash_decode(q, k, v, return_lse=True, **options)
            assert_matches(out, lse, q, k, v, atol=LOOSE[q.dtype] * 4, **options)

    def test_a_record_keeps_no_workspace(self, target, repeats):
        q, k, v = make_inputs(1, 8, 2, 300, 64, torch.float16, target.device)
        workspace = Workspace()
        for _ in range(3):
            flash_decode(q, k, v, num_splits=4, workspace=workspace)
        assert len(repeats) == 2
        assert all(result is not None for result in repeats)
        alive = weakref.ref(workspace), weakref.ref(workspace.buffer)
        del workspace
        assert [x() for x in alive] == [None, None]
        assert_matches(flash_decode(q, k, v, num_splits=4, workspace=Workspace()), None, q, k, v)

    def test_the_number_of_threads_may_change(self, repeats, monkeypatch):
        """A plan is made for a number of threads, and lasts as long."""
        q, k, v = make_inputs(1, 1, 1, 30000, 64, torch.float32, "cpu")
        started, run_shared = [], cpu.run_shared

        def counted(work, threads):
            started.append(threads)
            run_shared(work, threads)

        monkeypatch.setattr(cpu, "run_shared", counted)
        before = torch.get_num_threads()
        try:
            for threads in (1, 1, 3, 3, 1, 3):
                torch.set_num_threads(threads)
                assert_matches(flash_decode(q, k, v), None, q, k, v)
        finally:
            torch.set_num_threads(before)
        assert started == [1, 1, 3, 3, 1, 3]
        assert len(repeats) == 4

    @pytest.mark.parametrize("steps", [(1, 1, 1, 1), (64, 1, 1, 1), (8, 8, 8, 1), (1, 64, 64, 1)], ids=str)
    def test_queries_that_overlap_themselves(self, target, repeats, steps):
        """Whose strides are none for an output."""
        q = torch.randn(1000, device=target.device).half().as_strided((2, 4, 3, 64), steps)
        _, k, v = make_inputs(2, 4, 2, 100, 64, torch.float16, target.device)
        for _ in range(2):
            out, lse = flash_decode(q, k, v, return_lse=True)
            assert out.stride(-1) == 1
            assert_matches(out, lse, q, k, v, atol=LOOSE[q.dtype] * 4)

    @pytest.mark.gpu
    @needs_gpu
    def test_streams_have_scratch_of_their_own(self):
        q, k, v = make_inputs(1, 8, 2, 3000, 64, torch.bfloat16, "cuda")
        want = flash_decode(q, k, v, num_splits=8)
        for _ in range(3):
            for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    out = flash_decode(q, k, v, num_splits=8)
                stream.synchronize()
                assert torch.equal(out, want)

    @pytest.mark.gpu
    @needs_gpu
    def test_a_captured_graph_and_eager_calls_do_not_disturb_each_other(self):
        q, k, v = make_inputs(2, 8, 2, 4000, 64, torch.float16, "cuda")
        want = flash_decode(q, k, v, num_splits=16)
        flash_decode(q, k, v, num_splits=16)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = flash_decode(q, k, v, num_splits=16)
        for _ in range(3):
            out.fill_(float("nan"))
            graph.replay()
            assert torch.equal(flash_decode(q, k, v, num_splits=16), want)
            assert torch.equal(out, want)


def test_steps_that_are_constants_and_keys_that_lie_end_to_end():
    """Of caches [B, Hkv, N, D], however they lie in memory."""
    bhnd = torch.empty(2, 4, 100, 64, dtype=torch.bfloat16)
    bnhd = torch.empty(2, 100, 4, 64, dtype=torch.bfloat16).transpose(1, 2)
    assert (fixed_step(bhnd, 32), are_end_to_end(bhnd, bhnd)) == (64, True)
    assert (fixed_step(bnhd, 32), are_end_to_end(bhnd, bnhd)) == (4 * 64, False)
    one_head = torch.empty(2, 100, 1, 64, dtype=torch.bfloat16).transpose(1, 2)
    assert (fixed_step(one_head, 32), are_end_to_end(one_head)) == (64, True)
    for other in (bhnd[..., :48], torch.empty(2, 4, 1, 64).expand(2, 4, 100, 64), bhnd[:, :, ::2]):
        assert (fixed_step(other, 32), are_end_to_end(other)) == (0, False)
    narrow = torch.empty(2, 4, 100, 8, dtype=torch.int8)
    assert (fixed_step(narrow, 32), are_end_to_end(narrow)) == (8, False), "not by 16 bytes"
    far = torch.empty(1, 2**20, 2, 64, dtype=torch.bfloat16, device="meta").transpose(1, 2)
    far = far.transpose(1, 2).as_strided((1, 2**20, 4, 64), (0, 64, 2**26, 1))
    assert (fixed_step(far, 16), fixed_step(far, 32)) == (2**26, 0), "offsets fit into 32 bits"


def test_up_to_eight_rows_of_16_bits_are_columns():
    for dtype, group, turned in ((torch.bfloat16, 8, True), (torch.bfloat16, 9, False), (torch.float32, 4, False)):
        assert is_turned(choose_tile(group, 1, 128, 128, dtype.itemsize), dtype) == turned
