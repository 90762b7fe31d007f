"""The emulated model, as vLLM runs it: attention layers that only declare their KV cache, and a timed forward pass."""

from __future__ import annotations

import contextlib
import logging
import time
from typing import TYPE_CHECKING, Any

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention

from kvshuttle.clock import now_s
from kvshuttle.emulate.batch import rows_of
from kvshuttle.emulate.model_dir import CONFIG_KEY, VOCAB_SIZE, WRONG_KV
from kvshuttle.emulate.neighbours import Neighbours, let_pass
from kvshuttle.emulate.pattern import Stamps
from kvshuttle.emulate.profile import parse_profile
from kvshuttle.emulate.steps import Emulation

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)

_CERTAIN = 100.0
"""Logit of the next token; all others are 0, so sampling at any usual temperature draws it."""


class EmulatedModel(torch.nn.Module):
    """Declares the geometry's KV cache, and computes nothing: a forward pass writes stamps and lasts as long as
    the profile says.

    ``attach`` must be called before the first real batch; until then a pass is vLLM's own trial run and does nothing.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self._profile = parse_profile(getattr(vllm_config.model_config.hf_config, CONFIG_KEY))
        geometry = self._profile.geometry
        self.layers = torch.nn.ModuleList(
            Attention(
                geometry.num_kv_heads,
                geometry.head_dim,
                scale=1.0,
                num_kv_heads=geometry.num_kv_heads,
                cache_config=vllm_config.cache_config,
                prefix=f"{prefix}.layers.{index}.attn" if prefix else f"layers.{index}.attn",
            )
            for index in range(geometry.num_layers)
        )
        self._batch: Any = None
        self._emulation: Emulation | None = None
        self._neighbours: Neighbours | None = None

    def attach(self, input_batch: Any, *, trace_path: Path | None, model_dir: Path) -> None:
        """The KV memory is there. ``input_batch``: the model runner's, which knows the requests and their tokens.

        ``model_dir``: engines of the same one are each other's neighbours.
        """
        pages = [layer.kv_cache.view(torch.int64).numpy() for layer in self.layers]
        self._emulation = Emulation(self._profile, Stamps(pages), trace_path=trace_path, now_s=now_s)
        self._emulation.clear()
        self._batch = input_batch
        if self._profile.contention is not None:
            self._neighbours = Neighbours.of(model_dir)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """vLLM asks for it by name; no emulated engine takes embeddings."""
        return torch.zeros(len(input_ids), 1)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """One pass. Returns ``[tokens, 1]``: at each request's last token the next one, as a float64."""
        started_at_s = now_s()
        hidden = torch.zeros(len(positions), 1, dtype=torch.float64)
        metadata = get_forward_context().attn_metadata
        if self._emulation is None or not metadata or not self._batch.num_reqs:
            return hidden
        with self._neighbours.computing() if self._neighbours else contextlib.nullcontext():
            rows = rows_of(self._batch, next(iter(metadata.values())))
            step = self._emulation.step(rows, started_at_s=started_at_s)
            for row, token in zip(rows, step.tokens, strict=True):
                hidden[row.last_index, 0] = token
            lasting_s = let_pass(
                step.planned_s,
                since_s=started_at_s,
                slowdown=step.slowdown,
                neighbours=self._neighbours,
                now_s=now_s,
                sleep=time.sleep,
            )
        self._emulation.finish(step, lasting_s=lasting_s)
        return hidden

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """``[rows, vocabulary]``: certainty for the next token; for a request with wrong KV, not a number.

        vLLM counts the latter in its ``vllm:corrupted_requests`` where ``VLLM_COMPUTE_NANS_IN_LOGITS`` is set.
        """
        tokens = hidden_states[:, 0].long()
        logits = torch.zeros(len(tokens), VOCAB_SIZE, dtype=torch.float32)
        logits.scatter_(1, tokens[:, None], _CERTAIN)
        logits[tokens == WRONG_KV, WRONG_KV] = torch.nan
        return logits

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """There are none."""
        return set()
