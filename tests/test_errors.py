"""Each rejection: its type, the argument it names, and that explain() says the same. Nothing is launched."""

import re

import pytest
import torch

from flash_decoding import Workspace, explain, flash_decode

Q, K, V = torch.zeros(2, 4, 1, 64), torch.zeros(2, 2, 10, 64), torch.zeros(2, 2, 10, 64)
LENS = torch.tensor([3, 5], dtype=torch.int32)
INT8 = torch.zeros(2, 2, 10, 64, dtype=torch.int8)
FP8 = INT8.to(torch.float8_e4m3fn)
INT4, GROUPS = torch.zeros(2, 2, 10, 32, dtype=torch.uint8), torch.ones(2, 2, 10, 1, dtype=torch.float16)
CODES, PACKED = (
    dict(k=INT8, v=INT8, k_scale=1.0, v_scale=1.0),
    dict(k=INT4, v=INT4, kv_format="int4", k_scale=GROUPS, v_scale=GROUPS),
)
TOKENS = torch.ones(2, 2, 10)

REFUSED = [
    (dict(q=[1.0]), TypeError, "q must be a torch.Tensor, got list"),
    (dict(kv_lens=[3, 5]), TypeError, r"kv_lens must be a torch.Tensor or None, got list; torch.tensor\(\[...\], dtype=torch.int32"),
    (dict(layout="nhd"), ValueError, r"layout must be one of \['bhnd', 'bnhd'\], got 'nhd'"),
    (dict(q=Q[0]), ValueError, r"q must have shape \[B, H, L, D\] for layout 'bhnd', got \[4, 1, 64\]"),
    (dict(k=K[0]), ValueError, "k must have shape"),
    (dict(q=Q.double(), k=K.double(), v=V.double()), TypeError, "q must be float16, bfloat16 or float32, got torch.float64"),
    (dict(k=K.half()), TypeError, "k must have the dtype of q, torch.float32, got torch.float16"),
    (dict(v=V.bfloat16()), TypeError, "v must have the dtype of q"),
    (dict(k=K[:1]), ValueError, "k must have the batch of q, 2, got 1"),
    (dict(q=torch.zeros(2, 3, 1, 64)), ValueError, "heads_q must be a positive multiple of heads_kv, got 3 and 2$"),
    (dict(q=Q.transpose(1, 2), k=K.transpose(1, 2), v=V.transpose(1, 2)), ValueError, r"heads_kv, got 1 and 10; the shapes \[2, 1, 4, 64\] and \[2, 10, 2, 64\] of q and k fit layout='bnhd'"),
    (dict(k=K[:, :0], v=V[:, :0]), ValueError, "heads_q must be a positive multiple of heads_kv, got 4 and 0"),
    (dict(v=V[:, :1]), ValueError, "v must have the heads of k, 2, got 1"),
    (dict(v=V[:, :, :9]), ValueError, "v must have the length of k, 10, got 9"),
    (dict(q=torch.zeros(2, 4, 65, 64)), ValueError, "q must hold 1 to 64 query tokens per sequence, got 65"),
    (dict(k=K[..., :32]), ValueError, "k must have the head_dim of q, 64, got 32"),
    (dict(v=torch.zeros(2, 2, 10, 20)), ValueError, "value_dim must be a multiple of 8 from 16 to 512, got 20"),
    (dict(q=Q[..., :8], k=K[..., :8]), ValueError, "head_dim must be a multiple of 8 from 16 to 576, got 8"),
    (dict(k=torch.zeros(2, 2, 10, 128)[..., ::2]), ValueError, "k must have a contiguous last axis"),
    (dict(q=torch.zeros(2, 4, 1, 1).expand(2, 4, 1, 64)), ValueError, "q must have a contiguous last axis"),
    (dict(k=K.to("meta")), ValueError, "k must be on the device of q, cpu, got meta"),
    (dict(q=Q.clone().requires_grad_()), ValueError, "q must not require a gradient"),
    (dict(kv_lens=LENS.float()), TypeError, "kv_lens must be int32 or int64, got torch.float32"),
    (dict(kv_lens=torch.zeros(3, dtype=torch.int32)), ValueError, r"kv_lens must have shape \[2\], got \[3\]"),
    (dict(kv_lens=torch.zeros(4, dtype=torch.int32)[::2]), ValueError, "kv_lens must be contiguous, got stride 2"),
    (dict(kv_lens=LENS.to("meta")), ValueError, "kv_lens must be on the device of q, cpu, got meta"),
    (dict(kv_lens=torch.tensor([3, 11])), ValueError, "kv_lens must lie from 0 to 10, the cache's keys, got values from 3 to 11"),
    (dict(kv_start=torch.tensor([-1, 0])), ValueError, "kv_start must lie from 0"),
    (dict(key_mask=torch.ones(2, 10)), TypeError, "key_mask must be bool"),
    (dict(key_mask=torch.ones(2, 9, dtype=torch.bool)), ValueError, r"key_mask must have shape \[2, 10\], got \[2, 9\]"),
    (dict(key_mask=torch.ones(2, 10, dtype=torch.bool, device="meta")), ValueError, "key_mask must be on the device of q"),
    (dict(scale=float("nan")), ValueError, "scale must be finite, got nan"),
    (dict(scale="1"), TypeError, "scale must be a number or None, got str"),
    (dict(num_splits=0), ValueError, "num_splits must be from 1 to 16384, got 0; None means automatic"),
    (dict(num_splits=-1), ValueError, "num_splits must be from 1 to 16384, got -1"),
    (dict(num_splits=10**9), ValueError, "num_splits must be from 1 to 16384, got 1000000000"),
    (dict(num_splits=2.5), TypeError, "num_splits must be an int or None, got float"),
    (dict(num_splits=True), TypeError, "num_splits must be an int or None, got bool"),
    (dict(split_size=0), ValueError, "split_size must be from 1 to"),
    (dict(split_size=2**63), ValueError, "split_size must be from 1 to"),
    (dict(k=K[:, :1].expand(2, 2, 10, 64)[:, :, :1].expand(2, 2, 20000, 64), v=V[:, :, :1].expand(2, 2, 20000, 64), split_size=1), ValueError, "split_size must cut 20000 keys into at most 16384 splits, got 1"),
    (dict(k=K[:, :, :1].expand(2, 2, 2**31, 64), v=V[:, :, :1].expand(2, 2, 2**31, 64)), ValueError, "k must hold at most 2147418112 keys"),
    (dict(scale=1e39), ValueError, "scale must be at most"),
    (dict(softcap=-1), ValueError, "softcap must be at least 0, where 0 means off, got -1"),
    (dict(softcap=float("nan")), ValueError, "softcap must be finite, got nan"),
    (dict(window=-1), ValueError, "window must be at least 0 keys left of the query's own, got -1; None means off"),
    (dict(window=1.0), TypeError, "window must be an int or None, got float"),
    (dict(causal=1), TypeError, "causal must be a bool, got int"),
    (dict(q_lens=torch.tensor([1, 2])), ValueError, "q_lens must lie from 0 to 1, query tokens, got values from 1 to 2"),
    (dict(q_lens=LENS.half()), TypeError, "q_lens must be int32 or int64"),
    (dict(sinks=torch.zeros(3)), ValueError, r"sinks must have shape \[4\], got \[3\]"),
    (dict(sinks=torch.zeros(4).half()), TypeError, "sinks must be float32, got torch.float16"),
    (dict(alibi_slopes=torch.zeros(2, 4)), ValueError, r"alibi_slopes must have shape \[4\], got \[2, 4\]"),
    (dict(tree_mask=torch.ones(2, 2, 2, dtype=torch.bool)), ValueError, r"tree_mask must have shape \[2, 1, 1\]"),
    (dict(tree_mask=torch.ones(2, 1, 1, dtype=torch.bool), causal=False), ValueError, "causal must be True with tree_mask"),
    (dict(block_table=torch.zeros(2, 3, dtype=torch.int64), kv_lens=LENS), TypeError, "block_table must be int32, got torch.int64"),
    (dict(block_table=torch.zeros(3, 3, dtype=torch.int32), kv_lens=LENS), ValueError, r"block_table must have shape \[2, max_pages\], got \[3, 3\]"),
    (dict(block_table=torch.zeros(6, dtype=torch.int32), kv_lens=LENS), ValueError, r"block_table must have shape \[2, max_pages\], got \[6\]"),
    (dict(block_table=torch.zeros(2, 6, dtype=torch.int32)[:, ::2], kv_lens=LENS), ValueError, "block_table must have a contiguous last axis"),
    (dict(block_table=torch.tensor([[0, 2], [1, 0]], dtype=torch.int32), kv_lens=torch.tensor([12, 5])), ValueError, r"block_table must hold pages from 0 to 1 where kv_lens reaches, got 2 at \[0, 1\]"),
    (dict(scale=10**400), ValueError, "scale must be finite, got inf"),
    (dict(sinks=torch.zeros(4, requires_grad=True)), ValueError, "sinks must not require a gradient"),
    (dict(block_table=torch.zeros(2, 3, dtype=torch.int32)), ValueError, "kv_lens must be given with block_table, got None"),
    (dict(block_table=torch.tensor([[0, 9], [1, 9]], dtype=torch.int32), kv_lens=torch.tensor([12, 5]), check=True), ValueError, r"block_table must hold pages from 0 to 1 where kv_lens reaches, got 9 at \[0, 1\]"),
    (dict(check="no"), TypeError, "check must be a bool, got str"),
    (dict(q=torch._neg_view(Q)), ValueError, "q must not be a negated view"),
    (dict(q=Q.to_sparse()), TypeError, "q must be a dense tensor"),
    (dict(out=torch.zeros(1, 1, 1, 64).expand(2, 4, 1, 64)), ValueError, "out must not overlap itself"),
    (dict(num_splits=2, split_size=5), ValueError, "split_size must be None when num_splits is given"),
    (dict(out=Q.half()), TypeError, "out must have the dtype of q"),
    (dict(out=Q[:1]), ValueError, r"out must have shape \[2, 4, 1, 64\], got \[1, 4, 1, 64\]"),
    (dict(out=Q.to("meta")), ValueError, "out must be on the device of q"),
    (dict(out=torch.zeros(2, 4, 1, 128)[..., ::2]), ValueError, "out must have a contiguous last axis"),
    (dict(lse=torch.zeros(2, 4, 1).half()), TypeError, "lse must be float32"),
    (dict(lse=torch.zeros(2, 4)), ValueError, r"lse must be contiguous with shape \[2, 4, 1\], got \[2, 4\]"),
    (dict(lse=torch.zeros(2, 4, 1, device="meta")), ValueError, "lse must be on the device of q"),
    (dict(workspace=torch.zeros(9)), TypeError, "workspace must be a Workspace or None, got Tensor"),
    (dict(backend="cuda"), ValueError, r"backend must be one of \['auto', 'triton', 'cpu'\], got 'cuda'"),
    (dict(kv_format="int5"), ValueError, "kv_format must name a format such as 'fp8' or 'int4:group32', got 'int5'"),
    (dict(kv_format=8), TypeError, "kv_format must be a KVFormat, a str or None, got int"),
    (dict(k=FP8), TypeError, "v must have the dtype of k, torch.float8_e4m3fn, got torch.float32; a kv_format can name a format for each"),
    (dict(v=FP8), TypeError, "v must have the dtype of k, torch.float32, got torch.float8_e4m3fn"),
    (dict(k=INT4, v=INT4), TypeError, "kv_format must name the codes that k holds as uint8, such as 'int4', got None"),
    (dict(kv_format="fp8"), TypeError, "k must be float8_e4m3fn or uint8 for fp8_e4m3 codes, got torch.float32"),
    (CODES | dict(kv_format="fp8"), TypeError, "k must be float8_e4m3fn or uint8 for fp8_e4m3 codes, got torch.int8"),
    (CODES | dict(kv_format="none/int8"), TypeError, "k must have the dtype of q, torch.float32, got torch.int8"),
    (dict(k_scale=1.0), ValueError, "k_scale must be None where k has the dtype of q, got one"),
    (dict(v_scale=torch.ones(2)), ValueError, "v_scale must be None where v has the dtype of q, got one"),
    (dict(v=INT8, kv_format="none/int8", k_scale=1.0, v_scale=1.0), ValueError, "k_scale must be None where k has the dtype of q"),
    (dict(k=INT8, v=INT8, v_scale=1.0), ValueError, "k_scale must be given with int8 codes, got None"),
    (PACKED | dict(v_scale=None), ValueError, "v_scale must be given with int4 codes, got None"),
    (CODES | dict(k_scale="1"), TypeError, "k_scale must be a torch.Tensor, a number or None, got str"),
    (CODES | dict(v_scale=True), TypeError, "v_scale must be a torch.Tensor, a number or None, got bool"),
    (CODES | dict(k_scale=0), ValueError, "k_scale must be finite and not 0, got 0"),
    (CODES | dict(v_scale=float("inf")), ValueError, "v_scale must be finite and not 0, got inf"),
    (CODES | dict(v_scale=torch.tensor([1.0, float("nan")])), ValueError, "v_scale must be finite and not 0"),
    (CODES | dict(k_scale=torch.zeros(2, 64)), ValueError, "k_scale must be finite and not 0"),
    (CODES | dict(k_scale=torch.ones(3)), ValueError, r"k_scale must have shape \[2\] for scales per head, got \[3\]"),
    (CODES | dict(k_scale=torch.ones(2, 2)), ValueError, r"k_scale must have shape \[2, 64\] for scales per channel, got \[2, 2\]"),
    (CODES | dict(v_scale=torch.ones(2, 64)), ValueError, r"v_scale must not be per channel, which is for keys, got shape \[2, 64\]"),
    (CODES | dict(v_scale=TOKENS[..., None]), ValueError, "v_scale must have at most 3 axes for int8 codes"),
    (CODES | dict(k_scale=TOKENS[..., :9]), ValueError, r"k_scale must have shape \[2, 2, 10\] for scales per token, got \[2, 2, 9\]"),
    (CODES | dict(k_scale=TOKENS, kv_format="int8:head"), ValueError, r"k_scale must have shape \[2\] for scales per head"),
    (CODES | dict(kv_format="int8:token"), TypeError, "k_scale must be a torch.Tensor for scales per token, got float"),
    (CODES | dict(k_scale=torch.ones(2).double()), TypeError, "k_scale must be float32 for scales per head, got torch.float64"),
    (CODES | dict(k_scale=torch.ones(4)[::2]), ValueError, "k_scale must have contiguous rows of scales"),
    (CODES | dict(v_scale=torch.ones(2, device="meta")), ValueError, "v_scale must be on the device of the codes, cpu, got meta"),
    (CODES | dict(k_scale=torch.ones(2).to_sparse()), TypeError, "k_scale must be a dense tensor, got layout torch.sparse_coo"),
    (CODES | dict(v_scale=torch.ones(2, requires_grad=True)), ValueError, "v_scale must not require a gradient"),
    (PACKED | dict(k=INT8.view(torch.uint8)), ValueError, "k must have the head_dim of q, 64, two in a byte, 32, got 64"),
    (PACKED | dict(k_scale=GROUPS.float()), TypeError, "k_scale must be float16 for scales per group, got torch.float32"),
    (PACKED | dict(k_scale=TOKENS.half()), ValueError, r"k_scale must have shape \[B, Hkv, N, 64 / group\] or .* for int4 codes, with a group of 32, 64, 128, got \[2, 2, 10\]"),
    (PACKED | dict(k_scale=GROUPS.expand(2, 2, 10, 4)), ValueError, "for int4 codes, with a group of 32, 64, 128"),
    (PACKED | dict(kv_format="int4:group32"), ValueError, r"k_scale must have shape \[2, 2, 10, 2\] for scales per group, got \[2, 2, 10, 1\]"),
    (PACKED | dict(kv_format="int4:group128"), ValueError, "group must divide the width of k, 64, got 128"),
    (PACKED | dict(v=INT4[..., :20]), ValueError, r"v_scale must have shape \[B, Hkv, N, 40 / group\]"),
    (PACKED | dict(v=INT4[..., :18]), ValueError, "value_dim must be a multiple of 8 from 16 to 512, got 36"),
    (dict(q=Q.to("meta"), k=K.to("meta"), v=V.to("meta")), ValueError, "q must be on a CPU or a CUDA device, got meta"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "kind", "message"), REFUSED, ids=[message[:40] for _, _, message in REFUSED])
def test_bad_input_is_refused_by_name(change, kind, message, monkeypatch):
    monkeypatch.setattr("flash_decoding.api.run", lambda *args: pytest.fail("something was launched"))
    arguments = dict(q=Q, k=K, v=V) | change
    with pytest.raises(kind, match=message):
        flash_decode(**arguments)
    assert any(reason == str(_error(arguments)) for reason in explain(**arguments))


def _error(arguments):
    try:
        flash_decode(**arguments)
    except (TypeError, ValueError) as error:
        return error
    raise AssertionError("accepted")


def test_explain_lists_every_reason_and_nothing_else():
    assert explain(Q, K, V, kv_lens=LENS, num_splits=3, workspace=Workspace()) == []
    reasons = explain(torch.zeros(2, 3, 1, 60), K, V[:, :, :9], num_splits=-1, backend="cpu")
    assert len(reasons) == 5, reasons
    assert len(explain(Q, K.half(), V[..., :60], num_splits=2.5, split_size="a", scale="1")) == 6
    for name in ("heads_q", "head_dim", "k must", "v must", "num_splits"):
        assert sum(reason.startswith(name) for reason in reasons) == 1


def test_gradients_are_no_obstacle_where_they_are_off():
    q = Q.clone().requires_grad_()
    with torch.no_grad():
        assert flash_decode(q, K, V).shape == Q.shape


def test_every_reason_against_codes_is_listed():
    reasons = explain(Q, INT8, INT4, kv_format="fp8/int4", k_scale="1", v_scale=0.0, num_splits=-1)
    assert len(reasons) == 5, reasons
    reasons = explain(Q, INT8, INT8, k_scale=torch.ones(3), v_scale=torch.ones(2).half())
    assert len(reasons) == 2, reasons


def test_reasons_against_scales_are_listed_beside_every_other():
    codes = {"k", "v", "kv_format", "k_scale", "v_scale"}
    scales = [
        x for x, _, text in REFUSED
        if x.get("k") is INT8 is x.get("v") and "kv_format" not in x and "dense" not in text
    ]  # fmt: skip
    # Without dense arrays and a layout there is nothing that scales could be held against.
    others = [
        (x, text) for x, _, text in REFUSED
        if not codes & set(x) and isinstance(x.get("q", Q), torch.Tensor) and not x.get("q", Q).is_sparse
        and x.get("layout") != "nhd"
    ]  # fmt: skip
    assert len(scales) > 10
    assert len(others) > 40
    for wrong in scales:
        alone = explain(**dict(q=Q) | wrong)
        assert len(alone) == 1, alone
        for other, text in others:
            reasons = explain(**dict(q=Q) | wrong | other)
            assert alone[0] in reasons, f"{alone[0]} is missing beside {reasons}"
            assert any(re.search(text, reason) for reason in reasons), f"{text} is missing beside {reasons}"


def test_lengths_of_another_kind_beside_pages_are_a_reason_too():
    table, lens = torch.zeros(2, 2, dtype=torch.int32), torch.ones(2, dtype=torch.bool)
    pool = torch.randn(4, 2, 16, 64)
    assert explain(Q, pool, pool, block_table=table.to(torch.complex64), kv_lens=table[:, 0])
    reasons = explain(Q, pool, pool, block_table=table, kv_lens=lens, q_lens=lens, window=3)
    assert sum("must be int32 or int64, got torch.bool" in reason for reason in reasons) == 2, reasons


@pytest.mark.parametrize("sparse", [torch.Tensor.to_sparse, lambda x: x[None].to_sparse_csr()], ids=["coo", "csr"])
def test_sparse_arrays_are_refused_by_name_after_dense_ones_too(sparse):
    call = dict(k=INT8, v=INT8, k_scale=torch.ones(2), v_scale=1.0)
    flash_decode(Q, **call)
    with pytest.raises(TypeError, match="k_scale must be a dense tensor, got layout"):
        flash_decode(Q, **call | {"k_scale": sparse(torch.ones(2))})


def test_a_named_backend_never_falls_back(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    from flash_decoding import backends

    backends._refusals.cache_clear()
    with pytest.raises(ValueError, match="backend 'triton' cannot run this call: q is on the CPU; backend='cpu' can"):
        flash_decode(Q, K, V, backend="triton")
    backends._refusals.cache_clear()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_mixed_devices_and_checked_lengths_on_a_gpu():
    q, k, v = (x.cuda() for x in (Q, K, V))
    with pytest.raises(ValueError, match="kv_lens must be on the device of q, cuda:0, got cpu"):
        flash_decode(q, k, v, kv_lens=LENS)
    with pytest.raises(ValueError, match="v must be on the device of q, cuda:0, got cpu"):
        flash_decode(q, k, V)
    with pytest.raises(ValueError, match="backend 'cpu' cannot run this call: q is on a CUDA device"):
        flash_decode(q, k, v, backend="cpu")
    with pytest.raises(ValueError, match="kv_lens must lie from 0"):
        flash_decode(q, k, v, kv_lens=torch.tensor([3, 11], device="cuda"), check=True)
