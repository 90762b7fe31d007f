"""Write the tables of documents from the code: ``python scripts/docs_tables.py [--check]``.

Only what stands between ``<!-- generated: NAME -->`` and ``<!-- end -->`` is written; the prose around it is by hand.
"""

# ruff: noqa: SLF001 - argparse shows its options in no other way

from __future__ import annotations

import argparse
import ast
import re
import sys
from dataclasses import MISSING, fields
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvshuttle.bench.grid_plan import GridPlan
from kvshuttle.bench.plan import HandoffPlan
from kvshuttle.bench.turns_plan import TurnsPlan
from kvshuttle.cli import _build_parser, attribute_docs
from kvshuttle.config import ConnectorConfig, LauncherConfig, RouterConfig
from kvshuttle.policy import ConversationTable
from kvshuttle.router.telemetry import Telemetry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = (ROOT / "docs" / "operations.md", ROOT / "ARCHITECTURE.md")
PACKAGE = ROOT / "src" / "kvshuttle"
STATS = PACKAGE / "connector" / "stats.py"
FLOORS = ("", "config", "handoff", "policy", "transport", "connector", "router", "launcher", "emulate", "bench")
MARKED = re.compile(r"(<!-- generated: (?P<name>[a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def main() -> int:
    stale = [path for path in DOCUMENTS if path.read_text() != filled(path.read_text())]
    if "--check" in sys.argv[1:]:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is stale: run scripts/docs_tables.py")
        return 1 if stale else 0
    for path in stale:
        path.write_text(filled(path.read_text()))
        print(f"wrote {path.relative_to(ROOT)}")
    return 0


def filled(text: str) -> str:
    """The document with every marked part written anew. Raises ``KeyError`` for a mark that nothing fills."""
    return MARKED.sub(lambda match: f"{match[1]}\n{PARTS[match['name']]()}\n{match[3]}", text)


# --- knobs and options ------------------------------------------------------------------------------


def connector_knobs() -> str:
    return table(["Key", "Default", "Meaning"], [[f"`{n}`", d, m] for n, d, m in knobs_of(ConnectorConfig)])


def router_knobs() -> str:
    return knobs_with_options(RouterConfig, "router")


def launcher_knobs() -> str:
    return knobs_with_options(LauncherConfig, "up")


def bench_handoff_knobs() -> str:
    return knobs_with_options(HandoffPlan, "bench handoff")


def bench_turns_knobs() -> str:
    return knobs_with_options(TurnsPlan, "bench turns")


def bench_run_keys() -> str:
    return table(["Key", "Default", "Meaning"], [[f"`{n}`", d, m] for n, d, m in knobs_of(GridPlan)])


def knobs_with_options(config: type, command: str) -> str:
    """Knobs that are also options of a command."""
    options = {action.dest: action.option_strings for action in actions_of(command)}
    rows = []
    for name, default, meaning in knobs_of(config):
        shown = ", ".join(f"`{option}`" for option in options.get(name, []))
        rows.append([f"`{name}`", shown or "`--prefill`, `--decode`", default, meaning])
    return table(["Key", "Option", "Default", "Meaning"], rows)


def knobs_of(config: type) -> Iterator[tuple[str, str, str]]:
    """(name, default, meaning) of each knob; a knob without a docstring is an error."""
    meanings = attribute_docs(config)
    for knob in fields(config):
        meaning = meanings[knob.name].replace("``", "`")
        yield knob.name, default_text(knob.default, knob.default_factory), meaning


def default_text(default: object, factory: object) -> str:
    if default is MISSING:
        return "none" if factory is not MISSING else "required"
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, StrEnum):
        return f"`{default.value}`"
    if isinstance(default, tuple):
        return ", ".join(f"`{value}`" for value in default) or "none"
    if isinstance(default, str):
        return f"`{default}`" if default else "empty"
    return f"{default:,}" if isinstance(default, int) and default >= 100_000 else f"{default}"


def commands() -> str:
    """The command line, but for the options that are knobs."""
    configs = (RouterConfig, LauncherConfig, HandoffPlan, TurnsPlan)
    knob_names = {knob.name for config in configs for knob in fields(config)}
    rows = []
    for name, (text, parser) in described_commands().items():
        own = [action for action in parser._actions if action.dest not in knob_names | {"help"}]
        rows.append([f"`kvshuttle {name}`", sentence(text), "; ".join(option_text(action) for action in own)])
    return table(["Command", "What it does", "Options that are not knobs"], rows)


def option_text(action: argparse.Action) -> str:
    name = ", ".join(action.option_strings) or str(action.dest).upper()
    metavar = f" {action.metavar}" if action.metavar and action.option_strings else ""
    return f"`{name}{metavar}`" + (f": {action.help}" if action.help else "")


def actions_of(command: str) -> list[argparse.Action]:
    """Of a command, or of one below it: ``bench turns``."""
    parser = _build_parser()
    for word in command.split():
        choices = subparsers(parser)
        assert choices is not None
        parser = choices.choices[word]
    return list(parser._actions)


def described_commands(parser: argparse.ArgumentParser | None = None) -> dict[str, tuple[str, argparse.ArgumentParser]]:
    """What each command does, for those that are listed; of one that has commands below it, those."""
    found: dict[str, tuple[str, argparse.ArgumentParser]] = {}
    choices = subparsers(parser or _build_parser())
    assert choices is not None
    for action in choices._choices_actions:
        chosen = choices.choices[action.dest]
        if subparsers(chosen) is None:
            found[action.dest] = action.help or "", chosen
        else:
            found |= {f"{action.dest} {name}": each for name, each in described_commands(chosen).items()}
    return found


def subparsers(parser: argparse.ArgumentParser) -> Any:
    """The commands of a parser; None for none."""
    return next((a for a in parser._actions if isinstance(a, argparse._SubParsersAction)), None)


# --- metrics ----------------------------------------------------------------------------------------


def connector_metrics() -> str:
    """``SERIES`` of the connector, read without importing it: it needs vLLM."""
    rows = []
    for name, kind, labels, text in connector_series():
        suffix = "_total" if kind == "Counter" else ""
        rows.append([f"`kvshuttle:{name}{suffix}`", kind.lower(), labels_text(labels), text])
    return table(["Metric", "Kind", "Labels", "Meaning"], rows)


def connector_series() -> Iterator[tuple[str, str, tuple[str, ...], str]]:
    """(name, kind, labels, help text) of each series."""
    for node in ast.parse(STATS.read_text()).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "SERIES":
            assert isinstance(node.value, ast.Dict)
            for key, call in zip(node.value.keys, node.value.values, strict=True):
                assert isinstance(call, ast.Call)
                kind, labels, text = call.args[:3]
                yield ast.literal_eval(key), ast.unparse(kind), ast.literal_eval(labels), ast.literal_eval(text)


def router_metrics() -> str:
    rows = []
    for name, kind, labels, text in router_series():
        rows.append([f"`{name}`", kind, labels_text(labels), sentence(text)])
    return table(["Metric", "Kind", "Labels", "Meaning"], rows)


def router_series() -> Iterator[tuple[str, str, tuple[str, ...], str]]:
    """(name, kind, labels, help text) of each series that a router with one engine shows."""
    table = ConversationTable(max_turns=1, ttl_s=1.0)
    telemetry = Telemetry(OneEngine(), table, is_logging_requests=False)  # type: ignore[arg-type]
    telemetry.refused(400)
    helps: dict[str, str] = {}
    kinds: dict[str, str] = {}
    labels: dict[str, tuple[str, ...]] = {}
    for line in telemetry.exposition().decode().splitlines():
        if line.startswith("# "):
            _, what, name, rest = line.split(" ", 3)
            (helps if what == "HELP" else kinds)[name] = rest
            continue
        name, _, given = line.rpartition(" ")[0].partition("{")
        found = tuple(re.findall(r'(\w+)="', given))
        labels[re.sub(r"_(bucket|sum|count)$", "", name)] = tuple(label for label in found if label != "le")
    for name, text in helps.items():
        if not name.endswith("_created"):
            yield name, kinds[name], labels[name], text


class OneEngine:
    """As much of a registry as gauges need to have a child."""

    name = "engine"
    is_up = True
    outstanding_requests = outstanding_tokens = 0
    peers: frozenset[str] = frozenset()

    @property
    def engines(self) -> dict[str, OneEngine]:
        return {self.name: self}


def labels_text(labels: tuple[str, ...]) -> str:
    return ", ".join(f"`{label}`" for label in labels)


# --- modules ----------------------------------------------------------------------------------------


def modules_of(folder: str) -> Callable[[], str]:
    """A table of one folder's modules, each with the first sentence of its docstring."""

    def rows() -> str:
        paths = sorted((PACKAGE / folder).glob("*.py"), key=lambda path: (path.stem != "__init__", path.stem))
        described = [(path.name, ast.get_docstring(ast.parse(path.read_text())) or "") for path in paths]
        return table(["Module", "What it is"], [[f"`{name}`", first_sentence(text)] for name, text in described])

    return rows


def first_sentence(docstring: str) -> str:
    paragraph = " ".join(docstring.split("\n\n", maxsplit=1)[0].split())
    sentence_end = re.search(r"[.?!](?= [A-Z]|$)", paragraph)
    text = paragraph[: sentence_end.end()] if sentence_end else paragraph
    return text.replace("``", "`").removesuffix("::")


# --- Markdown ---------------------------------------------------------------------------------------


def sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith('.') else '.'}"


def table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


PARTS: dict[str, Callable[[], str]] = {
    "commands": commands,
    "connector-knobs": connector_knobs,
    "router-knobs": router_knobs,
    "launcher-knobs": launcher_knobs,
    "bench-handoff-knobs": bench_handoff_knobs,
    "bench-turns-knobs": bench_turns_knobs,
    "bench-run-keys": bench_run_keys,
    "connector-metrics": connector_metrics,
    "router-metrics": router_metrics,
    **{f"modules-{folder or 'top'}": modules_of(folder) for folder in FLOORS},
}
"""What each mark is filled with."""


if __name__ == "__main__":
    sys.exit(main())
