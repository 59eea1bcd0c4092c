"""The op that tracers see: torch.compile, fake tensors, make_fx, jit.trace, and what they must refuse."""

import pytest
import torch
from helpers import assert_matches, make_inputs, max_error
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from flash_decoding import Workspace, flash_attn_with_kvcache, flash_decode
from flash_decoding.problem import Call

pytestmark = pytest.mark.compiles


@pytest.mark.parametrize("return_lse", [False, True])
def test_fake_tensors_give_the_shapes_of_the_result(target, return_lse):
    with FakeTensorMode():
        q, k, v = make_inputs(2, 4, 2, 30, 64, torch.float16, target.device, value_dim=32)
        got = flash_decode(q, k, v, return_lse=return_lse)
        out = got[0] if return_lse else got
        assert (out.shape, out.dtype, out.device.type) == ((2, 4, 1, 32), torch.float16, target.device)
        if return_lse:
            assert (got[1].shape, got[1].dtype) == ((2, 4, 1), torch.float32)


def test_make_fx_looks_into_no_scales(target):
    q, k, _ = make_inputs(2, 4, 2, 16, 64, torch.float16, target.device)
    codes, descale = k.transpose(1, 2).to(torch.int8), torch.full((2, 2), 0.5, device=target.device)

    def decode(q, codes, descale):
        return flash_attn_with_kvcache(q.transpose(1, 2), codes, codes, k_descale=descale, v_descale=descale)

    graph = make_fx(decode, tracing_mode="fake")(q, codes, descale)
    assert max_error(graph(q, codes, descale), decode(q, codes, descale)) == 0.0


def test_make_fx_records_the_op(target):
    inputs = make_inputs(2, 4, 2, 30, 64, torch.float32, target.device)
    graph = make_fx(lambda q, k, v: flash_decode(q, k, v) + 1.0)(*inputs)
    assert "flash_decoding.decode" in graph.code
    assert max_error(graph(*inputs), flash_decode(*inputs) + 1.0) == 0.0


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_jit_trace_records_the_op(target):
    inputs = make_inputs(2, 4, 2, 30, 64, torch.float32, target.device)
    traced = torch.jit.trace(lambda q, k, v: flash_decode(q, k, v), inputs)
    others = make_inputs(2, 4, 2, 30, 64, torch.float32, target.device)
    assert_matches(traced(*others), None, *others)


def test_the_schema_holds(target):
    q, k, v = make_inputs(2, 4, 2, 30, 64, torch.float32, target.device)
    out, lse = torch.zeros_like(q), torch.zeros(2, 4, 1, device=target.device)
    arguments = (*Call(q, k, v, num_splits=3)[: Call._fields.index("out")], "auto", out, lse)
    torch.ops.flash_decoding.decode(*arguments)
    assert_matches(out, lse, q, k, v)
    torch.library.opcheck(torch.ops.flash_decoding.decode.default, arguments)


def test_gradients_are_refused_when_compiled_too(target):
    q, k, v = make_inputs(2, 4, 2, 30, 64, torch.float32, target.device)
    linear = torch.nn.Linear(64, 64, device=target.device)
    compiled = torch.compile(lambda x: flash_decode(linear(x), k, v), fullgraph=True)
    with pytest.raises(Exception, match="must not require a gradient"):
        compiled(q)
    with torch.no_grad():
        assert compiled(q).shape == q.shape


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workspace": Workspace()}, "workspace must be None"),
        ({"check": True}, "check must be False"),
        ({"window": True}, "window must be an int or None, got bool"),
    ],
    ids=["workspace", "check", "window"],
)
def test_what_a_graph_cannot_do_is_refused(target, options, message):
    q, k, v = make_inputs(2, 4, 2, 30, 64, torch.float32, target.device)
    with pytest.raises(Exception, match=message):
        torch.compile(lambda x: flash_decode(x, k, v, **options), fullgraph=True)(q)


def test_vmap_is_refused_and_not_wrong(target):
    q, k, v = make_inputs(2, 4, 2, 30, 64, torch.float32, target.device)
    with pytest.raises(RuntimeError, match="flash_decoding::decode"):
        torch.vmap(lambda x: flash_decode(x[None], k[:1], v[:1]))(q)


def test_bad_input_is_refused_by_the_op(target):
    q, k, v = make_inputs(2, 4, 2, 30, 64, torch.float32, target.device)
    arguments = Call(q, k.half(), v)[: Call._fields.index("out")]
    with pytest.raises(TypeError, match="k must have the dtype of q"):
        torch.ops.flash_decoding.decode(*arguments, "auto", torch.zeros_like(q), None)
