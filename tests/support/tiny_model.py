"""A model with dummy weights that computes in no time, for tests with more ranks or engines than cores."""

from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING

from kvshuttle.launcher.model import SMOLLM2, cache_dir_from, ensure_model

if TYPE_CHECKING:
    from pathlib import Path

TINY_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "vocab_size": 49152,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
KV_BYTES_PER_TOKEN = 4 * 2 * 4 * 64 * 4
"""Layers, K and V, KV heads over all ranks, head size, bytes of a float32."""


def make_tiny_model(directory: Path) -> Path:
    """Write its configuration, with the bundled model's tokenizer. ``--load-format dummy`` seeds its weights."""
    source = ensure_model(SMOLLM2, cache_dir_from(os.environ), env=os.environ, report=print)
    (directory / "config.json").write_text(json.dumps(TINY_QWEN3))
    for name in TOKENIZER_FILES:
        if (source / name).exists():
            shutil.copy(source / name, directory / name)
    return directory
