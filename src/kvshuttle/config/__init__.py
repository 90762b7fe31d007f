"""Every knob, declared once: default, unit, meaning and range.

One frozen dataclass for each part. Only ``cli.py`` and vLLM's own configuration feed them; an unknown
key is an error, never ignored.
"""

from kvshuttle.config.connector import ConnectorConfig
from kvshuttle.config.environment import QUIET_WAITS_VARIABLE
from kvshuttle.config.launcher import Device, LauncherConfig
from kvshuttle.config.router import EngineRole, EngineSpec, ModeChoice, PrefillFailurePolicy, RouterConfig
from kvshuttle.config.secret import SECRET_VARIABLE, secret_from

__all__ = [
    "QUIET_WAITS_VARIABLE",
    "SECRET_VARIABLE",
    "ConnectorConfig",
    "Device",
    "EngineRole",
    "EngineSpec",
    "LauncherConfig",
    "ModeChoice",
    "PrefillFailurePolicy",
    "RouterConfig",
    "secret_from",
]
