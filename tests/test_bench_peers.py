"""The adapters, against stand-ins that do what each library documents: layouts, pages, plans and splits must fit."""

from __future__ import annotations

import sys
import types
from dataclasses import replace
from typing import ClassVar

import pytest
import torch

from flash_decoding import reference
from flash_decoding.bench.peers import OURS, label_of, peers_for, peers_on
from flash_decoding.bench.peers.base import Peer, one_line
from flash_decoding.bench.timing import check_output, make_inputs, reference_by_head
from flash_decoding.bench.workloads import Case, Options, Shape

# 133 keys: no multiple of a page; three query heads share a KV head.
CASES = [
    Case("x", "gqa", Shape(2, 6, 2, 133, 64), "bfloat16", "cpu"),
    Case("x", "mha", Shape(1, 4, 4, 128, 64), "bfloat16", "cpu"),
]
SHAPE = Shape(3, 6, 2, 133, 64)
OPTION_CASES = [
    # A sequence below a page, one that fills its pages, one at the bound.
    Case("x", "ragged", SHAPE, "bfloat16", "cpu", Options(page_size=16, kv_lens=(5, 64, 133))),
    Case("x", "paged window", SHAPE, "bfloat16", "cpu", Options(page_size=64, window=20)),
    Case("x", "window", Shape(1, 6, 2, 133, 64), "bfloat16", "cpu", Options(window=20)),
    Case("x", "tokens", SHAPE, "bfloat16", "cpu", Options(q_len=4)),
]
# Which of them a peer refuses, and the start of its reason.
DENSE_ONLY = dict.fromkeys(("paged window", "ragged"), "takes no block table")
PLAIN_ONLY = dict.fromkeys(("window", "tokens"), "called here with a dense cache, one query token and no window only")
REFUSED = {
    "sdpa": DENSE_ONLY,
    "sdpa_packed": DENSE_ONLY | PLAIN_ONLY,
    "sdpa_math": DENSE_ONLY | PLAIN_ONLY,
    "xformers": dict.fromkeys([case.name for case in OPTION_CASES], PLAIN_ONLY["window"]),
    "flex_attention": dict.fromkeys([case.name for case in OPTION_CASES], PLAIN_ONLY["window"]),
    "flash_attn2": dict.fromkeys(DENSE_ONLY, "its pages hold a multiple of 256 keys"),
    "flashinfer": {"tokens": "its CUDA-core kernel takes one query token per sequence"},
    "xqa": {"tokens": "called here with one query token per sequence only; more need a packed mask"},
}
# Caches in fp8, and one that no other library reads.
CODES = [
    Case("x", "gqa", Shape(2, 6, 2, 133, 64), "bfloat16", "cpu", kv_format="fp8"),
    Case("x", "single", Shape(1, 4, 4, 128, 64), "bfloat16", "cpu", kv_format="fp8"),
    Case("x", "ragged", SHAPE, "bfloat16", "cpu", Options(page_size=16, kv_lens=(5, 64, 133)), kv_format="fp8"),
]
INT8 = Case("x", "int8", SHAPE, "bfloat16", "cpu", kv_format="int8")
READ_FP8 = ("fa3", "fa3_tuned", "flashinfer", "flashinfer_tc", "xqa")
NAMES = ["flash_decoding", "flash_decoding_unsplit", "sdpa", "sdpa_packed", "sdpa_math", "flash_attn2", "fa3",
         "fa3_tuned", "xformers", "flashinfer", "flashinfer_tc", "xqa"]  # fmt: skip


def attend(q, k, v, scale=None, causal=False, window=-1):
    """[L, H, D] against [N, Hkv, D]."""
    out = reference(
        q[None].float(), k[None].float(), v[None].float(), layout="bnhd", scale=scale, causal=causal,
        window=None if window == -1 else window,
    )  # fmt: skip
    return out[0].to(q.dtype)


class Wrapper:
    """The documented behaviour of FlashInfer's BatchDecodeWithPagedKVCacheWrapper."""

    made: ClassVar[list[dict]] = []

    def __init__(self, workspace, kv_layout="NHD", use_tensor_cores=False, backend="auto"):
        assert workspace.dtype == torch.uint8
        self.layout = kv_layout
        Wrapper.made.append({"tensor_cores": use_tensor_cores, "backend": backend})

    def plan(
        self, indptr, indices, last_page_len, heads_q, heads_kv, head_dim, page_size, *, window_left, q_data_type,
        kv_data_type,
    ):  # fmt: skip
        assert indptr.dtype == indices.dtype == last_page_len.dtype == torch.int32
        assert q_data_type == torch.bfloat16
        self.kv_data_type = kv_data_type
        self.indptr, self.indices, self.last, self.page_size = indptr, indices, last_page_len, page_size
        self.heads = heads_q, heads_kv, head_dim
        self.starts, self.masks = range(len(last_page_len) + 1), {"window": window_left}

    def run(self, q, cache, k_scale=None, v_scale=None):
        assert all(x.dtype == self.kv_data_type for x in cache)
        assert q.shape[1:] == (self.heads[0], self.heads[2])
        outs = []
        for b in range(len(self.last)):
            pages = self.indices[self.indptr[b] : self.indptr[b + 1]].long()
            keys = (len(pages) - 1) * self.page_size + int(self.last[b])
            k, v = (gather(x, pages, keys, self.layout) for x in cache)
            outs.append(attend(q[self.starts[b] : self.starts[b + 1]], *scaled(k, v, k_scale, v_scale), **self.masks))
        return torch.cat(outs)


class PrefillWrapper(Wrapper):
    """Likewise BatchPrefillWithPagedKVCacheWrapper: queries of each sequence one after the other."""

    def __init__(self, workspace, kv_layout="NHD", backend="auto"):
        super().__init__(workspace, kv_layout, True, backend)

    def plan(self, qo_indptr, *cache, causal, **options):
        assert qo_indptr.dtype == torch.int32
        super().plan(*cache, **options)
        self.starts, self.masks = qo_indptr.tolist(), self.masks | {"causal": causal}


def gather(pool, pages, keys, layout):
    """The first keys of these pages as [N, Hkv, D]."""
    x = pool[pages]
    x = x if layout == "NHD" else x.transpose(1, 2)
    return x.reshape(-1, *x.shape[2:])[:keys]


def scaled(k, v, k_scale, v_scale):
    """Codes times a number, which a library wants as a float on the host."""
    assert (k_scale is None) == (k.dtype == torch.bfloat16)
    assert all(x is None or type(x) is float for x in (k_scale, v_scale))
    return (k, v) if k_scale is None else (k.float() * k_scale, v.float() * v_scale)


def single_decode(q, k, v, kv_layout="NHD", window_left=-1, k_scale=None, v_scale=None):
    k, v = scaled(k, v, k_scale, v_scale)
    if kv_layout == "HND":
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    return attend(q[None], k, v, window=window_left)[0]


def xqa(query, cache, workspace, block_tables, seq_lens, max_seq_len, bmm1_scale, bmm2_scale, window_left, kv_layout):
    assert seq_lens.dtype == torch.uint32
    page_size = cache[0].shape[1 if kv_layout == "NHD" else 2]
    assert max_seq_len <= block_tables.shape[1] * page_size
    assert type(bmm1_scale) is type(bmm2_scale) is float
    assert bmm2_scale == 1.0 or cache[0].dtype == cache[1].dtype == torch.float8_e4m3fn
    outs = []
    for b in range(query.shape[0]):
        k, v = (gather(x, block_tables[b].long(), int(seq_lens[b].to(torch.int64)), kv_layout) for x in cache)
        out = attend(query[b : b + 1].float(), k, v, scale=bmm1_scale, window=window_left)
        outs.append((out * bmm2_scale).to(query.dtype))
    return torch.cat(outs)


def with_kvcache(
    q, k, v, cache_seqlens=None, page_table=None, scheduler_metadata=None, num_splits=0, causal=False,
    window_size=(-1, -1), k_descale=None, v_descale=None,
):  # fmt: skip
    """flash_attn_with_kvcache of both generations: [B, L, H, D], masks aligned bottom right; fp8 all or nothing."""
    assert q.dtype == k.dtype == v.dtype
    if k_descale is not None:
        assert q.dtype == torch.float8_e4m3fn
        assert k_descale.shape == v_descale.shape == (q.shape[0], k.shape[2])
        # All the same, so that pages need not be told apart.
        k, v = (x.float() * scale[0, 0] for x, scale in ((k, k_descale), (v, v_descale)))
    left, right = window_size
    assert causal or right == 0 or q.shape[1] == 1
    masks = {"causal": causal or right == 0, "window": None if left == -1 else left}
    if scheduler_metadata is not None:
        (batch, q_len, *_, lens), options = scheduler_metadata
        assert (batch, q_len) == q.shape[:2]
        assert lens is cache_seqlens
        assert options["qkv_dtype"] == q.dtype
        assert options["page_size"] == (None if page_table is None else k.shape[1])
        assert options.get("causal", False) == causal
        assert options.get("window_size", (-1, -1)) == window_size
    if page_table is not None:
        masks |= {"block_table": page_table, "kv_lens": cache_seqlens}
    elif cache_seqlens is not None:
        assert torch.equal(cache_seqlens, torch.full((q.shape[0],), k.shape[1], dtype=torch.int32))
    return reference(q.float(), k.float(), v.float(), layout="bnhd", **masks).to(torch.bfloat16)


def split_k(q, k, v, op):
    """xFormers' [B, M, groups, heads, D], K and V expanded over the heads without a copy."""
    assert k.stride(3) == v.stride(3) == 0 or k.shape[3] == 1
    b, m, groups, heads, d = q.shape
    flat = [x.reshape(b, -1, groups * heads, d).float() for x in (q, k, v)]
    return reference(*flat, layout="bnhd").to(q.dtype).view(b, m, groups, heads, d)


@pytest.fixture
def stand_ins(monkeypatch):
    """Modules of the documented shape in place of libraries that need a GPU."""

    def module(name, **contents):
        made = types.ModuleType(name)
        made.__dict__.update(contents)
        monkeypatch.setitem(sys.modules, name, made)
        return made

    decode = module("flashinfer.decode", xqa_batch_decode_with_kv_cache=xqa)
    module(
        "flashinfer", decode=decode, BatchDecodeWithPagedKVCacheWrapper=Wrapper,
        BatchPrefillWithPagedKVCacheWrapper=PrefillWrapper, single_decode_with_kv_cache=single_decode, __path__=[],
    )  # fmt: skip
    module("flash_attn", flash_attn_with_kvcache=with_kvcache)
    module(
        "flash_attn_interface", flash_attn_with_kvcache=with_kvcache,
        get_scheduler_metadata=lambda *args, **options: (args, options),
    )  # fmt: skip
    fmha = types.SimpleNamespace(
        memory_efficient_attention_forward=split_k, triton_splitk=types.SimpleNamespace(FwOp=object)
    )
    module("xformers", __path__=[])
    module("xformers.ops", fmha=fmha)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    Wrapper.made.clear()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("name", NAMES)
def test_every_variant_computes_the_case(name: str, case: Case, stand_ins):
    run_every_variant(find_peer(name), case)


@pytest.mark.parametrize("case", OPTION_CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("name", [*NAMES, "flex_attention"])
def test_every_variant_computes_the_options_or_the_peer_refuses_them(name: str, case: Case, stand_ins, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    peer = find_peer(name)
    assert peer.refuses(case) == REFUSED.get(name, {}).get(case.name)
    if peer.refuses(case) is None:
        run_every_variant(peer, case)


@pytest.mark.parametrize("case", CODES, ids=lambda case: case.name)
@pytest.mark.parametrize("name", ["flash_decoding", *READ_FP8])
def test_every_variant_computes_fp8(name: str, case: Case, stand_ins, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    peer = find_peer(name)
    assert peer.refuses(case) is None
    run_every_variant(peer, case)
    exact = name not in ("fa3", "fa3_tuned", "xqa")
    prepared = next(iter(peer.variants(case, make_inputs(case, 1, seed=0))))()
    assert prepared.tolerance == (None if exact else 0.125)


@pytest.mark.parametrize("name", NAMES[1:])
def test_peers_say_which_codes_they_lack(name: str, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    reason = {
        "flash_decoding_unsplit": "measured on 16-bit caches only",
        **dict.fromkeys(READ_FP8, "of these formats it takes fp8_e4m3:tensor only"),
    }.get(name, "takes no quantised cache of these formats")
    assert find_peer(name).refuses(INT8) == reason
    paged = replace(INT8, options=Options(page_size=16))
    assert find_peer(name).refuses(paged) == reason


def test_a_case_of_ours_alone_has_no_other_peers():
    alone = replace(CASES[0], ours_only=True)
    assert [peer.name for peer in peers_on(alone)] == [peer.name for peer in peers_on(alone, ["sdpa"])] == [OURS]
    assert len(peers_on(CASES[0])) > 1


def find_peer(name: str) -> Peer:
    (peer,) = [peer for peer in peers_for("cuda") if peer.name == name]
    return peer


def run_every_variant(peer: Peer, case: Case) -> None:
    copies = make_inputs(case, 2, seed=0)
    ran = set()
    for make in peer.variants(case, copies):
        prepared = make()
        assert len(prepared.calls) == len(copies)
        for call, inputs in zip(prepared.calls, copies, strict=True):
            with prepared.context():
                out = prepared.to_bhnd(call())
            want = reference_by_head(case, inputs)
            assert out.shape == want.shape
            if case.form is None:
                torch.testing.assert_close(out.double(), want, rtol=0.02, atol=2e-3)
            assert check_output(out, want, "bfloat16", prepared.tolerance)[1] is None
        ran.add(prepared.variant)
    assert ran


def test_tensor_cores_take_the_kernel_that_splits(stand_ins):
    for case in (CASES[0], OPTION_CASES[-1]):
        for make in find_peer("flashinfer_tc").variants(case, make_inputs(case, 1, seed=0)):
            make()
    assert {(made["tensor_cores"], made["backend"]) for made in Wrapper.made} == {(True, "fa2")}


def test_flashinfer_reports_its_plan_time(stand_ins):
    prepared = next(iter(find_peer("flashinfer").variants(CASES[0], make_inputs(CASES[0], 1, seed=0))))()
    assert prepared.plan_us is not None
    assert prepared.plan_us > 0


def test_flashinfer_says_which_groups_it_lacks():
    peer = find_peer("flashinfer")
    seven = Case("x", "x", Shape(8, 28, 4, 128, 128), "bfloat16")
    assert peer.refuses(seven) == "its CUDA-core kernel has no 7 query heads per KV head"
    assert peer.refuses(CASES[0]) is None


def test_xqa_says_which_pages_it_lacks():
    case = Case("x", "x", SHAPE, "bfloat16", options=Options(page_size=8))
    assert find_peer("xqa").refuses(case) == "its pages hold 16, 32, 64, 128 keys, not 8"


def test_paged_cases_are_called_with_their_own_page_size(stand_ins):
    for name in ("flashinfer", "flashinfer_tc", "xqa"):
        for case, size in zip(OPTION_CASES, (16, 64), strict=False):
            copies = make_inputs(case, 1, seed=0)
            found = {make().variant for make in find_peer(name).variants(case, copies)}
            assert found == {f"page {size}, NHD", f"page {size}, HND"}


def test_an_absent_library_is_a_reason():
    peer = Peer("x", "X", "cpu", lambda case, copies: iter(()), module="no_such_library.part")
    assert not peer.installed()
    assert peer.available() == "no_such_library.part is not installed"


def test_a_crash_at_import_is_a_reason(tmp_path, monkeypatch):
    (tmp_path / "broken_library.py").write_text("raise OSError('libsomething.so.7: cannot open\\nmore lines')")
    monkeypatch.syspath_prepend(tmp_path)
    peer = Peer("x", "X", "cpu", lambda case, copies: iter(()), module="broken_library")
    assert peer.available() == "importing broken_library failed: libsomething.so.7: cannot open"


def test_a_missing_dependency_is_named(tmp_path, monkeypatch):
    (tmp_path / "needy_library.py").write_text("import no_such_dependency")
    monkeypatch.syspath_prepend(tmp_path)
    peer = Peer("x", "X", "cpu", lambda case, copies: iter(()), module="needy_library")
    assert peer.available() == "importing needy_library needs no_such_dependency"


def test_peers_by_name():
    assert [peer.name for peer in peers_for("cpu", [])] == [OURS]
    assert [peer.name for peer in peers_for("cpu", ["sdpa"])] == [OURS, "sdpa"]
    with pytest.raises(ValueError, match="peer must be one of flash_decoding"):
        peers_for("cpu", ["nope"])
    assert label_of("fa3") == "FlashAttention-3"


def test_one_line():
    assert one_line(RuntimeError("\n  first\nsecond")) == "first"
    assert one_line(ValueError()) == "ValueError"
    assert len(one_line("x" * 500)) == 200
