"""Accelerator profiles: how long a step takes that an engine schedules, read from TOML with its provenance."""

from __future__ import annotations

import tomllib
from bisect import bisect_right
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kvshuttle.config.checks import is_int, shortened
from kvshuttle.emulate.geometry import Geometry
from kvshuttle.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PROFILE_DIR = Path(__file__).parent / "profiles"
_MOST = 1_000_000
"""Of milliseconds, requests at a time, and how many times longer."""
_MOST_CONTEXT = 1_000_000_000


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """``fixed + per_token * n + per_token_squared * n ** 2`` for ``n`` tokens, in milliseconds."""

    fixed_ms: float
    per_token_ms: float
    per_token_squared_ms: float

    def step_ms(self, chunks: Sequence[tuple[int, int]]) -> float:
        """One step over ``chunks`` of (tokens before it, tokens in it); 0 for none.

        A chunk behind ``p`` tokens pays the square term's growth from ``p`` on, so that chunks add up to the whole.
        """
        if not chunks:
            return 0.0
        tokens = sum(num for _, num in chunks)
        squares = sum((before + num) ** 2 - before**2 for before, num in chunks)
        return self.fixed_ms + self.per_token_ms * tokens + self.per_token_squared_ms * squares


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """Milliseconds of a decode step, by batch size (rows) and mean context in tokens (columns)."""

    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    steps_ms: tuple[tuple[float, ...], ...]

    def step_ms(self, num_seqs: int, mean_context: float) -> float:
        """Interpolated between the table's entries; beyond them the nearest entry holds. 0 for an empty batch."""
        if num_seqs == 0:
            return 0.0
        row, row_part = _place(self.batches, num_seqs)
        column, column_part = _place(self.contexts, mean_context)
        low, high = (
            _between(each[column], each[min(column + 1, len(each) - 1)], column_part)
            for each in (self.steps_ms[row], self.steps_ms[min(row + 1, len(self.steps_ms) - 1)])
        )
        return _between(low, high, row_part)


@dataclass(frozen=True, slots=True)
class Contention:
    """How many times longer a step takes while another engine of the same machine computes.

    Only of machines whose engines share cores or memory. ``prefill``: steps that compute prompts. ``decode``: others.
    """

    prefill: float
    decode: float


@dataclass(frozen=True, slots=True)
class Profile:
    """An accelerator with a model on it. ``provenance`` says where the figures come from.

    ``contention``: None where engines have an accelerator each, and none slows another down.
    """

    name: str
    provenance: str
    geometry: Geometry
    prefill: PrefillCost
    decode: DecodeCost
    contention: Contention | None = None

    def step_s(self, chunks: Sequence[tuple[int, int]], decode_contexts: Sequence[int]) -> float:
        """Seconds of one step: prefill ``chunks`` of (tokens before, tokens in it) and one token for each context.

        In a mixed step weights are read once: decode adds only what it takes beyond the table's cheapest step. And any
        step reads them, so that none is shorter than that one, however few tokens of a prompt it computes.
        """
        num_seqs = len(decode_contexts)
        decode_ms = self.decode.step_ms(num_seqs, sum(decode_contexts) / num_seqs if num_seqs else 0.0)
        if not chunks:
            return decode_ms / 1000
        cheapest_ms = self.decode.step_ms(1, 0.0)
        extra_ms = max(0.0, decode_ms - cheapest_ms) if num_seqs else 0.0
        return (max(self.prefill.step_ms(chunks), cheapest_ms) + extra_ms) / 1000

    def slowdown(self, *, computes_prompts: bool) -> float:
        """How many times longer a step takes while another engine of the machine computes; 1 for no longer."""
        if self.contention is None:
            return 1.0
        return self.contention.prefill if computes_prompts else self.contention.decode

    def scaled(self, *, time_scale: float, bytes_scale: float) -> Profile:
        """The same, slowed and with about ``bytes_scale`` times the KV bytes."""
        return replace(self.slowed(time_scale), geometry=self.geometry.scaled(bytes_scale))

    def slowed(self, time_scale: float) -> Profile:
        """The same accelerator with every duration multiplied by ``time_scale``."""
        if not time_scale > 0:
            raise ConfigError(f"time_scale: a number above 0, got {time_scale!r}")
        cost = self.prefill
        return Profile(
            name=self.name if time_scale == 1 else f"{self.name} x {time_scale:g}",
            provenance=self.provenance,
            geometry=self.geometry,
            prefill=PrefillCost(
                cost.fixed_ms * time_scale, cost.per_token_ms * time_scale, cost.per_token_squared_ms * time_scale
            ),
            decode=DecodeCost(
                self.decode.batches,
                self.decode.contexts,
                tuple(tuple(value * time_scale for value in row) for row in self.decode.steps_ms),
            ),
            contention=self.contention,
        )


def load_profile(name: str) -> Profile:
    """A profile of ours by name, or the TOML file at a path. Raises ``ConfigError`` naming the file and the field."""
    path = Path(name) if name.endswith(".toml") else PROFILE_DIR / f"{name}.toml"
    try:
        values = tomllib.loads(path.read_text())
    except FileNotFoundError as error:
        raise ConfigError(
            f"profile: no {name!r}; known are {', '.join(profile_names())}, or give a path that ends in .toml"
        ) from error
    except (OSError, ValueError, RecursionError) as error:  # what is no TOML, or no path, is a ValueError
        raise ConfigError(f"profile: {path}: {error}") from error
    try:
        return parse_profile(values)
    except ConfigError as error:
        raise ConfigError(f"{path.name}: {error}") from error


class ProfileKnobs(Protocol):
    """What a benchmark's plan says of its accelerator."""

    @property
    def profile(self) -> str:
        """As ``load_profile`` takes it."""

    @property
    def time_scale(self) -> float:
        """Multiplies durations."""

    @property
    def bytes_scale(self) -> float:
        """Multiplies the KV bytes."""


def effective_profile(plan: ProfileKnobs) -> Profile:
    """The plan's profile, slowed and with its bytes scaled. Raises ``ConfigError``."""
    return load_profile(plan.profile).scaled(time_scale=plan.time_scale, bytes_scale=plan.bytes_scale)


def profile_names() -> list[str]:
    """The profiles that come with the package."""
    return sorted(path.stem for path in PROFILE_DIR.glob("*.toml"))


def parse_profile(values: Mapping[str, Any]) -> Profile:
    """From a parsed TOML table. Raises ``ConfigError`` naming the field and what to put there."""
    reader = _Reader(values)
    reader.allow("", ("name", "provenance", "geometry", "prefill", "decode", "contention"))
    geometry = reader.table("geometry", ("num_layers", "num_kv_heads", "head_dim", "dtype"), ("dtype",))
    prefill = reader.table("prefill", ("fixed_ms", "per_token_ms", "per_token_squared_ms"))
    decode = reader.table("decode", ("batches", "contexts", "steps_ms"))
    contention = reader.table("contention", ("prefill", "decode")) if "contention" in values else {}
    return Profile(
        name=reader.text("name"),
        provenance=reader.text("provenance"),
        geometry=Geometry(**geometry),
        prefill=PrefillCost(**{key: _milliseconds(f"prefill.{key}", value) for key, value in prefill.items()}),
        decode=_decode_cost(decode),
        contention=Contention(**{key: _times(f"contention.{key}", value) for key, value in contention.items()})
        if contention
        else None,
    )


def to_mapping(profile: Profile) -> dict[str, Any]:
    """The JSON-able table that ``parse_profile`` reads."""
    geometry, prefill, decode, contention = profile.geometry, profile.prefill, profile.decode, profile.contention
    shared = {"contention": {"prefill": contention.prefill, "decode": contention.decode}} if contention else {}
    return {
        "name": profile.name,
        "provenance": profile.provenance,
        "geometry": {
            "num_layers": geometry.num_layers,
            "num_kv_heads": geometry.num_kv_heads,
            "head_dim": geometry.head_dim,
            "dtype": geometry.dtype,
        },
        "prefill": {
            "fixed_ms": prefill.fixed_ms,
            "per_token_ms": prefill.per_token_ms,
            "per_token_squared_ms": prefill.per_token_squared_ms,
        },
        "decode": {
            "batches": list(decode.batches),
            "contexts": list(decode.contexts),
            "steps_ms": [list(row) for row in decode.steps_ms],
        },
        **shared,
    }


class _Reader:
    """Looks keys up and names them when they are missing, unknown or of the wrong kind."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def allow(self, where: str, known: Sequence[str], values: Mapping[str, Any] | None = None) -> None:
        unknown = sorted(set(self._values if values is None else values) - set(known))
        if unknown:
            raise ConfigError(f"{where}{unknown[0]}: unknown key; known are {', '.join(known)}")

    def text(self, key: str) -> str:
        value = self._values.get(key)
        if not isinstance(value, str) or not value.strip():
            raise ConfigError(f"{key}: text, got {value!r}")
        return value

    def table(self, key: str, known: Sequence[str], optional: Sequence[str] = ()) -> dict[str, Any]:
        value = self._values.get(key)
        if not isinstance(value, dict):
            raise ConfigError(f"[{key}]: a table with {', '.join(known)}, got {value!r}")
        self.allow(f"{key}.", known, value)
        missing = [each for each in known if each not in value and each not in optional]
        if missing:
            raise ConfigError(f"{key}.{missing[0]}: missing; write it under [{key}]")
        return value


def _decode_cost(table: Mapping[str, Any]) -> DecodeCost:
    axes = {}
    for key in ("batches", "contexts"):
        values = table[key]
        most = _MOST if key == "batches" else _MOST_CONTEXT
        is_list = isinstance(values, list) and values and all(is_int(v) and 0 < v <= most for v in values)
        if not is_list or values != sorted(set(values)):
            raise ConfigError(
                f"decode.{key}: a rising list of whole numbers from 1 to {most:,}, got {shortened(repr(values))}"
            )
        axes[key] = tuple(values)
    rows = table["steps_ms"]
    if not isinstance(rows, list) or len(rows) != len(axes["batches"]):
        raise ConfigError(f"decode.steps_ms: one row for each of the {len(axes['batches'])} batches")
    for index, row in enumerate(rows):
        if not isinstance(row, list) or len(row) != len(axes["contexts"]):
            raise ConfigError(f"decode.steps_ms[{index}]: one value for each of the {len(axes['contexts'])} contexts")
    steps_ms = tuple(tuple(_milliseconds("decode.steps_ms", value) for value in row) for row in rows)
    return DecodeCost(axes["batches"], axes["contexts"], steps_ms)


def _milliseconds(field: str, value: Any) -> float:
    if not _is_number(value) or value < 0:
        raise ConfigError(f"{field}: a number of milliseconds, 0 to {_MOST:,}, got {shortened(repr(value))}")
    return float(value)


def _times(field: str, value: Any) -> float:
    if not _is_number(value) or value < 1:
        raise ConfigError(f"{field}: how many times longer, 1 to {_MOST:,}, got {shortened(repr(value))}")
    return float(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value <= _MOST


def _place(axis: Sequence[int], value: float) -> tuple[int, float]:
    """Index of the entry at or below ``value``, and how far it is to the next one (0 to 1)."""
    index = min(max(bisect_right(axis, value) - 1, 0), len(axis) - 1)
    if index == len(axis) - 1 or value <= axis[index]:
        return index, 0.0
    return index, (value - axis[index]) / (axis[index + 1] - axis[index])


def _between(low: float, high: float, part: float) -> float:
    return low + (high - low) * part
