"""generate_batch() of Transformers writes what generate() writes with the eager implementation, every step by us."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import pytest
import torch
from helpers import max_error
from packaging.version import parse as parse_version
from test_transformers import ALONE, CONFIGS, OWN_ATTENTION, PADDED, WINDOWED, generate, make_model, make_windowed_model
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    modeling_flash_attention_utils,
    modeling_utils,
)
from transformers import __version__ as transformers_version
from transformers.cli.serving.model_manager import ModelManager
from transformers.integrations import hub_kernels
from transformers.utils import is_kernels_available

from flash_decoding import flash_attn_with_kvcache, flash_decode, reference
from flash_decoding.integrations import flash_attn, query_blocks
from flash_decoding.integrations import transformers as integration
from flash_decoding.integrations.transformers import (
    BATCHING_NAME,
    KERNEL_NAME,
    batched_attention,
    decode_calls,
    enable_continuous_batching,
    register_kernel,
    reset_decode_calls,
)

if parse_version(transformers_version) < parse_version("5.21"):
    pytest.skip(f"needs Transformers 5.21 or newer, here is {transformers_version}", allow_module_level=True)

# The longest one is cut: a step takes at most 64 tokens, so that some steps hold a piece of it and decoding sequences.
PROMPTS = [list(range(10, 23)), [7], list(range(5, 95)), list(range(40, 48))]
NEW_TOKENS = 10
CONFIG = {
    "generation_config": GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0),
    "progress_bar": False,
}


def make(family: str, device: str = "cpu") -> torch.nn.Module:
    return (
        make_model(CONFIGS[family], "eager", device)
        if family == "llama"
        else make_windowed_model(family, "eager", device)
    )


def write_one_by_one(model: torch.nn.Module) -> list[list[int]]:
    prompts = [torch.tensor([prompt], device=model.device) for prompt in PROMPTS]
    return [
        model.generate(x, max_new_tokens=NEW_TOKENS, do_sample=False, attention_mask=torch.ones_like(x))[
            0, x.shape[1] :
        ].tolist()
        for x in prompts
    ]


def write_together(model: torch.nn.Module, **options: object) -> list[list[int]]:
    batching = ContinuousBatchingConfig(**{"page_size": 16, "num_blocks": 32, "max_batch_tokens": 64} | options)
    outputs = model.generate_batch(PROMPTS, continuous_batching_config=batching, **CONFIG)
    return [output.generated_tokens for output in outputs.values()]


@pytest.mark.parametrize("family", ["llama", *WINDOWED])
def test_batches_equal_sequences_alone(family):
    model = make(family)
    want = write_one_by_one(model)
    enable_continuous_batching(model)
    reset_decode_calls()
    assert write_together(model) == want
    assert model.config._attn_implementation == BATCHING_NAME
    # The prompts take two steps, and every step calls each of the two layers once.
    assert decode_calls() >= 2 * (NEW_TOKENS + 1)
    model.set_attn_implementation("split_kv")
    assert write_one_by_one(model) == want


def test_a_shared_prefix_is_shared():
    """Transformers finds pages that another prompt filled; they reach us as keys like any others."""
    model = make("llama")
    prompts = [[*range(5, 55), last] for last in (60, 61, 62)]
    want = [
        generate(model, {"input_ids": torch.tensor([p])})[0, len(p) : len(p) + NEW_TOKENS].tolist() for p in prompts
    ]
    enable_continuous_batching(model)
    batching = ContinuousBatchingConfig(page_size=16, num_blocks=32, max_batch_tokens=64)
    outputs = model.generate_batch(prompts, continuous_batching_config=batching, **CONFIG)
    assert [output.generated_tokens for output in outputs.values()] == want


@pytest.fixture
def kernel(monkeypatch) -> str:
    """The name of our hub kernel, loaded by the kernels package or, where Transformers finds none, by a stand-in.

    The stand-in looks the name up in LOCAL_KERNELS and runs the file it finds, as the package does; all around it is
    Transformers' own.
    """
    monkeypatch.setenv("LOCAL_KERNELS", "")
    monkeypatch.setattr(modeling_flash_attention_utils, "_loaded_implementation", None)
    name = register_kernel()
    if not is_kernels_available():

        def get_kernel(repo_id: str, **_options: object) -> object:
            found = dict(entry.split("=", 1) for entry in os.environ["LOCAL_KERNELS"].split(":"))
            spec = importlib.util.spec_from_file_location("_hub_kernel", Path(found[repo_id]) / "__init__.py")
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module

        for module in (hub_kernels, modeling_utils):
            monkeypatch.setattr(module, "is_kernels_available", lambda: True)
        monkeypatch.setattr(hub_kernels, "get_kernel", get_kernel)
    return name


@pytest.fixture
def calls(monkeypatch) -> list[dict[str, object]]:
    """What flash_decode() is given by flash-attn's functions."""
    calls = []

    def decode(q, k, v, **options):
        calls.append({"k": k, **options})
        return flash_decode(q, k, v, **options)

    monkeypatch.setattr(query_blocks, "flash_decode", decode)
    return calls


# gpt-oss names the kernels of the hub that it takes; others are replaced by one of these.
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_batches_through_the_hub_kernel(family, kernel, calls):
    model = make(family)
    want = write_one_by_one(model)
    model.set_attn_implementation(kernel)
    assert model.config._attn_implementation == KERNEL_NAME
    assert write_together(model) == want
    assert len(calls) >= 2 * (NEW_TOKENS + 1)


@pytest.mark.parametrize("inputs", [ALONE, PADDED], ids=["alone", "left-padded"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_generate_through_the_hub_kernel(family, inputs, kernel):
    model = make(family)
    want = generate(model, inputs)
    model.set_attn_implementation(kernel)
    assert torch.equal(generate(model, inputs), want)


def test_a_model_loads_with_the_hub_kernel(kernel, tmp_path):
    model = make("llama")
    want = generate(model, ALONE)
    model.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=kernel, dtype=torch.float32)
    assert torch.equal(generate(model.eval(), ALONE), want)


def test_the_model_that_transformers_serve_loads_runs_through_us(kernel, calls, tmp_path):
    model = make("llama")
    want = write_one_by_one(model)
    model.save_pretrained(tmp_path)
    manager = ModelManager(device="cpu", dtype="float32", attn_implementation=kernel, continuous_batching=True)
    model = manager._load_model(manager.process_model_name(str(tmp_path)))
    assert write_together(model) == want
    assert len(calls) >= 2 * (NEW_TOKENS + 1)


def test_a_decode_step_reads_and_writes_the_pages_of_the_cache(target, kernel, calls):
    """What continuous batching does on CUDA where every sequence has one new token, through Transformers' own call."""
    device = target.device
    pools = [torch.randn(9, 16, 2, 32, device=device) for _ in range(2)]
    table = torch.tensor([[3, 0, 7], [5, -1, -1]], dtype=torch.int32, device=device)
    lens = torch.tensor([40, 9], device=device)  # with the new token
    q, k, v = (torch.randn(1, 2, heads, 32, device=device) for heads in (4, 2, 2))
    dense = [pool[table.clamp(min=0).long()].flatten(1, 2) for pool in pools]
    for x, new in zip(dense, (k, v), strict=True):
        x[[0, 1], lens - 1] = new[0]
    out = modeling_flash_attention_utils._flash_attention_forward(
        q, k, v, None, query_length=2, is_causal=True, softcap=3.0, attn_implementation=kernel, block_table=table,
        k_cache=pools[0], v_cache=pools[1], cu_seq_lens_q=torch.arange(3, device=device), max_length_q=1,
        cu_seq_lens_k=torch.tensor([0, 40, 49], device=device), max_length_k=1,
    )  # fmt: skip
    want = reference(q[0, :, None], *dense, layout="bnhd", kv_lens=lens, softcap=3.0)
    assert max_error(out[0], want[:, 0]) < 1e-5
    assert torch.equal(pools[0][7, 7], k[0, 0])
    assert torch.equal(pools[1][5, 8], v[0, 1])
    (call,) = calls
    assert call["k"] is pools[0]
    assert call["block_table"] is table


def test_the_kernel_is_named_once_beside_others(monkeypatch):
    monkeypatch.setenv("LOCAL_KERNELS", "somebody/else=/elsewhere")
    assert register_kernel() == register_kernel() == KERNEL_NAME
    other, ours = os.environ["LOCAL_KERNELS"].split(":")
    assert other == "somebody/else=/elsewhere"
    name, path = ours.split("=", 1)
    assert name == KERNEL_NAME
    metadata = json.loads((Path(path) / "metadata.json").read_text())
    assert metadata["name"] == "flash-decoding"
    assert metadata["license"] == "Apache-2.0"


def test_sinks_are_an_argument_that_transformers_sees():
    """Transformers drops s_aux without a word where a kernel's function has no argument of this name."""
    define = modeling_flash_attention_utils._lazy_define_process_function
    sinks = torch.zeros(4)
    for function in (flash_attn_with_kvcache, flash_attn.flash_attn_varlen_func, flash_attn.flash_attn_func):
        options = define(function)(query_length=1, key_length=9, is_causal=True, s_aux=sinks, softcap=2.0)
        assert options["s_aux"] is sinks
        assert options["softcap"] == 2.0


def test_what_is_no_batch_is_refused():
    model = make("llama")
    enable_continuous_batching(model)
    with pytest.raises(ValueError, match="must be 'split_kv' outside of continuous batching, got 'flash_split_kv'"):
        generate(model, ALONE)
    q, starts = torch.zeros(1, 4, 3, 16), torch.tensor([0, 3])
    options = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 3}
    assert batched_attention(model, q, q, q, None, **options)[0].shape == (1, 3, 4, 16)
    for name, x in (("position_bias", torch.zeros(1)), ("dropout", 0.1)):
        with pytest.raises(ValueError, match=f"{name} must be .* for attn_implementation='flash_split_kv'"):
            batched_attention(model, q, q, q, None, **options, **{name: x})


def test_models_and_versions_that_cannot_be_batched_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="got BloomForCausalLM, which does not call Transformers' attention interface"):
        enable_continuous_batching(make_model(OWN_ATTENTION["BloomForCausalLM"], "eager"))
    monkeypatch.setattr(integration, "transformers_version", "5.23.0")
    with pytest.raises(ValueError, match=r"transformers must be at least 5\.24 here, got 5\.23\.0"):
        enable_continuous_batching(make("llama"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("family", ["llama", *WINDOWED])
def test_batches_equal_sequences_alone_on_a_gpu(family, graphs):
    model = make(family, "cuda")
    want = write_one_by_one(model)
    enable_continuous_batching(model)
    assert write_together(model, use_cuda_graph=graphs) == want


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("graphs", [False, True])
def test_decode_steps_use_the_pages_on_a_gpu(graphs, kernel, calls):
    model = make("llama", "cuda")
    want = write_one_by_one(model)
    model.set_attn_implementation(kernel)
    assert write_together(model, use_cuda_graph=graphs, max_blocks_per_request=16) == want
    assert any(call["block_table"] is not None for call in calls)
