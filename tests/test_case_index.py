"""Every public case has a test that carries its number, test_c001_... to test_c067_...."""

import ast
import re
from pathlib import Path

# Cases of options that are not there yet, and why.
PENDING: dict[int, str] = {}


def test_every_case_has_a_test_with_its_number():
    found = set()
    for path in Path(__file__).parent.glob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_c"):
                numbers = re.match(r"test_((?:c\d{3}_)*)", node.name)[1]
                found |= {int(number) for number in re.findall(r"\d{3}", numbers)}
    assert found == set(range(1, 68)) - set(PENDING)
