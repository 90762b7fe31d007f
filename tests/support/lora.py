"""LoRA adapters with random weights, large enough to change what a model says."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
from safetensors.numpy import save_file

if TYPE_CHECKING:
    from pathlib import Path

RANK = 8
_SPREAD = 0.15
"""Standard deviation of both factors: what they add is about as large as the weights that it is added to."""


def make_adapter(model: Path, directory: Path, *, seed: int) -> Path:
    """Write an adapter of ``model`` (a Llama) for the query and value projections of all layers."""
    config = json.loads((model / "config.json").read_text())
    hidden = config["hidden_size"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    widths = {"q_proj": config["num_attention_heads"] * head, "v_proj": config["num_key_value_heads"] * head}
    rng = np.random.default_rng(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, width in widths.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for factor, shape in (("lora_A", (RANK, hidden)), ("lora_B", (width, RANK))):
                tensors[f"{prefix}.{factor}.weight"] = rng.normal(0, _SPREAD, shape).astype(np.float32)
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "target_modules": sorted(widths),
        "bias": "none",
    }
    (directory / "adapter_config.json").write_text(json.dumps({**settings, "task_type": "CAUSAL_LM"}))
    return directory
