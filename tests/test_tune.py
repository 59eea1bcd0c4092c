"""Tables of measured settings: where they come from, what a plan makes of them, and how `tune` chooses. No GPU."""

from __future__ import annotations

import json
import pickle
import warnings
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from conftest import TARGETS
from helpers import assert_matches
from typer.testing import CliRunner

from flash_decoding import Workspace, tuning
from flash_decoding.bench import tile_sweep
from flash_decoding.bench.tile_sweep import (
    Device,
    Sample,
    compile_jobs,
    key_of,
    make_call,
    make_problems,
    make_targets,
    measure,
    plan_sample,
    plans_of,
    rule_tile,
    write_document,
)
from flash_decoding.bench.timing import Method, Timed
from flash_decoding.cli import tune as command
from flash_decoding.cli.commands import app
from flash_decoding.split_plan import KINDS, Key, Setting, choose_plan
from flash_decoding.tuning import FOLDER_VARIABLE, file_name, find_table, user_folder

H200 = Device(132, 232448)
RTX4060 = Device(24, 99 * 1024)
GPU = "NVIDIA Test 9000"
KEY = Key("dense", 64, 8, 96)
SETTING = Setting(block_n=64, num_warps=1, buffers=2, programs=4)
# The settings are those of the GPU's kernels.
TRITON = [one for one in TARGETS if one.values[0].backend == "triton"]
RUN = {"environment": {"gpu": GPU}, "method": {}}


def document(*keys: tuple[Key, Setting | None], gpu: str = GPU, schema: int = tuning.SCHEMA) -> dict:
    entries = [
        {**key._asdict(), "run": 0, "setting": None if setting is None else asdict(setting), "gain": 1.0, "cases": []}
        for key, setting in keys
    ]
    return {"schema": schema, "gpu": gpu, "runs": [RUN], "keys": entries}


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """(the package's folder, the user's), both empty; nothing is remembered."""
    packaged, own = tmp_path / "package", tmp_path / "own"
    packaged.mkdir()
    own.mkdir()
    monkeypatch.setattr(tuning, "PACKAGED", packaged)
    monkeypatch.setenv(FOLDER_VARIABLE, str(own))
    find_table.cache_clear()
    yield packaged, own
    find_table.cache_clear()


def put(folder: Path, content: object) -> Path:
    file = folder / file_name(GPU)
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return file


class TestFiles:
    def test_the_name_of_a_file(self):
        assert file_name("NVIDIA H200") == "nvidia-h200.json"
        assert file_name("NVIDIA A100-SXM4-80GB") == "nvidia-a100-sxm4-80gb.json"

    def test_the_folder_follows_xdg(self, monkeypatch, tmp_path):
        monkeypatch.delenv(FOLDER_VARIABLE)
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        default = tmp_path / ".cache" / "flash-decoding" / "tuned"
        assert user_folder() == default
        for ignored in ("", "relative/path"):
            monkeypatch.setenv("XDG_CACHE_HOME", ignored)
            assert user_folder() == default
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        assert user_folder() == tmp_path / "cache" / "flash-decoding" / "tuned"
        monkeypatch.setenv(FOLDER_VARIABLE, "~/mine")
        assert user_folder() == tmp_path / "mine"

    def test_without_a_home_there_is_no_folder(self, monkeypatch):
        def no_home():
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.delenv(FOLDER_VARIABLE)
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setattr(Path, "home", no_home)
        assert user_folder() is None

    def test_no_file_is_no_table_and_no_warning(self, folders):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert find_table(GPU) is None
        assert "rule" in tuning.describe_table(GPU)

    def test_the_user_s_file_comes_first_key_by_key(self, folders):
        packaged, own = folders
        other, third = Key("paged", 128, 16, 24), Key("ragged", 64, 8, 96)
        put(packaged, document((KEY, SETTING), (other, SETTING), (third, SETTING)))
        mine = Setting(128, 4, 2, 2)
        put(own, document((KEY, mine), (other, None)))
        table = find_table(GPU)
        # What the user's file measured without finding anything faster follows the rule again.
        assert dict(table.settings) == {KEY: mine, third: SETTING}
        assert str(packaged) in tuning.describe_table(GPU)
        assert str(own) in tuning.describe_table(GPU)

    def test_a_file_is_read_once(self, folders):
        file = put(folders[1], document((KEY, SETTING)))
        table = find_table(GPU)
        file.write_text("gone")
        assert find_table(GPU) is table

    @pytest.mark.parametrize(
        ("content", "reason"),
        [
            ("", "Expecting value"),
            ("[]", "schema"),
            ('{"schema": 1', "Expecting"),
            (document((KEY, SETTING), schema=0), "schema must be 1, got 0"),
            (document((KEY, SETTING), gpu="NVIDIA Other"), "gpu must be 'NVIDIA Test 9000', got 'NVIDIA Other'"),
            (document() | {"keys": None}, "keys"),
            (document() | {"keys": [1]}, "a key must be an object"),
            (document((KEY._replace(kind="sparse"), SETTING)), "kind"),
            (document((KEY._replace(from_mb=7), SETTING)), "from_mb"),
            (document((KEY._replace(width="64"), SETTING)), "width"),
            (document((KEY, Setting(48, 1, 2, 4))), "block_n must be a power of two, got 48"),
            (document((KEY, Setting(64, 0, 2, 4))), "num_warps"),
            (document((KEY, Setting(64, 1, 2, 1000))), "programs"),
            (document((KEY, Setting(64, 1, True, 4))), "buffers"),
            (document() | {"keys": [KEY._asdict() | {"setting": "fast"}]}, "block_n"),
        ],
        ids=str,
    )
    def test_a_file_that_cannot_be_used_is_named_once_and_ignored(self, folders, content, reason):
        packaged, own = folders
        put(packaged, document((KEY, SETTING)))
        file = put(own, content)
        with pytest.warns(RuntimeWarning, match="tune` writes it anew") as caught:
            table = find_table(GPU)
        assert len(caught) == 1
        assert str(file) in str(caught[0].message)
        assert reason in str(caught[0].message)
        assert dict(table.settings) == {KEY: SETTING}, "the package's own still counts"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            find_table(GPU)

    def test_bytes_that_are_no_text(self, folders):
        (folders[1] / file_name(GPU)).write_bytes(b"\xff\xfe\x00")
        with pytest.warns(RuntimeWarning, match="not used"):
            assert find_table(GPU) is None

    def test_the_packaged_files_are_usable_and_beat_the_rule(self):
        for file in sorted((Path(tuning.__file__).parent / "data" / "tuned").glob("*.json")):
            content = json.loads(file.read_text())
            keys = tuning.parse(content, content["gpu"])
            assert file.name == file_name(content["gpu"])
            for entry in content["keys"]:
                assert (entry["setting"] is None) == (entry["gain"] == 1.0)
                assert entry["gain"] == 1.0 or entry["gain"] >= tile_sweep.LEAST_GAIN
                assert entry["cases"], "what was measured is kept"
            assert len(keys) == len(content["keys"]), "every key once"


class Clock:
    """A timer without a GPU: times(sample, plan) in microseconds, None for a plan that does not run."""

    def __init__(self, times):
        self.times = times
        self.compared = []

    def screen(self, sample, plans):
        return [self.times(sample, plan) for plan in plans]

    def compare(self, sample, plans):
        self.compared.append((sample, list(plans)))
        return [[self.times(sample, plan) * factor for factor in (1.0, 0.99, 1.5)] for plan in plans]


def target_of(key: Key = KEY, device: Device = H200) -> tile_sweep.Target:
    (target,) = [target for target in make_targets(device) if target.key == key]
    return target


def time_by_tile(fast: tuple[int, int, int], factor: float, only: int | None = None):
    """100 us, and factor times that for one tile (on one sample, if `only` names its index)."""

    def times(sample, plan):
        tile = plan.tile
        chosen = (tile.block_n, tile.num_warps, tile.buffers) == fast
        return 100.0 * (factor if chosen and (only is None or sample == target_of().samples[only]) else 1.0)

    return times


class TestChoice:
    def test_the_fastest_enters_with_its_gain(self):
        measured = measure(target_of(), H200, Clock(time_by_tile((64, 1, 2), 0.97)))
        setting = measured.setting
        assert (setting.block_n, setting.num_warps, setting.buffers) == (64, 1, 2)
        assert measured.gain == pytest.approx(1 / 0.97)
        assert (measured.rule.block_n, measured.rule.num_warps) == (32, 1)

    def test_a_gain_of_a_percent_is_not_enough(self):
        measured = measure(target_of(), H200, Clock(time_by_tile((64, 1, 2), 0.991)))
        assert (measured.setting, measured.gain) == (None, 1.0)

    def test_what_is_slower_somewhere_does_not_enter(self):
        def times(sample, plan):
            if plan.tile.block_n == 32:
                return 100.0
            return 120.0 if sample.batch == 8 else 70.0

        assert measure(target_of(), H200, Clock(times)).setting is None

    def test_a_gain_on_one_sample_is_shared_over_all(self):
        measured = measure(target_of(), H200, Clock(time_by_tile((128, 2, 2), 0.9, only=0)))
        assert measured.gain == pytest.approx((1 / 0.9) ** (1 / 3))

    def test_program_counts_are_candidates(self):
        """More programs of the rule's own tile: more splits where there are few sequences."""
        rule = plan_sample(target_of().samples[0], H200)
        own = rule.tile

        def times(sample, plan):
            return 100.0 - plan.num_splits / 2 if plan.tile == own else None

        measured = measure(target_of(), H200, Clock(times))
        assert measured.setting.programs > 3
        chosen = plan_sample(target_of().samples[0], H200, measured.setting)
        assert chosen.num_splits > rule.num_splits

    def test_plans_that_do_not_run_are_left_out(self):
        def times(sample, plan):
            return None if plan.tile.block_n == 128 else 90.0 if plan.tile.num_stages == 4 else 100.0

        clock = Clock(times)
        measured = measure(target_of(), H200, clock)
        assert measured.setting is None or measured.setting.block_n != 128
        assert all(plan.tile.block_n != 128 for _, plans in clock.compared for plan in plans)
        lost = [row for case in measured.cases for row in case["screened"] if row[-1] is None]
        assert lost, "the file says what did not run"

    def test_a_sample_that_does_not_fit_does_not_count(self):
        def times(sample, plan):
            if sample.batch == 8:
                return None
            return 90.0 if plan.tile.block_n == 64 else 100.0

        assert measure(target_of(), H200, Clock(times)).gain == pytest.approx(1 / 0.9)
        nothing = measure(target_of(), H200, Clock(lambda sample, plan: None))
        assert (nothing.setting, nothing.gain) == (None, 1.0)

    def test_only_finalists_are_compared_each_beside_the_rule(self):
        clock = Clock(lambda sample, plan: 100.0 + plan.tile.block_n + plan.num_splits)
        measure(target_of(), H200, clock)
        assert [sample for sample, _ in clock.compared] == list(target_of().samples)
        for sample, plans in clock.compared:
            assert plans[0] == plan_sample(sample, H200)
            assert len(plans) <= 1 + tile_sweep.FINALISTS


class TestTargets:
    @pytest.mark.parametrize("device", [H200, RTX4060], ids=["h200", "rtx4060"])
    def test_samples_belong_to_their_key(self, device):
        """And so does the plan that is timed: the library would make the same with this setting in its table."""
        for target in make_targets(device):
            for sample in target.samples:
                assert key_of(sample, device) == target.key
                for setting in target.candidates:
                    tile = plan_sample(sample, device, setting).tile
                    assert (tile.block_n, tile.num_warps) == (setting.block_n, setting.num_warps)
                    assert tile.buffers == setting.buffers, "what does not fit is no candidate"
                    pipeline = tile.buffers * tile.block_n * 2 * sample.head_dim * tile_sweep.ELEMENT_SIZE
                    assert pipeline < device.shared_memory

    def test_every_key_has_candidates_besides_the_rule(self):
        targets = make_targets(H200)
        assert len({target.key for target in targets}) == len(targets)
        for target in targets:
            rule, others = plans_of(target, H200)
            assert others
            assert rule not in others
            tile = rule_tile(target.samples[0], H200)
            own = (tile.block_n, tile.num_warps, tile.buffers)
            assert own in {(one.block_n, one.num_warps, one.buffers) for one in target.candidates}

    def test_filters(self):
        everything = make_targets(H200)
        assert {target.key.kind for target in everything} == set(KINDS)
        paged = make_targets(H200, kinds=["paged"], widths=[64])
        assert paged
        assert {target.key[:2] for target in paged} == {("paged", 64)}
        quick = make_targets(H200, quick=True)
        assert len(quick) < len(everything) / 2
        assert {target.key.from_mb for target in quick} == {24, 96}

    def test_lengths_fill_their_spread(self):
        sample = Sample(64, 32, 8, 4096, 128, page_size=16, spread=64)
        lens = sample.kv_lens
        assert max(lens) <= 4096 < 1.05 * max(lens)
        assert 64 <= min(lens) < 70
        assert sample.read_bytes == sum(lens) * 8 * 2 * 128 * 2
        assert sample.read_bytes <= sample.cache_bytes < 1.1 * sample.read_bytes
        assert Sample(2, 8, 8, 100, 64).kv_lens == [100, 100]

    def test_every_kernel_is_compiled_once_and_the_jobs_travel(self):
        pytest.importorskip("triton")
        targets = make_targets(H200)
        jobs = compile_jobs(targets, H200)
        assert pickle.loads(pickle.dumps(jobs)) == jobs
        chunks = {
            (s.heads_q // s.heads_kv, s.q_len, s.page_size, s.spread is None, plan.tile, plan.at_once is None,
             plan.num_splits > 1)
            for job in jobs for s, plan in job[:1]
        }  # fmt: skip
        assert len(chunks) == len(jobs)
        wanted = {plan.tile for target in targets for plans in plans_of(target, H200)[1] for plan in plans}
        assert wanted <= {chunk[4] for chunk in chunks}
        assert all(s.cache_bytes <= 1 << 28 for job in jobs for s, _ in job), "many processes share the GPU"


@pytest.mark.interpreter
@pytest.mark.parametrize("sample", [
    Sample(2, 4, 2, 40, 64),
    Sample(1, 4, 2, 40, 64, page_size=16),
    Sample(3, 4, 2, 40, 64, page_size=16, spread=8),
    Sample(3, 4, 2, 160, 64, spread=8),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("setting", [None, Setting(16, 2, 2, 3)], ids=["rule", "setting"])
@pytest.mark.parametrize("target", TRITON)
def test_timed_calls_compute_attention(target, sample, setting):
    """The inputs that are timed are attention, and a setting changes nothing but the time."""
    size = sample.cache_bytes // tile_sweep.ELEMENT_SIZE
    caches = [torch.randn(size, dtype=torch.float16, device=target.device) for _ in range(2)]
    for problem in make_problems(sample, caches):
        plan = plan_sample(sample, Device(6, RTX4060.shared_memory), setting)
        if setting is not None:
            assert plan.tile.block_n == 16
            assert (plan.at_once is not None) == (sample.kv_len == 160), "long enough to be cut into pieces"
        out = make_call(problem, plan, Workspace(), torch.empty_like(problem.q))()
        options = {} if problem.kv_lens is None else {"kv_lens": problem.kv_lens}
        if problem.block_table is not None:
            options["block_table"] = problem.block_table
        assert_matches(out, None, problem.q, problem.k, problem.v, atol=2e-3, **options)


@pytest.mark.interpreter
@pytest.mark.parametrize("target", TRITON)
class TestTimer:
    """What the timer does around the clock, with the clock of a GPU taken away."""

    SAMPLES = (Sample(2, 4, 2, 64, 64), Sample(2, 4, 2, 64, 64, page_size=16, spread=2))

    @pytest.fixture
    def timer(self, target, monkeypatch):
        monkeypatch.setattr(tile_sweep, "DTYPE", "float16")
        monkeypatch.setattr(tile_sweep, "capture", lambda calls: (calls, [call() for call in calls]))
        monkeypatch.setattr(tile_sweep, "time_graph", lambda graph, calls, *_, repeats: Timed(float(calls), 0.0, []))
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 20, 1 << 20))
        key = Key("dense", 64, 8, 0)
        method = Method(rotated_bytes=200_000, graph_repeats=3)
        return tile_sweep.GpuTimer([tile_sweep.Target(key, self.SAMPLES, ())], method, target.device)

    def plans(self, sample):
        device = Device(6, RTX4060.shared_memory)
        return [
            plan_sample(sample, device, setting)
            for setting in (Setting(64, 2, 2, 1), Setting(16, 2, 2, 2), Setting(32, 4, 2, 1))
        ]

    def test_copies_are_enough_for_a_cold_cache(self, timer):
        for sample in self.SAMPLES:
            copies = -(-200_000 // sample.read_bytes)
            assert copies > 2
            assert timer.screen(sample, self.plans(sample)) == [copies] * 3
            assert timer.compare(sample, self.plans(sample)[:2]) == [[copies] * 3] * 2
        assert timer.faults == []

    def test_what_does_not_fit_is_named(self, timer):
        large = Sample(2, 4, 2, 4096, 64)
        assert timer.screen(large, self.plans(large)) == [None] * 3
        assert timer.faults == ["b2-h4x2-n4096-d64 does not fit into the free memory of the GPU"]

    def test_what_is_wrong_or_does_not_run_has_no_time(self, timer, monkeypatch):
        honest = tile_sweep.make_call

        def make(problem, plan, workspace, out):
            call = honest(problem, plan, workspace, out)

            def fail():
                raise RuntimeError("out of resource: shared memory, Required: 300000")

            return {16: lambda: call().add_(0.1), 32: fail}.get(plan.tile.block_n, call)

        monkeypatch.setattr(tile_sweep, "make_call", make)
        sample = self.SAMPLES[0]
        first, wrong, too_large = timer.screen(sample, self.plans(sample))
        assert first > 0
        assert (wrong, too_large) == (None, None)
        assert len(timer.faults) == 2
        assert "the largest error is" in timer.faults[0]
        assert "out of resource" in timer.faults[1]


def measured_of(key: Key, setting: Setting | None = SETTING) -> tile_sweep.Measured:
    target = tile_sweep.Target(key, (), ())
    rule = rule_tile(target_of().samples[0], H200)
    case = {"batch": 1, "screened": [[32, 1, 3, 24, None, 68.5]], "compared": []}
    return tile_sweep.Measured(target, rule, setting, 1.03 if setting else 1.0, [case])


class TestDocument:
    def test_what_is_written_is_read(self, folders):
        own = folders[1]
        measured = measure(target_of(), H200, Clock(time_by_tile((64, 1, 2), 0.97)))
        write_document(own / file_name(GPU), GPU, RUN, [measured])
        assert dict(find_table(GPU).settings) == {KEY: measured.setting}
        written = json.loads((own / file_name(GPU)).read_text())
        assert written["runs"] == [RUN]
        (entry,) = written["keys"]
        assert entry["gain"] == pytest.approx(1.0309, abs=1e-4)
        assert [case["batch"] for case in entry["cases"]] == [1, 2, 8]
        for case in entry["cases"]:
            assert case["rule"][:3] == [32, 1, 3]
            assert len(case["screened"]) > len(case["compared"]) > 1
            assert all(len(times) == 3 for *_, times in case["compared"]), "every timing is kept"

    def test_other_keys_of_the_file_stay_with_their_run(self, tmp_path):
        path = tmp_path / "deep" / "x.json"
        other, later = Key("paged", 64, 8, 24), {"environment": {"date": "later"}}
        write_document(path, GPU, RUN, [measured_of(KEY), measured_of(other)])
        write_document(path, GPU, later, [measured_of(KEY, None)])
        written = json.loads(path.read_text())
        assert tuning.parse(written, GPU) == {KEY: None, other: SETTING}
        runs = {entry["kind"]: written["runs"][entry["run"]] for entry in written["keys"]}
        assert runs == {"dense": later, "paged": RUN}
        assert list(path.parent.iterdir()) == [path], "no temporary file is left"
        # A run of which nothing is left goes.
        write_document(path, GPU, later, [measured_of(other)])
        assert json.loads(path.read_text())["runs"] == [later]

    @pytest.mark.parametrize("old", ["", "{}", json.dumps(document((KEY, SETTING), gpu="NVIDIA Other"))])
    def test_a_file_that_cannot_be_used_is_written_over(self, tmp_path, old):
        path = tmp_path / "x.json"
        path.write_text(old)
        write_document(path, GPU, RUN, [measured_of(Key("paged", 64, 8, 24))])
        assert list(tuning.parse(json.loads(path.read_text()), GPU)) == [Key("paged", 64, 8, 24)]


def run(*arguments: object):
    return CliRunner().invoke(app, ["tune", *map(str, arguments)])


class TestCommand:
    def test_a_dry_run_lists_and_measures_nothing(self, folders):
        result = run("--dry-run", "--kind", "paged", "--width", 64)
        assert result.exit_code == 0, result.stderr
        assert "b1-h32x8-n131072-d64-page16" in result.stdout
        assert "4 keys" in result.stdout
        assert not list(folders[1].iterdir())

    @pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
    def test_without_a_gpu_it_refuses(self):
        result = run()
        assert result.exit_code == 2
        assert result.stderr.strip() == (
            "flash-decoding: tune needs a CUDA device, and torch finds none; --dry-run shows what would be measured"
        )

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["--kind", "sparse"], "--kind must be one of dense, paged, ragged, ragged-paged, got 'sparse'"),
            (["--width", "80"], "--width must be one of 64, 128, 256, got 80"),
            (["--kind", "paged", "--width", "256", "--dry-run"], "must leave something to measure"),
            (["--output", "."], "--output must be a file that can be written"),
        ],
    )
    def test_refusals(self, arguments, words):
        result = run(*arguments)
        assert result.exit_code == 2
        assert words in result.stderr

    @pytest.fixture
    def pretend(self, monkeypatch, folders):
        """A GPU on which one tile is 3 % faster than the others."""
        timer = Clock(time_by_tile((64, 1, 2), 0.97))
        timer.faults = ["a sample does not fit"]
        monkeypatch.setattr(command, "_find_device", lambda dry_run: (GPU, H200))
        monkeypatch.setattr(tile_sweep, "GpuTimer", lambda targets, method: timer)
        monkeypatch.setattr(tile_sweep, "count_compilers", lambda jobs: 3)
        monkeypatch.setattr(tile_sweep, "compile_ahead", lambda jobs, workers, done: [done() for _ in jobs])
        return folders[1] / file_name(GPU)

    def test_what_won_is_shown_and_in_use_from_then_on(self, pretend):
        result = run("--kind", "dense", "--width", 64)
        assert result.exit_code == 0, result.stderr
        (row,) = [" ".join(line.split()) for line in result.stdout.splitlines() if "≥ 96 MB" in line]
        assert row == "dense ≥ 96 MB, D 64, 8 rows 32, 1, 3 64, 1, 2; 2 3.1%"
        assert "a sample does not fit" in result.stdout
        table = find_table(GPU)
        assert table.settings[KEY].block_n == 64
        sizes = dict(batch=2, heads_kv=8, group=1, q_len=1, kv_len=65536, head_dim=64, value_dim=64, element_size=2)
        assert choose_plan(**sizes, **asdict(H200), table=table).tile.block_n == 64
        environment = json.loads(pretend.read_text())["runs"][0]["environment"]
        assert {"date", "torch", "flash-decoding", "triton"} <= environment.keys()

    def test_output_goes_where_it_is_told(self, pretend, tmp_path):
        file = tmp_path / "here" / "mine.json"
        assert run("--kind", "dense", "--width", 64, "--output", file).exit_code == 0
        assert tuning.parse(json.loads(file.read_text()), GPU)[KEY].block_n == 64
        assert not pretend.exists()

    def test_a_disk_error_loses_no_result(self, pretend, monkeypatch):
        def full(*arguments):
            raise OSError(28, "No space left on device", "x.json")

        monkeypatch.setattr(tile_sweep, "write_document", full)
        result = run("--kind", "dense", "--width", 64)
        assert result.exit_code == 2
        assert "No space left on device" in result.stderr
        assert "3.1%" in result.stdout


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu(tmp_path):
    """One key, from compiling to the file."""
    file = tmp_path / "x.json"
    result = run("--kind", "dense", "--width", 64, "--quick", "--output", file)
    assert result.exit_code == 0, result.stdout + result.stderr
    content = json.loads(file.read_text())
    keys = tuning.parse(content, torch.cuda.get_device_name())
    assert [key[:3] for key in keys] == [("dense", 64, 8)] * 2
    for entry in content["keys"]:
        for case in entry["cases"]:
            assert all(row[-1] is not None and row[-1] > 0 for row in case["screened"])
