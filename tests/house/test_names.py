"""Names: modules say what they hold, exports are what is declared, tests are sentences that can be false."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from support.source_tree import Function, Module, listed, modules

if TYPE_CHECKING:
    from collections.abc import Iterator

BANNED_MODULE_NAMES = frozenset({"base", "common", "helpers", "manager", "utils", "util", "helper", "misc"})
MIN_WORDS_OF_A_TEST = 3
CHECKING = ("assert", ".bind", "check", "expect", "fail", "given", "raises", "wait_for", "wait_until")
FOLDERS = ("src", "scripts", "benchmarks", "tests")


def test_no_module_has_a_name_that_says_nothing() -> None:
    named = [
        module.where
        for folder in FOLDERS
        for module in modules(folder)
        if BANNED_MODULE_NAMES & {part.removesuffix(".py") for part in module.where.split("/")}
    ]
    assert not named, listed(named)


def test_declared_exports_are_sorted_and_complete() -> None:
    declaring = [(module, exports) for module in modules("src") if (exports := _declared(module)) is not None]
    assert declaring
    for module, exports in declaring:
        assert exports == sorted(exports, key=_order), f"{module.where}: __all__ is not sorted"
        assert len(set(exports)) == len(exports), f"{module.where}: __all__ names something twice"
        assert set(exports) == _public(module), f"{module.where}: __all__ is not what the module offers"


def test_every_test_is_named_by_the_sentence_it_proves() -> None:
    terse = [
        f"{module.where}:{test.lineno}: {test.name}"
        for module, test in _tests()
        if len(test.name.removeprefix("test_").split("_")) < MIN_WORDS_OF_A_TEST
    ]
    assert not terse, listed(terse)


def test_every_test_can_fail() -> None:
    harmless = [f"{module.where}:{test.lineno}: {test.name}" for module, test in _tests() if not _can_fail(test)]
    assert not harmless, listed(harmless)


def test_unit_and_property_tests_sleep_only_to_poll_or_for_a_stated_reason() -> None:
    sleeping = [
        f"{module.where}:{call.lineno}"
        for folder in ("tests/unit", "tests/property")
        for module in modules(folder)
        for name, function in module.functions
        for call in _sleeps(function)
        if not name.split(".")[-1].startswith("wait") and "#" not in module.text.splitlines()[call.lineno - 1]
    ]
    assert not sleeping, listed(sleeping)


def _declared(module: Module) -> list[str] | None:
    for node in module.tree.body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]:
            names: list[str] = ast.literal_eval(node.value)
            return names
    return None


def _public(module: Module) -> set[str]:
    """What a module offers: a package, everything public that it imports; another, what it defines or re-exports."""
    names: set[str] = set()
    is_package = module.path.name == "__init__.py"
    declared = set(_declared(module) or ())
    for node in module.tree.body:
        if isinstance(node, ast.ImportFrom) and node.module != "__future__":
            imported = {alias.asname or alias.name for alias in node.names}
            names |= imported if is_package else imported & declared
        elif isinstance(node, Function | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            names |= {ast.unparse(target) for target in getattr(node, "targets", [getattr(node, "target", None)])}
    return {name for name in names if not name.startswith("_") and name not in ("M", "T", "logger")}


def _order(name: str) -> tuple[int, str]:
    """Constants, then classes, then functions, as ruff sorts ``__all__``."""
    return (0 if name.isupper() else 1 if name[:1].isupper() else 2), name


def _tests() -> Iterator[tuple[Module, Function]]:
    for module in modules("tests"):
        for _, function in module.functions:
            if function.name.startswith("test_"):
                yield module, function


def _sleeps(function: Function) -> list[ast.Call]:
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    return [call for call in calls if ast.unparse(call.func) == "time.sleep"]


def _can_fail(test: Function) -> bool:
    """It asserts, or calls something that does: ``raises``, ``wait_for``, or a fuzzed parser that must not raise."""
    calls = {ast.unparse(node.func).lower() for node in ast.walk(test) if isinstance(node, ast.Call)}
    has_assert = any(isinstance(node, ast.Assert) for node in ast.walk(test))
    return has_assert or any(word in call for call in calls for word in CHECKING)
