"""The import arrows: errors <- dialects <- {frontend, passes}; runtime stands alone."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BASE = {"errors", "config", "guard", "reproducer"}
ALLOWED = {
    "errors": set(),
    "config": set(),
    "guard": set(),
    "reproducer": BASE,
    "dialects": BASE | {"dialects"},
    "frontend": BASE | {"dialects", "passes", "frontend"},
    "passes": BASE | {"dialects", "passes"},
    "runtime": BASE | {"runtime"},
}
NOT_IN_RUNTIME = {"torch", "torch_mlir"}


def sources(owner: str) -> list[Path]:
    folder = ROOT / owner
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [ROOT / f"{owner}.py"]


def imported(path: Path) -> set[str]:
    """Dotted names of the modules that a file imports, relative ones made absolute."""
    package = ["flambeau", *path.relative_to(ROOT).parts[:-1]]
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names |= {f"{base}.{alias.name}" for alias in node.names}
    return names


def siblings(path: Path) -> set[str]:
    """The files and folders of the package that a file imports from."""
    dotted = [name.split(".") for name in imported(path)]
    return {parts[1] for parts in dotted if parts[0] == "flambeau" and len(parts) > 1}


@pytest.mark.parametrize("owner", ALLOWED)
def test_imports_follow_the_arrows(owner):
    found = {path: siblings(path) - ALLOWED[owner] for path in sources(owner)}
    assert {str(path.relative_to(ROOT)): names for path, names in found.items() if names} == {}


def test_every_folder_has_its_arrow():
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert folders - set(ALLOWED) <= {"tools", "tests"}


def test_runtime_imports_neither_torch_nor_its_mlir():
    for path in sources("runtime"):
        assert {name.split(".")[0] for name in imported(path)}.isdisjoint(NOT_IN_RUNTIME), path


@pytest.mark.parametrize(
    "module",
    ["flambeau", "flambeau.runtime.session", "flambeau.runtime.compiler", "flambeau.guard"],
)
def test_importing_loads_no_torch(module):
    code = f"import sys, {module}; print(sorted({{'torch', 'torch_mlir'}} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_public_names_load():
    import flambeau

    for name in flambeau.__all__:
        assert getattr(flambeau, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        flambeau.no_such_name  # noqa: B018


def test_every_error_is_a_flambeau_error():
    from flambeau import errors

    classes = [c for c in vars(errors).values() if isinstance(c, type)]
    raised = [c for c in classes if issubclass(c, Exception) and not issubclass(c, Warning)]
    assert all(issubclass(c, errors.FlambeauError) for c in raised)
