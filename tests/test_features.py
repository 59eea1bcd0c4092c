"""docs/features.md is drawn from the tests, and no option of flash_decode() is missing in it."""

import inspect
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
from features import FEATURES, ROOT, backends_of, features_of

from flash_decoding import flash_decode


def test_the_page_is_not_stale():
    command = [sys.executable, str(ROOT / "tests" / "features.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_option_has_a_row():
    words = set(re.findall(r"\w+", " ".join(f"{feature.name} {feature.means}" for feature in FEATURES)))
    options = set(inspect.signature(flash_decode).parameters) - {"q", "k", "v", "backend", "check"}
    assert options - words == set()


def test_features_and_backends_of_a_test(request):
    test = request.node
    assert features_of(test) == set()
    assert backends_of(test) == {"cpu"}
    test.add_marker(pytest.mark.gpu)
    assert backends_of(test) == {"gpu"}
    test.add_marker(pytest.mark.feature("window", "sinks"))
    assert features_of(test) == {"window", "sinks"}
    test.add_marker(pytest.mark.feature("no such feature"))
    with pytest.raises(SystemExit, match="no such feature"):
        features_of(test)


@pytest.mark.parametrize(
    ("name", "feature"),
    [
        ("tests/test_cpu_backend.py::test_each_option_alone[window-0-float32]", "window"),
        ("tests/test_errors.py::test_bad_input_is_refused_by_name[window]", None),
    ],
)
def test_names_tell_the_feature(name, feature):
    test = SimpleNamespace(nodeid=name, iter_markers=lambda _: [])
    assert features_of(test) == ({feature} if feature else set())
