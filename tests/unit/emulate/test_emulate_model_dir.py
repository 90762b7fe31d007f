"""The directory that an emulated engine is started with."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from kvshuttle.emulate.model_dir import CONFIG_KEY, FIRST_WORD, VOCAB_SIZE, words, write_model_dir
from kvshuttle.emulate.profile import load_profile, parse_profile

if TYPE_CHECKING:
    from pathlib import Path

PROFILE = load_profile("h200-tp8-qwen3-32b")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "emulated"
    write_model_dir(path, PROFILE, max_model_len=4096)
    return path


def test_the_config_carries_the_geometry_and_the_whole_profile(model_dir: Path) -> None:
    config = json.loads((model_dir / "config.json").read_text())
    assert parse_profile(config[CONFIG_KEY]) == PROFILE
    assert (config["num_hidden_layers"], config["num_key_value_heads"], config["head_dim"]) == (64, 8, 128)
    assert config["max_position_embeddings"] == 4096


def test_the_tokenizer_has_one_token_for_each_of_our_words(model_dir: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    ids = [FIRST_WORD, FIRST_WORD + 17, VOCAB_SIZE - 1, FIRST_WORD]
    text = tokenizer.decode(ids)
    assert text.split() == [words()[0], words()[17], words()[-1], words()[0]]
    assert tokenizer.encode(text).ids == ids


def test_the_tokenizer_reads_any_text_byte_by_byte(model_dir: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    text = "Ünïcode, 3 lines\n\tand \U0001f600 too"
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text
    assert all(2 <= each < VOCAB_SIZE for each in ids)


def test_wrong_kv_is_seen_in_the_text(model_dir: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    assert tokenizer.decode([0]) == "<wrong-kv>"


def test_an_answer_as_history_comes_to_the_tokens_that_it_was_made_of(model_dir: Path) -> None:
    tokenizers, jinja2 = pytest.importorskip("tokenizers"), pytest.importorskip("jinja2")
    tokenizer = tokenizers.Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    template = jinja2.Template(json.loads((model_dir / "tokenizer_config.json").read_text())["chat_template"])

    def ids_of(*messages: tuple[str, str]) -> list[int]:
        said = [{"role": role, "content": content} for role, content in messages]
        return tokenizer.encode(template.render(messages=said, add_generation_prompt=True)).ids

    asked = ("user", " ".join(words()[:3]))
    made = [FIRST_WORD + 7, FIRST_WORD + 9]
    answered = ("assistant", tokenizer.decode(made))
    kept = [*ids_of(asked), *made]
    assert ids_of(asked, answered, asked)[: len(kept)] == kept
