"""The repository as house tests look at it: files that git knows, parsed once."""

from __future__ import annotations

import ast
import functools
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "kvshuttle"
PURE_FLOORS = ("handoff", "policy", "blocks")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """One Python file. ``name``: dotted for the package's own modules, else the path."""

    path: Path
    text: str
    tree: ast.Module

    @property
    def where(self) -> str:
        """The path from the repository's root."""
        return str(self.path.relative_to(ROOT))

    @property
    def name(self) -> str:
        """The dotted name of a module of the package."""
        parts = self.path.relative_to(PACKAGE.parent).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @functools.cached_property
    def functions(self) -> list[tuple[str, Function]]:
        """Every function with its qualified name, methods and inner functions included."""
        return _functions(self.tree, "")


@functools.cache
def tracked_files() -> tuple[Path, ...]:
    """What belongs to the project: files that git tracks or would track."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    names = sorted({name for name in listed.stdout.split("\0") if name})
    return tuple(path for name in names if (path := ROOT / name).is_file())


@functools.cache
def text_of(path: Path) -> str:
    """A tracked file as text."""
    return path.read_text(encoding="utf-8")


@functools.cache
def modules(folder: str) -> tuple[Module, ...]:
    """Every Python file under a folder of the repository (``src``, ``tests``, …)."""
    found = [path for path in tracked_files() if path.suffix == ".py" and path.is_relative_to(ROOT / folder)]
    return tuple(Module(path, text_of(path), ast.parse(text_of(path))) for path in found)


def listed(findings: list[str]) -> str:
    """Findings as an assertion's message, one a line."""
    return "\n" + "\n".join(findings)


def imported_names(module: Module) -> set[str]:
    """Dotted names that a module imports, at its top or inside functions; ``from a import b`` gives a and a.b."""
    names: set[str] = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def _functions(node: ast.AST, prefix: str) -> list[tuple[str, Function]]:
    found: list[tuple[str, Function]] = []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function):
            found.append((prefix + child.name, child))
        inner = f"{prefix}{child.name}." if isinstance(child, Function | ast.ClassDef) else prefix
        found.extend(_functions(child, inner))
    return found
