"""The commands bench, plan and profile as they are called."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from flash_decoding.bench.results import empty_row, new_results, read_results, write_results
from flash_decoding.bench.timing import Method
from flash_decoding.bench.workloads import Case, Shape
from flash_decoding.cli import bench, plan, profile

app = typer.Typer()
app.command("bench")(bench.bench)
app.command("plan")(plan.plan)
app.command("profile")(profile.profile)

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")


def call(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code, result.output
    return " ".join((result.output + result.stderr).split())


def sample_file(folder: Path) -> Path:
    case = Case("serving", "b1", Shape(1, 32, 8, 8192, 128), "bfloat16")
    times = {"us_graph": 12.5, "us_graph_spread": 0.1, "us_eager": 30.0, "us_host": 20.0, "read_floor_us": 10.0}
    results = new_results({"gpu": "NVIDIA H200", "cpu": "a CPU"}, Method())
    results["rows"] = [
        empty_row(case, "flash_decoding", "ok") | times | {"max_abs_err": 1e-4},
        empty_row(case, "sdpa", "error: no kernel"),
    ]
    write_results(folder / "nvidia-h200" / "serving.json", results)
    return folder / "nvidia-h200" / "serving.json"


def test_bench_writes_what_it_measured_after_each_row(tmp_path: Path):
    output = call(
        "bench", "--device", "cpu", "--shape", "1,4,2,300,64", "--peer", "sdpa", "--json", str(tmp_path / "all.json"),
        "--results-dir", str(tmp_path / "results"), "--markdown", str(tmp_path / "all.md"), "--threads", "1",
    )  # fmt: skip
    results = read_results(tmp_path / "all.json")
    assert [row["impl"] for row in results["rows"]] == ["flash_decoding", "sdpa"]
    assert all(row["status"] == "ok" for row in results["rows"])
    assert results["environment"]["cpu_threads"] == 1
    (kept,) = (tmp_path / "results").rglob("shape.json")
    assert read_results(kept)["rows"] == results["rows"]
    assert "| 1, 4/2, 300, 64, float32 |" in (tmp_path / "all.md").read_text()
    assert "shape: µs per decode step" in output


def test_an_unwritable_file_does_not_stop_the_run(tmp_path: Path):
    (tmp_path / "file").write_text("")
    output = call(
        "bench",
        "--device",
        "cpu",
        "--shape",
        "1,2,2,64,32",
        "--peer",
        "none",
        "--json",
        str(tmp_path / "file" / "x.json"),
    )
    assert "cannot be written" in output
    assert "measuring goes on without it" in output
    assert "shape: µs per decode step" in output


def test_report_redraws_without_a_gpu(tmp_path: Path):
    pytest.importorskip("matplotlib")
    path = sample_file(tmp_path)
    output = call(
        "bench", "--report", str(tmp_path), "--plot", str(tmp_path / "plot.png"), "--markdown", str(tmp_path / "t.md")
    )
    assert "NVIDIA H200" in output
    assert "SDPA: error: no kernel" in output
    assert (tmp_path / "plot.png").stat().st_size > 10_000
    assert "<svg" in (tmp_path / "plot.svg").read_text()
    assert "| 1, 32/8, 8192, 128 | 34 | 10.0 | 12.5 | 1.25 |" in (tmp_path / "t.md").read_text()
    assert read_results(path)["rows"][1]["status"] == "error: no kernel"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--shape", "1,2,3"], "shape must be five whole numbers B,Hq,Hkv,N,D, got '1,2,3'"),
        (["--suite", "nope"], "suite must be one of article, serving, latency, cpu or all, got 'nope'"),
        (["--device", "tpu"], "device must be auto, cuda or cpu, got 'tpu'"),
        (["--dtype", "int8"], "dtype must be one of bfloat16, float16, float32, got 'int8'"),
        (["--suite", "cpu", "--peer", "nope"], "peer must be one of flash_decoding"),
        (["--report", "/no/such/file.json"], "/no/such/file.json does not exist"),
    ],
)
def test_bad_input_is_one_sentence(arguments: list[str], sentence: str):
    assert sentence in call("bench", *arguments, code=2)


@no_gpu
def test_gpu_suites_without_a_gpu_say_so():
    assert "No CUDA device here: article left out." in call("bench", "--suite", "article", code=2)


def test_plan_needs_no_gpu(tmp_path: Path):
    output = call("plan", "2,8,8,65536,128", "--gpu", "h200", "--json", str(tmp_path / "plan.json"))
    assert "16 of 132 (12%)" in output
    assert "536.9 MB" in output
    numbers = json.loads((tmp_path / "plan.json").read_text())["plans"][0]
    assert numbers["unsplit"]["programs"] == 16
    assert numbers["split"]["working_processors"] == 128
    assert numbers["split"]["floor_us"] < numbers["split"]["chunk_us"] < numbers["unsplit"]["chunk_us"]


def test_plan_takes_several_shapes_and_a_split_count():
    output = call("plan", "1,8,1,4096,64", "1,1,1,64,64", "--gpu", "rtx4060", "--num-splits", "7")
    assert output.count("independent problems") == 2
    assert "1 of 24 (4%)" in output


def test_plan_draws(tmp_path: Path):
    pytest.importorskip("matplotlib")
    call("plan", "--gpu", "a100", "--plot", str(tmp_path / "plan"))
    assert (tmp_path / "plan.png").exists()
    assert (tmp_path / "plan.svg").exists()


def test_plan_for_the_cpu_measures_its_memory():
    output = call("plan", "1,32,8,8192,128", "--cpu", "--dtype", "float32")
    assert "GB/s (measured now)" in output
    assert "threads with work" in output


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--gpu", "voodoo"], "gpu must be one of rtx4060"),
        (["1,2", "--gpu", "h100"], "shape must be five whole numbers"),
        (["--gpu", "h100", "--dtype", "int4"], "--dtype must be one of bfloat16, float16, float32, got 'int4'"),
        (["--gpu", "h100", "--num-splits", "0"], "--num-splits must be at least 1, got 0"),
        (["1,2,2,64,64", "1,2,2,65,64", "--gpu", "h100", "--plot", "x"], "--plot must be given with one shape, got 2"),
    ],
)
def test_plan_refuses_in_one_sentence(arguments: list[str], sentence: str):
    assert sentence in call("plan", *arguments, code=2)


@no_gpu
def test_plan_and_profile_without_a_gpu_say_what_to_do():
    assert "as in --gpu h200" in call("plan", code=2)
    assert "profile needs a CUDA device" in call("profile", code=2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_profile_on_a_gpu(tmp_path: Path):
    output = call(
        "profile", "1,8,2,8192,64", "--no-ncu", "--json", str(tmp_path / "p.json"), "--plot", str(tmp_path / "p")
    )
    assert "registers per thread" in output
    step = json.loads((tmp_path / "p.json").read_text())["steps"][0]
    assert [kernel["kernel"] for kernel in step["kernels"]] == ["chunk", "reduce"]
    assert all(kernel["us"] > 0 and kernel["registers"] > 0 for kernel in step["kernels"])
