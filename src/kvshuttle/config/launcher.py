"""Knobs of the launcher."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from kvshuttle.config.checks import check_dtype, check_numbers
from kvshuttle.config.connector import ConnectorConfig
from kvshuttle.config.router import ModeChoice
from kvshuttle.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping


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
    mode: ModeChoice = ModeChoice.AUTO
    """The router's ``mode``."""
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
        check_numbers(self, lambda name: f"--{_option(name)}")
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
        check_dtype("--dtype", self.dtype)
        taken = {arg.partition("=")[0] for arg in self.router_args} & {"--host", "--port"}
        if taken:
            raise ConfigError(f"--router-arg: {min(taken)} is an option of the launcher itself; give it there")
        owned = sorted({"side_channel_host", "side_channel_port"} & set(self.connector_options))
        if owned:
            raise ConfigError(f"--connector-option {owned[0]}: the launcher chooses it itself; leave it out")
        # An unknown key would only show when the first engine dies of it half a minute later.
        ConnectorConfig.from_extra_config(self.connector_options)


def _option(name: str) -> str:
    return name.removeprefix("num_").replace("_", "-")
