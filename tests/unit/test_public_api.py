"""What `import offload` offers is what it says, and what the docs name."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import offload

ROOT = Path(__file__).parents[2]
PUBLIC = {
    "Adagrad",
    "Adam",
    "AdamW",
    "BudgetError",
    "ConfigError",
    "CorruptStateError",
    "Lion",
    "ModelError",
    "OffloadError",
    "PlanError",
    "SGD",
    "Session",
    "StorageError",
    "StoreError",
    "__version__",
    "testing",
}
BUILT_IN = {
    "BudgetError": MemoryError,
    "ConfigError": ValueError,
    "CorruptStateError": OSError,
    "ModelError": RuntimeError,
    "PlanError": ValueError,
    "StorageError": OSError,
    "StoreError": RuntimeError,
}


def test_all_is_what_is_promised():
    assert set(offload.__all__) == PUBLIC


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_public_name_can_be_imported(name):
    assert getattr(offload, name) is getattr(offload, name)
    assert name in dir(offload)


def test_an_unknown_name_raises_attribute_error():
    with pytest.raises(AttributeError, match="Sesion"):
        offload.Sesion  # noqa: B018


@pytest.mark.parametrize(("name", "built_in"), sorted(BUILT_IN.items()))
def test_each_error_is_also_of_the_fitting_built_in_class(name, built_in):
    assert issubclass(getattr(offload, name), offload.OffloadError)
    assert issubclass(getattr(offload, name), built_in)


def test_the_docs_name_only_what_exists():
    documents = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    text = "\n".join(path.read_text(encoding="utf-8") for path in documents)

    named = set(re.findall(r"\boffload\.([A-Z]\w+)", text))

    assert named <= PUBLIC


def test_the_version_needs_no_torch():
    code = "import offload, sys; offload.__version__; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
