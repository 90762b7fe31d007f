"""Markdown that all reports share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

NOTHING = "-"
"""Stands where nothing was measured."""


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells under their heads."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *rows))


def pairs(rows: Sequence[tuple[str, str]]) -> str:
    """A table of names and what is to be said of them."""
    return "\n".join(["| | |", "| --- | --- |", *(f"| {name} | {text} |" for name, text in rows)])


def machine_rows(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """On what it was measured, with what, and when."""
    packages = ", ".join(f"{name} {version}" for name, version in facts["packages"].items())
    return [
        ("Machine", f"{facts['cpu']}, {facts['cores']} cores, {facts['memory']}, Linux {facts['kernel']}"),
        ("Versions", f"kvshuttle {facts['kvshuttle']} at {facts['commit'] or 'no commit'}, {packages}"),
        ("Date", facts["date"]),
    ]
