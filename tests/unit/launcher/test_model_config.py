"""What a model's config.json says of lengths and of KV memory."""

from __future__ import annotations

from typing import Any

import pytest

from kvshuttle.launcher.model_config import context_tokens_in, dtype_in, kv_bytes_per_token_in

SMALL = {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576}


@pytest.mark.parametrize(
    ("config", "dtype", "num_bytes"),
    [
        (SMALL, "auto", 2 * 30 * 3 * 64 * 2),
        (SMALL, "float32", 2 * 30 * 3 * 64 * 4),
        ({**SMALL, "head_dim": 128}, "auto", 2 * 30 * 3 * 128 * 2),
        ({"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}, "auto", 2 * 2 * 4 * 8 * 2),
        ({**SMALL, "kv_lora_rank": 512}, "auto", 0),
        ({**SMALL, "num_hidden_layers": "thirty"}, "auto", 0),
        ({**SMALL, "num_attention_heads": 0}, "auto", 0),
        ({}, "auto", 0),
    ],
)
def test_the_kv_of_a_token_follows_from_the_models_shape_where_it_is_kept_as_usual(
    config: dict[str, Any], dtype: str, num_bytes: int
) -> None:
    assert kv_bytes_per_token_in(config, dtype) == num_bytes


@pytest.mark.parametrize(
    ("config", "num_tokens"),
    [
        ({"max_position_embeddings": 64, "rope_scaling": None, "rope_parameters": {"rope_type": "default"}}, 64),
        ({"max_position_embeddings": 64, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 0),
        ({"max_position_embeddings": 64, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, 0),
        ({"max_position_embeddings": 64, "model_max_length": 128}, 0),
        ({"max_position_embeddings": 64, "rope_scaling": 5, "rope_parameters": "factor"}, 64),
        ({"max_position_embeddings": None}, 0),
        ({"max_position_embeddings": "long"}, 0),
    ],
)
def test_a_model_takes_what_it_says_unless_vllm_may_take_more(config: dict[str, Any], num_tokens: int) -> None:
    assert context_tokens_in(config) == num_tokens


def test_what_a_model_does_not_say_is_not_known() -> None:
    assert (context_tokens_in({}), dtype_in({})) == (0, "")
    assert (context_tokens_in({"max_position_embeddings": 64}), dtype_in({"torch_dtype": "float16"})) == (64, "float16")
