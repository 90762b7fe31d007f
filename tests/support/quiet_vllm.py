"""Imports what the connector's tests need of vLLM, with its dependencies' import-time warnings out of the way.

Our tests turn warnings into errors; a deprecation inside torch's own modules is not ours to fix. Import this first.
"""

from __future__ import annotations

import os
import warnings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", r"`torch\.jit\.", DeprecationWarning)
    import vllm.distributed.kv_transfer.kv_connector.utils
    import vllm.distributed.kv_transfer.kv_connector.v1.base
    import vllm.v1.core.sched.scheduler  # noqa: F401
