"""Reads Prometheus text: enough to take figures from an engine's ``/metrics``."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_SAMPLE = re.compile(r"(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)(?:\s+-?\d+)?")
_LABEL = re.compile(r'(?P<key>[a-zA-Z_]\w*)="(?P<value>(?:[^"\\]|\\.)*)"')
_ESCAPES = {r"\\": "\\", r"\"": '"', r"\n": "\n"}


def samples_of(text: str) -> Iterator[tuple[str, Mapping[str, str], float]]:
    """(name, labels, value) of each sample; lines that are none are passed over."""
    for line in text.splitlines():
        match = None if line.startswith("#") else _SAMPLE.fullmatch(line.strip())
        if match is None:
            continue
        try:
            value = float(match["value"])
        except ValueError:
            continue
        labels = {label["key"]: _unescape(label["value"]) for label in _LABEL.finditer(match["labels"] or "")}
        yield match["name"], labels, value


def totals_by(text: str, name: str, label: str, **wanted: str) -> dict[str, float]:
    """Sums of a series' samples for each value of ``label``, over those samples that carry the ``wanted`` labels."""
    totals: defaultdict[str, float] = defaultdict(float)
    for found, labels, value in samples_of(text):
        if found == name and all(labels.get(key) == one for key, one in wanted.items()):
            totals[labels.get(label, "")] += value
    return dict(totals)


def total_of(text: str, name: str, **wanted: str) -> float:
    """The sum of a series' samples that carry the ``wanted`` labels; 0 without any."""
    return sum(totals_by(text, name, "", **wanted).values())


def _unescape(value: str) -> str:
    return re.sub(r"\\.", lambda match: _ESCAPES.get(match[0], match[0]), value)
