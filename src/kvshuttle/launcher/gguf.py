"""GGUF to safetensors, in a process of its own: this module loads transformers and torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

if TYPE_CHECKING:
    from pathlib import Path


def convert_gguf(source: Path, target: Path) -> None:
    """Write the GGUF file ``source`` as a bfloat16 safetensors directory with its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        dtype="bfloat16",
        quantization_config=GgufConfig(dequantize=True),
    )
    # Some releases leave a note of the former quantization behind, and vLLM would believe it.
    vars(model.config).pop("quantization_config", None)
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(target)
