"""The code in README and docs runs, and their links lead somewhere.

A Python block whose first line is `# not run here` is left out; the blocks of a file run in order
in one namespace, in an empty directory.
"""

import re
import shlex
import tomllib
from pathlib import Path

import pytest
import typer

from offload.cli.app import app
from offload.config import build_config

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    path
    for path in (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")))
    if path.is_file()
]
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"^(?:    )?(offload [a-z][^#;\n]*)", re.MULTILINE)
_MOST_COLUMNS = 110
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


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_lines_fit_a_window_but_for_tables(path):
    lines = path.read_text(encoding="utf-8").splitlines()

    long = [line for line in lines if len(line) > _MOST_COLUMNS and not line.startswith("|")]

    assert long == []


def _commands():
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8").replace("\\\n", " ")
        blocks = re.findall(r"^```\w*\n(.*?)^```$|((?:^    .*\n)+)", text, re.MULTILINE | re.DOTALL)
        for block in blocks:
            for command in _COMMAND.findall("".join(block)):
                yield pytest.param(command, id=command[:60])


@pytest.mark.parametrize("text", list(_commands()))
def test_commands_in_the_docs_are_those_that_there_are(text):
    _, *words = shlex.split(text)
    command = typer.main.get_command(app)
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]

    if words != ["--help"]:
        command.make_context("offload", list(words))

    assert all((ROOT / word).exists() for word in words if word.startswith("examples/"))
