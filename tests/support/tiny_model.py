"""A model that computes in no time, for tests with more ranks or engines than cores."""

from __future__ import annotations

import json
import os
import re
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import save_file

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
    "tie_word_embeddings": False,
    "vocab_size": 49152,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
KV_BYTES_PER_TOKEN = 4 * 2 * 4 * 64 * 4
"""Layers, K and V, KV heads over all ranks, head size, bytes of a float32."""


def make_talking_model(directory: Path, *, max_model_len: int) -> Path:
    """Write it, with the bundled tokenizer. What it says hangs on all that it has read, as with dummy weights not.

    It says whole words only, each with the blank before it, so that an answer sent back as text is the same tokens.
    """
    config = TINY_QWEN3 | {"max_position_embeddings": max_model_len}
    _write(directory, config)
    vocabulary = json.loads((directory / "tokenizer.json").read_text())["model"]["vocab"]
    words = sorted(token for text, token in vocabulary.items() if _WORD.match(text))
    save_file(_talking_weights(config, words), directory / "model.safetensors", metadata={"format": "pt"})
    return directory


_WORD = re.compile(r"\u0120[a-z]{3,}$")
_SHARPNESS = 1.5
"""Of attention: heads look at few tokens each, and not at the average of all, which would always be the same."""


def _talking_weights(config: dict[str, Any], words: list[int]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)

    def matrix(num_out: int, num_in: int) -> np.ndarray:
        # Keeps the size of what goes through it.
        return (rng.standard_normal((num_out, num_in)) / num_in**0.5).astype(np.float32)

    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    tensors = {
        "model.embed_tokens.weight": rng.standard_normal((config["vocab_size"], hidden)).astype(np.float32),
        "model.norm.weight": np.ones(hidden, np.float32),
        "lm_head.weight": np.zeros((config["vocab_size"], hidden), np.float32),
    }
    tensors["lm_head.weight"][words] = matrix(len(words), hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        shapes = {
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        tensors |= {f"{prefix}.{name}.weight": matrix(*shape) for name, shape in shapes.items()}
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{name}.weight"] = np.ones(hidden, np.float32)
        for name in ("q_norm", "k_norm"):
            tensors[f"{prefix}.self_attn.{name}.weight"] = np.full(head, _SHARPNESS, np.float32)
    return tensors


def _write(directory: Path, config: dict[str, Any]) -> None:
    source = ensure_model(SMOLLM2, cache_dir_from(os.environ), env=os.environ, report=print)
    (directory / "config.json").write_text(json.dumps(config))
    for name in TOKENIZER_FILES:
        if (source / name).exists():
            shutil.copy(source / name, directory / name)
