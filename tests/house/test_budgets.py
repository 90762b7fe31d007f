"""Sizes that keep the code readable at one sitting. An exception stands here and, with its reason, in the code."""

from __future__ import annotations

import ast

from support.source_tree import Function, Module, listed, modules

FUNCTION_LINES = 70
CORE_FUNCTION_LINES = 40
FILE_LINES = 400
CORE_FILE_LINES = 300
NESTING = 3
PARAMETERS = 8

CORE = "src/kvshuttle/handoff/"
FOLDERS = ("src", "scripts", "benchmarks", "tests")
FILE_FOLDERS = ("src", "scripts", "benchmarks")

EXCEPTIONS: dict[str, str] = {}
"""``path:function`` (or ``path``) to the reason, which must stand in that file as ``budget: <reason>``."""

_BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.TryStar, ast.Match)


def test_every_function_fits_its_line_budget() -> None:
    too_long = []
    for module in _modules(FOLDERS):
        budget = CORE_FUNCTION_LINES if module.where.startswith(CORE) else FUNCTION_LINES
        for name, function in module.functions:
            length = (function.end_lineno or function.lineno) - function.lineno + 1
            if length > budget:
                too_long.append(f"{module.where}:{name}: {length} lines, the budget is {budget}")
    assert not (found := _unexcused(too_long)), listed(found)


def test_every_file_fits_its_line_budget() -> None:
    too_long = []
    for module in _modules(FILE_FOLDERS):
        budget = CORE_FILE_LINES if module.where.startswith(CORE) else FILE_LINES
        length = len(module.text.splitlines())
        if length > budget:
            too_long.append(f"{module.where}: {length} lines, the budget is {budget}")
    assert not (found := _unexcused(too_long)), listed(found)


def test_no_function_nests_deeper_than_three_blocks() -> None:
    too_deep = [
        f"{module.where}:{name}: {depth} blocks deep"
        for module in _modules(FILE_FOLDERS)
        for name, function in module.functions
        if (depth := _depth(function.body)) > NESTING
    ]
    assert not (found := _unexcused(too_deep)), listed(found)


def test_no_function_takes_more_than_eight_parameters() -> None:
    too_many = [
        f"{module.where}:{name}: {count} parameters"
        for module in _modules(FILE_FOLDERS)
        for name, function in module.functions
        if (count := _num_parameters(function)) > PARAMETERS
    ]
    assert not (found := _unexcused(too_many)), listed(found)


def test_every_exception_is_needed_and_explained_where_it_stands() -> None:
    texts = {module.where: module.text for module in _modules(FOLDERS)}
    for place, reason in EXCEPTIONS.items():
        assert f"budget: {reason}" in texts[place.partition(":")[0]], place


def _modules(folders: tuple[str, ...]) -> list[Module]:
    return [module for folder in folders for module in modules(folder)]


def _unexcused(findings: list[str]) -> list[str]:
    return [finding for finding in findings if not any(finding.startswith(f"{place}: ") for place in EXCEPTIONS)]


def _depth(statements: list[ast.stmt]) -> int:
    return max((_depth_of(statement) for statement in statements), default=0)


def _depth_of(statement: ast.stmt) -> int:
    """Blocks inside blocks. An ``elif`` is its ``if``'s sibling; inner functions are counted on their own."""
    if isinstance(statement, ast.Match):
        return 1 + max(_depth(case.body) for case in statement.cases)
    if isinstance(statement, ast.If):
        is_elif = len(statement.orelse) == 1 and isinstance(statement.orelse[0], ast.If)
        return max(1 + _depth(statement.body), _depth(statement.orelse) + (0 if is_elif else 1))
    if not isinstance(statement, _BLOCKS):
        return 0
    bodies = [getattr(statement, part, []) for part in ("body", "orelse", "finalbody")]
    bodies += [handler.body for handler in getattr(statement, "handlers", [])]
    return 1 + max(_depth(body) for body in bodies)


def _num_parameters(function: Function) -> int:
    arguments = function.args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))
