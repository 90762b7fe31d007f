"""Writes the directory that ``--model`` names for an emulated engine: a config and a tokenizer, no weights."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from kvshuttle.emulate.profile import to_mapping

if TYPE_CHECKING:
    from pathlib import Path

    from kvshuttle.emulate.profile import Profile

ARCHITECTURE = "KvshuttleEmulatedForCausalLM"
CONFIG_KEY = "kvshuttle_emulate"
"""The profile sits under this key of config.json."""

WRONG_KV = 0
"""Token that a request answers with, and nothing else, once its KV was found wrong."""
WRONG_KV_TEXT = "<wrong-kv>"
END = 1
NUM_SPECIAL = 2
NUM_BYTES = 256
FIRST_WORD = NUM_SPECIAL + NUM_BYTES
VOCAB_SIZE = 8192
NUM_WORDS = VOCAB_SIZE - FIRST_WORD
"""Answers are made of words only: token ids from ``FIRST_WORD`` on."""

_CONSONANTS = "bcdfghjklmnprstvwxyz"
_VOWELS = "aeiou"


def write_model_dir(path: Path, profile: Profile, *, max_model_len: int = 32_768) -> None:
    """Write config.json, generation_config.json and the tokenizer's files into ``path``, which is made if need be."""
    path.mkdir(parents=True, exist_ok=True)
    for name, content in (
        ("config.json", config(profile, max_model_len=max_model_len)),
        ("generation_config.json", {"bos_token_id": None, "eos_token_id": END}),
        ("tokenizer.json", tokenizer()),
        ("tokenizer_config.json", tokenizer_config(max_model_len)),
    ):
        (path / name).write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def config(profile: Profile, *, max_model_len: int) -> dict[str, Any]:
    """A Qwen3 config, so that transformers knows the type, with our architecture and the profile in it."""
    geometry = profile.geometry
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "dtype": geometry.dtype,
        "vocab_size": VOCAB_SIZE,
        "num_hidden_layers": geometry.num_layers,
        "num_attention_heads": geometry.num_kv_heads,
        "num_key_value_heads": geometry.num_kv_heads,
        "head_dim": geometry.head_dim,
        # Buffers between layers have this width; there are no layers.
        "hidden_size": geometry.num_kv_heads * geometry.head_dim,
        "intermediate_size": 64,
        "max_position_embeddings": max_model_len,
        "bos_token_id": None,
        "eos_token_id": END,
        "tie_word_embeddings": True,
        CONFIG_KEY: to_mapping(profile),
    }


def tokenizer() -> dict[str, Any]:
    """Bytes and four-letter words: a text of our words and single spaces has one token for each, other text more."""
    specials = (WRONG_KV_TEXT, "<end>")
    pieces = [*specials, *_byte_letters(), *(f"\u0120{word}" for word in words())]
    assert len(pieces) == VOCAB_SIZE
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": index,
                "content": content,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                # What says that something is wrong must not be left out of texts.
                "special": index == END,
            }
            for index, content in enumerate(specials)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,
            "vocab": {piece: index for index, piece in enumerate(pieces)},
            "merges": [],
        },
    }


def tokenizer_config(max_model_len: int) -> dict[str, Any]:
    """The tokenizer's class and a chat template that shows each message with its role.

    An answer begins with a space, and as history it has to come to the tokens that it was made of.
    """
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<end>",
        "model_max_length": max_model_len,
        "clean_up_tokenization_spaces": False,
        "chat_template": (
            "{% for message in messages %}{{ message['role'] }}: {{ message['content'] | trim }}\n{% endfor %}"
            "{% if add_generation_prompt %}assistant:{% endif %}"
        ),
    }


def words() -> list[str]:
    """``NUM_WORDS`` words that read like ``baba``, in the order of their token ids."""
    syllables = [consonant + vowel for consonant in _CONSONANTS for vowel in _VOWELS]
    return [first + second for first in syllables for second in syllables][:NUM_WORDS]


def _byte_letters() -> list[str]:
    """The letter that byte-level tokenizers write for each byte: itself where it can be seen, else one from 256 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(NUM_BYTES) if byte not in visible]
    letters = {byte: chr(byte) for byte in visible} | {byte: chr(256 + index) for index, byte in enumerate(hidden)}
    return [letters[byte] for byte in range(NUM_BYTES)]
