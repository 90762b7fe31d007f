"""Knobs of the router, and where its engines listen."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, urlsplit

from kvshuttle.config.checks import check_numbers, is_duration, is_int
from kvshuttle.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping


class EngineRole(StrEnum):
    """An engine's place in a request."""

    PREFILL = "prefill"
    DECODE = "decode"


class PrefillFailurePolicy(StrEnum):
    """What happens when no prefill engine could serve a request after all attempts."""

    RETRY_THEN_LOCAL = "retry_then_local"
    """The decode engine computes the prompt itself, up to ``local_prefill_max_tokens``."""
    RETRY_THEN_FAIL = "retry_then_fail"


class ModeChoice(StrEnum):
    """How KV should get from the prefill engine to the decode engine."""

    AUTO = "auto"
    """``push``, unless every decode engine is busy."""
    PUSH = "push"
    """Both legs at once; the prefill engine writes while it computes."""
    PULL = "pull"
    """The decode engine is chosen, and reads, when the prompt is computed."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Where one engine listens. ``name`` stands for it in logs and metrics; addresses never leave the router."""

    name: str
    role: EngineRole
    host: str
    port: int
    is_tls: bool
    side_address: str
    """``host:port`` of its scheduler half's side channel."""

    @property
    def http_address(self) -> str:
        """``host:port`` of its HTTP server."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str, role: EngineRole, index: int) -> EngineSpec:
        """From ``http://host:port,side_host:side_port``, as on the command line. Raises ``ConfigError``."""
        url_text, comma, side_address = text.strip().partition(",")
        example = f"write http://127.0.0.1:8100,127.0.0.1:14579 instead of {text!r}"
        try:
            url, side = urlsplit(url_text), urlsplit(f"//{side_address.strip()}")
            port, is_bare = url.port, url.port != 0 and _is_host_and_port(url)
            is_side_good = bool(comma and side.port and _is_host_and_port(side)) and not set(side_address) & set("@?#/")
        except ValueError as error:
            raise ConfigError(f"{role} engine: {error}; {example}") from error
        if url.scheme not in ("http", "https") or not url.hostname or url.path.strip("/") or not is_bare:
            raise ConfigError(f"{role} engine: the URL is scheme, host and port only; {example}")
        if not is_side_good:
            raise ConfigError(f"{role} engine: the side channel's host:port is missing or malformed; {example}")
        is_tls = url.scheme == "https"
        return cls(f"{role}-{index}", role, url.hostname, port or (443 if is_tls else 80), is_tls, side_address.strip())


def _is_host_and_port(url: SplitResult) -> bool:
    """Whether there is no user, query or fragment. Raises ``ValueError`` for a host that no name can have."""
    host = url.hostname or ""
    host.encode("idna")
    is_plain = not (url.username or url.password or url.query or url.fragment)
    return bool(host) and is_plain and not any(letter.isspace() for letter in url.netloc)


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Knobs of ``kvshuttle router``; ``from_mapping`` refuses unknown keys and bad values.

    Every wait of a request has its own deadline. The defaults leave room for long prompts on slow engines: a *dead*
    engine is noticed by its reset connections or by ``unhealthy_after`` failed probes, long before them.
    """

    engines: tuple[EngineSpec, ...]
    """The engines, from ``prefill`` and ``decode``."""
    host: str = "127.0.0.1"
    """Address to bind."""
    port: int = 8000
    """Port to bind, 0 for a free one."""
    mode: ModeChoice = ModeChoice.AUTO
    """How KV is handed off where a request's header does not say: ``push``, ``pull``, or by load with ``auto``."""
    prefill_failure_policy: PrefillFailurePolicy = PrefillFailurePolicy.RETRY_THEN_LOCAL
    """What happens when no prefill engine could serve a request: ``retry_then_local`` or ``retry_then_fail``."""
    local_prefill_max_tokens: int = 32_768
    """Longest prompt (estimated) that a decode engine may be made to compute after failures; 0 for none."""
    disaggregate_from_tokens: int = 0
    """Shorter prompts (estimated) go to a decode engine alone."""
    prefill_keep_fields: tuple[str, ...] = ()
    """Fields the prefill leg keeps though it usually drops them, for chat templates that render them
    (Kimi K3 renders ``response_format`` and ``tool_choice``)."""
    max_attempts: int = 3
    """Dispatches of one request before the failure policy decides."""
    retry_pause_s: float = 0.05
    """Pause before the first retry, doubled for each further one."""
    connect_timeout_s: float = 2.0
    """Longest time for a connection to an engine."""
    prefill_timeout_s: float = 300.0
    """Prefill leg: longest wait for its whole answer."""
    first_byte_timeout_s: float = 300.0
    """Decode leg: longest wait for the first data event of a stream. Whole answers have only the total limit."""
    idle_timeout_s: float = 120.0
    """Longest gap between two reads of a decode stream."""
    total_timeout_s: float = 3600.0
    """Longest time for a request altogether, retries included."""
    slow_client_timeout_s: float = 60.0
    """Longest time a client may leave a full buffer unread."""
    request_timeout_s: float = 60.0
    """Longest time a client may take to send one request."""
    keep_alive_s: float = 75.0
    """Idle time after which a client's connection is closed."""
    drain_s: float = 30.0
    """Time given to running requests at shutdown."""
    max_header_bytes: int = 65_536
    """Longest head of a client's request."""
    max_body_bytes: int = 64 * 1024 * 1024
    """Longest body of a client's request."""
    max_response_bytes: int = 256 * 1024 * 1024
    """Longest answer that is not streamed; it is checked whole before the client sees any of it."""
    client_buffer_bytes: int = 262_144
    """Unread bytes per client above which its engine is no longer read."""
    max_connections: int = 8192
    """Client connections at a time."""
    max_engine_connections: int = 2048
    """Connections to one engine at a time."""
    engine_idle_s: float = 4.0
    """Idle engine connections are closed after this; below the 5 s after which vLLM closes them itself."""
    probe_interval_s: float = 1.0
    """Pause between two looks at an engine."""
    probe_timeout_s: float = 3.0
    """Longest wait for an answer to one look, on HTTP and on the side channel."""
    unhealthy_after: int = 3
    """Failed probes in a row before an engine counts as down; a refused connection counts at once."""
    quarantine_s: float = 2.0
    """How long a failing engine is avoided, doubled for each failure in a row up to sixteenfold."""
    engine_api_key: str = ""
    """Sent with the router's own look at ``/v1/models``; clients' own keys are passed on with their requests."""
    is_reusing_history: bool = True
    """Have answered turns kept, and tell the next turn's engines where. Off: every prompt is computed anew."""
    history_ttl_s: float = 480.0
    """How long engines keep an answered turn: their ``decoder_kv_blocks_ttl``."""
    history_margin_s: float = 0.5
    """Time before that at which a turn is not counted on any more."""
    max_conversations: int = 10_000
    """Turns remembered at a time, one for each line of a conversation; the one used longest ago goes first."""
    is_history_renewed: bool = False
    """Have turns kept for longer than ``history_ttl_s``, by renewing them at their engines."""
    history_renewed_for_s: float = 3600.0
    """With that: for how long after its last use a turn is renewed."""
    local_append_max_tokens: int = 0
    """Turns with no more new tokens than this (estimated) go to the decode engine that keeps their history, alone."""
    is_logging_requests: bool = True
    """One JSON line for each request, without any of its text."""

    def __post_init__(self) -> None:
        check_numbers(self)
        self._validate_engines()
        self._validate_texts()
        self._validate_choices()
        for knob in fields(self):
            value = getattr(self, knob.name)
            if knob.name.endswith("_s") and not is_duration(value):
                raise ConfigError(f"{knob.name}: a number of seconds above 0, got {value!r}")
            if knob.name.startswith("is_") and not isinstance(value, bool):
                raise ConfigError(f"{knob.name}: true or false, got {value!r}")
            if knob.name.endswith("_bytes") and (not is_int(value) or value < 1024):
                raise ConfigError(f"{knob.name}: 1024 or more, got {value!r}")
            if knob.name.startswith("max_") and (not is_int(value) or value < 1):
                raise ConfigError(f"{knob.name}: 1 or more, got {value!r}")
        if not is_int(self.port) or not 0 <= self.port <= 65535:
            raise ConfigError(f"port: 0 to 65535, got {self.port!r}")
        for name in (
            "local_prefill_max_tokens", "disaggregate_from_tokens", "unhealthy_after", "local_append_max_tokens",
        ):  # fmt: skip
            if not is_int(getattr(self, name)) or getattr(self, name) < 0:
                raise ConfigError(f"{name}: 0 or more, got {getattr(self, name)!r}")

        if not self.history_margin_s < self.history_ttl_s:
            raise ConfigError(
                f"history_margin_s: less than history_ttl_s ({self.history_ttl_s}), got {self.history_margin_s}"
            )

    def _validate_engines(self) -> None:
        for role in EngineRole:
            if not any(engine.role is role for engine in self.engines):
                raise ConfigError(f"engines: at least one {role} engine is needed; name it with --{role} URL,SIDE")
        for attribute in ("name", "http_address", "side_address"):
            values = [getattr(engine, attribute) for engine in self.engines]
            for value in values:
                if values.count(value) > 1:
                    raise ConfigError(f"engines: {attribute} {value!r} is given twice")

    def _validate_choices(self) -> None:
        for name, kind in _CHOICES.items():
            if getattr(self, name) not in tuple(kind):
                raise ConfigError(f"{name}: one of {', '.join(kind)}, got {getattr(self, name)!r}")

    def _validate_texts(self) -> None:
        if not isinstance(self.host, str) or not self.host.strip():
            raise ConfigError(f"host: a name or address such as 127.0.0.1, got {self.host!r}")
        names = self.prefill_keep_fields
        if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
            raise ConfigError(f'prefill_keep_fields: a list of names such as ["tool_choice"], got {names!r}')
        if not isinstance(self.engine_api_key, str) or not self.engine_api_key.isprintable():
            raise ConfigError("engine_api_key: text of one line, without control characters")  # a secret: not shown

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> RouterConfig:
        """From a TOML table: ``prefill`` and ``decode`` are lists of ``"URL,SIDE"``, the rest are the knobs by name.

        Raises ``ConfigError`` naming the key.
        """
        rest = dict(values)
        engines: list[EngineSpec] = []
        for role in EngineRole:
            texts = rest.pop(role.value, [])
            if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
                raise ConfigError(f"{role}: a list of URL,SIDE strings, got {texts!r}")
            engines += [EngineSpec.parse(text, role, index) for index, text in enumerate(texts)]
        known = {knob.name for knob in fields(cls)} - {"engines"}
        unknown = sorted(set(rest) - known)
        if unknown:
            raise ConfigError(f"{unknown[0]}: unknown key; known are prefill, decode, {', '.join(sorted(known))}")
        if isinstance(rest.get("prefill_keep_fields"), list):
            rest["prefill_keep_fields"] = tuple(rest["prefill_keep_fields"])
        host = rest.get("host")
        if isinstance(host, str) and host.startswith("[") and host.endswith("]"):
            rest["host"] = host[1:-1]  # as IPv6 addresses stand in URLs
        for name, kind in _CHOICES.items():
            if rest.get(name) in tuple(kind):
                rest[name] = kind(rest[name])
        return cls(engines=tuple(engines), **rest)


_CHOICES: dict[str, type[StrEnum]] = {"mode": ModeChoice, "prefill_failure_policy": PrefillFailurePolicy}
