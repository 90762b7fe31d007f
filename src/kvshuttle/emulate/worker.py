"""The worker class of emulated engines: vLLM's own for the CPU, which also shows the model its requests."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from kvshuttle.emulate.settings import options_in, trace_path_in


class EmulatedWorker(CPUWorker):
    """Nothing of the worker changes. A model's forward pass is told only tokens of this step; to know a whole prompt,
    the emulated one must see the runner's batch."""

    def initialize_from_config(self, *args: Any, **kwargs: Any) -> None:
        """After vLLM has allocated the KV cache and before its connector registers it."""
        additional = self.vllm_config.additional_config
        options = options_in(additional)
        if options.get("nixl_progress_thread") is False:
            _switch_progress_thread_off()
        if pause_us := options.get("nixl_progress_pause_us"):
            _pace_progress_thread(pause_us)
        super().initialize_from_config(*args, **kwargs)
        self.model_runner.get_model().attach(
            self.model_runner.input_batch,
            trace_path=trace_path_in(additional),
            model_dir=Path(self.vllm_config.model_config.model),
        )


def _switch_progress_thread_off() -> None:
    """vLLM's connectors have no option for it; they look the agent's configuration up in their own module.

    Several of their threads use one agent. With the progress thread NIXL locks what they share, without it only when
    asked to; unlocked, notifications get lost.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker

    make_config = base_worker.nixl_agent_config
    modes = sys.modules[make_config.__module__].nixl_thread_sync_t

    def without_thread(*args: Any, **kwargs: Any) -> Any:
        own = {"enable_prog_thread": False, "sync_mode": modes.NIXL_THREAD_SYNC_STRICT}
        return make_config(*args, **{**kwargs, **own})

    base_worker.nixl_agent_config = without_thread


def _pace_progress_thread(pause_us: int) -> None:
    """NIXL's thread knows how to pause, but its Python interface sets the pause to none, which takes a core."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker

    interface: Any = sys.modules[base_worker.nixl_agent_config.__module__]
    bindings = interface.nixlBind

    def set_attribute(config: Any, name: str, value: Any) -> None:
        object.__setattr__(config, name, pause_us if name == "pthrDelay" else value)

    paced = type("Paced", (bindings.nixlAgentConfig,), {"__setattr__": set_attribute})
    interface.nixlBind = SimpleNamespace(**{**vars(bindings), "nixlAgentConfig": paced})
