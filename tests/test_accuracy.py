"""flash-decoding accuracy: its figures are those of the plain definition, and its documents those of its file."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch
from helpers import assert_refused
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, PreTrainedTokenizerFast
from typer.testing import CliRunner

from flash_decoding import KVFormat, dequantize_kv, quantize_kv
from flash_decoding.bench import accuracy
from flash_decoding.bench.document import BEGIN, END, find_block, fingerprint
from flash_decoding.cli.commands import app
from flash_decoding.integrations import transformers as integration
from flash_decoding.integrations.transformers import cache_argument, register

pytest.importorskip("matplotlib")

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "amd-epyc" / "accuracy.json"
DOCUMENT = ROOT / "docs" / "quantization.md"
LAYERS, HEADS_KV, HEAD_DIM = 2, 2, 64
WORDS = ["<unk>", "<s>", "why", "is", "the", "sky", "blue", "because", "of", "light"]
CONFIG = LlamaConfig(
    vocab_size=len(WORDS), hidden_size=64, intermediate_size=96, num_hidden_layers=LAYERS, num_attention_heads=4,
    num_key_value_heads=HEADS_KV, head_dim=HEAD_DIM, max_position_embeddings=512, bos_token_id=1, eos_token_id=None,
    initializer_range=0.12,
)  # fmt: skip
FORMATS = ["int8", "fp8:token", "int8/int4", "int4:group32+zero", "int4"]

register()


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIG, dtype=torch.float32, attn_implementation="split_kv").eval()


@pytest.fixture(scope="module")
def model_folder(model, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("small-llama")
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>").save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    # Two whole blocks of 64 predictions, and a part of one.
    return torch.randint(len(WORDS), (150,), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def rows(model, tokens) -> dict[str | None, dict]:
    return {row["format"]: row for row in accuracy.measure(model, tokens, FORMATS)}


class NumbersCache(DynamicCache):
    """What a format keeps of bfloat16 keys and values, in float32, one token at a time."""

    def __init__(self, kv_format: str | None) -> None:
        super().__init__()
        self.kv_format = kv_format

    def update(self, key_states, value_states, *args, **kwargs):
        key_states, value_states = key_states.bfloat16().float(), value_states.bfloat16().float()
        if self.kv_format is not None:
            *codes, k_scale, v_scale, kv_format = quantize_kv(key_states, value_states, self.kv_format)
            key_states, value_states = dequantize_kv(*codes, kv_format, k_scale=k_scale, v_scale=v_scale)
        return super().update(key_states, value_states, *args, **kwargs)


@torch.no_grad()
def log_probabilities(model, tokens: torch.Tensor, kv_format: str | None) -> torch.Tensor:
    """Token by token, with eager attention: the definition of what is measured."""
    model.set_attn_implementation("eager")
    cache, found = NumbersCache(kv_format), []
    for token in tokens[:-1]:
        logits = model(input_ids=token[None, None], use_cache=True, **{cache_argument(model): cache}).logits
        found.append(logits[0, -1].double().log_softmax(dim=-1))
    model.set_attn_implementation("split_kv")
    return torch.stack(found)


@pytest.mark.parametrize("kv_format", [None, *FORMATS])
def test_figures_are_those_of_writing_token_by_token(model, tokens, rows, kv_format):
    found, exact = (log_probabilities(model, tokens, name) for name in (kv_format, None))
    nll = -found.gather(1, tokens[1:, None])
    row = rows[kv_format]
    assert row["perplexity"] == pytest.approx(float(nll.mean().exp()), rel=1e-3)
    kl = float((exact.exp() * (exact - found)).sum(dim=-1).mean())
    assert row["kl"] == pytest.approx(kl, rel=0.05, abs=1e-9)
    same = float((found.argmax(dim=-1) == exact.argmax(dim=-1)).double().mean())
    assert row["same_tokens"] == pytest.approx(same, abs=0.011)  # one of 149
    change = nll + exact.gather(1, tokens[1:, None])
    assert row["change_percent"] == pytest.approx(100 * math.expm1(float(change.mean())), abs=0.05)
    error = 100 * float(change.std()) / math.sqrt(149)
    assert row["change_error_percent"] == pytest.approx(error, rel=0.1, abs=1e-6)


def test_the_16_bit_cache_differs_from_itself_in_nothing(rows):
    first = next(iter(rows.values()))
    assert (first["format"], first["kl"], first["same_tokens"], first["change_percent"]) == (None, 0.0, 1.0, 0.0)
    assert (first["bytes_per_token"], first["of_16_bits"]) == (LAYERS * HEADS_KV * 2 * HEAD_DIM * 2, 1.0)


def test_fewer_bits_are_fewer_bytes_and_a_larger_divergence(rows):
    bytes_of_a_row = {
        "int8": 2 * 68,
        "fp8:token": 2 * 68,
        "int8/int4": 68 + 34,
        "int4:group32+zero": 2 * 40,
        "int4": 2 * 34,
    }
    for name, count in bytes_of_a_row.items():
        assert rows[name]["bytes_per_token"] == LAYERS * HEADS_KV * count
        assert rows[name]["of_16_bits"] == count / 256
    assert 0 < rows["int8"]["kl"] < rows["fp8:token"]["kl"] < rows["int4:group32+zero"]["kl"] < rows["int4"]["kl"]
    assert rows["int8"]["same_tokens"] > rows["int4"]["same_tokens"]


def test_a_wrong_scale_is_found(model, tokens, monkeypatch):
    original = integration.flash_decode

    def wrong(*args, v_scale=None, **options):
        return original(*args, v_scale=v_scale if v_scale is None else 1.5 * v_scale, **options)

    monkeypatch.setattr(integration, "flash_decode", wrong)
    row = accuracy.measure(model, tokens[:70], ["int8"])[1]
    assert row["kl"] > 0.01


@pytest.mark.parametrize(
    ("head_dim", "missing"),
    [(64, {"int4:group128"}), (128, set()), (96, {"int8/int4", "int4/int8", "int4", "int4:group128"})],
)
def test_formats_are_chosen_that_fit_the_heads(head_dim, missing):
    assert set(accuracy.choose_formats(head_dim)) == {*accuracy.FORMATS, "int4:group128"} - missing


@pytest.mark.parametrize(
    ("name", "label"),
    [("int8:token/int8:token", "int8"), ("fp8", "fp8_e4m3"), ("fp8_e4m3:tensor/int4:group64", "fp8_e4m3/int4"),
     ("int8:channel/int4:group32+zero", "int8:channel/int4:group32+zero"), ("none/int8", "none/int8")],
)  # fmt: skip
def test_formats_have_short_names(name, label):
    assert KVFormat.parse(name).label == label
    assert KVFormat.parse(label) == KVFormat.parse(name)


def test_the_text_that_ships_is_whole():
    text = accuracy.read_shipped_text()
    assert text.startswith("When on board H.M.S. ‘Beagle,’ as naturalist")
    assert text.endswith("main but not exclusive means of modification.\n")
    assert len(text.split("\n\n")) == 10


def run(*arguments: object):
    return CliRunner(env={"COLUMNS": "120"}).invoke(app, ["accuracy", *[str(x) for x in arguments]])


@pytest.fixture
def text(tmp_path) -> Path:
    file = tmp_path / "words.txt"
    file.write_text("why is the sky blue because of the light " * 20)
    return file


def test_the_command_prints_writes_and_draws(model_folder, text, tmp_path):
    file, plot = tmp_path / "result.json", tmp_path / "picture"
    options = ("--model", model_folder, "--text", text, "--device", "cpu")
    result = run(*options, "--tokens", 90, "--json", file, "--plot", plot)
    assert result.exit_code == 0, result.stderr
    written = json.loads(file.read_text())
    names = [row["format"] for row in written["formats"]]
    assert names == [None, *accuracy.choose_formats(HEAD_DIM)]
    assert (written["tokens"], written["text"], written["dtype"]) == (90, "words.txt", "float32")
    for name in names[1:]:
        assert KVFormat.parse(name).label in result.stdout
    assert (tmp_path / "picture.png").stat().st_size > 10000
    assert fingerprint(written["formats"]) in (tmp_path / "picture.svg").read_text()

    again = run("--report", file)
    assert again.exit_code == 0
    table = result.stdout[: result.stdout.index("wrote")]
    assert again.stdout == table


def test_the_report_is_drawn_into_a_document(model_folder, text, tmp_path):
    file, document = tmp_path / "result.json", tmp_path / "docs.md"
    options = ("--model", model_folder, "--text", text, "--device", "cpu", "--tokens", 40)
    assert run(*options, "--json", file, "--kv-dtype", "int8", "--kv-dtype", "fp8:head/int4").exit_code == 0
    document.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    result = run("--report", file, "--plot", tmp_path / "images" / "loss", "--readme", document)
    assert result.exit_code == 0, result.stderr
    drawn = document.read_text()
    assert drawn.startswith("before\n")
    assert drawn.endswith("\nafter\n")
    results = accuracy.read_results(file)
    assert find_block(drawn) == accuracy.render_block(results, "images/loss.svg")
    assert "| int8 |" in drawn
    assert "| fp8_e4m3:head/int4 |" in drawn
    assert "40 tokens of words.txt" in drawn


def test_bfloat16_models_are_measured_as_they_are(model_folder, text, tmp_path):
    file = tmp_path / "result.json"
    options = ("--model", model_folder, "--text", text, "--device", "cpu", "--tokens", 20, "--json", file)
    assert run(*options, "--dtype", "bf16", "--kv-dtype", "int8").exit_code == 0
    exact, row = json.loads(file.read_text())["formats"]
    assert exact["bytes_per_token"] == LAYERS * HEADS_KV * 2 * HEAD_DIM * 2
    assert 0 < row["kl"] < 0.1


def test_wrong_options_are_refused(model_folder, text, tmp_path):
    here = ("--model", model_folder, "--device", "cpu")
    assert_refused(run(*here, "--kv-dtype", "int5"), "--kv-dtype", "'int5'")
    assert_refused(run(*here, "--text", tmp_path / "none.txt"), "--text", "No such file")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\xff")
    assert_refused(run(*here, "--text", tmp_path / "bytes"), "--text must be UTF-8")
    (tmp_path / "short").write_text("why")
    assert_refused(run(*here, "--text", tmp_path / "short"), "--text must hold at least 2 tokens, got 1", after=1)
    assert_refused(run(*here, "--text", text, "--readme", tmp_path / "x.md"), "--readme must be given with --report")
    assert_refused(run("--report", tmp_path / "none.json"), "--report", "cannot be read")
    (tmp_path / "other.json").write_text('{"schema": 1, "rows": []}')
    assert_refused(run("--report", tmp_path / "other.json"), "--report", "result file of the accuracy command")
    assert_refused(run("--report", tmp_path / "other.json", "--text", text), "--text must be given without --report")
    assert_refused(run(*here, "--json", tmp_path), "--json must be a file")
    assert_refused(run("--device", "tpu"), "--device", "tpu")
    refused = run(*here, "--text", text, "--tokens", 20, "--kv-dtype", "int4:group128")
    assert_refused(refused, "--kv-dtype does not fit", "group must divide the width of k, 64, got 128", after=1)


def test_the_figure_holds_every_format():
    rows = [
        {"format": name, "of_16_bits": share, "kl": kl, "change_percent": 0.5}
        for name, share, kl in ((None, 1.0, 0.0), ("int8", 0.53, 1e-4), ("int8/int4", 0.4, 1e-2), ("fp8", 0.5, 0.0))
    ]
    figure = accuracy.accuracy_figure({"model": "some model", "formats": rows})
    (axes,) = figure.axes
    drawn = {line.get_label(): (line.get_xdata()[0], line.get_ydata()[0]) for line in axes.lines}
    assert drawn == {
        "int8   +0.50 %": (53.0, 1e-4),
        "int8/int4   +0.50 %": (40.0, 1e-2),
        "fp8_e4m3   +0.50 %": (50.0, 1e-12),
    }
    assert axes.get_title(loc="left") == "some model: memory against loss"


def test_the_document_is_drawn_from_the_kept_file():
    """`make results` draws it; this fails when the file or the document changed alone."""
    results = accuracy.read_results(RESULTS)
    block = find_block(DOCUMENT.read_text())
    assert block is not None
    picture = re.search(r"!\[.*\]\((.*)\)", block)
    assert picture is not None
    assert block == accuracy.render_block(results, picture[1])
    assert fingerprint(results["formats"]) in (DOCUMENT.parent / picture[1]).read_text()
