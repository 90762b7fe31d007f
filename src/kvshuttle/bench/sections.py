"""A report as sections, written as Markdown or as one HTML page that needs nothing else. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True)
class Section:
    """A heading, plain text, a table, charts (SVG text; the page only), and what the charts' styles stand for."""

    title: str
    text: str = ""
    heads: tuple[str, ...] = ()
    rows: Sequence[Sequence[str]] = ()
    charts: Sequence[str] = ()
    legend: Mapping[str, str] | None = None
    """Names by style."""


def as_markdown(title: str, sections: Sequence[Section]) -> str:
    """The whole report without its charts."""
    parts = [f"# {title}"]
    for section in sections:
        parts.append(f"## {section.title}")
        parts.append(section.text)
        if section.rows:
            lines = (section.heads, ["---"] * len(section.heads), *section.rows)
            parts.append("\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in lines))
    return "\n\n".join(part for part in parts if part) + "\n"


def as_page(title: str, sections: Sequence[Section], styles: Mapping[str, str]) -> str:
    """One HTML document: style and charts are in it, and nothing is fetched. ``styles``: CSS colour by style name."""
    colours = "".join(f".{name}{{--c:{colour}}}" for name, colour in styles.items())
    contents = "".join(f'<li><a href="#s{index}">{escape(each.title)}</a></li>' for index, each in enumerate(sections))
    body = "".join(_section(index, each) for index, each in enumerate(sections))
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width"/>'
        f"<title>{escape(title)}</title><style>{_STYLE}{colours}</style></head><body><main>"
        f"<h1>{escape(title)}</h1><nav><ul>{contents}</ul></nav>{body}</main></body></html>\n"
    )


def _section(index: int, section: Section) -> str:
    parts = [f'<section id="s{index}"><h2>{escape(section.title)}</h2>']
    if section.text:
        parts += [f"<p>{escape(paragraph)}</p>" for paragraph in section.text.split("\n\n")]
    if section.legend:
        entries = (f'<span class="key {name}"></span>{escape(text)}' for name, text in section.legend.items())
        parts.append(f'<p class="legend">{"".join(f"<span>{entry}</span>" for entry in entries)}</p>')
    if section.charts:
        parts.append(f'<div class="charts">{"".join(section.charts)}</div>')
    if section.rows:
        head = "".join(f"<th>{escape(cell)}</th>" for cell in section.heads)
        rows = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in section.rows)
        parts.append(f'<div class="table"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>')
    parts.append("</section>")
    return "".join(parts)


_STYLE = """
:root{color-scheme:light dark}
body{font:15px/1.5 system-ui,sans-serif;margin:0;color:light-dark(#1b1f24,#e6e8eb);background:light-dark(#fff,#15181c)}
main{max-width:1120px;margin:0 auto;padding:24px}
h1{font-size:26px}
h2{font-size:19px;margin-top:40px;border-bottom:1px solid light-dark(#d7dbe0,#343a41)}
nav ul{columns:2;padding-left:20px}
a{color:light-dark(#1257b8,#7ab2ff)}
.table{overflow-x:auto}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:13px}
th,td{padding:3px 10px;border-bottom:1px solid light-dark(#e4e7eb,#2a3036);text-align:left;vertical-align:top}
.charts{display:flex;flex-wrap:wrap;gap:12px}
.legend>span{margin-right:18px;white-space:nowrap}
.key{display:inline-block;width:22px;height:4px;margin-right:6px;vertical-align:middle;background:var(--c)}
svg{font:11px system-ui,sans-serif;fill:currentColor}
svg .title{font-weight:600;font-size:12px}
svg .grid{stroke:light-dark(#e4e7eb,#2a3036);stroke-width:1}
svg .line{fill:none;stroke:var(--c);stroke-width:2}
svg .mark{fill:var(--c)}
svg .whisker{stroke:var(--c);stroke-width:1.5}
svg [class$="-quiet"]{stroke-dasharray:5 3}
.part0{--c:#8a94a3;fill:var(--c)}
.part1{--c:#2f6fd0;fill:var(--c)}
.part2{--c:#d9480f;fill:var(--c)}
.part3{--c:#2b8a57;fill:var(--c)}
.part4{--c:#a05fc0;fill:var(--c)}
"""
