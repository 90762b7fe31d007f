"""What vLLM loads through its entry point ``vllm.general_plugins``, in every process: registers the emulated model."""

from __future__ import annotations

from kvshuttle.emulate.model_dir import ARCHITECTURE


def register() -> None:
    """Tell vLLM of the model class, by name only: nothing is imported until an engine is started with it."""
    from vllm.model_executor.models.registry import ModelRegistry

    ModelRegistry.register_model(ARCHITECTURE, "kvshuttle.emulate.model:EmulatedModel")
