"""The code in README and docs runs, and their links lead somewhere.

A Python block whose first line is `# not run here` is left out; the blocks of a file run in order
in one namespace, in an empty directory.
"""

import re
import tomllib
from pathlib import Path

import pytest

from offload.config import build_config

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    path
    for path in (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")))
    if path.is_file()
]
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)#\s]+)(#[^)]*)?\)")


def _blocks(path, language):
    text = path.read_text(encoding="utf-8")
    found = [block for name, block in _BLOCK.findall(text) if name == language]
    return [block for block in found if not block.startswith("# not run here")]


def _with(language):
    return [
        pytest.param(path, id=str(path.relative_to(ROOT)))
        for path in DOCUMENTS
        if _blocks(path, language)
    ]


@pytest.mark.parametrize("path", _with("python"))
def test_python_in_the_docs_runs(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "docs"}

    for block in _blocks(path, "python"):
        exec(compile(block, str(path), "exec"), namespace)


@pytest.mark.parametrize("path", _with("toml"))
def test_toml_in_the_docs_is_a_valid_configuration(path):
    for block in _blocks(path, "toml"):
        build_config(tomllib.loads(block), overrides={"tiers.host.memory": "1GiB"})


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_between_files_lead_somewhere(path):
    targets = [target for target, _ in _LINK.findall(path.read_text(encoding="utf-8"))]

    missing = [
        target for target in targets if "://" not in target and not (path.parent / target).exists()
    ]

    assert missing == []


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.toml")), ids=lambda p: p.name)
def test_every_example_configuration_loads(path):
    build_config(tomllib.loads(path.read_text(encoding="utf-8")))
