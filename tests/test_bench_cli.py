"""The commands bench, plan and profile as they are called."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

from flash_decoding import KVFormat, quantize_kv
from flash_decoding.backends import load
from flash_decoding.bench import profiling
from flash_decoding.bench.profiling import Launch, StepProfile
from flash_decoding.bench.results import empty_row, new_results, read_results, write_results
from flash_decoding.bench.roofline import Ceilings
from flash_decoding.bench.run import _environment
from flash_decoding.bench.timing import Method, Timed
from flash_decoding.bench.workloads import SUITES, Case, Shape
from flash_decoding.cli import bench, plan, profile
from flash_decoding.hardware import Gpu, find_gpu
from flash_decoding.problem import Call, make_problem
from flash_decoding.split_plan import MIN_SHARED_MEMORY

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
H200 = RESULTS / "nvidia-h200"
LONG_ON_TWO = ("1,32,8,131072,128", "--ranks", "2", "--plot", "y")

app = typer.Typer()
app.command("bench")(bench.bench)
app.command("plan")(plan.plan)
app.command("profile")(profile.profile)

BAD_D = (12, 8, 520, 4096)
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


def test_bench_quantises_the_caches_of_given_shapes(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(bench, "Method", lambda: Method(rotated_bytes=100_000))
    call(
        "bench", "--device", "cpu", "--shape", "1,4,2,300,64", "--kv-format", "int4", "--peer", "none",
        "--json", str(tmp_path / "all.json"),
    )  # fmt: skip
    (row,) = read_results(tmp_path / "all.json")["rows"]
    assert (row["status"], row["dtype"], row["kv_dtype"]) == ("ok", "float32", "int4:group64")
    assert row["bytes"] == 2 * 2 * 300 * (32 + 2)


MEASURE = ("bench", "--device", "cpu", "--shape", "1,2,2,64,32", "--peer", "none")


def test_threads_of_the_measuring_process_sleep_on_busy_cores_unless_chosen_otherwise(monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setattr("os.getloadavg", lambda: (1e9, 0.0, 0.0), raising=False)
    assert _environment(None)["OMP_WAIT_POLICY"] == "passive"
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert _environment(None)["OMP_WAIT_POLICY"] == "active"
    monkeypatch.delenv("OMP_WAIT_POLICY")
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0), raising=False)
    assert "OMP_WAIT_POLICY" not in _environment(None)


@pytest.mark.parametrize("option", ["--json", "--results-dir"])
def test_a_file_that_cannot_be_written_later_keeps_the_run_and_its_exit_code(tmp_path: Path, monkeypatch, option: str):
    def full(path, results):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("flash_decoding.bench.results.write_results", full)
    output = call(*MEASURE, option, str(tmp_path / "x"), code=2)
    assert "cannot be written (No space left on device); measuring goes on without it" in output
    assert "shape: µs per decode step" in output


@pytest.mark.parametrize(("command", "option"), [
    *[(MEASURE, option) for option in ("--json", "--results-dir", "--markdown", "--plot")],
    *[(("bench", "--report", "."), option) for option in ("--markdown", "--plot", "--readme")],
    *[((name,), option) for name in ("plan", "profile") for option in ("--json", "--plot")],
])  # fmt: skip
def test_a_file_that_cannot_be_written_is_refused_before_any_work(tmp_path: Path, monkeypatch, command, option: str):
    monkeypatch.setattr(bench, "_measure", lambda *_: pytest.fail("measured"))
    (tmp_path / "file").write_text("")
    result = CliRunner().invoke(app, [*command, option, str(tmp_path / "file" / "x")])
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith(f"flash-decoding: {option} must be a file that can be written, got {tmp_path}")


def test_without_matplotlib_plot_is_refused_before_any_work(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "--plot needs matplotlib: pip install 'flash-decoding[bench]'" in call(
        "plan", "--plot", str(tmp_path / "x"), code=2
    )


def test_the_summary_fits_into_80_columns_and_details_are_asked_for(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(bench, "console", Console(width=80))
    case = Case("serving", "b1", Shape(16, 128, 16, 131072, 128), "bfloat16")
    times = {"us_graph_spread": 0.1, "us_eager": 30.0, "us_host": 20.0, "read_floor_us": 1000.0, "max_abs_err": 1e-4}
    rows = [
        empty_row(case, impl, "ok") | times | {"us_graph": us}
        for impl, us in (("flash_decoding", 1250.0), ("sdpa_packed", 1240.0), ("sdpa", 13000.0))
    ]
    write_results(tmp_path / "serving.json", new_results({"gpu": "NVIDIA H200"}, Method(), rows))
    result = CliRunner().invoke(app, ["bench", "--report", str(tmp_path / "serving.json")])
    lines = result.stdout.splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert "…" not in result.stdout
    assert "16, 128/16, 131072, 128 17180 1000 1250 1.25 13000 1240 10.40 (SDPA packed)" in " ".join(
        result.stdout.split()
    )
    assert "every peer" not in result.stdout
    assert lines[-1] == "Every peer of every shape: --details."
    detailed = CliRunner().invoke(app, ["bench", "--report", str(tmp_path / "serving.json"), "--details"]).stdout
    assert detailed.index("serving: µs per decode step") < detailed.index("serving: every peer")


def test_summaries_of_paged_suites_fit_into_80_columns(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(bench, "console", Console(width=80))
    times = {"us_graph_spread": 0.1, "us_eager": 30.0, "us_host": 20.0, "read_floor_us": 1000.0, "max_abs_err": 1e-4}
    for suite in ("ragged", "options", "quantised"):
        rows = [
            empty_row(case, impl, "ok") | times | {"us_graph": us, "plan_us": 12345.0}
            for case in SUITES[suite]
            for impl, us in (("flash_decoding", 12500.0), ("fa3_tuned", 12400.0), ("flashinfer_tc", 13000.0))
        ]
        write_results(tmp_path / f"{suite}.json", new_results({"gpu": "NVIDIA H200"}, Method(), rows))
    result = CliRunner().invoke(app, ["bench", "--report", str(tmp_path)])
    assert all(len(line) <= 80 for line in result.stdout.splitlines())
    assert "…" not in result.stdout
    for whole in (
        "fp8_e4m3:tensor",
        "(FlashAttention-3,",
        "13000",
        "options: what the options cost",
        "1070–39517,",
        "page 16",
    ):
        assert whole in result.stdout


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
        (["--shape", "1,2,3"], "--shape must be five whole numbers B,Hq,Hkv,N,D, got '1,2,3'"),
        (["--suite", "nope"], f"--suite must be one of {', '.join(SUITES)} or all, got 'nope'"),
        (["--device", "tpu"], "--device must be auto, cuda or cpu, got 'tpu'"),
        (["--dtype", "int8"], "--dtype must be one of bfloat16, float16, float32, bf16, fp16, fp32, got 'int8'"),
        (["--kv-format", "int8"], "--kv-format must be given with --shape"),
        (["--shape", "1,2,2,64,64", "--kv-format", "int3", "--device", "cpu"],
         "--kv-format must name one format of keys and of values, as 'fp8' or 'int4:group32', got 'int3'"),
        (["--suite", "cpu", "--peer", "nope"], "--peer must be one of flash_decoding"),
        (["--report", "/no/such/file.json"], "/no/such/file.json does not exist"),
        (["--threads", "-1", "--device", "cpu"], "--threads must be at least 1, got -1"),
        (["--threads", "0", "--device", "cpu"], "--threads must be at least 1, got 0"),
        (["--compare", "x.json"], "--compare must be given with --report"),
        (["--merge"], "--merge must be given with --report"),
        *[
            (["--report", ".", *option], f"{option[0]} must be given without --report, which measures nothing")
            for option in (["--json", "x"], ["--suite", "cpu"], ["--shape", "1,2,2,64,64"], ["--dtype", "float16"],
                           ["--kv-format", "int8"], ["--peer", "sdpa"], ["--threads", "2"], ["--results-dir", "x"])
        ],
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence(arguments: list[str], sentence: str):
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("flash-decoding: ")
    assert sentence in line


def write_times(path: Path, times: dict[str, float | None]) -> Path:
    """A result file with one row per peer; None: the peer failed."""
    case = Case("cpu", "b1", Shape(1, 32, 8, 8192, 128), "float32", "cpu")
    rows = [
        empty_row(case, impl, "ok" if us is not None else "error: x") | {"us_eager": us} for impl, us in times.items()
    ]
    write_results(path, new_results({"cpu": "a CPU"}, Method(), rows))
    return path


def test_compare_shows_the_medians_that_were_not_repeated(tmp_path: Path):
    first = {"flash_decoding": 1000.0, "sdpa": 2000.0, "sdpa_packed": 40.0, "flex_attention": 60.0, "fa3": 70.0}
    second = {"flash_decoding": 1029.0, "sdpa": 1900.0, "sdpa_packed": 49.0, "flex_attention": None}
    files = write_times(tmp_path / "a.json", first), write_times(tmp_path / "b.json", second)
    output = call("bench", "--report", str(files[0]), "--compare", str(files[1]))
    _, _, table = output.partition("medians that differ by more than 3% above 50 µs")
    assert "cpu 1, 32/8, 8192, 128, float32, SDPA 2000 1900 5.3%" in table
    assert "2.9%" not in table
    assert "49.0" not in table  # too short to judge
    assert table.endswith(
        "3 rows in both files, 2 above 50 µs; the largest difference of these is 5.3%: "
        "cpu 1, 32/8, 8192, 128, float32, SDPA, 2000 and 1900 µs."
    )


def test_compare_of_a_run_with_itself(tmp_path: Path):
    path = write_times(tmp_path / "a.json", {"flash_decoding": 1000.0, "sdpa": 20.0})
    output = call("bench", "--report", str(path), "--compare", str(path))
    assert "medians that differ" not in output
    assert "2 rows in both files, 1 above 50 µs; the largest difference of these is 0.0%" in output


def test_compare_of_other_suites_is_refused(tmp_path: Path):
    path = write_times(tmp_path / "a.json", {"flash_decoding": 1000.0})
    output = call("bench", "--report", str(sample_file(tmp_path)), "--compare", str(path), code=2)
    assert "--compare must hold rows of the suites in --report" in output


@no_gpu
def test_gpu_suites_without_a_gpu_say_so():
    assert "No CUDA device here: article left out." in call("bench", "--suite", "article", code=2)


def test_plan_needs_no_gpu(tmp_path: Path):
    output = call("plan", "2,8,8,65536,128", "--gpu", "h200", "--json", str(tmp_path / "plan.json"))
    assert "16 of 132 (12%)" in output
    assert "536.9 MB" in output
    numbers = json.loads((tmp_path / "plan.json").read_text())["plans"][0]
    assert numbers["unsplit"]["programs"] == 16
    assert numbers["split"]["working_processors"] == 132
    assert numbers["split"]["floor_us"] < numbers["split"]["chunk_us"] < numbers["unsplit"]["chunk_us"]


def test_plan_takes_several_shapes_and_a_split_count():
    output = call("plan", "1,8,1,4096,64", "1,1,1,64,64", "--gpu", "rtx4060", "--num-splits", "7", "--dtype", "fp16")
    assert output.count("independent problems") == 2
    assert "1 of 24 (4%)" in output


def test_plan_of_a_cache_of_codes(tmp_path: Path):
    file, shape = tmp_path / "plan.json", Shape(1, 32, 8, 131072, 128)
    options = ("1,32,8,131072,128", "--gpu", "h200")
    assert "scales" not in call("plan", *options)
    for name, row in (
        ("fp8_e4m3", 256), ("int8:head", 256), ("int8", 264), ("int4", 136), ("int4:group32+zero", 160),
        ("none/int8", 388),
    ):  # fmt: skip
        output = call("plan", *options, "--kv-dtype", name, "--json", str(file))
        assert f"b1-h32x8-n131072-d128 in {name}: 8 independent problems" in output
        assert "the prediction counts their bytes alone" in output
        numbers = json.loads(file.read_text())["plans"][0]
        assert numbers["kv_bytes"] == 8 * 131072 * row
        assert KVFormat.parse(numbers["kv_dtype"]) == KVFormat.parse(name)
        assert numbers["split"]["floor_us"] == pytest.approx(2.1 + 8 * 131072 * row / 4560e3)
    case = Case("x", "x", shape, "bfloat16", kv_format="int4:group32+zero")
    assert case.kv_bytes == 8 * 131072 * 160
    assert "d128 in int4 spread over ranks" in call("plan", *options, "--kv-dtype", "int4", "--ranks", "2")
    on_cpu = call("plan", "1,32,8,4096,128", "--cpu", "--dtype", "fp32", "--kv-dtype", "int8")
    assert "d128 in int8: 8 independent problems" in on_cpu
    assert "bytes of K, V and scales 8.7 MB" in on_cpu


@pytest.mark.parametrize("name", ["fp8", "int8", "int4:group32", "int8:channel/int4", "none/int8"])
def test_the_plan_of_codes_is_the_kernels_own(name: str):
    h200, shape = find_gpu("h200"), Shape(2, 8, 2, 3000, 128)
    # What the kernels take themselves to run on where there is no GPU.
    small = replace(h200, processors=1, limits=replace(h200.limits, shared_per_program=MIN_SHARED_MEMORY))
    k = torch.zeros(2, 2, 3000, 128)
    cache = quantize_kv(k.half(), k.half(), name)
    call = Call(torch.zeros(2, 8, 1, 128).half(), cache.k, cache.v, kv_format=cache.kv_format, k_scale=cache.k_scale,
                v_scale=cache.v_scale)  # fmt: skip
    ours = profiling.plan_of(shape, "float16", small, None, KVFormat.parse(name))
    assert ours == load("triton").plan(make_problem(call), None, None)


def test_plan_draws(tmp_path: Path):
    pytest.importorskip("matplotlib")
    call("plan", "--gpu", "a100", "--plot", str(tmp_path / "plan"))
    assert (tmp_path / "plan.png").exists()
    assert (tmp_path / "plan.svg").exists()


def test_a_plan_of_a_cache_without_codes_is_the_plain_one():
    assert call("plan", "--gpu", "h100", "--kv-dtype", "none/none") == call("plan", "--gpu", "h100")


def test_plan_for_the_cpu_measures_its_memory():
    output = call("plan", "1,32,8,8192,128", "--cpu", "--dtype", "float32")
    assert "GB/s (measured now)" in output
    assert "threads with work" in output


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--gpu", "voodoo"], "--gpu must be one of rtx4060"),
        (["1,2", "--gpu", "h100"], "SHAPE must be five whole numbers"),
        (["--gpu", "h100", "--dtype", "int4"], "--dtype must be one of bfloat16, float16, float32, bf16"),
        (["--gpu", "h100", "--gpu", "a100"], "--gpu must be given once, got h100 and a100"),
        (["--gpu", "h100", "--cpu"], "--cpu must be given without --gpu"),
        (["--gpu", "h100", "--kv-dtype", "int5"], "--kv-dtype must name a format such as 'int8'"),
        (
            ["1,2,2,64,80", "--gpu", "h100", "--kv-dtype", "int4"],
            "--kv-dtype does not fit the heads of b1-h2x2-n64-d80: group must divide",
        ),
        (
            ["1,2,2,64,512", "--gpu", "rtx4060", "--kv-dtype", "int4:group32"],
            "--kv-dtype does not run on --gpu rtx4060",
        ),
        (["--gpu", "h100", "--kv-dtype", "int8", "--dtype", "fp32"], "--dtype must be bfloat16 or float16 for a cache"),
        (
            ["--gpu", "h100", "--kv-dtype", "fp8", "--ranks", "2", "--measured", "x", "--plot", "y"],
            "--measured must be given without",
        ),
        (["--gpu", "h100", "--ranks", "2", "--measured", "x"], "--measured must be given with --plot"),
        (["--gpu", "h100", "--ranks", "2", "--num-splits", "4"], "--num-splits must be given without --ranks"),
        (
            [*LONG_ON_TWO, "--gpu", "h100", "--measured", str(H200 / "distributed.json")],
            "--measured must be results of H100",
        ),
        (
            [*LONG_ON_TWO, "--gpu", "h200", "--measured", str(H200 / "article.json")],
            "--measured must have rows of the suite distributed",
        ),
        (["--gpu", "h100", "--num-splits", "0"], "--num-splits must be at least 1, got 0"),
        (["1,2,2,64,64", "1,2,2,65,64", "--gpu", "h100", "--plot", "x"], "--plot must be given with one shape, got 2"),
        *[([f"1,2,2,64,{d}", "--gpu", "h100"], f"D must be a multiple of 8 from 16 to 512, got {d}") for d in BAD_D],
        (["--gpu", "h100", "--num-splits", "16385"], "--num-splits must be at most 16384, got 16385"),
        (["1,2,2,2147483647,64", "--gpu", "h100"], "N must be at most 2147418112, got 2147483647"),
        (["1,2,2,64,12", "--cpu"], "D must be a multiple of 8 from 16 to 512, got 12"),
    ],
)
def test_plan_refuses_in_one_sentence(arguments: list[str], sentence: str):
    assert sentence in call("plan", *arguments, code=2)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([RESULTS / "amd-epyc" / "accuracy.json"], "accuracy.json must have rows"),
        ([RESULTS / "amd-epyc" / "cpu.json", H200 / "article.json"], "--report must be given files of one machine"),
        (
            [H200 / "article.json", H200 / "options.json", "--merge"],
            "--merge: only the suites article, serving",
        ),
    ],
)
def test_report_refuses_what_one_table_cannot_hold(arguments, sentence):
    paths = [word for path in arguments for word in (["--merge"] if path == "--merge" else ["--report", str(path)])]
    assert sentence in call("bench", *paths, code=2)


def test_a_report_of_several_gpus_has_their_columns():
    output = call("bench", "--report", str(H200 / "distributed.json"))
    row = next(line for line in output.split("b1-") if line.startswith("h32x8-n1048576-d128"))
    assert row.split()[1:] == ["2", "945.1", "481.0", "1.96", "477.4", "3.6", "490.5"], "the columns"
    assert "by symmetric memory" in " ".join(output.split())


def test_the_plan_names_a_tile_that_was_measured():
    output = call("plan", "16,32,1,32768,128", "--gpu", "h200")
    assert "tile × in flight 64 keys × 3 128 keys × 2" in output
    assert "The tile is a setting measured on this GPU" in output
    assert "setting measured" not in call("plan", "16,32,1,32768,128", "--gpu", "a100")


def test_plan_says_when_k_and_v_are_read_more_than_once(tmp_path: Path):
    options = ("--gpu", "h200", "--dtype", "float32", "--num-splits", "4", "--json", str(tmp_path / "plan.json"))
    output = call("plan", "1,32,2,8192,128", *options)
    assert "fill 2 tiles of rows, and each reads K and V" in output
    assert "read by 2 tiles of query rows 33.6 MB 33.6 MB" in output
    numbers = json.loads((tmp_path / "plan.json").read_text())["plans"][0]
    assert numbers["row_tiles"] == 2
    assert numbers["split"]["programs"] == 1 * 2 * 2 * 4
    assert "tiles of rows" not in call("plan", "1,16,2,8192,128", *options)


class TestProfile:
    """What the command does around the measurement, which a GPU test covers."""

    @pytest.fixture(autouse=True)
    def pretend(self, monkeypatch):
        """A GPU on which every step takes a fixed time."""
        gpu = find_gpu("h200")
        monkeypatch.setattr("flash_decoding.hardware.present_gpu", lambda: gpu)
        monkeypatch.setattr(
            "flash_decoding.bench.roofline.measure_ceilings", lambda dtype, method: Ceilings(4580.0, 1, 790.0, dtype)
        )
        monkeypatch.setattr("flash_decoding.bench.profiling.profile_step", self.profile_step)
        monkeypatch.setattr("flash_decoding.bench.profiling.time_step", lambda case, method: Timed(20.0, 0.1, [20.0]))

    @staticmethod
    def profile_step(case: Case, gpu: Gpu, num_splits: int | None, method: Method) -> StepProfile:
        plan = profiling.plan_of(case.shape, case.dtype, gpu, num_splits)
        sizes = profiling.sizes_of(case.shape, case.dtype, plan.tile)
        chunk = Launch("chunk", 0.0, 9.0, 64, 64, 200, 70_000)
        kernels = profiling.summarise([chunk], sizes, plan.num_splits, gpu)
        return StepProfile(case, plan.num_splits, sizes.row_tiles, Timed(10.0, 0.1, [10.0]), kernels, None, None)

    def test_the_article_s_ratio(self, tmp_path: Path):
        output = call("profile", "1,8,2,8192,64", "--no-ncu", "--json", str(tmp_path / "p.json"))
        assert "D 128 ÷ D 64 ≈ 2: 2.00" in output
        assert "tiles of rows" not in output
        (step,) = json.loads((tmp_path / "p.json").read_text())["steps"]
        assert step["checks"]["wide_over_narrow"] == 2.0

    @pytest.mark.parametrize("error", [MemoryError("no room"), ValueError("refused"), RuntimeError("no kernel")])
    def test_a_twin_that_fails_loses_no_result(self, monkeypatch, tmp_path: Path, error: Exception):
        def fail(case, method):
            raise error

        monkeypatch.setattr("flash_decoding.bench.profiling.time_step", fail)
        output = call("profile", "1,8,2,8192,64", "--no-ncu", "--json", str(tmp_path / "p.json"))
        assert f"D 128 ÷ D 64 not measured: {error}" in output
        (step,) = json.loads((tmp_path / "p.json").read_text())["steps"]
        assert step["us"] == 10.0
        assert step["checks"]["wide_over_narrow"] is None

    def test_no_twin_of_an_odd_head_size(self):
        output = call("profile", "1,8,2,8192,136", "--no-ncu")
        assert "D 136 ÷ D 68 not measured: the library has no head size 68" in output

    def test_a_shape_that_is_refused_does_not_end_the_others(self, monkeypatch, tmp_path: Path):
        def refuse_one(case, *rest):
            if case.shape.batch == 3:
                raise ValueError("batch must not be 3")
            return self.profile_step(case, *rest)

        monkeypatch.setattr("flash_decoding.bench.profiling.profile_step", refuse_one)
        output = call("profile", "3,8,2,64,64", "1,8,2,64,64", "--no-ncu", "--json", str(tmp_path / "p.json"))
        assert "b3-h8x2-n64-d64: batch must not be 3" in output
        (step,) = json.loads((tmp_path / "p.json").read_text())["steps"]
        assert step["case"]["name"] == "b1-h8x2-n64-d64"

    def test_several_tiles_of_rows_are_told(self, tmp_path: Path):
        options = ("--no-ncu", "--dtype", "float32", "--num-splits", "2", "--json", str(tmp_path / "p.json"))
        assert "fill 2 tiles of rows, and each reads K and V" in call("profile", "1,32,2,8192,128", *options)
        (step,) = json.loads((tmp_path / "p.json").read_text())["steps"]
        assert step["row_tiles"] == 2
        assert step["kernels"][0]["work"]["bytes_moved"] > 2 * 2 * 2 * 8192 * 128 * 4


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--num-splits", "20000"], "--num-splits must be at most 16384, got 20000"),
        (["--num-splits", "0"], "--num-splits must be at least 1, got 0"),
        *[([f"1,2,2,64,{d}"], f"D must be a multiple of 8 from 16 to 512, got {d}") for d in BAD_D],
    ],
)
def test_profile_refuses_in_one_sentence(arguments: list[str], sentence: str):
    assert sentence in call("profile", *arguments, code=2)


@no_gpu
def test_plan_and_profile_without_a_gpu_say_what_they_do():
    assert call("plan").startswith("No GPU here, so this is for --gpu h200; name another, or --cpu. H200: 132")
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
