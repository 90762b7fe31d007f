"""What a model's config.json says of how long its prompts may be and how much KV a token takes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from kvshuttle.config.checks import is_int
from kvshuttle.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_FILE = "config.json"
_LENGTH_KEY = "max_position_embeddings"
_ROPE_KEYS = ("rope_scaling", "rope_parameters")
"""Where they have a factor, vLLM's length follows from it by rules of its own."""
_BYTES_OF_HALF = 2
_BYTES_OF_FLOAT = 4


def read_model_config(directory: Path) -> dict[str, Any]:
    """The model's configuration; of one that takes more than text, the part about text.

    Raises ``ConfigError`` naming ``--model`` where there is none, or none that can be read.
    """
    path = directory / _FILE
    try:
        values = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ConfigError(f"--model: {directory} holds no {_FILE}; give the directory of a model") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"--model: {path}: {error}; give the directory of a whole model") from error
    if not isinstance(values, dict):
        raise ConfigError(f"--model: {path} holds {type(values).__name__}, no object; give the directory of a model")
    text = values.get("text_config")
    return text if isinstance(text, dict) else values


def context_tokens_in(config: Mapping[str, Any]) -> int:
    """The longest prompt with its answer; 0 where this does not say, or where vLLM may take longer ones."""
    ropes = [rope for key in _ROPE_KEYS if isinstance(rope := config.get(key), dict)]
    is_longer = config.get("model_max_length") or any("factor" in rope for rope in ropes)
    return 0 if is_longer else _count(config, _LENGTH_KEY)


def dtype_in(config: Mapping[str, Any]) -> str:
    """The number format that it is kept in; "" where it does not say."""
    return str(config.get("dtype") or config.get("torch_dtype") or "")


def kv_bytes_per_token_in(config: Mapping[str, Any], dtype: str) -> int:
    """KV of a token in all layers, where it is kept as usual: a key and a value for each head. 0 where it does not say.

    ``dtype``: vLLM's ``--dtype``.
    """
    heads = _count(config, "num_attention_heads")
    kv_heads = _count(config, "num_key_value_heads") or heads
    head_dim = _count(config, "head_dim") or (_count(config, "hidden_size") // heads if heads else 0)
    if "kv_lora_rank" in config:
        return 0
    size = _BYTES_OF_FLOAT if dtype in ("float32", "float") else _BYTES_OF_HALF
    return 2 * _count(config, "num_hidden_layers") * kv_heads * head_dim * size


def _count(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    return max(0, int(value or 0)) if is_int(value) else 0
