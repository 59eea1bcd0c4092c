"""cascade_decode(): the same result as plain decoding, its rule, and what it refuses."""

import math

import pytest
import torch
from conftest import INTERPRETED, NO_GPU, TRITON_TARGETS
from helpers import DTYPES, LOOSE, assert_matches, describe, max_error
from paging import to_pages

from flash_decoding import Workspace, backends, cascade_decode, flash_decode, reference
from flash_decoding.cascade import group_rows, saves_time

NAN = float("nan")


class Case:
    """A paged cache whose sequences share their first pages, with NaN in everything that no call may read."""

    def __init__(self, target, dtype, *, batch=3, heads_q=4, heads_kv=2, q_len=1, head_dim=32, value_dim=16,
                 page_size=4, prefix_pages=3, suffix_pages=5, layout="bhnd", empty=(), index=torch.int32):  # fmt: skip
        self.target, self.prefix_len, device = target, prefix_pages * page_size, target.device
        capacity = self.prefix_len + suffix_pages * page_size
        lens = torch.randint(self.prefix_len + q_len, capacity + 1, (batch,))
        lens[list(empty)] = 0
        q = torch.randn(batch, heads_q, q_len, head_dim).to(dtype)
        k, v = (torch.randn(batch, heads_kv, capacity, width).to(dtype) for width in (head_dim, value_dim))
        owner = int(lens.argmax())
        self.k, self.v, table = to_pages(k, v, page_size, lens, layout=layout)
        # The prefix is that of one sequence; the pages that the others had for it are nobody's any more.
        own = table[torch.arange(batch) != owner, :prefix_pages]
        for pool in (self.k, self.v):
            pool[own[(own >= 0) & (own < pool.shape[0])].long()] = NAN
        table[lens > 0, :prefix_pages] = table[owner, :prefix_pages].clone()
        table[0, :prefix_pages] = table[owner, :prefix_pages]  # row 0 names it, whatever its length
        self.q = q if layout == "bhnd" else q.transpose(1, 2).contiguous()
        self.options = {"block_table": table, "kv_lens": lens.to(index), "layout": layout}
        self.q, self.k, self.v = (x.to(device) for x in (self.q, self.k, self.v))
        self.options = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in self.options.items()}

    def decode(self, shared=True, **options):
        options = {**self.options, "return_lse": True, "backend": self.target.backend, **options}
        return cascade_decode(self.q, self.k, self.v, prefix_len=self.prefix_len, shared=shared, **options)

    def check(self, **options):
        """The shared way against the reference."""
        out, lse = self.decode(**options)
        atol = LOOSE[self.q.dtype] * max(1.0, self.v.nan_to_num(nan=0.0).abs().max().item())
        assert_matches(out, lse, self.q, self.k, self.v, atol=atol, **{**self.options, **options})
        return out, lse


def trees(batch, q_len, device):
    """Masks of trees: a token sees itself and some of those before it; the first of sequence 0 not even itself."""
    mask = torch.rand(batch, q_len, q_len).tril() > 0.4
    mask |= torch.eye(q_len, dtype=torch.bool)
    mask[0, 0] = False
    return mask.to(device)


SHAPES = [
    {},
    {"layout": "bnhd", "index": torch.int64},
    {"q_len": 3, "heads_q": 6, "page_size": 1, "prefix_pages": 9, "suffix_pages": 30},
    {"q_len": 3, "layout": "bnhd", "batch": 5, "heads_kv": 1, "head_dim": 16},
    {"batch": 1, "heads_q": 2, "head_dim": 64, "value_dim": 64, "page_size": 16, "prefix_pages": 1},
    {"batch": 4, "empty": (0, 2)},
    {"batch": 2, "empty": (1,), "q_len": 2, "layout": "bnhd"},
    {"batch": 13, "q_len": 5, "heads_q": 2, "heads_kv": 1},  # 65 rows: two groups of 40, of which 15 are padding
    {"batch": 2, "q_len": 64, "heads_q": 1, "heads_kv": 1, "suffix_pages": 20},  # two full groups
    {"batch": 3, "page_size": 16, "suffix_pages": 40, "empty": (1,)},  # suffixes that the planner shares out as a batch
]


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", DTYPES, ids=describe)
@pytest.mark.parametrize("shape", SHAPES, ids=describe)
def test_the_shared_way_gives_what_the_definition_gives(target, shape, dtype):
    Case(target, dtype, **shape).check()


@pytest.mark.interpreter
@pytest.mark.parametrize("target", TRITON_TARGETS)
@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        (torch.float16, {"batch": 4, "page_size": 16, "suffix_pages": 8, "empty": (1,)}),
        # Two tiles of rows, the second one partly filled.
        (torch.float32, {"q_len": 4, "heads_q": 6, "page_size": 16, "suffix_pages": 12, "layout": "bnhd"}),
    ],
    ids=describe,
)
def test_suffixes_in_pieces(target, plans_in_pieces, dtype, shape):
    case = Case(target, dtype, **shape)
    case.check(sinks=torch.randn(shape.get("heads_q", 4), device=target.device))
    prefix, suffix = plans_in_pieces
    assert prefix.at_once is None
    assert suffix.at_once


@pytest.mark.parametrize("dtype", DTYPES, ids=describe)
@pytest.mark.parametrize(
    "shape",
    [
        {"batch": 64, "heads_q": 8, "head_dim": 128, "value_dim": 128, "page_size": 16, "prefix_pages": 20},
        {"batch": 67, "heads_q": 8, "heads_kv": 8, "head_dim": 64, "value_dim": 64, "page_size": 16, "empty": (66,)},
        {"batch": 130, "heads_q": 8, "heads_kv": 1, "head_dim": 64, "value_dim": 128, "page_size": 64},
        {"batch": 9, "q_len": 8, "heads_q": 14, "head_dim": 80, "value_dim": 80, "page_size": 8, "layout": "bnhd"},
        {"batch": 3, "heads_q": 16, "heads_kv": 1, "head_dim": 576, "value_dim": 512, "page_size": 64},
        {"batch": 2, "heads_q": 8, "head_dim": 128, "value_dim": 128, "page_size": 256, "prefix_pages": 16},
    ],
    ids=describe,
)
def test_larger_shapes(target, shape, dtype):
    Case(target, dtype, **shape).check()


@pytest.mark.interpreter
@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize("names", ["sinks", "softcap scale", "q_lens", "tree", "flat", "sinks q_lens softcap tree"])
def test_options(target, names, layout):
    case = Case(target, torch.float32, batch=4, q_len=4, empty=(3,), layout=layout)
    device = target.device
    options = {
        "sinks": {"sinks": torch.tensor([-30.0, 0.0, 2.0, 30.0], device=device)},
        "softcap": {"softcap": 1.5},
        "scale": {"scale": 0.7},
        "q_lens": {"q_lens": torch.tensor([4, 0, 1, 3], dtype=torch.int32, device=device)},
        "tree": {"tree_mask": trees(4, 4, device)},
        "flat": {"causal": False},
    }
    case.check(**{key: x for name in names.split() for key, x in options[name].items()})


@pytest.mark.interpreter
def test_a_row_that_sees_only_the_prefix(target):
    """No committed suffix, and a tree mask that hides the new token even from itself."""
    case = Case(target, torch.float32, batch=2)
    case.options["kv_lens"].fill_(case.prefix_len + 1)
    mask = torch.tensor([[[False]], [[True]]], device=target.device)
    _, lse = case.check(tree_mask=mask)
    assert bool(lse.isfinite().all())


@pytest.mark.interpreter
def test_a_sink_counts_once(target):
    """q = 0: prefix, suffix and sink each weigh what they hold."""
    case = Case(target, torch.float32, batch=2, heads_q=2, heads_kv=1)
    case.q.zero_()
    case.v[case.v.isfinite()] = 1.0
    out, lse = case.decode(sinks=torch.tensor([0.0, math.log(10.0)], device=target.device))
    n = case.options["kv_lens"].double()[:, None, None]
    sink = torch.tensor([1.0, 10.0], device=target.device)[None, :, None]
    assert max_error(out, (n / (n + sink))[..., None].expand_as(out)) < 1e-6
    assert max_error(lse, n.log().expand_as(lse)) < 1e-5


@pytest.mark.interpreter
def test_rows_that_do_not_ask_may_hold_nan(target):
    case = Case(target, torch.float32, batch=4, q_len=3, empty=(0,))
    q_lens = torch.tensor([3, 1, 0, 3], device=target.device)
    out, lse = case.check(q_lens=q_lens)
    case.q[0], case.q[1, :, 1:], case.q[2] = NAN, NAN, NAN
    again, again_lse = case.decode(q_lens=q_lens)
    assert torch.equal(out, again)
    assert torch.equal(lse, again_lse)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=describe)
def test_nothing_is_rounded_in_between(target, dtype):
    """As for splits (case C025): hardly more elements are rounded the wrong way than by plain decoding."""
    shape = {"heads_q": 32, "heads_kv": 8, "head_dim": 128, "value_dim": 128, "page_size": 16, "prefix_pages": 100}
    case = Case(target, dtype, **shape)
    want = reference(case.q, case.k, case.v, **case.options)
    wrong = [(case.decode(shared)[0] != want.to(dtype)).double().mean().item() for shared in (False, True)]
    error = [max_error(case.decode(shared)[0], want) for shared in (False, True)]
    assert wrong[1] <= wrong[0] + 0.02
    assert error[1] <= 1.2 * error[0] + torch.finfo(dtype).eps / 2 * want.abs().max().item()


@pytest.mark.interpreter
@pytest.mark.parametrize("shared", [False, True])
def test_given_outputs_and_a_workspace_are_used(target, shared):
    case = Case(target, torch.float32, batch=4, layout="bnhd")
    out, lse = torch.full((4, 1, 4, 32), NAN, device=target.device)[..., :16], torch.full((4, 4, 1), NAN)
    lse, workspace = lse.to(target.device), Workspace()
    got, got_lse = case.decode(shared, out=out, lse=lse, workspace=workspace)
    assert got.data_ptr() == out.data_ptr()
    assert got_lse.data_ptr() == lse.data_ptr()
    assert_matches(out, lse, case.q, case.k, case.v, atol=1e-5, **case.options)
    assert not shared or workspace.size_bytes > 0
    alone = case.decode(shared, return_lse=False)
    assert torch.equal(alone, out)


def test_queries_of_any_strides(target):
    """As cut from a fused projection, where no view groups the rows, and expanded from one sequence."""
    case = Case(target, torch.float32, batch=3, q_len=2)
    fused = torch.randn(3, 2, 4 * 32 + 7, device=target.device)[..., :128].unflatten(-1, (4, 32)).transpose(1, 2)
    for q in (fused, fused[:1].expand(3, -1, -1, -1), fused.transpose(1, 2).contiguous().transpose(1, 2)):
        case.q = q
        case.check()


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 9, 63, 64, 65, 72, 127, 128, 129, 1000, 4096])
def test_groups_hold_all_rows_and_come_in_few_sizes(rows):
    groups, length = group_rows(rows)
    assert rows <= groups * length
    assert groups == -(-rows // 64)
    assert length in (1, 2, 4, *range(8, 65, 8))
    assert groups * length - rows < 8 * groups


# An H200, 8 KV heads of 128 in 16 bits: 4 KB a key.
@pytest.mark.parametrize(
    ("sequences", "prefix_len", "wins"),
    [(1, 10**6, False), (2, 1024, False), (8, 1024, True), (64, 64, False), (64, 128, True), (256, 16, False)],
)
def test_the_rule(sequences, prefix_len, wins):
    shared_reads = -(-4 * sequences // 64)  # four query heads per KV head
    assert saves_time(sequences, shared_reads, 4096 * prefix_len, 4560.0) is wins


def test_the_rule_never_shares_what_spares_nothing():
    """One query head tile per sequence and as many tiles together: 64 rows per KV head and sequence."""
    assert not saves_time(32, 32, 10**9, 4560.0)


def spy(monkeypatch, name):
    """How often decode_shared() runs."""
    module, calls = backends.load(f"{name}.cascade"), []
    run = module.decode_shared
    monkeypatch.setattr(module, "decode_shared", lambda *args: calls.append(run(*args)))
    return calls


@pytest.mark.interpreter
def test_what_decides(target, monkeypatch):
    case, device = Case(target, torch.float32, batch=4), target.device
    calls = spy(monkeypatch, target.backend)
    case.decode(shared=False)
    case.decode(shared=None)  # far too little to share on a GPU; a CPU never shares by itself
    case.decode(shared=None, window=5)
    case.decode(shared=None, alibi_slopes=torch.ones(4, device=device))
    case.decode(shared=False, alibi_slopes=torch.ones(4, device=device))
    assert calls == []
    case.decode()
    assert len(calls) == 1
    monkeypatch.setattr("flash_decoding.cascade._is_faster", lambda *args: True)
    case.decode(shared=None)
    assert len(calls) == 2
    case.decode(shared=None, window=5)
    case.prefix_len = 0
    case.decode(shared=None)
    assert len(calls) == 2


def test_windows_and_slopes_are_decoded_plainly(target):
    case = Case(target, torch.float32, batch=4)
    for options in ({"window": 7}, {"alibi_slopes": torch.rand(4, device=target.device)}):
        out, lse = case.decode(shared=None, **options)
        assert_matches(out, lse, case.q, case.k, case.v, atol=1e-5, **case.options, **options)


def test_an_empty_batch(target):
    case = Case(target, torch.float32, batch=1)
    options = {name: x[:0] if isinstance(x, torch.Tensor) else x for name, x in case.options.items()}
    q = case.q[:0]
    assert cascade_decode(q, case.k, case.v, prefix_len=4, shared=True, **options).shape == (0, 4, 1, 16)


@pytest.mark.compiles
@pytest.mark.parametrize("shared", [None, True])
def test_compiled(target, shared):
    case = Case(target, torch.float32, batch=4)

    def step(q, k, v, table, lens):
        return cascade_decode(
            q * 1.0, k, v, block_table=table, kv_lens=lens, prefix_len=case.prefix_len, shared=shared, return_lse=True
        )

    with torch.no_grad():
        arguments = case.q, case.k, case.v, case.options["block_table"], case.options["kv_lens"]
        out, lse = torch.compile(step, fullgraph=True)(*arguments)
    assert_matches(out, lse, case.q, case.k, case.v, atol=1e-5, **case.options)
    for change, message in (({"workspace": Workspace()}, "workspace must be None"), ({"check": True}, "check must be")):
        with pytest.raises(Exception, match=message):
            torch.compile(lambda q, change=change: case_of(case, q, **change), fullgraph=True)(case.q)


def case_of(case, q, **change):
    return cascade_decode(q, case.k, case.v, prefix_len=case.prefix_len, **case.options, **change)


@pytest.mark.compiles
def test_the_schema_holds(target):
    case = Case(target, torch.float32, batch=4)
    table, lens = case.options["block_table"], case.options["kv_lens"]
    out, lse = torch.zeros(4, 4, 1, 16, device=target.device), torch.zeros(4, 4, 1, device=target.device)
    arguments = (
        case.q, case.k.nan_to_num(), case.v.nan_to_num(), "bhnd", lens, table, None, None, True, None, None, None, None,
        None, None, None, None, None, None, case.prefix_len, True, "auto", out, lse,
    )  # fmt: skip
    torch.library.opcheck(torch.ops.flash_decoding.cascade.default, arguments)


GOOD = {
    "q": torch.zeros(2, 4, 1, 16), "k": torch.zeros(5, 2, 4, 16), "v": torch.zeros(5, 2, 4, 16),
    "block_table": torch.tensor([[0, 1, 2], [0, 1, 3]], dtype=torch.int32), "kv_lens": torch.tensor([9, 12]),
    "prefix_len": 8,
}  # fmt: skip
OTHER = torch.tensor([[0, 1, 2], [0, 2, 3]], dtype=torch.int32)
OUTSIDE = torch.tensor([[0, 9, 2], [0, 9, 3]], dtype=torch.int32)
REFUSED = [
    (dict(prefix_len=7), ValueError, "multiple of the page size, 4, from 0 to less than the table's 12 keys, got 7"),
    (dict(prefix_len=12), ValueError, "prefix_len must be a multiple"),
    (dict(prefix_len=-4), ValueError, "prefix_len must be a multiple"),
    (dict(prefix_len=8.0), TypeError, "prefix_len must be an int, got float"),
    (dict(prefix_len=True), TypeError, "prefix_len must be an int, got bool"),
    (dict(shared=1), TypeError, "shared must be a bool or None, got int"),
    (dict(shared=True, prefix_len=0), ValueError, "prefix_len must be at least one page with shared=True, got 0"),
    (dict(shared=True, window=3), ValueError, "window must be None with shared=True"),
    (dict(shared=True, alibi_slopes=torch.ones(4)), ValueError, "alibi_slopes must be None with shared=True"),
    (dict(kv_lens=torch.tensor([9, 8])), ValueError, r"hold the prefix and the new tokens, 8 \+ 1, got 8 at \[1\]"),
    (dict(kv_lens=torch.tensor([1, 9])), ValueError, r"got 1 at \[0\]"),
    (dict(block_table=OTHER), ValueError, "block_table must begin with the same 2 pages in all rows, got others in"),
    (dict(block_table=OUTSIDE, kv_lens=torch.tensor([0, 0])), ValueError, "name the prefix in its first row, pages"),
    (dict(block_table=None), TypeError, "block_table must be a torch.Tensor, got NoneType"),
    (dict(kv_lens=None), TypeError, "kv_lens must be a torch.Tensor, got NoneType"),
    (dict(k=GOOD["k"].half()), TypeError, "k must have the dtype of q"),
    (dict(workspace=3), TypeError, "workspace must be a Workspace or None, got int"),
    (dict(backend="cuda"), ValueError, "backend must be one of"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "kind", "message"), REFUSED, ids=[message[:40] for _, _, message in REFUSED])
def test_bad_input_is_refused_by_name(change, kind, message, monkeypatch):
    monkeypatch.setattr("flash_decoding.cascade._run", lambda *args: pytest.fail("something was launched"))
    with pytest.raises(kind, match=message):
        cascade_decode(**{**GOOD, **change})


def test_the_good_call_behind_the_bad_ones_is_accepted():
    for change in ({}, {"shared": True}, {"kv_lens": torch.tensor([0, 9])}, {"q_lens": torch.tensor([0, 1])}):
        assert cascade_decode(**{**GOOD, **change}).shape == GOOD["q"].shape
    lens = torch.tensor([9, 0])  # a sequence without keys may have any table
    assert torch.equal(
        cascade_decode(**{**GOOD, "block_table": OTHER, "kv_lens": lens, "shared": True}), torch.zeros(2, 4, 1, 16)
    )


@pytest.mark.gpu
@NO_GPU
def test_checks_read_the_gpu_only_when_asked():
    good = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in GOOD.items()}
    bad = {**good, "kv_lens": torch.tensor([9, 3], device="cuda")}
    assert cascade_decode(**bad, shared=True).isfinite().all()
    with pytest.raises(ValueError, match="kv_lens must be 0 or hold"):
        cascade_decode(**bad, shared=True, check=True)


@pytest.fixture
def served(request):
    """What a server might hold: 64 sequences behind a long system prompt."""
    from conftest import Target

    return Case(
        Target("triton", "cuda"), torch.bfloat16, batch=64, heads_q=32, heads_kv=8, head_dim=128, value_dim=128,
        page_size=16, prefix_pages=128, suffix_pages=8,
    )  # fmt: skip


@pytest.mark.gpu
@NO_GPU
def test_the_rule_shares_what_is_worth_it(served, monkeypatch):
    calls = spy(monkeypatch, "triton")
    assert_matches(*served.decode(shared=None), served.q, served.k, served.v, atol=2e-2, **served.options)
    assert len(calls) == 1


@pytest.mark.gpu
@NO_GPU
def test_four_kernels(served):
    """Lengths less the prefix, two chunk kernels, one reduce kernel."""
    given = {"out": torch.zeros_like(served.q), "lse": torch.zeros(64, 32, 1, device="cuda")}
    served.decode(**given)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        served.decode(**given)
        torch.cuda.synchronize()
    kernels = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len(kernels) == 4, kernels


@pytest.mark.gpu
@NO_GPU
@pytest.mark.parametrize("own_workspace", [False, True])
def test_one_graph_is_right_for_every_later_content(served, own_workspace):
    workspace = Workspace(256 << 20, "cuda") if own_workspace else None
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        served.decode(workspace=workspace)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = served.decode(workspace=workspace)
    other = Case(
        served.target, torch.bfloat16, batch=64, heads_q=32, heads_kv=8, head_dim=128, value_dim=128, page_size=16,
        prefix_pages=128, suffix_pages=8, empty=range(40, 64),
    )  # fmt: skip
    # The pools differ in size, because they hold only pages that are used: the smaller one goes into the larger.
    for mine, its in ((served.q, other.q), (served.k, other.k), (served.v, other.v)):
        mine[: its.shape[0]].copy_(its[: mine.shape[0]])
    for name in ("block_table", "kv_lens"):
        served.options[name].copy_(other.options[name])
    out.fill_(NAN)
    flash_decode(served.q, served.k, served.v, num_splits=8, **served.options)  # eager calls disturb no scratch
    graph.replay()
    assert_matches(out, lse, served.q, served.k, served.v, atol=2e-2, **served.options)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter does not compile")
@pytest.mark.parametrize("arch", [80, 89, 90])
@pytest.mark.parametrize("value_dim", [64, 128, 512])
@pytest.mark.parametrize("ragged", [False, True])
def test_the_reduce_kernel_with_a_prefix_compiles_and_does_not_spill(ragged, value_dim, arch):
    pytest.importorskip("triton")
    from compiling import compile_reduce

    built = compile_reduce(torch.bfloat16, value_dim, 32, 1, arch, ragged=ragged, shared=True)
    assert built.spills == 0
    assert built.stack_bytes == 0
    assert built.shared_bytes <= 48 * 1024
