"""The import contracts hold, and the pure packages load no torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PURE = ("offload", "offload.config", "offload.policy", "offload.layout", "offload.plan")


def test_a_module_imports_only_from_lower_layers():
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache", "--no-logo"]

    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("module", [*PURE, "offload.policies.order", "offload.cli"])
def test_a_pure_module_loads_no_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"

    result = subprocess.run([sys.executable, "-c", code], check=False)

    assert result.returncode == 0


def test_nobody_imports_a_policy_statically():
    sources = sorted((ROOT / "offload").rglob("*.py"))

    importers = [path for path in sources if _imports(path, "offload.policies")]

    assert importers == []


def _imports(path, package):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        if any(name == package or name.startswith(f"{package}.") for name in names):
            return True
    return False
