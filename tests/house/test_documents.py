"""Documents say what the code says: generated parts are current, and tables by hand name exactly what exists."""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from typing import TYPE_CHECKING

import pytest

from kvshuttle import errors
from kvshuttle.connector.readings import INTERNAL_ERROR
from kvshuttle.handoff import DenyReason, EndReason, KeepOutcome, Outcome, PushOutcome
from kvshuttle.handoff.cards import Fingerprint
from kvshuttle.policy import DropReason, Following, ModeReason, PlacementReason, RouteReason
from kvshuttle.router import telemetry
from kvshuttle.router.exchange import FailureReason
from kvshuttle.router.turns import HistoryResult
from support.source_tree import PACKAGE, ROOT, Module, listed, modules, text_of

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import ModuleType

OPERATIONS = text_of(ROOT / "docs" / "operations.md")
DEPLOYMENT = text_of(ROOT / "docs" / "deployment.md")
TOLD_LEVELS = ("warning", "error", "exception", "critical")
VARIABLE = re.compile(r"\bKVSHUTTLE_[A-Z_]+\b")


@functools.cache
def script(name: str) -> ModuleType:
    """A file of ``scripts/``, imported."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_of_knobs_commands_metrics_and_modules_are_current() -> None:
    docs_tables = script("docs_tables")
    stale = [str(path) for path in docs_tables.DOCUMENTS if docs_tables.filled(text_of(path)) != text_of(path)]
    assert not stale, f"run scripts/docs_tables.py: {stale}"


def test_every_generated_part_is_shown_somewhere() -> None:
    docs_tables = script("docs_tables")
    shown = {match["name"] for path in docs_tables.DOCUMENTS for match in docs_tables.MARKED.finditer(text_of(path))}
    assert shown == set(docs_tables.PARTS)


@pytest.mark.parametrize(
    ("heading", "labels"),
    [
        ("Outcomes of a hand-off", [*Outcome, "prompt_without_tokens", INTERNAL_ERROR]),
        ("Outcomes of a push", [*PushOutcome, INTERNAL_ERROR]),
        ("KV kept for the next turn", [*KeepOutcome, *EndReason]),
        ("Outcomes of a request", telemetry.Outcome),
        ("Routes and reasons", RouteReason),
        ("Modes of a hand-off", ModeReason),
        ("Choice of an engine", PlacementReason),
        ("History of a request", HistoryResult),
        ("Where a turn is decoded", Following),
        ("Turns that left the table", DropReason),
        ("Failed legs", FailureReason),
        ("Where a client left", telemetry.Window),
        ("Stages", telemetry.Stage),
    ],
)
def test_a_table_names_exactly_the_labels_that_exist(heading: str, labels: Iterable[str]) -> None:
    assert first_cells(OPERATIONS, heading) == [str(label) for label in labels]


def test_every_reason_of_a_failed_read_is_explained() -> None:
    assert set(first_cells(OPERATIONS, "Failures of a read")) == set(read_failure_reasons())


def test_every_outcome_of_holdings_and_leases_is_explained() -> None:
    rows = re.findall(r"^\| (holdings|leases) \| (`.*?`) \|", section(OPERATIONS, "Holdings and leases"), re.MULTILINE)
    explained = {(name, outcome) for name, cell in rows for outcome in re.findall(r"`(\w+)`", cell)}
    assert explained == ledger_outcomes() | {("holdings", str(reason)) for reason in EndReason}
    assert {f"denied_{reason}" for reason in DenyReason} <= {str(outcome) for outcome in Outcome}


def test_every_error_is_explained() -> None:
    tree = ast.parse(text_of(PACKAGE / "errors.py"))
    names = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    assert first_cells(OPERATIONS, "Errors") == names
    assert all(issubclass(getattr(errors, name), errors.KvshuttleError) for name in names)


def test_every_warning_and_error_that_is_logged_is_explained() -> None:
    explained, logged = set(first_cells(OPERATIONS, "Log lines")), set(logged_lines())
    assert not logged - explained, f"not explained: {listed(sorted(logged - explained))}"
    assert not explained - logged, f"not logged any more: {listed(sorted(explained - logged))}"


def test_every_environment_variable_is_explained() -> None:
    files = [*modules("src"), *modules("scripts"), *modules("tests")]
    used = {name for module in files for name in VARIABLE.findall(module.text)} - {"KVSHUTTLE_"}
    assert used == {name for name in first_cells(OPERATIONS, "Environment") if VARIABLE.fullmatch(name)}


def test_every_field_of_the_request_log_is_explained() -> None:
    explained = re.findall(r"`(\w+)`", "".join(first_cells_raw(OPERATIONS, "The request log")))
    assert sorted(explained) == sorted(telemetry.Receipt.__slots__)


def test_every_option_of_the_command_line_is_in_the_documents() -> None:
    docs_tables = script("docs_tables")
    options = {
        option
        for _, parser in docs_tables.described_commands().values()
        for action in parser._actions
        for option in action.option_strings
    } - {"-h", "--help"}
    missing = sorted(option for option in options if f"`{option}" not in OPERATIONS)
    assert not missing, listed(missing)


def test_every_field_of_the_fingerprint_is_explained_where_refusals_are() -> None:
    explained = set(re.findall(r"`(\w+)`", "".join(first_cells_raw(DEPLOYMENT, "What is refused"))))
    assert set(Fingerprint.__struct_fields__) <= explained


def test_every_refusal_at_start_is_in_the_list() -> None:
    refusals = section(DEPLOYMENT, "What is refused")
    missing = [start for start in refusal_starts() if start not in refusals]
    assert not missing, listed(missing)


def test_the_changelog_tells_of_the_protocol_version() -> None:
    from kvshuttle.handoff import PROTOCOL_VERSION

    assert f"Protocol version {PROTOCOL_VERSION}." in text_of(ROOT / "CHANGELOG.md")


def section(text: str, heading: str) -> str:
    """What stands under a heading, up to the next heading of its level or above."""
    match = re.search(rf"^(#+) {re.escape(heading)}$", text, re.MULTILINE)
    assert match is not None, f"no heading {heading!r}"
    rest = text[match.end() :]
    end = re.search(rf"^#{{1,{len(match[1])}}} ", rest, re.MULTILINE)
    return rest[: end.start()] if end else rest


def first_cells_raw(text: str, heading: str) -> list[str]:
    """The first cell of each row of the tables under a heading, without heads and rules."""
    rows = re.findall(r"^\| (.*?) \|", section(text, heading), re.MULTILINE)
    return [row for row in rows if row.startswith("`")]


def first_cells(text: str, heading: str) -> list[str]:
    """The same, where each first cell is one code span."""
    return [row.strip("`") for row in first_cells_raw(text, heading)]


def read_failure_reasons() -> set[str]:
    """Reasons in the connector: of a ``ReadResult``, of ``_fail``, or assigned to ``reason``."""
    found: set[str] = set()
    for module in connector_modules():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("ReadResult", "_fail"):
                found |= strings_in(node.args[1]) if len(node.args) > 1 else set()
            elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "reason":
                found |= strings_in(node.value)
    return found - {""}


def ledger_outcomes() -> set[tuple[str, str]]:
    """Keys of the totals that the side channel's service counts, but for the denials."""
    (service,) = [module for module in connector_modules() if module.path.name == "service.py"]
    return {
        (key.elts[0].value, key.elts[1].value)
        for node in ast.walk(service.tree)
        if isinstance(node, ast.Dict)
        for key in node.keys
        if isinstance(key, ast.Tuple)
        and all(isinstance(part, ast.Constant) for part in key.elts)
        and key.elts[0].value in ("holdings", "leases")
    }


def logged_lines() -> list[str]:
    """The text of every call of a logger at warning or above."""
    return [
        ast.literal_eval(node.args[0])
        for module in modules("src")
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) == "logger"
        and node.func.attr in TOLD_LEVELS
    ]


def refusal_starts() -> list[str]:
    """``name:`` at the beginning of each ``ConfigError`` that the connector or a transport raises."""
    starts = []
    for module in modules("src"):
        if module.where.split("/")[2] not in ("connector", "transport"):
            continue
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "ConfigError":
                match = re.match(r"\w+:", "".join(sorted(strings_in(node.args[0]), key=len)[-1:]))
                starts += [match[0]] if match else []
    assert starts
    return starts


def connector_modules() -> list[Module]:
    return [module for module in modules("src") if module.where.startswith("src/kvshuttle/connector/")]


def strings_in(node: ast.AST) -> set[str]:
    return {each.value for each in ast.walk(node) if isinstance(each, ast.Constant) and isinstance(each.value, str)}
