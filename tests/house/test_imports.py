"""Imports go down only, and the pure floors stay pure. ``pyproject.toml`` holds the contracts; here is the rest."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from importlinter.cli import EXIT_STATUS_SUCCESS, lint_imports

from support.source_tree import PACKAGE, PURE_FLOORS, ROOT, Module, imported_names, listed, modules

if TYPE_CHECKING:
    import pytest

PURE_STANDARD_LIBRARY = frozenset(
    {
        "__future__",
        "array",
        "collections",
        "collections.abc",
        "dataclasses",
        "enum",
        "functools",
        "hashlib",
        "heapq",
        "itertools",
        "math",
        "typing",
    }
)
"""What the pure floors may use of Python itself: nothing that reads a clock, draws at random, or does IO."""

BUILTINS_WITH_EFFECTS = frozenset({"__import__", "breakpoint", "compile", "eval", "exec", "input", "open", "print"})

ENTRY_POINTS = {
    "kvshuttle": "the package itself: its version",
    "kvshuttle.__main__": "python -m kvshuttle",
    "kvshuttle.cli": "the console script, and what __main__ runs",
    "kvshuttle.connector.connector": "named by kv_connector_module_path",
    "kvshuttle.emulate.plugin": "vLLM's entry point vllm.general_plugins",
    "kvshuttle.emulate.model": "named to vLLM by the plugin",
    "kvshuttle.emulate.worker": "named by --worker-cls",
    "kvshuttle.emulate.traced_worker": "named by --worker-cls",
    "kvshuttle.connector.quiet_waits": "vLLM's plugin entry point, see pyproject.toml",
    "kvshuttle.transport.memory": "the verified fake; shipped for the contract suite and the simulator",
    "kvshuttle.transport.faulty": "the seeded fault wrapper; shipped for the contract suite and the simulator",
}
"""Modules that nothing in the package needs to import, and who uses them instead."""


def test_the_import_contracts_hold(capsys: pytest.CaptureFixture[str]) -> None:
    status = lint_imports(config_filename=str(ROOT / "pyproject.toml"), no_cache=True)
    assert status == EXIT_STATUS_SUCCESS, capsys.readouterr().out


def test_the_pure_floors_import_nothing_with_effects() -> None:
    allowed = PURE_STANDARD_LIBRARY | {"msgspec"}
    strange = [
        f"{module.where}: imports {name}"
        for module in pure_modules()
        for name in sorted(_directly_imported(module))
        if not name.startswith("kvshuttle") and name not in allowed
    ]
    assert not strange, listed(strange)


def test_the_pure_floors_call_nothing_with_effects() -> None:
    calls = [
        f"{module.where}:{node.lineno}: {node.id}"
        for module in pure_modules()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Name) and node.id in BUILTINS_WITH_EFFECTS
    ]
    assert not calls, listed(calls)


def test_the_pure_floors_mint_no_ids_and_read_no_clock() -> None:
    smuggled = [
        f"{module.where}: {name}"
        for module in pure_modules()
        for name in imported_names(module) & {"kvshuttle.ids.mint", "kvshuttle.clock", "kvshuttle.clock.now_s"}
    ]
    assert not smuggled, listed(smuggled)


def test_nixl_is_named_in_one_file() -> None:
    naming = [module.where for module in modules("src") if any(_is_nixl(name) for name in _strings_and_imports(module))]
    assert naming == ["src/kvshuttle/transport/nixl.py"]


def test_every_module_is_imported_by_another_or_is_an_entry_point() -> None:
    package = modules("src")
    used = {name for module in package for name in imported_names(module) if name != module.name}
    dead = {module.name for module in package if module.name not in used} - set(ENTRY_POINTS)
    packages_of_live_modules = {module.name.rpartition(".")[0] for module in package if module.name not in dead}
    assert dead - packages_of_live_modules == set()


def pure_modules() -> list[Module]:
    """Modules of the floors that take time and randomness as arguments."""
    floors = [PACKAGE / floor for floor in PURE_FLOORS] + [PACKAGE / f"{floor}.py" for floor in PURE_FLOORS]
    found = [m for m in modules("src") if any(m.path.is_relative_to(floor) for floor in floors)]
    assert len(found) > len(PURE_FLOORS)
    return found


def _directly_imported(module: Module) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


def _strings_and_imports(module: Module) -> set[str]:
    strings = {
        node.value for node in ast.walk(module.tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    return strings | imported_names(module)


def _is_nixl(name: str) -> bool:
    return name in ("nixl", "nixl_cu12") or name.startswith(("nixl.", "nixl_cu12.", "nixl._", "nixl_cu12._"))
