"""The cost rule of communication, the prediction for many ranks, and the commands that show and measure it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast
from typer.testing import CliRunner

from flash_decoding.bench.results import read_results, write_results
from flash_decoding.cli.commands import app
from flash_decoding.distributed.cost import (
    choose_way,
    collective_us,
    communication_us,
    find_network,
    known_links,
    received_bytes,
)

ROOT = Path(__file__).parents[1]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
NVLINK = find_network("nvlink4")


def run(*arguments):
    return CliRunner().invoke(app, [str(x) for x in arguments])


def test_bytes_of_both_ways():
    state = 32 * 130 * 4  # acc, m and l of 32 rows, in float32
    assert received_bytes("all_gather", "replicated", 4, 32, 128, 2) == [3 * state]
    assert received_bytes("reduce_scatter", "heads", 4, 32, 128, 2) == [3 * state // 4]
    assert received_bytes("reduce_scatter", "replicated", 4, 32, 128, 2) == [3 * state // 4, 3 * 32 * 128 * 2 // 4]
    assert received_bytes("symmetric_memory", "replicated", 4, 32, 128, 2) == [2 * 3 * state]
    assert received_bytes("symmetric_memory", "heads", 4, 32, 128, 2) == [2 * 3 * state // 4]


@pytest.mark.parametrize(
    ("output", "ranks", "heads_q", "batch", "way"),
    [
        ("replicated", 2, 32, 1, "all_gather"),  # one collective is sooner done than two
        ("replicated", 8, 32, 1, "all_gather"),
        ("replicated", 8, 32, 256, "reduce_scatter"),  # 30 MB from each rank, or an eighth of that
        ("heads", 8, 32, 1, "reduce_scatter"),  # less, in one collective as well
        ("replicated", 8, 28, 256, "all_gather"),  # heads that do not split
    ],
)
def test_the_rule(output, ranks, heads_q, batch, way):
    assert choose_way(output, ranks, heads_q, batch * heads_q, 128, 2) == way


@pytest.mark.parametrize(
    ("output", "ranks", "batch", "way"),
    [
        ("replicated", 2, 1, "symmetric_memory"),  # no collective is sooner done than one
        ("heads", 8, 16, "symmetric_memory"),
        ("replicated", 8, 1024, "reduce_scatter"),  # twice the bytes of all states
        ("replicated", 16, 1, "all_gather"),  # two hosts
    ],
)
def test_the_rule_where_ranks_reach_each_other(output, ranks, batch, way):
    assert choose_way(output, ranks, 32, batch * 32, 128, 2, reach=True) == way


def test_a_collective_takes_longer_with_more_ranks_bytes_and_hosts():
    assert collective_us(2, 0, NVLINK) < collective_us(4, 0, NVLINK) < collective_us(8, 0, NVLINK)
    assert collective_us(8, 10**6, NVLINK) < collective_us(8, 10**8, NVLINK)
    # The ninth rank is on another host.
    assert collective_us(9, 0, NVLINK) - collective_us(8, 0, NVLINK) > collective_us(8, 0, NVLINK) - 8.0
    assert collective_us(8, 0, find_network("nvlink4", gpus_per_host=4)) > collective_us(8, 0, NVLINK)
    assert communication_us("all_gather", "replicated", 1, 32, 128, 2, NVLINK) == 0.0


def test_links_have_sources_and_every_protocol():
    for link in known_links().values():
        assert len(link.source) > 20
        assert link.protocols.keys() == NVLINK.inside.protocols.keys()
    assert find_network(compute_capability="9.0").inside.key == "nvlink4"
    assert find_network(compute_capability="8.9").inside.key == "pcie4"
    with pytest.raises(ValueError, match=r"link must be one of nvlink3, .*, got 'token ring'"):
        find_network("token ring")


def test_plan_ranks(tmp_path):
    result = run("plan", "1,32,8,1048576,128", "--gpu", "h200", "--ranks", 8, "--ranks", 512, "--json",
                 tmp_path / "plan.json", "--plot", tmp_path / "scaling")  # fmt: skip
    assert result.exit_code == 0, result.output
    (plan,) = json.loads((tmp_path / "plan.json").read_text())["plans"]
    steps = {p["ranks"]: p for p in plan["predictions"]}
    assert list(steps) == [2**i for i in range(10)]
    assert steps[1]["communication_us"] == 0.0
    # Below the turning point more ranks pay, above they don't.
    best = plan["most_useful_ranks"]
    assert 8 <= best <= 64
    assert all(p["total_us"] > steps[best]["total_us"] for ranks, p in steps.items() if ranks != best)
    assert f"More than {best} ranks stop paying" in " ".join(result.output.split())
    assert (tmp_path / "scaling.svg").exists()
    assert (tmp_path / "scaling.png").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--link", "nvlink4"), "--link must be given with --ranks"),
        (("--ranks", "0"), "--ranks must be from 1 to 4096, got 0"),
        (("--ranks", "8", "--cpu"), "--cpu must be given without --ranks"),
        (("--ranks", "8", "--gpus-per-host", "0"), "--gpus-per-host must be at least 1, got 0"),
        (("--ranks", "8", "--link", "string", "--gpu", "h200"), "--link must be one of"),
    ],
)
def test_plan_ranks_refuses(arguments, words, capfd):
    result = run("plan", *arguments)
    assert result.exit_code == 2
    assert words in capfd.readouterr().err + result.output


def test_bench_distributed_measures_two_processes(tmp_path):
    path = tmp_path / "distributed.json"
    command = [*TORCHRUN, "-m", "flash_decoding", "bench", "--suite", "distributed", "--device", "cpu", "--json", path,
               "--shape", "1,4,2,2048,32"]  # fmt: skip
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=200, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    (row,) = read_results(path)["rows"]
    assert (row["suite"], row["ranks"], row["status"], row["variant"]) == ("distributed", 2, "ok", "all_gather")
    assert row["max_abs_err"] < 1e-5
    assert row["us_eager"] > row["us_communication"]
    # Written with four decimals, and a tiny cache on two processes is far below 1.
    assert row["speedup"] == pytest.approx(row["us_one"] / row["us_eager"], abs=5.1e-5)
    # Another picture of the same: what was measured beside what is predicted. As if these were two GPUs.
    results = read_results(path)
    results["environment"]["gpu"] = "NVIDIA H200"
    write_results(path, results)
    drawn = run("plan", "1,4,2,2048,32", "--gpu", "h200", "--ranks", 2, "--plot", tmp_path / "p", "--measured", path)
    assert drawn.exit_code == 0, drawn.output
    assert "measured" in (tmp_path / "p.svg").read_text()


def test_bench_distributed_says_how_it_is_started(capfd):
    result = run("bench", "--suite", "distributed")
    assert result.exit_code == 2
    assert "--suite distributed must be started by torchrun" in capfd.readouterr().err + result.output


def test_the_example_writes_what_one_process_writes(tmp_path):
    """A small random model; the demo model is a minute of loading, twice."""
    words = ["<unk>", "<s>", "why", "is", "the", "sky", "blue", "because", "of", "light"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>").save_pretrained(tmp_path)
    config = LlamaConfig(
        vocab_size=len(words), hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=1, eos_token_id=None, initializer_range=0.3,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(tmp_path)
    ids = torch.tensor([[words.index(word) for word in ("why", "is", "the", "sky", "blue")]])
    whole = model.generate(ids, max_new_tokens=24, do_sample=False, pad_token_id=0)[0, ids.shape[1] :].tolist()
    assert len(set(whole)) > 2, "a model that repeats one word would hide what is wrong"

    example = [str(ROOT / "examples" / "sharded_generate.py"), "why is the sky blue", "--tokens", "24", "--block", "3"]
    done = subprocess.run(
        [*TORCHRUN, *example, "--model", str(tmp_path)], capture_output=True, text=True, timeout=200, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == f"2 processes, tokens {whole}"
