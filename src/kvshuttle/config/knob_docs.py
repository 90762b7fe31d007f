"""What knobs mean, as their classes say it: the one place where a knob is explained."""

from __future__ import annotations

import ast
import inspect
import textwrap


def attribute_docs(config: type) -> dict[str, str]:
    """The docstring after each attribute of a class, on one line."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(config))).body
    assert isinstance(definition, ast.ClassDef)
    docs = {}
    for statement, after in zip(definition.body, definition.body[1:], strict=False):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
            docs[statement.target.id] = " ".join(after.value.value.split())
    return docs
