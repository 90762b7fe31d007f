"""Every knob, declared once: default, unit, meaning and range.

One frozen dataclass for each part. Only ``cli.py`` and vLLM's own configuration feed them; an unknown
key is an error, never ignored.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any
from urllib.parse import urlsplit

from kvshuttle.errors import ConfigError

SECRET_VARIABLE = "KVSHUTTLE_SECRET"  # noqa: S105 - its name, not its value
_SECRET_MIN_LEN_BYTES = 16


def secret_from(env: Mapping[str, str]) -> bytes | None:
    """The side channel's shared key, None when there is none. Raises ``ConfigError`` when it is too short to be one.

    It comes from the environment, since command lines and vLLM's configuration are shown in logs and process lists.
    """
    secret = env.get(SECRET_VARIABLE, "").encode()
    if secret and len(secret) < _SECRET_MIN_LEN_BYTES:
        raise ConfigError(
            f"{SECRET_VARIABLE}: at least {_SECRET_MIN_LEN_BYTES} bytes, the same on every engine and the router"
        )
    return secret or None


# --- the connector, inside vLLM -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ConnectorConfig:
    """Knobs of ``kv_connector_extra_config``; ``from_extra_config`` refuses unknown keys and bad values.

    Defaults: the lease of 30 s is vLLM's own (``kv_lease_duration``). An acquire takes about a millisecond, so 2 s
    means that the holder is gone. Reading 32k tokens of a 70B model moves some 10 GB, about a second on a link of
    100 Gb/s.
    """

    side_channel_host: str = "127.0.0.1"
    """Address to bind; anything but loopback needs ``KVSHUTTLE_SECRET``."""
    side_channel_port: int = 14579
    """Port of the engine's side channel, 0 for a free one; the data-parallel rank is added. 14579 is vLLM's."""
    advertise_host: str = ""
    """Name or address under which peers reach this host; "" means ``side_channel_host``."""
    model_identity: str = ""
    """What makes two engines' weights the same; "" means the last part of the model's name or path."""
    nixl_backends: tuple[str, ...] = ("UCX",)
    """NIXL backends, for instance ``["LIBFABRIC"]`` on EFA."""
    nixl_backend_params: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Parameters for each backend, as NIXL takes them."""
    nixl_progress_thread: bool = False
    """NIXL's own progress thread; it burns a core for each agent even when idle."""
    lease_s: float = 30.0
    """How long computed KV is kept for a reader that does not come, and how long a lease lasts unrenewed."""
    acquire_timeout_s: float = 2.0
    """Longest wait for a holder's answer before the prompt is recomputed."""
    read_timeout_s: float = 10.0
    """Longest a read may take before it counts as failed."""
    total_wait_s: float = 300.0
    """Longest a lease is renewed for a request that this engine has not admitted yet."""
    push_timeout_s: float = 10.0
    """Push: longest time in which nothing arrives, once the prompt is computed, before it is read instead."""
    confirm_timeout_s: float = 2.0
    """Push: longest wait for the word that nothing is written any more; after it the blocks are kept out of use."""
    submit_margin_s: float = 1.0
    """No read starts or counts later than this before the lease ends."""
    recompute_threshold_tokens: int = 0
    """Fewest missing tokens worth a read; below it they are computed locally."""

    def __post_init__(self) -> None:
        for name in (knob.name for knob in fields(self) if knob.name.endswith("_s")):
            if not _is_duration(getattr(self, name)):
                raise ConfigError(f"{name}: a number of seconds above 0, got {getattr(self, name)!r}")
        for name in ("side_channel_host", "advertise_host", "model_identity"):
            if not isinstance(getattr(self, name), str):
                raise ConfigError(f"{name}: text, got {getattr(self, name)!r}")
        if not self.submit_margin_s < self.lease_s / 3:
            raise ConfigError(
                f"submit_margin_s: less than a third of lease_s ({self.lease_s}), got {self.submit_margin_s}:"
                " a lease is renewed after a third of its life"
            )
        if not _is_int(self.side_channel_port) or not 0 <= self.side_channel_port <= 65535:
            raise ConfigError(f"side_channel_port: 0 to 65535, got {self.side_channel_port!r}")
        if not _is_int(self.recompute_threshold_tokens) or self.recompute_threshold_tokens < 0:
            raise ConfigError(f"recompute_threshold_tokens: 0 or more, got {self.recompute_threshold_tokens!r}")
        self._validate_nixl()

    def _validate_nixl(self) -> None:
        names = self.nixl_backends
        if not isinstance(names, tuple) or not names or not all(isinstance(name, str) for name in names):
            raise ConfigError(f'nixl_backends: a list of names such as ["UCX"], got {names!r}')
        if not isinstance(self.nixl_backend_params, Mapping):
            raise ConfigError(
                f"nixl_backend_params: an object of objects, by backend, got {self.nixl_backend_params!r}"
            )
        if not isinstance(self.nixl_progress_thread, bool):
            raise ConfigError(f"nixl_progress_thread: true or false, got {self.nixl_progress_thread!r}")

    @classmethod
    def from_extra_config(cls, extra: Mapping[str, Any]) -> ConnectorConfig:
        """Build from vLLM's ``kv_connector_extra_config``. Raises ``ConfigError`` naming the key."""
        known = {knob.name: knob for knob in fields(cls)}
        unknown = sorted(set(extra) - set(known))
        if unknown:
            raise ConfigError(
                f"kv_connector_extra_config.{unknown[0]}: unknown key; known are {', '.join(sorted(known))}"
            )
        values = dict(extra)
        if isinstance(values.get("nixl_backends"), list):
            values["nixl_backends"] = tuple(values["nixl_backends"])
        return cls(**values)


# --- the router -----------------------------------------------------------------------------------


class EngineRole(StrEnum):
    """An engine's place in a request."""

    PREFILL = "prefill"
    DECODE = "decode"


class PrefillFailurePolicy(StrEnum):
    """What happens when no prefill engine could serve a request after all attempts."""

    RETRY_THEN_LOCAL = "retry_then_local"
    """The decode engine computes the prompt itself, up to ``local_prefill_max_tokens``."""
    RETRY_THEN_FAIL = "retry_then_fail"


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
        url = urlsplit(url_text)
        example = f"write http://127.0.0.1:8100,127.0.0.1:14579 instead of {text!r}"
        try:
            port, side = url.port, urlsplit(f"//{side_address}")
            is_side_good = bool(comma and side.hostname and side.port) and not side.path
        except ValueError as error:
            raise ConfigError(f"{role} engine: {error}; {example}") from error
        if url.scheme not in ("http", "https") or not url.hostname or url.path.strip("/") or url.query:
            raise ConfigError(f"{role} engine: the URL is scheme, host and port only; {example}")
        if not is_side_good:
            raise ConfigError(f"{role} engine: the side channel's host:port is missing or malformed; {example}")
        is_tls = url.scheme == "https"
        return cls(f"{role}-{index}", role, url.hostname, port or (443 if is_tls else 80), is_tls, side_address.strip())


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
    is_logging_requests: bool = True
    """One JSON line for each request, without any of its text."""

    def __post_init__(self) -> None:
        self._validate_engines()
        self._validate_texts()
        for knob in fields(self):
            value = getattr(self, knob.name)
            if knob.name.endswith("_s") and not _is_duration(value):
                raise ConfigError(f"{knob.name}: a number of seconds above 0, got {value!r}")
            if knob.name.startswith("is_") and not isinstance(value, bool):
                raise ConfigError(f"{knob.name}: true or false, got {value!r}")
            if knob.name.endswith("_bytes") and (not _is_int(value) or value < 1024):
                raise ConfigError(f"{knob.name}: 1024 or more, got {value!r}")
            if knob.name.startswith("max_") and (not _is_int(value) or value < 1):
                raise ConfigError(f"{knob.name}: 1 or more, got {value!r}")
        if not _is_int(self.port) or not 0 <= self.port <= 65535:
            raise ConfigError(f"port: 0 to 65535, got {self.port!r}")
        for name in ("local_prefill_max_tokens", "disaggregate_from_tokens", "unhealthy_after"):
            if not _is_int(getattr(self, name)) or getattr(self, name) < 0:
                raise ConfigError(f"{name}: 0 or more, got {getattr(self, name)!r}")
        if self.prefill_failure_policy not in tuple(PrefillFailurePolicy):
            raise ConfigError(
                f"prefill_failure_policy: one of {', '.join(PrefillFailurePolicy)}, got {self.prefill_failure_policy!r}"
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
        policy = rest.get("prefill_failure_policy")
        if policy in tuple(PrefillFailurePolicy):
            rest["prefill_failure_policy"] = PrefillFailurePolicy(policy)
        return cls(engines=tuple(engines), **rest)


def _is_duration(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


# --- the launcher -----------------------------------------------------------------------------------


class Device(StrEnum):
    """What engines compute on."""

    AUTO = "auto"
    """GPUs when there are any and vLLM is not its CPU build, else the CPU."""
    CPU = "cpu"
    GPU = "gpu"


@dataclass(frozen=True, slots=True)
class LauncherConfig:
    """Knobs of ``kvshuttle up`` and ``kvshuttle demo``. Raises ``ConfigError`` naming the option on bad values."""

    model: str = "smollm2"
    """The bundled model, the directory of another, or a name that vLLM itself can fetch."""
    served_model_name: str = ""
    """What clients call the model; "" means the last part of ``model``."""
    num_prefill: int = 1
    """Prefill engines to start."""
    num_decode: int = 1
    """Decode engines to start."""
    host: str = "127.0.0.1"
    """Address of the router. Engines and side channels stay on loopback."""
    port: int = 8000
    """Port of the router, 0 for a free one."""
    device: Device = Device.AUTO
    """What the engines compute on; ``auto`` takes GPUs when vLLM here can use them."""
    dtype: str = "auto"
    """vLLM's ``--dtype`` for every engine."""
    kv_cache_gib: int = 2
    """KV cache of each engine on the CPU, in GiB for each tensor-parallel rank."""
    max_model_len: int = 0
    """Longest prompt plus answer in tokens, 0 for the model's own limit."""
    engine_args: tuple[str, ...] = ()
    """Further arguments for every engine."""
    prefill_args: tuple[str, ...] = ()
    """Further arguments for prefill engines only."""
    decode_args: tuple[str, ...] = ()
    """Further arguments for decode engines only."""
    router_args: tuple[str, ...] = ()
    """Further arguments for ``kvshuttle router``."""
    connector_options: Mapping[str, Any] = field(default_factory=dict)
    """Keys of ``ConnectorConfig`` for every engine."""
    startup_timeout_s: float = 600.0
    """Longest wait until everything is healthy; large models load for minutes."""
    stop_timeout_s: float = 15.0
    """Time given to each process between SIGTERM and SIGKILL."""
    is_restarting: bool = True
    """Start a process that dies while serving again, at the same ports."""

    def __post_init__(self) -> None:
        for name in ("num_prefill", "num_decode", "kv_cache_gib"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{_option(name)}: 1 or more, got {getattr(self, name)}")
        if self.max_model_len < 0:
            raise ConfigError(f"--max-model-len: 1 or more, or 0 for the model's own limit, got {self.max_model_len}")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port: 0 to 65535, got {self.port}")
        for name in ("startup_timeout_s", "stop_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"--{_option(name)}: a number of seconds above 0, got {getattr(self, name)}")
        owned = sorted({"side_channel_host", "side_channel_port"} & set(self.connector_options))
        if owned:
            raise ConfigError(f"--connector-option {owned[0]}: the launcher chooses it itself; leave it out")
        # An unknown key would only show when the first engine dies of it half a minute later.
        ConnectorConfig.from_extra_config(self.connector_options)


def _option(name: str) -> str:
    return name.removeprefix("num_").replace("_", "-")
