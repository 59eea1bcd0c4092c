"""Who imports whom, and what importing the package costs."""

import ast
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "flash_decoding"


def imports(path):
    """Modules of ours that a file imports, at any depth of nesting."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{name.name}" for name in node.names}
    return {name for name in found if name.startswith("flash_decoding")}


def layer(path):
    return path.relative_to(PACKAGE).as_posix()


def test_backends_do_not_import_each_other_nor_anything_above():
    for name, other in (("triton", "cpu"), ("cpu", "triton")):
        files = sorted((PACKAGE / "backends" / name).glob("*.py"))
        assert files, f"backend {name} is there"
        for path in files:
            above = ("api", "op", "cli", "integrations", "bench", "reference", "merge", f"backends.{other}")
            for module in above:
                assert f"flash_decoding.{module}" not in imports(path), f"{layer(path)} imports {module}"


def test_nothing_in_the_core_imports_its_users():
    for path in PACKAGE.glob("*.py"):
        if path.name in ("__main__.py", "__init__.py"):
            continue
        for module in imports(path):
            for user in ("cli", "integrations", "bench"):
                assert not module.startswith(f"flash_decoding.{user}"), f"{layer(path)} imports {module}"


def test_nothing_optimised_imports_the_reference():
    allowed = ("__init__.py", "cli/", "bench/")
    for path in PACKAGE.rglob("*.py"):
        if "flash_decoding.reference" in imports(path) or "flash_decoding.reference.reference" in imports(path):
            assert layer(path).startswith(allowed), f"{layer(path)} imports the reference"


def test_the_planner_knows_no_torch():
    source = (PACKAGE / "split_plan.py").read_text()
    assert "import torch" not in source
    assert "import triton" not in source


def test_importing_costs_little_more_than_torch():
    program = """if True:
        import time
        start = time.perf_counter(); import torch; torch_s = time.perf_counter() - start
        start = time.perf_counter(); import flash_decoding; print(time.perf_counter() - start)
    """
    runs = [float(subprocess.check_output([sys.executable, "-c", program])) for _ in range(3)]
    assert min(runs) < 0.3
