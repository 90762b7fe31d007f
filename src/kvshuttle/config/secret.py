"""The side channel's shared key, from the environment."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvshuttle.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

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
