"""What cannot be a benchmark: told with its place and its fix, before anything starts and with nothing left behind."""

from __future__ import annotations

import errno
import json
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import pytest

from kvshuttle.bench import calibrate, grid, inspection
from kvshuttle.bench.calibrate import running_pair
from kvshuttle.bench.calibrate_plan import CalibratePlan
from kvshuttle.bench.churn_plan import ChurnPlan
from kvshuttle.bench.inspection import max_model_len_of
from kvshuttle.bench.machine_facts import machine_facts, read_facts
from kvshuttle.bench.plan import HandoffPlan
from kvshuttle.bench.plan_file import claim, option_of
from kvshuttle.bench.turns_fleet import check_pools, real_subject
from kvshuttle.bench.turns_plan import TurnsPlan
from kvshuttle.cli import main
from kvshuttle.emulate.profile import load_profile
from kvshuttle.errors import ConfigError
from kvshuttle.launcher.plan import Machine
from kvshuttle.launcher.prepare import claimed_directory
from support.grid_values import grid_plan

if TYPE_CHECKING:
    from pathlib import Path

GIB = 2**30
PROFILE = "h200-tp8-qwen3-32b"
MACHINE = Machine(cores=(0, 1), memory_bytes=16 * GIB)
SMALL_MODEL = {
    "max_position_embeddings": 8192,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_size": 576,
}


@pytest.fixture(autouse=True)
def _two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is too much for two may not be for the machine of a test."""
    monkeypatch.setattr("kvshuttle.launcher.machine.usable_cores", lambda: (0, 1))


def model_in(directory: Path, config: Any) -> Path:
    model = directory / "model"
    model.mkdir()
    (model / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return model


@pytest.mark.parametrize("kind", [HandoffPlan, TurnsPlan, ChurnPlan, CalibratePlan])
def test_no_number_of_a_benchmark_may_be_out_of_all_proportion(kind: Any) -> None:
    given = {"profile": PROFILE} if kind is TurnsPlan else {}
    for knob in fields(kind):
        if isinstance(knob.default, bool) or not isinstance(knob.default, int | float):
            continue
        for wrong in (10**22, 10**400, 1e300, float("inf"), float("nan")):
            with pytest.raises(ConfigError, match=f"^{option_of(knob.name)}: "):
                kind(**given, **{knob.name: wrong})


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (f"churn --num-prefill {10**22}", "--num-prefill: up to 1,000, got 1"),
        ("churn --num-decode 999", "--num-prefill, --num-decode: 1,001 engines, and this machine has "),
        (f"churn --decode-blocks {10**9}", "--decode-blocks: 1,953,125.0 GiB of KV cache for an engine, and this mach"),
        ("churn --window-s 61 --minutes 1", "--window-s: no longer than the load (--minutes 1), got 61"),
        ("churn --profile nowhere", "profile: no 'nowhere'; known are "),
        ("handoff --profile nowhere", "profile: no 'nowhere'; known are "),
        (
            "handoff --prompt-tokens 200000",
            "--kv-cache-gib: holds 65536 tokens of 65536 bytes, but one request of full",
        ),
        (
            "handoff --concurrency 64",
            "--kv-cache-gib: holds 65536 tokens of 65536 bytes, but what is there at a time (6144 tokens x 64, 4"
            " decoding) takes 401920; give it more, or lower --bytes-scale, --prompt-tokens, --output-tokens,",
        ),
        (
            "handoff --kv-cache-gib 99999",
            "--kv-cache-gib: 99,999.0 GiB of KV cache for an engine, and this machine has",
        ),
        ("turns --profile nowhere", "profile: no 'nowhere'; known are "),
        (f"turns --profile {PROFILE} --conversations 9999", "--prefill-pool-tokens: "),
        ("turns --model /nowhere", "--model: /nowhere is neither a directory nor one of the bundled models"),
        ("calibrate --model /nowhere", "--model: /nowhere is neither a directory nor one of the bundled models"),
        (
            "handoff --chunk-tokens 31",
            "--chunk-tokens: 32 or more, a token for each request that an engine runs at a time",
        ),
        (
            "turns --chunk-tokens 8",
            "--chunk-tokens: 32 or more, a token for each request that an engine runs at a time",
        ),
        ("calibrate --chunk-tokens 8", "--chunk-tokens: 32 or more, a token for each request that an engine runs at a"),
        ("churn --decode-slots 1025", "--decode-slots: up to 1024, got 1025"),
        ("turns --dtype int3", "--dtype: one of auto, half, float16, bfloat16, float, float32, got 'int3'"),
        ("calibrate --dtype int3", "--dtype: one of auto, half, float16, bfloat16, float, float32, got 'int3'"),
        ("run nowhere", "plan: no 'nowhere'; known are "),
    ],
)
def test_what_cannot_be_run_is_told_and_leaves_no_directory_behind(
    command: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "runs" / "one"
    assert main(["bench", *command.split(), "--out", str(out)]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"kvshuttle: {message}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["turns", "calibrate"])
@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "config.json: Expecting property name"),
        ("", "config.json: Expecting value"),
        ("[]", "config.json holds list, no object; give the directory of a model"),
        ("[" * 100_000, "config.json: "),
        ({"text_config": {"max_position_embeddings": 64}}, " takes 64; "),
    ],
)
def test_a_models_configuration_that_cannot_be_is_told_before_engines_start(
    command: str, config: Any, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = model_in(tmp_path, config)
    assert main(["bench", command, "--model", str(model), "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompt-tokens", "9000"], "--prompt-tokens, --contexts, --steps: requests may come to 9080 tokens, and "),
        (
            ["--contexts", "4000", "--batches", "32"],
            "--kv-cache-gib: holds 93206 tokens of 23040 bytes, but 32 that deco",
        ),
    ],
)
def test_a_calibration_must_fit_the_model_and_its_memory(
    options: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(calibrate, "this_machine", lambda: MACHINE)
    model = model_in(tmp_path, SMALL_MODEL)
    given = ["--model", str(model), "--prompt-tokens", "64", "--prompt-tokens", "128", "--prompt-tokens", "256"]
    assert main(["bench", "calibrate", "--out", str(tmp_path / "out"), *given, *options]) == 2
    assert capsys.readouterr().err.startswith(f"kvshuttle: {message}")
    assert not (tmp_path / "out").exists()


def test_a_pair_that_runs_must_take_requests_as_long_as_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "fetch_json", lambda *_: {"data": [{"id": "m", "max_model_len": 512}]})
    plan = CalibratePlan(prefill="http://h:1,h:2", decode="http://h:3,h:4")
    with pytest.raises(ConfigError, match="may come to 592 tokens, and http://h:1 takes 512"), running_pair(plan):
        pass


@pytest.mark.parametrize("answer", [{}, {"data": []}, {"data": 3}, {"data": ["m"]}, {"data": [{"max_model_len": "7"}]}])
def test_a_pair_that_does_not_say_how_much_it_takes_is_tried(answer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "fetch_json", lambda *_: answer)
    assert max_model_len_of("http://h:1") == 0


def test_conversations_must_fit_the_memory_of_the_machine(tmp_path: Path) -> None:
    profile = load_profile(PROFILE)
    plan = TurnsPlan(profile=PROFILE)
    check_pools(plan, profile.geometry.kv_bytes_per_token, MACHINE)
    check_pools(replace(plan, conversations=500), 0, MACHINE)
    with pytest.raises(
        ConfigError, match=r"^--decode-pool-tokens: 2,441\.4 GiB .* has 16\.0 GiB of memory; give less, or"
    ):
        check_pools(replace(plan, decode_pool_tokens=10_000_000), profile.geometry.kv_bytes_per_token, MACHINE)
    with pytest.raises(ConfigError, match=r"^--prefill-pool-tokens: .* fewer --conversations or --turns"):
        real_subject(TurnsPlan(conversations=500), model_in(tmp_path, SMALL_MODEL), MACHINE)


def written_facts(directory: Path, facts: Any) -> Path:
    path = directory / "facts.json"
    path.write_text(facts if isinstance(facts, str) else json.dumps(facts))
    return path


FACTS = machine_facts(load_profile(PROFILE))
GEOMETRY = FACTS["profile"]["geometry"]


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ("", "Expecting value"),
        ("{", "Expecting property name"),
        ("\udcff".encode("utf-8", "surrogatepass").decode("latin-1"), "Expecting value"),
        ("[]", "an object with date, cpu, .*, got \\[\\]"),
        ("null", "an object with date, cpu, .*, got None"),
        ({key: value for key, value in FACTS.items() if key != "cpu"}, "cpu: text, missing"),
        ({**FACTS, "cores": "two"}, "cores: a whole number, got 'two'"),
        ({**FACTS, "packages": []}, r"packages: an object, got \[\]"),
        ({**FACTS, "packages": {"vllm": 3}}, "packages.vllm: text, got 3"),
        ({**FACTS, "profile": 3}, "profile: an object, got 3"),
        ({**FACTS, "profile": None}, "profile: an object, got None"),
        ({**FACTS, "profile": {"geometry": GEOMETRY}}, "profile.name: text, missing"),
        (
            {**FACTS, "profile": {"name": "p", "geometry": {**GEOMETRY, "dtype": 3}}},
            "profile.geometry.dtype: text, got 3",
        ),
        (
            {key: value for key, value in FACTS.items() if key != "kv_bytes_per_token"},
            "kv_bytes_per_token: a whole numb",
        ),
    ],
)
def test_facts_that_are_none_are_told_with_their_place(facts: Any, message: str, tmp_path: Path) -> None:
    path = written_facts(tmp_path, facts)
    told = f"^--out: {path}: {message}.*; put the file back that the run wrote, or measure into another directory$"
    with pytest.raises(ConfigError, match=told):
        read_facts(path, is_emulated=True)


def test_facts_of_a_run_are_read_as_they_were_written(tmp_path: Path) -> None:
    assert read_facts(written_facts(tmp_path, FACTS), is_emulated=True) == FACTS
    real = machine_facts(None)
    assert read_facts(written_facts(tmp_path, real), is_emulated=False) == real


PLANS = [HandoffPlan(), TurnsPlan(profile=PROFILE), TurnsPlan(), ChurnPlan(), grid_plan()]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: str(plan.benchmark))
def test_a_report_of_broken_facts_says_so(plan: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    claim(plan, tmp_path)
    written_facts(tmp_path, {**FACTS, "kernel": None})
    assert main(["bench", "report", "--out", str(tmp_path)]) == 2
    assert "facts.json: kernel: text, got None; put the file back" in capsys.readouterr().err


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: str(plan.benchmark))
def test_a_report_of_nothing_says_so(plan: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    claim(plan, tmp_path)
    written_facts(tmp_path, FACTS)
    for name in ("records.jsonl", "cells.jsonl"):
        (tmp_path / name).write_text("")
    assert main(["bench", "report", "--out", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert f"--out: {tmp_path} holds a plan, and nothing is measured yet; measure first, or give another" in told
    assert not list(tmp_path.glob("report.*"))


def test_a_report_of_an_empty_directory_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "report", "--out", str(tmp_path)]) == 2
    assert f"--out: {tmp_path} is no run of this benchmark: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"benchmark": "run", "systems": ["plain"], "rates": [1], "input_tokens": [1]}',
            "num_prompts, duration_s: one",
        ),
        ('{"benchmark": "handoff", "prompt_tokens": [1, 2]}', "is no plan of this benchmark"),
        ('{"benchmark": "turns", "turns": "many"}', "is no plan of this benchmark"),
        ('{"benchmark": "churn", "minutes": 1e999}', "--minutes: a finite number, got inf"),
        ('{"benchmark": "churn", "minutes": ' + "9" * 5000 + "}", "plan.json is no plan"),
        ("[" * 100_000, "plan.json is no plan"),
    ],
)
def test_a_report_of_a_plan_that_cannot_be_says_so(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plan.json").write_text(text)
    written_facts(tmp_path, FACTS)
    assert main(["bench", "report", "--out", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", ["report", "handoff"])
def test_a_plan_that_is_a_directory_says_so(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "plan.json").mkdir()
    assert main(["bench", command, "--out", str(tmp_path)]) == 2
    assert f"--out: {tmp_path}/plan.json is no plan: " in capsys.readouterr().err


def test_a_report_that_cannot_be_written_is_not_taken_for_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(_: object) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("kvshuttle.bench.report.write_report", full)
    assert main(["bench", "report", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.endswith("--out: [Errno 28] No space left on device\n")


def test_a_run_of_churn_does_not_go_on_in_a_published_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "records.jsonl.gz").write_bytes(b"published")
    assert main(["bench", "churn", "--out", str(tmp_path)]) == 2
    assert f"--out: {tmp_path} holds a run already, which cannot go on" in capsys.readouterr().err
    assert [each.name for each in tmp_path.iterdir()] == ["records.jsonl.gz"]


def test_two_processes_do_not_measure_into_one_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with claimed_directory("--out", tmp_path):
        assert main(["bench", "handoff", "--out", str(tmp_path / "link")]) == 2
    assert "--out: another kvshuttle writes to " in capsys.readouterr().err
    with claimed_directory("--out", tmp_path) as directory:
        assert directory == tmp_path


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (f"rates = [{10**400}]", "rates: up to 1,000,000, got 1000"),
        ("rates = [" + "9" * 5000 + "]", "plan: "),
        ("rates = " + "[" * 100_000, "plan: "),
        ("rates = [1]\nchunk_tokens = 6", "chunk_tokens: 8 or more, a token for each request that an engine runs at a"),
        ("rates = [nan]", "rates: a finite number, got nan"),
        ("rates = [1]\nnum_decode = 999", "num_prefill, num_decode: 1,000 engines, and this machine has "),
        ("rates = [1]\ndecode_kv_gib = 99_999", "decode_kv_gib: 99,999.0 GiB of KV cache for an engine, and this mac"),
    ],
)
def test_a_plan_of_loads_that_cannot_be_run_leaves_no_directory_behind(
    lines: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "mine.toml"
    plan.write_text(f'systems = ["plain"]\ninput_tokens = 512\nnum_prompts = 4\n{lines}\n')
    assert main(["bench", "run", str(plan), "--out", str(tmp_path / "out")]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert len(told) < 1000
    assert list(tmp_path.iterdir()) == [plan]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"dtype": "float16"},
            "dtype: bfloat16 as in the profile h200-tp8-qwen3-32b, got 'auto', which for .* is float16",
        ),
        (
            {"max_position_embeddings": 1024},
            "input_tokens, output_tokens: requests may come to 2120 tokens, and .* takes",
        ),
        ("[]", "--model: "),
    ],
)
def test_a_model_that_is_not_the_plans_is_told_before_engines_start(
    config: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grid, "this_machine", lambda: MACHINE)
    values = {"systems": ["shuttle-push-real"], "time_scale": 1, "bytes_scale": 1}
    plan = grid_plan(**values, prefill_kv_gib=8, decode_kv_gib=8, model=str(model_in(tmp_path, config)))
    with pytest.raises(ConfigError, match=f"^{message}"):
        grid.run_grid(plan, tmp_path / "out", env={}, say=lambda _: None)
    assert not (tmp_path / "out").exists()
