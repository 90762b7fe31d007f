"""Knobs as options of the command line."""

from __future__ import annotations

import argparse
from dataclasses import MISSING, fields
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvshuttle.config.knob_docs import attribute_docs

if TYPE_CHECKING:
    from collections.abc import Mapping


def given_path(text: str) -> Path:
    """A path on the command line, as the ``type`` of an option: none stands for the current directory by accident."""
    if not text.strip() or "\0" in text:
        raise argparse.ArgumentTypeError(f"a path, or . for the current directory, got {text!r}")
    return Path(text)


def add_knobs(
    parser: argparse.ArgumentParser, config: type, names: Mapping[str, str], skip: tuple[str, ...] = ()
) -> None:
    """One option for each field of a configuration class: its default, its docstring as help.

    Options that are not given are left out of the namespace, so that configuration files can speak.
    """
    meanings = attribute_docs(config)
    for knob in fields(config):
        if knob.name in skip:
            continue
        default = knob.default if knob.default is not MISSING else ""
        option = f"--{names.get(knob.name, knob.name.replace('_', '-'))}"
        text = meanings.get(knob.name, "").replace("``", "").replace("%", "%%")
        told = ", ".join(default) if isinstance(default, tuple) else default
        shown = "" if isinstance(default, bool) or told == "" else f" [{told}]"
        common: dict[str, Any] = {
            "dest": knob.name,
            "default": argparse.SUPPRESS,
            "help": (text + shown).strip() or None,
        }
        if isinstance(default, bool):
            parser.add_argument(option, action=argparse.BooleanOptionalAction, **common)
        elif isinstance(default, tuple):
            parser.add_argument(option, action="append", metavar="TEXT", **common)
        elif isinstance(default, StrEnum):
            parser.add_argument(option, choices=[str(value) for value in type(default)], **common)
        elif default == "" and knob.default is MISSING:
            parser.add_argument(option, action="append", metavar="KEY=VALUE", **common)
        else:
            kind = type(default)
            metavar = {int: "N", float: "X"}.get(kind, "TEXT")
            parser.add_argument(option, type=kind, metavar=metavar, **common)
