"""What an emulated model's KV cache looks like, and how many bytes a token takes in it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvshuttle.config.checks import is_int, shortened
from kvshuttle.errors import ConfigError

_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_LARGEST_SCALE = 1e6
_MOST = 10_000
_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Those that the attention backend of vLLM's CPU build can lay out."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """Layers, KV heads, head size and number format. Raises ``ConfigError`` naming the field."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim"):
            value = getattr(self, name)
            if not is_int(value) or not 1 <= value <= _MOST:
                raise ConfigError(f"geometry.{name}: a whole number from 1 to {_MOST:,}, got {shortened(repr(value))}")
        if self.head_dim not in _HEAD_SIZES:
            raise ConfigError(f"geometry.head_dim: one of {', '.join(map(str, _HEAD_SIZES))}, got {self.head_dim}")
        if not isinstance(self.dtype, str) or self.dtype not in _DTYPE_BYTES:
            raise ConfigError(f"geometry.dtype: one of {', '.join(_DTYPE_BYTES)}, got {self.dtype!r}")

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * _DTYPE_BYTES[self.dtype]

    def scaled(self, bytes_scale: float) -> Geometry:
        """The same with about ``bytes_scale`` times the bytes: fewer or more layers, at least one."""
        if not 0 < bytes_scale <= _LARGEST_SCALE:
            raise ConfigError(f"bytes_scale: a number above 0, up to {_LARGEST_SCALE:g}, got {bytes_scale!r}")
        num_layers = max(1, round(self.num_layers * bytes_scale))
        if num_layers > _MOST:
            raise ConfigError(
                f"bytes_scale: no more than {_MOST:,} layers can be emulated, and {bytes_scale:g} times the profile's"
                f" {self.num_layers} are {num_layers:,}"
            )
        return replace(self, num_layers=num_layers)
