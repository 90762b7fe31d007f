"""What the emulated forward pass writes and checks: every way in which KV can be wrong is caught."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvshuttle.emulate import steps
from kvshuttle.emulate.model_dir import FIRST_WORD, VOCAB_SIZE, WRONG_KV
from kvshuttle.emulate.pattern import Stamps, prefix_sums
from kvshuttle.emulate.profile import Contention, load_profile
from kvshuttle.emulate.steps import BatchRow, Emulation
from kvshuttle.emulate.trace import first_passes, prompt_ends, read_trace

if TYPE_CHECKING:
    from pathlib import Path

NUM_LAYERS, NUM_BLOCKS, NUM_HEADS, BLOCK = 3, 12, 2, 8
PROMPT = list(range(300, 320))  # two and a half blocks
OTHER = list(range(400, 420))


class Engine:
    """An emulated worker with its pages, and requests that hold blocks of it."""

    def __init__(self, trace_path: Path | None = None) -> None:
        shape = (NUM_BLOCKS, NUM_HEADS, BLOCK, 4)
        self.pages = [np.zeros(shape, dtype=np.int64) for _ in range(NUM_LAYERS)]
        self.now_s = 100.0
        profile = load_profile("h200-tp8-qwen3-32b")
        self.emulation = Emulation(profile, Stamps(self.pages), trace_path=trace_path, now_s=lambda: self.now_s)
        self.emulation.clear()

    def run(self, *rows: BatchRow) -> list[int]:
        """One step."""
        step = self.emulation.step(rows, started_at_s=self.now_s)
        self.now_s += step.planned_s
        self.emulation.finish(step, lasting_s=step.planned_s)
        return step.tokens

    def copy_blocks(self, source: Engine, pairs: dict[int, int]) -> None:
        """What a transfer does: their block to ours, in all layers."""
        for mine, theirs in zip(self.pages, source.pages, strict=True):
            for from_block, to_block in pairs.items():
                mine[to_block] = theirs[from_block]


def row(tokens: list[int], blocks: list[int], *, start: int = 0, request_id: str = "x", prompt: int = 20) -> BatchRow:
    """A request whose ``tokens`` from ``start`` on are computed in this step."""
    ids = np.array(tokens, dtype=np.int32)
    return BatchRow(
        request_id=request_id,
        start=start,
        end=len(tokens),
        num_prompt_tokens=prompt,
        token_ids=ids,
        prompt_token_ids=ids[:prompt] if len(ids) >= prompt else np.array(PROMPT, dtype=np.int32),
        block_ids=np.array(blocks, dtype=np.int32),
        last_index=0,
    )


@pytest.fixture
def handed_off() -> tuple[Engine, Engine, int]:
    """P has computed PROMPT in blocks 1 to 3, D has it in 7, 5 and 9. With P's answer."""
    source, sink = Engine(), Engine()
    (token,) = source.run(row(PROMPT, [1, 2, 3]))
    sink.copy_blocks(source, {1: 7, 2: 5, 3: 9})
    return source, sink, token


def test_only_steps_that_compute_prompts_are_slowed_like_those(handed_off: tuple[Engine, Engine, int]) -> None:
    source, sink, _ = handed_off
    for engine in (source, sink):
        engine.emulation.profile = replace(engine.emulation.profile, contention=Contention(prefill=1.1, decode=1.5))
    assert source.emulation.step([row(OTHER, [4, 5, 6])], started_at_s=0.0).slowdown == 1.1
    last_token = row(PROMPT, [7, 5, 9], start=19)
    assert sink.emulation.step([last_token], started_at_s=0.0).slowdown == 1.5
    decoded = row([*PROMPT, 300], [7, 5, 9], start=20)
    assert sink.emulation.step([decoded], started_at_s=0.0).slowdown == 1.5
    assert sink.emulation.step([decoded, row(OTHER, [1, 2, 3], request_id="y")], started_at_s=0.0).slowdown == 1.1


def first_token(engine: Engine, blocks: list[int], tokens: list[int] = PROMPT) -> int:
    """D's first step: it has everything but the last token of the prompt."""
    (token,) = engine.run(row(tokens, blocks, start=len(tokens) - 1))
    return token


def test_kv_that_was_handed_off_whole_is_right_and_gives_the_same_answer(handed_off) -> None:
    _, sink, token = handed_off
    assert first_token(sink, [7, 5, 9]) == token
    assert sink.emulation.num_wrong == 0
    assert FIRST_WORD <= token < VOCAB_SIZE


@pytest.mark.parametrize("layer", range(NUM_LAYERS))
@pytest.mark.parametrize("head", range(NUM_HEADS))
@pytest.mark.parametrize(("block", "offset"), [(7, 0), (7, 7), (5, 3), (9, 0), (9, 2)])
def test_one_corrupted_word_anywhere_is_caught(handed_off, layer: int, head: int, block: int, offset: int) -> None:
    _, sink, _ = handed_off
    sink.pages[layer][block, head, offset, 0] ^= 1
    assert first_token(sink, [7, 5, 9]) == WRONG_KV
    assert sink.emulation.num_wrong == 1


def test_words_behind_the_prompts_end_are_nobodys_business(handed_off) -> None:
    _, sink, token = handed_off
    sink.pages[0][9, 0, 5, 0] ^= 1
    assert first_token(sink, [7, 5, 9]) == token


def test_a_block_that_comes_late_is_caught_though_it_comes(handed_off) -> None:
    source, _, _ = handed_off
    sink = Engine()
    sink.copy_blocks(source, {1: 7, 3: 9})
    assert first_token(sink, [7, 5, 9]) == WRONG_KV
    sink.copy_blocks(source, {2: 5})
    (token,) = sink.run(row([*PROMPT, WRONG_KV], [7, 5, 9], start=20))
    assert token == WRONG_KV, "a request that once read wrong KV stays wrong"
    assert sink.emulation.num_wrong == 1


def test_a_block_of_which_half_is_written_is_caught(handed_off) -> None:
    source, _, _ = handed_off
    sink = Engine()
    sink.copy_blocks(source, {1: 7, 3: 9})
    for mine, theirs in zip(sink.pages, source.pages, strict=True):
        mine[5, :, : BLOCK // 2] = theirs[2, :, : BLOCK // 2]
    assert first_token(sink, [7, 5, 9]) == WRONG_KV


def test_a_layer_that_is_left_out_is_caught(handed_off) -> None:
    source, _, _ = handed_off
    sink = Engine()
    sink.copy_blocks(source, {1: 7, 2: 5, 3: 9})
    sink.pages[1][5] = source.pages[2][2]
    assert first_token(sink, [7, 5, 9]) == WRONG_KV


def test_blocks_of_one_request_in_the_wrong_order_are_caught(handed_off) -> None:
    _, sink, _ = handed_off
    assert first_token(sink, [5, 7, 9]) == WRONG_KV


def test_a_block_swapped_with_another_requests_is_caught(handed_off) -> None:
    source, sink, _ = handed_off
    source.run(row(OTHER, [4, 5, 6], request_id="y"))
    sink.copy_blocks(source, {5: 5})
    assert first_token(sink, [7, 5, 9]) == WRONG_KV


def test_the_same_tokens_behind_another_beginning_are_caught(handed_off) -> None:
    source, sink, _ = handed_off
    edited = [PROMPT[0] + 1, *PROMPT[1:]]
    source.run(row(edited, [4, 5, 6], request_id="y"))
    sink.copy_blocks(source, {5: 5})
    assert first_token(sink, [7, 5, 9]) == WRONG_KV


def test_a_whole_prompt_of_another_conversation_is_caught(handed_off) -> None:
    _, sink, _ = handed_off
    assert first_token(sink, [7, 5, 9], OTHER) == WRONG_KV


def test_answers_depend_on_the_tokens_and_not_on_chunks_or_blocks() -> None:
    whole, chunked = Engine(), Engine()
    (token,) = whole.run(row(PROMPT, [1, 2, 3]))
    for start, end in ((0, 5), (5, 8), (8, 17)):
        chunked.run(row(PROMPT[:end], [9, 8, 7], start=start))
    assert chunked.run(row(PROMPT, [9, 8, 7], start=17)) == [token]
    assert Engine().run(row(OTHER, [1, 2, 3])) != [token]


@pytest.mark.parametrize("num_steps", [steps.MIN_STEPS_TO_CHECK, 13, steps.MAX_STEPS_TO_CHECK])
def test_what_goes_wrong_while_decoding_is_caught_within_the_period(
    monkeypatch: pytest.MonkeyPatch, num_steps: int
) -> None:
    monkeypatch.setattr(steps, "CHECKED_TOKENS_EACH_STEP", (len(PROMPT) + 1) / num_steps)
    engine = Engine()
    blocks = list(range(NUM_BLOCKS))
    tokens = list(PROMPT)
    tokens += engine.run(row(tokens, blocks))
    engine.pages[2][0, 1, 4, 0] = 0
    for _ in range(num_steps + 1):
        tokens += engine.run(row(tokens, blocks, start=len(tokens) - 1))
    assert tokens[-1] == WRONG_KV
    assert tokens[len(PROMPT) + 1] != WRONG_KV
    assert engine.emulation.num_wrong == 1


def test_a_request_that_lost_its_blocks_is_checked_anew(handed_off) -> None:
    _, sink, token = handed_off
    assert first_token(sink, [7, 5, 9]) == token
    sink.run(row(OTHER, [0, 1, 2], request_id="y"))  # it is not in this batch
    sink.pages[0][7, 0, 0, 0] ^= 1
    assert sink.run(row([*PROMPT, token], [7, 5, 9], start=20)) == [WRONG_KV]


def test_the_same_request_id_with_other_tokens_is_another_request(handed_off) -> None:
    _, sink, token = handed_off
    assert first_token(sink, [7, 5, 9]) == token
    assert sink.run(row(OTHER, [0, 1, 2])) == Engine().run(row(OTHER, [3, 4, 5]))


def test_prefix_sums_continue_where_they_were_left() -> None:
    tokens = np.array(PROMPT, dtype=np.int32)
    whole = prefix_sums(tokens)
    assert list(prefix_sums(tokens[7:], start=7, before=int(whole[6]))) == list(whole[7:])
    assert len(set(whole.tolist())) == len(PROMPT)


def test_traces_of_two_engines_tell_the_gap_between_them(tmp_path: Path) -> None:
    source, sink = Engine(tmp_path / "p.jsonl"), Engine(tmp_path / "d.jsonl")
    source.run(row(PROMPT[:8], [1, 2, 3]))
    source.run(row(PROMPT, [1, 2, 3], start=8))
    ended_at_s = source.now_s
    sink.copy_blocks(source, {1: 7, 2: 5, 3: 9})
    sink.now_s = ended_at_s + 0.25
    sink.run(replace(row(PROMPT, [7, 5, 9], start=19), request_id="another name"))
    prefill, offset = read_trace(tmp_path / "p.jsonl")
    decode, _ = read_trace(tmp_path / "d.jsonl")
    (key,) = prompt_ends(prefill)
    assert first_passes(decode)[key].start_s - prompt_ends(prefill)[key] == pytest.approx(0.25)
    assert [[(r.start, r.end) for r in forward.requests] for forward in prefill] == [[(0, 8)], [(8, 20)]]
    assert read_trace(tmp_path / "p.jsonl", offset=offset) == ([], offset)


def test_a_trace_that_ends_in_half_a_line_is_read_up_to_it(tmp_path: Path) -> None:
    path = tmp_path / "1.jsonl"
    Engine(path).run(row(PROMPT, [1, 2, 3]))
    size = path.stat().st_size
    with path.open("ab") as file:
        file.write(b"[1.0,2.")
    passes, offset = read_trace(path)
    assert (len(passes), offset) == (1, size)
