"""append_kv() on every backend against plain indexing and a rotation of the test's own."""

import pytest
import torch
from conftest import INTERPRETED, NO_GPU
from helpers import DTYPES, LOOSE, describe, max_error

from flash_decoding import append_kv, backends, flash_decode, reference
from flash_decoding.append import Append

NAN = float("nan")


def rotate(x, cos, sin, interleaved):
    """x [..., D] turned by cos and sin [..., pairs], in float64, through complex numbers."""
    half = cos.shape[-1]
    turned, rest = x[..., : 2 * half].double(), x[..., 2 * half :].double()
    pairs = turned.unflatten(-1, (half, 2)) if interleaved else turned.unflatten(-1, (2, half)).transpose(-1, -2)
    z = torch.view_as_complex(pairs.contiguous()) * torch.complex(cos.double(), sin.double())
    y = torch.view_as_real(z)
    y = y.flatten(-2) if interleaved else y.transpose(-1, -2).flatten(-2)
    return torch.cat((y, rest), -1)


def make_tables(positions, rotary_dim, dtype, device):
    angles = torch.arange(positions)[:, None] * 10000.0 ** -(torch.arange(0, rotary_dim, 2) / rotary_dim)
    return [x.to(dtype).to(device) for x in (angles.cos(), angles.sin())]


class Case:
    """New tokens, a cache full of NaN, and what it must hold after."""

    def __init__(self, target, dtype, *, layout="bhnd", page_size=None, head_dim=24, value_dim=40, lens=(0, 5, 17),
                 new=4, new_lens=None, heads_kv=3, capacity=21, index=torch.int32):  # fmt: skip
        device, batch = target.device, len(lens)
        self.target, self.layout, self.capacity, self.page_size = target, layout, capacity, page_size
        self.k_new = torch.randn(batch, heads_kv, new, head_dim, device=device).to(dtype)
        self.v_new = torch.randn(batch, heads_kv, new, value_dim, device=device).to(dtype)
        self.lens = torch.tensor(lens, dtype=index, device=device)
        self.new_lens = None if new_lens is None else torch.tensor(new_lens, dtype=index, device=device)
        self.table, first, length = None, batch, capacity
        if page_size is not None:
            columns = capacity // page_size
            first, length = batch * columns + 3, page_size
            table = torch.randperm(first)[: batch * columns].view(batch, columns).to(torch.int32)
            ends = torch.tensor(lens) + (new if new_lens is None else torch.tensor(new_lens))
            starts = torch.arange(columns) * page_size
            unused = (starts >= ends[:, None]) | (starts + page_size <= torch.tensor(lens)[:, None])
            self.table = table.masked_fill(unused, -7).to(device)
        self.k_cache, self.v_cache = (
            torch.full((first, heads_kv, length, width), NAN, dtype=dtype, device=device)
            for width in (head_dim, value_dim)
        )

    def flip(self, x):
        return x if self.layout == "bhnd" or x is None else x.transpose(1, 2).contiguous()

    def run(self, **options):
        """The caches after append_kv(), [first, Hkv, length, width], and what it returned."""
        k_cache, v_cache = self.flip(self.k_cache.clone()), self.flip(self.v_cache.clone())
        q = options.pop("q", None)
        rotated = append_kv(
            self.flip(self.k_new), self.flip(self.v_new), k_cache, v_cache, self.lens, layout=self.layout,
            block_table=self.table, new_lens=self.new_lens, q=self.flip(q), backend=self.target.backend, **options,
        )  # fmt: skip
        return self.flip(k_cache), self.flip(v_cache), self.flip(rotated)

    def expected(self, cos=None, sin=None, interleaved=False):
        k_cache, v_cache = self.k_cache.double(), self.v_cache.double()
        for b, i in torch.cartesian_prod(torch.arange(len(self.lens)), torch.arange(self.k_new.shape[2])).tolist():
            n = int(self.lens[b]) + i
            if self.new_lens is not None and i >= int(self.new_lens[b]):
                continue
            first, slot = (b, n) if self.page_size is None else (int(self.table[b, n // self.page_size]),
                                                                 n % self.page_size)  # fmt: skip
            k = self.k_new[b, :, i]
            k_cache[first, :, slot] = k.double() if cos is None else rotate(k, cos[n], sin[n], interleaved)
            v_cache[first, :, slot] = self.v_new[b, :, i].double()
        return k_cache, v_cache


def assert_same(got, want, bound=0.0):
    """Equal within bound where something is expected; NaN, and nothing else, where nothing is."""
    assert torch.equal(got.isnan(), want.isnan()), "only the slots of the new tokens are written"
    assert max_error(got.nan_to_num(nan=0.0), want.nan_to_num(nan=0.0)) <= bound


CACHES = [{}, {"page_size": 1}, {"page_size": 7}]
# One last place of the largest entries, which are below 8.
ROUNDING = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3.2e-2}


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", DTYPES, ids=describe)
@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize("cache", CACHES, ids=describe)
def test_new_tokens_land_where_they_belong_and_nowhere_else(target, cache, layout, dtype):
    case = Case(target, dtype, layout=layout, **cache)
    k_cache, v_cache, rotated = case.run()
    want_k, want_v = case.expected()
    assert_same(k_cache, want_k)
    assert_same(v_cache, want_v)
    assert rotated is None


@pytest.mark.interpreter
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=describe)
@pytest.mark.parametrize("cache", CACHES, ids=describe)
def test_ragged_new_tokens(target, cache, index):
    case = Case(target, torch.float16, lens=(20, 0, 14, 21), new=7, new_lens=(1, 0, 7, 0), index=index, **cache)
    for got, want in zip(case.run()[:2], case.expected(), strict=True):
        assert_same(got, want)


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", DTYPES, ids=describe)
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
# All of the head, a part that is a whole number of vectors or not, one pair.
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(16, 16), (64, 32), (72, 72), (40, 24), (24, 2)])
@pytest.mark.parametrize("cache", [{}, {"page_size": 7}], ids=describe)
def test_keys_and_queries_are_rotated(target, cache, head_dim, rotary_dim, interleaved, dtype):
    case = Case(target, dtype, head_dim=head_dim, layout="bnhd", **cache)
    q = torch.randn(3, 6, 4, head_dim, device=target.device).to(dtype)
    for table_dtype in {dtype, torch.float32}:
        cos, sin = make_tables(case.capacity, rotary_dim, table_dtype, target.device)
        options = {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": interleaved}
        want_k, want_v = case.expected(cos, sin, interleaved)
        for q_advances in (True, False):
            k_cache, v_cache, rotated = case.run(q=q, q_advances=q_advances, **options)
            assert_same(k_cache, want_k, ROUNDING[dtype])
            assert_same(v_cache, want_v)
            n = case.lens.long()[:, None] + (torch.arange(4, device=target.device) if q_advances else 0)
            n = n.expand(3, 4)
            want_q = rotate(q, cos[n][:, None], sin[n][:, None], interleaved)
            assert rotated.dtype == dtype
            assert max_error(rotated, want_q) <= ROUNDING[dtype]
            # Entries that are not turned keep their bits.
            assert torch.equal(rotated[..., rotary_dim:], q[..., rotary_dim:])


@pytest.mark.interpreter
def test_more_queries_than_keys_and_other_strides(target):
    """q may have tokens that are not appended; arrays may be slices of larger ones."""
    case = Case(target, torch.float32, new=1, lens=(3, 20), heads_kv=2)
    wide = torch.randn(2, 5, 9, 50, device=target.device)
    q = wide[:, :4, 2:7, 8:32]
    cos, sin = make_tables(case.capacity + 4, 24, torch.float32, target.device)
    big_k, big_v = (torch.full((2, 4, 30, 60), NAN, device=target.device) for _ in "kv")
    k_cache, v_cache = big_k[:, 1:3, 4:25, 8:32], big_v[:, 2:, 9:, 20:]
    rotated = append_kv(
        case.k_new, case.v_new, k_cache, v_cache, case.lens, rotary_cos=cos, rotary_sin=sin, q=q,
        backend=target.backend,
    )  # fmt: skip
    want_k, want_v = case.expected(cos, sin)
    assert_same(k_cache, want_k, ROUNDING[torch.float32])
    assert_same(v_cache, want_v)
    assert int((~big_k.isnan()).sum()) == 2 * 2 * 24
    assert int((~big_v.isnan()).sum()) == 2 * 2 * 40
    n = case.lens.long()[:, None] + torch.arange(5, device=target.device)
    assert max_error(rotated, rotate(q, cos[n][:, None], sin[n][:, None], False)) <= ROUNDING[torch.float32]


@pytest.mark.interpreter
@pytest.mark.parametrize("page_size", [None, 4])
def test_the_kernels_themselves_stay_in_bounds(target, page_size):
    """What a GPU cannot check before the launch: lengths and pages that are garbage write nothing."""
    name = backends.resolve(target.backend, torch.device(target.device))
    lens = torch.tensor([7, 100, -1, -(2**62), 2**62, 8], device=target.device)
    length = 8 if page_size is None else page_size
    pages = 6 if page_size is None else 3
    room = torch.full((pages + 2, 2, length, 16), NAN, device=target.device)
    cache = room[1:-1]
    table = None
    if page_size is not None:
        table = torch.tensor([[-1, 1]] + [[0, 2]] * 4 + [[2**31 - 1, 3]], dtype=torch.int32, device=target.device)
    new = torch.randn(6, 2, 3, 16, device=target.device)
    other = torch.full_like(room, NAN)[1:-1]
    append = Append(
        new, new, cache, other, lens, table, None, None, None, False, None, None, 1,
        8, page_size,
    )  # fmt: skip
    backends.load(f"{name}.append").append(append)
    first, slot = (0, 7) if page_size is None else (1, 3)
    assert torch.equal(cache[first, :, slot], new[0, :, 0])
    assert torch.equal(other[first, :, slot], new[0, :, 0])
    assert int((~room.isnan()).sum()) == 2 * 16

    if page_size is not None:
        bad = torch.tensor([[-1, -1], [3, 3], [2**31 - 1, -(2**31)]] * 2, dtype=torch.int32, device=target.device)
        append = append._replace(block_table=bad, kv_lens=torch.zeros_like(lens))
        room.fill_(NAN)
        backends.load(f"{name}.append").append(append)
        assert bool(room.isnan().all())


@pytest.mark.interpreter
def test_queries_past_the_tables_take_their_last_row(target):
    case = Case(target, torch.float32, lens=(19, 20), new=1)
    cos, sin = make_tables(case.capacity, 24, torch.float32, target.device)
    q = torch.randn(2, 3, 4, 24, device=target.device)
    rotated = case.run(q=q, rotary_cos=cos, rotary_sin=sin)[2]
    n = (case.lens.long()[:, None] + torch.arange(4, device=target.device)).clamp(max=case.capacity - 1)
    assert max_error(rotated, rotate(q, cos[n][:, None], sin[n][:, None], False)) <= ROUNDING[torch.float32]


def test_wide_heads_and_many_tokens(target):
    """Shared out to several threads: a prompt of 1000 tokens, MLA's widths."""
    case = Case(target, torch.bfloat16, head_dim=576, value_dim=512, new=1000, lens=(3, 90), capacity=1100)
    cos, sin = make_tables(1100, 64, torch.float32, target.device)
    k_cache, v_cache, _ = case.run(rotary_cos=cos, rotary_sin=sin)
    want_k, want_v = case.expected(cos, sin)
    assert_same(k_cache, want_k, ROUNDING[torch.bfloat16])
    assert_same(v_cache, want_v)


@pytest.mark.interpreter
@pytest.mark.parametrize("shape", [(0, 2, 3, 16), (2, 2, 0, 16)], ids=["no-sequence", "no-token"])
def test_nothing_to_append(target, shape):
    new = torch.zeros(shape, device=target.device)
    cache = torch.full((shape[0], 2, 8, 16), NAN, device=target.device)
    lens = torch.zeros(shape[0], dtype=torch.int32, device=target.device)
    append_kv(new, new, cache, cache.clone(), lens, backend=target.backend)
    assert bool(cache.isnan().all())


def test_append_then_decode(target):
    """Token by token through a paged cache: each step sees what the steps before have written."""
    batch, heads_kv, page_size, columns = 2, 2, 16, 4
    k, v = (torch.randn(batch, heads_kv, 50, 32, device=target.device, dtype=torch.float16) for _ in "kv")
    pools = [torch.full((9, heads_kv, page_size, 32), NAN, device=target.device, dtype=torch.float16) for _ in "kv"]
    table = torch.randperm(8).view(batch, columns).to(torch.int32).to(target.device)
    lens = torch.zeros(batch, dtype=torch.int32, device=target.device)
    options = {"backend": target.backend, "block_table": table}
    for start, stop in ((0, 30), (30, 31), (31, 36), (36, 50)):
        append_kv(k[:, :, start:stop], v[:, :, start:stop], *pools, lens, **options)
        lens += stop - start
        q = torch.randn(batch, 4, 1, 32, device=target.device, dtype=torch.float16)
        got = flash_decode(q, *pools, kv_lens=lens, **options)
        want = reference(q, k[:, :, :stop], v[:, :, :stop])
        assert max_error(got, want) < LOOSE[torch.float16]


@pytest.mark.compiles
def test_torch_compile_records_one_op_that_writes(target):
    case = Case(target, torch.float32, lens=(0, 5), new=1)
    case.k_cache[1, :, :5], case.v_cache[1, :, :5] = 1.0, 2.0  # what the second sequence holds before
    cos, sin = make_tables(case.capacity, 24, torch.float32, target.device)
    q = torch.randn(2, 6, 1, 24, device=target.device)

    def step(k_new, v_new, k_cache, v_cache, lens, q):
        q = append_kv(k_new * 1.0, v_new, k_cache, v_cache, lens, rotary_cos=cos, rotary_sin=sin, q=q + 0.0)
        return q + 0.0, flash_decode(q, k_cache, v_cache, kv_lens=lens + 1)

    arguments = case.k_new, case.v_new, case.k_cache.clone(), case.v_cache.clone(), case.lens, q
    with torch.no_grad():
        rotated, out = torch.compile(step, fullgraph=True)(*arguments)
    want_k, want_v = case.expected(cos, sin)
    assert_same(arguments[2], want_k, ROUNDING[torch.float32])
    assert_same(arguments[3], want_v)
    n = case.lens.long()[:, None]
    assert max_error(rotated, rotate(q, cos[n][:, None], sin[n][:, None], False)) <= ROUNDING[torch.float32]
    want = reference(rotated, *(x.nan_to_num(nan=0.0) for x in arguments[2:4]), kv_lens=case.lens + 1)
    assert max_error(out, want) < LOOSE[torch.float32]


@pytest.mark.compiles
def test_the_schema_holds(target):
    case = Case(target, torch.float32, lens=(0, 5), new=2)
    cos, sin = make_tables(case.capacity, 24, torch.float32, target.device)
    q = torch.randn(2, 6, 2, 24, device=target.device)
    arguments = (
        case.k_new, case.v_new, torch.zeros_like(case.k_cache), torch.zeros_like(case.v_cache), case.lens, "bhnd",
        None, None, cos, sin, True, q, True, torch.zeros_like(q), "auto",
    )  # fmt: skip
    torch.library.opcheck(torch.ops.flash_decoding.append.default, arguments)
    with pytest.raises(ValueError, match="q_out must be like q"):
        torch.ops.flash_decoding.append(*arguments[:-2], None, "auto")


@pytest.mark.gpu
@NO_GPU
def test_a_captured_graph_is_right_for_later_lengths_and_tables():
    new, cache = torch.randn(2, 2, 1, 64, device="cuda"), torch.full((6, 2, 16, 64), NAN, device="cuda")
    lens = torch.tensor([0, 0], dtype=torch.int32, device="cuda")
    table = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32, device="cuda")
    values = cache.clone()

    def step():
        append_kv(new, new, cache, values, lens, block_table=table)
        lens.add_(1)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    cache.fill_(NAN)
    lens.copy_(torch.tensor([15, 3]))
    table.copy_(torch.tensor([[5, 4], [1, 0]]))
    graph.replay()
    graph.replay()
    written = (~cache.isnan()).any(-1).all(1).nonzero().tolist()
    assert written == [[1, 3], [1, 4], [4, 0], [5, 15]]
    assert lens.tolist() == [17, 5]


@pytest.mark.skipif(INTERPRETED, reason="the interpreter does not compile")
@pytest.mark.parametrize("arch", [80, 89, 90])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=describe)
@pytest.mark.parametrize(("head_dim", "value_dim"), [(64, 64), (128, 128), (80, 256), (576, 512)])
@pytest.mark.parametrize("options", [False, True], ids=["dense", "paged-rotated"])
def test_the_kernel_compiles_and_does_not_spill(options, head_dim, value_dim, dtype, arch):
    pytest.importorskip("triton")
    from compiling import NAMES, _compile

    from flash_decoding.backends.triton.append import _WARPS, _append_kernel, choose_rows

    block_r, block_d = choose_rows(head_dim, value_dim)
    x, stride, maybe = f"*{NAMES[dtype]}", ("i32", "i32", "i32"), "constexpr"
    pointers = ("k_new", "v_new", "k", "v") + (("q", "q_out") if options else ())
    signature = {f"{name}_ptr": x for name in pointers} | {
        f"{name}_stride": stride for name in ("k_new", "v_new", "k", "v", "q", "q_out")
    }
    signature |= dict.fromkeys(("block_table_ptr", "new_lens_ptr"), "*i32" if options else maybe)
    signature |= dict.fromkeys(("cos_ptr", "sin_ptr"), "*fp32" if options else maybe)
    signature |= dict.fromkeys(
        ("block_table_step", "cos_step", "sin_step", "L", "Lq", "Hkv", "Hq", "capacity", "pages", "positions", "q_step",
         "tiles"), "i32"
    )  # fmt: skip
    constants = {
        "D": head_dim, "DV": value_dim, "ROTARY_DIM": 64 if options else 0, "INTERLEAVED": options,
        "PAGE_SIZE": 16 if options else None, "BLOCK_R": block_r, "BLOCK_D": block_d,
    }  # fmt: skip
    built = _compile(_append_kernel, {**signature, "kv_lens_ptr": "*i32"}, constants, arch, _WARPS, 1)
    assert built.spills == 0
    assert built.stack_bytes == 0
    assert built.shared_bytes <= 48 * 1024
    assert "st.global.v4.b32" in built.ptx, "16 bytes a thread"


def bad(**changes):
    """A good call with one thing wrong."""
    x = torch.zeros(2, 3, 1, 16)
    cos = torch.zeros(8, 8)
    call = {
        "k_new": x, "v_new": x, "k_cache": torch.zeros(2, 3, 8, 16), "v_cache": torch.zeros(2, 3, 8, 16),
        "kv_lens": torch.tensor([0, 7]),
    }  # fmt: skip
    paged = {"block_table": torch.zeros(2, 4, dtype=torch.int32)}
    tables = {"rotary_cos": cos, "rotary_sin": cos}
    for name, more in (("paged", paged), ("tables", tables)):
        if changes.pop(name, False):
            call.update(more)
    return {**call, **changes}


TWICE = torch.zeros(2, 3, 8, 16)
X, WIDE, HALF = torch.zeros(2, 3, 1, 16), torch.zeros(8, 9), torch.zeros(8, 8).half()
BAD = {
    "layout": (bad(layout="nhd"), ValueError, "layout must be one of"),
    "kind": (bad(kv_lens=3), TypeError, "kv_lens must be a torch.Tensor, got int"),
    "dtype": (bad(k_new=X.double()), TypeError, "k_new must be float16, bfloat16 or float32"),
    "cache-dtype": (bad(k_cache=torch.zeros(2, 3, 8, 16).half()), TypeError, "k_cache must have the dtype of k_new"),
    "lens-dtype": (bad(kv_lens=torch.zeros(2)), TypeError, "kv_lens must be int32 or int64"),
    "table-dtype": (bad(block_table=torch.zeros(2, 4).long()), TypeError, "block_table must be int32"),
    "rank": (bad(k_new=X[0]), ValueError, "k_new must have shape"),
    "v-shape": (bad(v_new=X[:, :2]), ValueError, "v_new must have shape"),
    "cache-shape": (bad(k_cache=torch.zeros(3, 3, 8, 16)), ValueError, "k_cache must have shape"),
    "cache-length": (bad(v_cache=torch.zeros(2, 3, 9, 16)), ValueError, "v_cache must have shape"),
    "width": (bad(v_new=X[..., :12], v_cache=torch.zeros(2, 3, 8, 12)), ValueError, "value_dim must be a multiple"),
    "lens-shape": (bad(kv_lens=torch.zeros(3).long()), ValueError, "kv_lens must have one entry per sequence"),
    "stride": (bad(k_cache=torch.zeros(2, 3, 16, 8).transpose(2, 3)), ValueError, "k_cache must have a contig"),
    "overlap": (bad(k_cache=torch.zeros(1, 3, 8, 16).expand(2, -1, -1, -1)), ValueError, "must not overlap itself"),
    "too-long": (bad(kv_lens=torch.tensor([0, 9])), ValueError, "kv_lens must lie from 0 to 8"),
    "negative": (bad(kv_lens=torch.tensor([-1, 2])), ValueError, "kv_lens must lie from 0 to 8"),
    "full": (bad(kv_lens=torch.tensor([0, 8])), ValueError, "kv_lens must leave room for the new keys"),
    "new-lens": (bad(new_lens=torch.tensor([0, 2])), ValueError, "new_lens must lie from 0 to 1"),
    "page": (bad(block_table=torch.full((2, 4), 2, dtype=torch.int32)), ValueError, "block_table must hold pages from"),
    "same-cache": (bad(k_cache=TWICE, v_cache=TWICE), ValueError, "v_cache must not be k_cache: keys would be"),
    "same-memory": (bad(k_cache=TWICE, v_cache=TWICE[:]), ValueError, "v_cache must not be k_cache"),
    "same-place": (bad(paged=True, kv_lens=torch.tensor([5, 5])), ValueError,
                   r"got slot 5 of page 0 for tokens of sequences \[0, 1\]"),
    "same-place-later": (bad(paged=True, kv_lens=torch.tensor([5, 29])), ValueError, "a place of its own for every"),
    "one-table": (bad(rotary_cos=torch.zeros(8, 8)), ValueError, "rotary_sin must be given with rotary_cos"),
    "short-table": (bad(tables=True, paged=True), ValueError, "a row for each of the 32 positions"),
    "wide-table": (bad(rotary_cos=WIDE, rotary_sin=WIDE), ValueError, "rotary_cos must have from 1 to head_dim"),
    "table-kind": (bad(rotary_cos=HALF, rotary_sin=HALF), TypeError, "rotary_cos must be float32 or have the dtype"),
    "q-alone": (bad(q=X), ValueError, "rotary_cos must be given with q"),
    "q-width": (bad(tables=True, q=torch.zeros(2, 3, 1, 24)), ValueError, "q must have shape"),
    "gradient": (bad(k_new=X.clone().requires_grad_()), ValueError, "k_new must not require a gradient"),
    "flag": (bad(rotary_interleaved=1), TypeError, "rotary_interleaved must be a bool"),
    "backend": (bad(backend="cuda"), ValueError, "backend must be one of"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused(name):
    call, kind, message = BAD[name]
    caches = [call["k_cache"].clone(), call["v_cache"].clone()]
    with pytest.raises(kind, match=message):
        append_kv(**call)
    assert torch.equal(call["k_cache"], caches[0])
    assert torch.equal(call["v_cache"], caches[1])


def test_the_good_call_behind_the_bad_ones_is_accepted():
    call = bad(tables=True, q=X)
    append_kv(**call)
    with pytest.raises(ValueError, match="kv_lens must lie"):  # values are looked at again
        append_kv(**{**call, "kv_lens": torch.tensor([0, 9])})


def test_new_tokens_of_one_sequence_must_not_meet_either():
    new, table = torch.zeros(1, 2, 5, 16), torch.zeros(1, 3, dtype=torch.int32)
    caches, lens = [torch.zeros(3, 2, 4, 16) for _ in "kv"], torch.tensor([2])
    with pytest.raises(ValueError, match=r"got slot 2 of page 0 for tokens of sequences \[0, 0\]"):
        append_kv(new, new, *caches, lens, block_table=table)
    append_kv(new[:, :, :4] + 1, new[:, :, :4], *caches, lens, block_table=table)  # its two halves do not meet
    assert bool((caches[0][0] == 1).all())


def test_only_new_tokens_count_where_places_are_compared():
    call = bad(paged=True, kv_lens=torch.tensor([5, 5]), new_lens=torch.tensor([1, 0]))
    append_kv(**call)
    append_kv(**{**call, "kv_lens": torch.tensor([5, 6]), "new_lens": None})  # one page, two slots


def test_halves_of_one_memory_are_two_caches():
    new, both = torch.ones(2, 3, 1, 16), torch.zeros(2, 2, 3, 8, 16)
    append_kv(new, 2 * new, both[0], both[1], torch.tensor([0, 7]))
    both = both.transpose(0, 1).contiguous()
    append_kv(new, 2 * new, both[:, 0], both[:, 1], torch.tensor([0, 7]))
    assert both[:, 0].sum() * 2 == both[:, 1].sum() == 2 * 2 * 3 * 16


@pytest.mark.gpu
@NO_GPU
def test_check_compares_places_on_a_gpu():
    new, table = torch.zeros(2, 3, 1, 16, device="cuda"), torch.zeros(2, 4, dtype=torch.int32, device="cuda")
    caches, lens = [torch.zeros(2, 3, 8, 16, device="cuda") for _ in "kv"], torch.tensor([5, 5], device="cuda")
    with pytest.raises(ValueError, match="a place of its own for every new token"):
        append_kv(new, new, *caches, lens, block_table=table, check=True)
