"""What the documentation shows is run."""

import doctest
import inspect
import re
from pathlib import Path

import pytest
import torch

import flash_decoding

ROOT = Path(__file__).parents[1]


def test_the_readme_examples_run():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert len(blocks) == 3, "the last needs a model and is run in test_transformers.py"
    for block in blocks[:2]:
        exec(block, {})


@pytest.mark.parametrize("name", [name for name in flash_decoding.__all__ if name != "__version__"])
def test_docstring_examples_run(name):
    thing = getattr(flash_decoding, name)
    tests = doctest.DocTestFinder(recurse=False).find(thing, name, globs={"torch": torch, **vars(flash_decoding)})
    assert sum(len(test.examples) for test in tests) > 0, f"{name} shows an example"
    for test in tests:
        assert doctest.DocTestRunner().run(test).failed == 0


@pytest.mark.parametrize("name", [name for name in flash_decoding.__all__ if name != "__version__"])
def test_every_argument_is_documented(name):
    thing = getattr(flash_decoding, name)
    text = inspect.getdoc(thing)
    for parameter in inspect.signature(thing).parameters:
        if "Args: as for flash_decode" in text or "Args: those of flash_decode" in text:
            assert parameter in inspect.signature(flash_decoding.flash_decode).parameters
        else:
            assert re.search(rf"\b{parameter}\b", text), f"{name} documents {parameter}"


def test_links_in_the_documentation_lead_somewhere():
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name} links to {target}"
