"""The layering of the package, read from the source: who imports whom."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "aotcache"

LAYERS = (
    {"errors", "types", "envelope", "ownership", "drafts", "passing"},
    {
        "archive",
        "spec",
        "buckets",
        "key",
        "manifest",
        "compat",
        "trust",
        "recall",
        "recall_list",
        "recall_signers",
        "rotation",
        "config",
        "host",
        "lockfile",
        "recorded",
        "torch_private",
    },
    {"graph", "store", "db"},
    {"compile", "runtime", "build", "service"},
    {"integrations", "cli", "api", "migrations"},
)
TORCH = {"graph", "compile", "runtime", "integrations", "host", "torch_private", "flex"}
"""Parts that may import torch at all."""

BUILDER = {"build/drafter.py", "build/worker.py"}
"""What runs in the builder's child process. The parent that starts it needs no torch there."""

FACADE = {"__init__", "__main__", "flex"}
"""Public names that only point into the package; their imports are lazy or one line."""


OUTSIDE = ("api", "migrations")
"""Packages whose folders are beside aotcache/ in the checkout, and in it when installed."""


def modules() -> list[Path]:
    return sorted(
        [*PACKAGE.rglob("*.py"), *(path for name in OUTSIDE for path in (ROOT / name).rglob("*.py"))]
    )


def inside_package(path: Path) -> Path:
    """Where a file lies in the installed package."""
    return path.relative_to(PACKAGE if path.is_relative_to(PACKAGE) else ROOT)


def part(path: Path) -> str:
    """The part of the package a file belongs to: its folder, or its own name."""
    inside = inside_package(path)
    return inside.parts[0] if len(inside.parts) > 1 else inside.stem


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Every module named by an import statement anywhere in the file, with its line."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            assert node.module is not None
            yield node.module, node.lineno
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node.lineno


def imported_parts(path: Path) -> Iterator[tuple[str, int]]:
    for name, line in imports(path):
        steps = name.split(".")
        if steps[0] == "aotcache" and len(steps) > 1:
            yield steps[1], line


def layer(name: str) -> int:
    found = [number for number, names in enumerate(LAYERS) if name in names]
    assert found, f"{name} is in no layer: add it to LAYERS here and to docs/architecture.md"
    return found[0]


def top_level(path: Path) -> Iterator[tuple[str, int]]:
    """Modules imported when the file itself is imported: not inside functions or `if TYPE_CHECKING`."""
    pending: list[ast.AST] = list(ast.parse(path.read_text()).body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "", node.lineno
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending.extend(node.orelse)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            pending.extend(ast.iter_child_nodes(node))


def _is_type_checking_only(path: Path, line: int) -> bool:
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.If) or "TYPE_CHECKING" not in ast.unparse(node.test):
            continue
        if node.body[0].lineno <= line <= (node.body[-1].end_lineno or 0):
            return True
    return False


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(inside_package(path)))
def test_imports_never_point_upward(path: Path) -> None:
    if part(path) in FACADE:
        return
    own = layer(part(path))
    for name, line in imported_parts(path):
        if name in {"__version__", *FACADE} or _is_type_checking_only(path, line):
            continue
        assert layer(name) <= own, f"{path}:{line}: {part(path)} imports {name}, which is above it"


def test_the_worker_half_never_imports_the_builder_half() -> None:
    for path in modules():
        if part(path) not in {"runtime", "graph", "store"}:
            continue
        for name, line in imported_parts(path):
            assert name not in {"compile", "build"}, f"{path}:{line} imports {name}"


def test_compile_is_imported_by_build_alone() -> None:
    for path in modules():
        for name, line in imported_parts(path):
            if name == "compile":
                assert part(path) in {"compile", "build", "cli"}, f"{path}:{line} imports aotcache.compile"


def test_torch_is_imported_only_where_it_belongs() -> None:
    for path in modules():
        if str(inside_package(path)) in BUILDER:
            continue
        for name, line in imports(path):
            if name.split(".")[0] == "torch" and not _is_type_checking_only(path, line):
                assert part(path) in TORCH, f"{path}:{line}: {part(path)} imports {name}"


def test_nothing_pure_loads_torch_when_it_is_imported() -> None:
    for path in modules():
        if part(path) in TORCH - {"host", "torch_private"} or str(inside_package(path)) in BUILDER:
            continue
        for name, line in top_level(path):
            assert name.split(".")[0] != "torch", f"{path}:{line} imports {name} when it is imported"


def test_the_environment_is_read_in_config_alone() -> None:
    # The sandbox makes a scrubbed copy for its child; a fingerprint holds what a drafter's code reads.
    readers = {"config.py", "compile/sandbox.py", "graph/fingerprint.py"}
    for path in modules():
        text = path.read_text()
        if "os.environ" in text or "os.getenv" in text:
            assert str(inside_package(path)) in readers, f"{path} reads the environment"


@pytest.mark.parametrize(
    ("library", "owners"),
    [
        ("sqlalchemy", {"db", "service", "migrations"}),
        ("alembic", {"db", "migrations"}),
        ("fastapi", {"api"}),
        ("starlette", {"api"}),
        ("httpx", {"store"}),
        ("httpcore", {"store"}),
        ("obstore", {"store"}),
        ("cryptography", {"trust"}),
    ],
)
def test_a_library_is_used_where_it_belongs_alone(library: str, owners: set[str]) -> None:
    for path in modules():
        for name, line in imports(path):
            if name.split(".")[0] == library:
                assert part(path) in owners, f"{path}:{line}: {part(path)} imports {name}"


def test_the_wheel_lists_every_package() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    listed = {line.strip(' ",') for line in text.split("packages = [")[1].split("]")[0].splitlines()} - {""}
    found = {
        ".".join(("aotcache", *inside_package(path).parent.parts))
        for path in modules()
        if path.name == "__init__.py"
    }
    assert listed == found


@pytest.mark.parametrize("module", ["aotcache", "aotcache.cli", "aotcache.cli.app"])
def test_importing_it_loads_nothing_heavy(module: str) -> None:
    heavy = "{'torch', 'fastapi', 'sqlalchemy', 'numpy', 'transformers'}"
    code = f"import sys, {module}; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"


def test_no_module_is_longer_than_five_hundred_lines() -> None:
    long = {
        str(path.relative_to(ROOT)): n
        for path in modules()
        if (n := len(path.read_text().splitlines())) > 500
    }
    assert long == {}
