"""Knobs of the connector, inside vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from kvshuttle.config.checks import check_numbers, is_duration, is_int
from kvshuttle.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ConnectorConfig:
    """Knobs of ``kv_connector_extra_config``; ``from_extra_config`` refuses unknown keys and bad values.

    Defaults: the lease of 30 s is vLLM's own (``kv_lease_duration``), as are ``kv_recompute_threshold`` and
    ``decoder_kv_blocks_ttl``, name and figure. An acquire takes about a millisecond, so 2 s
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
    """No read starts later than this before the lease ends."""
    recompute_threshold_tokens: int = 0
    """Hand-off: fewest missing tokens worth a read; below it they are computed locally."""
    kv_recompute_threshold: int | str = 64
    """Reuse of an earlier turn: fewest missing tokens worth a read, or ``auto`` for what measurements say."""
    decoder_kv_blocks_ttl: float = 480.0
    """Seconds for which the KV of an answered request is kept for its next turn."""
    is_retention_renewed_on_use: bool = False
    """Start that time again with each read."""
    retention_max_blocks: int = 0
    """Most blocks kept for later turns; those used longest ago give way. 0 for no limit but the next one."""
    retention_max_fraction: float = 0.9
    """The same as a fraction of the pool; 0 to keep nothing."""
    is_disconnect_retained: bool = False
    """Keep also what a client left in the middle. With stop strings it is kept in any case: vLLM ends such a request
    in the same way when it has found one."""

    def __post_init__(self) -> None:
        check_numbers(self)
        for name in (knob.name for knob in fields(self) if knob.name.endswith("_s")):
            if not is_duration(getattr(self, name)):
                raise ConfigError(f"{name}: a number of seconds above 0, got {getattr(self, name)!r}")
        for name in ("side_channel_host", "advertise_host", "model_identity"):
            if not isinstance(getattr(self, name), str):
                raise ConfigError(f"{name}: text, got {getattr(self, name)!r}")
        if not self.submit_margin_s < self.lease_s / 3:
            raise ConfigError(
                f"submit_margin_s: less than a third of lease_s ({self.lease_s}), got {self.submit_margin_s}:"
                " a lease is renewed after a third of its life"
            )
        if not is_int(self.side_channel_port) or not 0 <= self.side_channel_port <= 65535:
            raise ConfigError(f"side_channel_port: 0 to 65535, got {self.side_channel_port!r}")
        if not is_int(self.recompute_threshold_tokens) or self.recompute_threshold_tokens < 0:
            raise ConfigError(f"recompute_threshold_tokens: 0 or more, got {self.recompute_threshold_tokens!r}")
        self._validate_nixl()
        self._validate_retention()

    def _validate_retention(self) -> None:
        threshold = self.kv_recompute_threshold
        if threshold != "auto" and (not is_int(threshold) or int(threshold) < 0):
            raise ConfigError(f'kv_recompute_threshold: a number of tokens, or "auto", got {threshold!r}')
        if not is_duration(self.decoder_kv_blocks_ttl):
            raise ConfigError(f"decoder_kv_blocks_ttl: a number of seconds above 0, got {self.decoder_kv_blocks_ttl!r}")
        if not is_int(self.retention_max_blocks) or self.retention_max_blocks < 0:
            raise ConfigError(f"retention_max_blocks: 0 or more, got {self.retention_max_blocks!r}")
        fraction = self.retention_max_fraction
        if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 <= fraction <= 1:
            raise ConfigError(f"retention_max_fraction: 0 to 1, got {fraction!r}")
        for name in ("is_retention_renewed_on_use", "is_disconnect_retained"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}: true or false, got {getattr(self, name)!r}")

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
