"""What no tracked file may hold: traces of one machine, unfinished business, links that lead nowhere."""

from __future__ import annotations

import re

from support.source_tree import ROOT, listed, text_of, tracked_files

TEXT_SUFFIXES = frozenset({"", ".cfg", ".ini", ".json", ".lock", ".md", ".py", ".sh", ".toml", ".txt", ".yaml", ".yml"})

# Written in pieces, so that this file passes its own tests.
MACHINE_PATH = re.compile(
    r"(?<![\w.~])/(?:" + "|".join(("work", "root", "farm", "home", "tmp/w", "Users")) + r")/[\w.]"
)
REGISTRY_HOST = re.compile(
    "|".join(
        re.escape(name).replace("@", r"\.")
        for name in (
            "pypi@org",
            "pythonhosted@org",
            "download@pytorch@org",
            "huggingface@co/",
            "hf@co/",
            "registry@npmjs@org",
            "deb@debian@org",
            "docker@io",
            "ghcr@io",
            "quay@io",
            "proxy@golang@org",
            "artifact" + "ory",
            "nexus@",
        )
    )
)
UNFINISHED = re.compile(r"\b(?:" + "|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK")) + r")\b")

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6}\s+(.*)$", re.MULTILINE)
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def test_no_file_names_a_path_of_one_machine() -> None:
    assert not (found := _lines_with(MACHINE_PATH)), listed(found)


def test_no_file_names_a_registry_host() -> None:
    assert not (found := _lines_with(REGISTRY_HOST)), listed(found)


def test_nothing_is_left_for_later() -> None:
    assert not (found := _lines_with(UNFINISHED)), listed(found)


def test_every_relative_link_of_a_document_leads_somewhere() -> None:
    broken = []
    for path in tracked_files():
        if path.suffix != ".md":
            continue
        for target in LINK.findall(FENCE.sub("", text_of(path))):
            if re.match(r"[a-z]+:", target):
                continue
            name, _, anchor = target.partition("#")
            file = (path.parent / name).resolve() if name else path
            if not file.exists() or not file.is_relative_to(ROOT):
                broken.append(f"{path.relative_to(ROOT)}: {target}: no such file")
            elif anchor and anchor not in _anchors(text_of(file)):
                broken.append(f"{path.relative_to(ROOT)}: {target}: no such heading")
    assert not broken, listed(broken)


def test_every_document_is_reached_from_the_readme() -> None:
    reached: set[str] = set()
    waiting = ["README.md"]
    while waiting:
        name = waiting.pop()
        if name in reached:
            continue
        reached.add(name)
        text = FENCE.sub("", text_of(ROOT / name))
        targets = [target.partition("#")[0] for target in LINK.findall(text) if not re.match(r"[a-z]+:", target)]
        files = [(ROOT / name).parent.joinpath(target).resolve() for target in targets if target]
        waiting += [str(file.relative_to(ROOT)) for file in files if file.suffix == ".md" and file.exists()]
    documents = {str(path.relative_to(ROOT)) for path in tracked_files() if path.suffix == ".md"}
    assert documents - reached == set()


def _lines_with(pattern: re.Pattern[str]) -> list[str]:
    found = []
    for path in tracked_files():
        if path.suffix not in TEXT_SUFFIXES:
            continue
        for number, line in enumerate(text_of(path).splitlines(), start=1):
            if pattern.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    return found


def _anchors(text: str) -> set[str]:
    """Headings as GitHub links to them."""
    headings = HEADING.findall(FENCE.sub("", text))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
