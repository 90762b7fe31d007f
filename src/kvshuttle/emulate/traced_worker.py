"""A worker class that computes for real and writes the trace that emulated engines write: to calibrate profiles by."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.forward_context import get_forward_context
from vllm.v1.worker.cpu_worker import CPUWorker

from kvshuttle.clock import now_s
from kvshuttle.emulate.batch import rows_of
from kvshuttle.emulate.pass_timer import PassTimer
from kvshuttle.emulate.settings import trace_path_in

if TYPE_CHECKING:
    from kvshuttle.emulate.steps import BatchRow


class TracedWorker(CPUWorker):
    """vLLM's own worker for the CPU, whose model is timed: its forward pass, and its logits.

    On a GPU both would return before anything is computed, so there is no such worker.
    """

    def initialize_from_config(self, *args: Any, **kwargs: Any) -> None:
        """After vLLM has allocated the KV cache: what runs before are trials."""
        super().initialize_from_config(*args, **kwargs)
        trace_path = trace_path_in(self.vllm_config.additional_config)
        if trace_path is None:
            return
        model, batch = self.model_runner.get_model(), self.model_runner.input_batch
        timer = PassTimer(trace_path, now_s)

        def rows() -> list[BatchRow]:
            metadata = get_forward_context().attn_metadata
            return rows_of(batch, next(iter(metadata.values()))) if metadata and batch.num_reqs else []

        model.forward = timer.timed_forward(model.forward, rows)
        model.compute_logits = timer.timed_logits(model.compute_logits)
