"""What a benchmark of conversations is asked to do: its knobs, and the cells that they span."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar

from kvshuttle.bench.kv_room import check_chunk
from kvshuttle.bench.plan import BLOCK_SIZE_TOKENS, PAIR_SLOTS
from kvshuttle.bench.plan_file import Benchmark, knobs_in, option_of
from kvshuttle.blocks import num_blocks_for
from kvshuttle.config.checks import check_dtype, check_numbers
from kvshuttle.errors import ConfigError
from kvshuttle.handoff.params import Mode

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_TEMPLATE_TOKENS = 32
"""What a chat template adds for a turn, at most."""
_EXCESS = 1.1
"""Texts are as long as asked for within a tenth."""
_ROOM = 1.5
"""A pool that is given no size has so many times the room of all conversations at their longest."""
_EMULATED_ONLY = ("time_scale", "bytes_scale")
_REAL_ONLY = ("model", "dtype")


class Switch(StrEnum):
    """Whether history is reused."""

    OFF = "off"
    ON = "on"


class PrefillCache(StrEnum):
    """What P remembers by itself."""

    OFF = "off"
    ON = "on"
    """Its prefix cache, as vLLM ships."""
    LARGER = "larger"
    """The same, and its KV memory larger by what D kept when history was reused; it is not reused here."""


class TurnsSystem(StrEnum):
    """Whose connector, and what stands in front of the engines."""

    SHUTTLE = "shuttle"
    """Ours, behind our router."""
    UPSTREAM = "upstream-pull-paced"
    """vLLM's NixlConnector behind the benchmark's proxy; bidirectional where history is reused."""


class Answers(StrEnum):
    """How answers come."""

    STREAMED = "streamed"
    WHOLE = "whole"
    """All at once; the client cannot tell when the first token was there."""


class ClientName(StrEnum):
    """Who holds the conversations."""

    OPENAI = "openai"
    """The unmodified OpenAI client, which names no conversation where our router is in front."""
    AIPERF = "aiperf"
    """A load generator made by others, which names them by a header."""


@dataclass(frozen=True, slots=True)
class EngineSetting:
    """What makes engines different: cells with the same setting are served by the same ones.

    ``is_both_ways``: vLLM's connector keeps history on D. ``only_for``: names the one cell that has them to itself.
    """

    prefill_cache: PrefillCache
    system: TurnsSystem = TurnsSystem.SHUTTLE
    is_both_ways: bool = False
    only_for: str = ""

    @property
    def name(self) -> str:
        """For directories."""
        ours = f"cache-{self.prefill_cache}"
        return ours if self.system is TurnsSystem.SHUTTLE else self.only_for or f"{self.system}-{ours}"


@dataclass(frozen=True, slots=True)
class TurnsCell:
    """One way to serve the conversations."""

    mode: Mode
    prefill_cache: PrefillCache
    is_reusing: bool
    system: TurnsSystem = TurnsSystem.SHUTTLE
    answers: Answers = Answers.STREAMED
    client: ClientName = ClientName.OPENAI

    @property
    def name(self) -> str:
        """For records, file names and salts."""
        way = str(self.mode) if self.system is TurnsSystem.SHUTTLE else str(self.system)
        is_plain = self.answers is Answers.STREAMED or self.system is TurnsSystem.UPSTREAM
        end = "" if is_plain else f"-{self.answers}"
        end += "" if self.client is ClientName.OPENAI else f"-{self.client}"
        return f"{way}-cache-{self.prefill_cache}-reuse-{Switch.ON if self.is_reusing else Switch.OFF}{end}"

    @property
    def engines(self) -> EngineSetting:
        """What its engines are started with."""
        # What vLLM's connector keeps on D after a last turn stays there until its time is over.
        is_both_ways = self.is_reusing and self.system is TurnsSystem.UPSTREAM
        return EngineSetting(self.prefill_cache, self.system, is_both_ways, self.name if is_both_ways else "")

    @property
    def text(self) -> str:
        """For people."""
        caches = {PrefillCache.LARGER: "on, and more memory"}
        cache = caches.get(self.prefill_cache, str(self.prefill_cache))
        return f"{self.way}, P's cache {cache}, reuse {'on' if self.is_reusing else 'off'}"

    @property
    def way(self) -> str:
        """For people: what it has in common with the cells that it stands beside in tables."""
        return self.served if self.client is ClientName.OPENAI else f"{self.served}, by {self.client}"

    @property
    def served(self) -> str:
        """For people: how answers come about, whoever asks."""
        way = str(self.mode) if self.system is TurnsSystem.SHUTTLE else f"vLLM's {self.mode}"
        return way if self.answers is Answers.STREAMED else f"{way}, not streamed"


@dataclass(frozen=True, slots=True)
class TurnsPlan:
    """Knobs of ``kvshuttle bench turns``. Raises ``ConfigError`` naming the option."""

    benchmark: ClassVar = Benchmark.TURNS
    growing: ClassVar[Mapping[str, Sequence[str]]] = {
        "reuse": tuple(Switch),
        "prefill_cache": tuple(PrefillCache),
        "modes": (Mode.PUSH, Mode.PULL),
        "systems": tuple(TurnsSystem),
        "answers": tuple(Answers),
        "clients": tuple(ClientName),
    }

    model: str = "smollm2"
    """The bundled model, or the directory of another. With ``--profile`` there is none."""
    dtype: str = "float32"
    """vLLM's ``--dtype``. In float32 equal prompts get equal answers, wherever their KV came from."""
    profile: str = ""
    """Emulate the accelerators of this profile in place of a model: one that comes with the package, or a TOML file."""
    time_scale: float = 4.0
    """With ``--profile``: multiplies its durations, since this machine moves bytes slower than the profile's does."""
    bytes_scale: float = 0.125
    """With ``--profile``: multiplies the layers of its KV cache, and so the bytes of a token."""
    reuse: tuple[str, ...] = (Switch.OFF, Switch.ON)
    """Whether history is reused: ``off``, ``on``."""
    prefill_cache: tuple[str, ...] = (PrefillCache.OFF, PrefillCache.ON)
    """P's prefix cache: ``off``, ``on``, or ``larger``: on, and P has the memory that D keeps for reuse besides."""
    modes: tuple[str, ...] = (Mode.PUSH,)
    """How KV is handed off by ours: ``push``, ``pull``."""
    systems: tuple[str, ...] = (TurnsSystem.SHUTTLE,)
    """Whose connector: ``shuttle``, or with ``--profile`` vLLM's, ``upstream-pull-paced``, bidirectional with reuse."""
    answers: tuple[str, ...] = (Answers.STREAMED,)
    """How ours answers: ``streamed``, ``whole``. vLLM's always answers whole, since its streams reuse nothing."""
    clients: tuple[str, ...] = (ClientName.OPENAI,)
    """Who asks: ``openai``, OpenAI's client; ``aiperf``, a load generator, installed into the cache when needed."""
    conversations: int = 1
    """Conversations at a time. Each waits for its answer before it goes on."""
    turns: int = 10
    """Turns of each."""
    first_tokens: int = 3300
    """New tokens of the first turn, about."""
    turn_tokens: int = 320
    """New tokens of each further turn, about."""
    output_tokens: int = 48
    """Longest answer. Emulated engines always answer with so many."""
    think_s: float = 0.0
    """Pause between an answer and the next turn."""
    prefill_pool_tokens: int = 0
    """KV memory of P in tokens; 0 for half as much again as all conversations take at their longest."""
    decode_pool_tokens: int = 0
    """The same for D, which keeps nine tenths of it for later turns at most."""
    chunk_tokens: int = 2048
    """vLLM's ``--max-num-batched-tokens`` on P and D: how much of a prompt one step computes."""
    seed: int = 0
    """Of texts, so that every cell sees the same ones."""
    startup_timeout_s: float = 400.0
    """Longest wait until a pair of engines is healthy."""

    def __post_init__(self) -> None:
        check_numbers(self, option_of)
        check_dtype("--dtype", self.dtype)
        self._check_choices()
        for name in (
            "time_scale", "bytes_scale", "conversations", "turns", "first_tokens", "turn_tokens", "output_tokens",
            "chunk_tokens", "startup_timeout_s",
        ):  # fmt: skip
            if not getattr(self, name) > 0:
                raise ConfigError(f"{option_of(name)}: a number above 0, got {getattr(self, name)}")
        check_chunk(self.chunk_tokens, PAIR_SLOTS, named_by="--chunk-tokens")
        if not self.think_s >= 0:
            raise ConfigError(f"--think-s: a number of seconds, 0 or more, got {self.think_s}")
        for name in ("prefill_pool_tokens", "decode_pool_tokens"):
            if getattr(self, name) and getattr(self, name) < self.max_model_len:
                raise ConfigError(
                    f"{option_of(name)}: {self.max_model_len} or more, which one conversation can take,"
                    f" or 0 to leave it open, got {getattr(self, name)}"
                )

    def _check_choices(self) -> None:
        for name, choices in self.growing.items():
            values = getattr(self, name)
            for value in values or ("nothing",):
                if value not in tuple(choices):
                    raise ConfigError(f"{option_of(name)}: one of {', '.join(choices)}, got {value!r}")
        for name in _REAL_ONLY if self.profile else _EMULATED_ONLY:
            if getattr(self, name) != _DEFAULTS[name]:
                wrong = "not with --profile, which takes the model's place" if self.profile else "only with --profile"
                raise ConfigError(f"{option_of(name)}: {wrong}")
        if TurnsSystem.UPSTREAM in self.systems and not self.profile:
            raise ConfigError(f"--system {TurnsSystem.UPSTREAM}: only with --profile, whose workers pace NIXL's thread")
        is_known = (
            TurnsSystem.SHUTTLE in self.systems and Switch.ON in self.reuse and PrefillCache.ON in self.prefill_cache
        )
        if PrefillCache.LARGER in self.prefill_cache and not is_known:
            raise ConfigError(
                "--prefill-cache larger: give --reuse on and --prefill-cache on as well, and --system shuttle;"
                " they say how much larger"
            )
        if PrefillCache.LARGER in self.prefill_cache and Switch.OFF not in self.reuse:
            raise ConfigError("--prefill-cache larger: give --reuse off as well; it is measured without reuse")

    @property
    def cells(self) -> list[TurnsCell]:
        """In the order of measuring: first what others are compared with, and engines with equal options together."""
        return [
            TurnsCell(mode, cache, is_reusing, system, answers, client)
            for cache in PrefillCache
            for system in TurnsSystem
            for is_reusing in (False, True)
            for mode, answers in self._ways(system)
            for client in ClientName
            if cache in self.prefill_cache
            and system in self.systems
            and client in self.clients
            and (Switch.ON if is_reusing else Switch.OFF) in self.reuse
            and not (cache is PrefillCache.LARGER and (is_reusing or system is TurnsSystem.UPSTREAM))
        ]

    def _ways(self, system: TurnsSystem) -> list[tuple[Mode, Answers]]:
        """Modes and kinds of answers that ``system`` is measured with."""
        if system is TurnsSystem.UPSTREAM:
            return [(Mode.PULL, Answers.WHOLE)]
        modes = [Mode(mode) for mode in self.growing["modes"] if mode in self.modes]
        return [(mode, answers) for mode in modes for answers in Answers if answers in self.answers]

    @property
    def longest_tokens(self) -> int:
        """A conversation with its last answer, about."""
        further = (self.turns - 1) * self.turn_tokens
        return self.first_tokens + further + self.turns * (self.output_tokens + _TEMPLATE_TOKENS)

    @property
    def max_model_len(self) -> int:
        """Room for one conversation, in whole blocks."""
        return num_blocks_for(round(self.longest_tokens * _EXCESS), BLOCK_SIZE_TOKENS) * BLOCK_SIZE_TOKENS

    def pool_blocks(self, num_tokens: int) -> int:
        """Blocks of a pool that is given ``num_tokens``, with the one that vLLM keeps for itself."""
        num_tokens = num_tokens or round(_ROOM * self.conversations * self.max_model_len)
        return num_blocks_for(num_tokens, BLOCK_SIZE_TOKENS) + 1

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> TurnsPlan:
        """From what ``mapping_of`` gives, or options. Raises ``ConfigError`` naming an unknown key."""
        return cls(**knobs_in(cls, values))


_DEFAULTS = {knob.name: knob.default for knob in fields(TurnsPlan)}
