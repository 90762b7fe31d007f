"""How engines under test are started, and what their legs carry."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvshuttle.bench.legs import Pair, _decode_params, _prefill_params
from kvshuttle.bench.plan import HandoffPlan, SystemName
from kvshuttle.bench.plan_file import claim, mapping_of, read_plan
from kvshuttle.bench.systems import SYSTEMS, Places, plan_pair
from kvshuttle.cli import main
from kvshuttle.errors import ConfigError
from kvshuttle.handoff.params import DecodeLeg, Mode, Peer, PrefillLeg, parse_leg

if TYPE_CHECKING:
    from kvshuttle.launcher.plan import ProcessPlan

PLACES = Places(Path("model"), Path("traces"))
SOURCE = Peer("127.0.0.1:20001", "prefill-0", "life-1")


def engines(name: SystemName, **knobs: bool) -> tuple[ProcessPlan, ...]:
    return plan_pair(SYSTEMS[name], HandoffPlan(**knobs), PLACES, count(20_000), "python").engines


def option(engine: ProcessPlan, name: str) -> str:
    return engine.argv[engine.argv.index(name) + 1]


@pytest.mark.parametrize("name", SystemName)
def test_all_systems_differ_only_in_their_connector(name: SystemName) -> None:
    own = {"--kv-transfer-config", "--additional-config"}
    for mine, reference in zip(engines(name), engines(SystemName.SHUTTLE_PUSH), strict=True):
        assert mine.env == reference.env
        assert len(mine.argv) == len(reference.argv)
        differing = {
            mine.argv[index - 1]
            for index, (one, other) in enumerate(zip(mine.argv, reference.argv, strict=True))
            if one != other
        }
        assert differing <= own


@pytest.mark.parametrize("name", SystemName)
def test_only_the_quiet_variants_switch_the_progress_thread_off(name: SystemName) -> None:
    for engine in engines(name):
        options = json.loads(option(engine, "--additional-config"))["kvshuttle_emulate"]
        assert options["trace_dir"] == f"traces/{engine.name}"
        assert ("nixl_progress_thread" in options) == name.endswith("-quiet")
        assert ("nixl_progress_pause_us" in options) == name.endswith("-paced")


def test_vllms_connectors_run_as_producer_and_consumer_on_ports_of_their_own() -> None:
    prefill, decode = engines(SystemName.UPSTREAM_PUSH)
    configs = [json.loads(option(engine, "--kv-transfer-config")) for engine in (prefill, decode)]
    assert [config["kv_role"] for config in configs] == ["kv_producer", "kv_consumer"]
    assert {config["kv_connector"] for config in configs} == {"NixlPushConnector"}
    ports = [engine.env["VLLM_NIXL_SIDE_CHANNEL_PORT"] for engine in (prefill, decode)]
    assert len({*ports, str(prefill.port), str(decode.port)}) == 4


def test_engines_spin_as_vllm_ships_when_asked_to() -> None:
    assert {engine.env["KVSHUTTLE_QUIET_WAITS"] for engine in engines(SystemName.SHUTTLE_PULL)} == {"1"}
    spinning = engines(SystemName.SHUTTLE_PULL, is_quiet_wait=False)
    assert {engine.env["KVSHUTTLE_QUIET_WAITS"] for engine in spinning} == {""}


@pytest.mark.parametrize("mode", Mode)
def test_our_legs_are_what_the_connector_reads(mode: Mode) -> None:
    pair = Pair(SYSTEMS[SystemName(f"shuttle-{mode}")], "http://p", "http://d", 20001, SOURCE)
    assert parse_leg(_prefill_params(pair, "t-1")) == PrefillLeg("t-1", mode=mode)
    assert parse_leg(_decode_params(pair, "t-1")) == DecodeLeg("t-1", SOURCE, mode=mode)


def test_vllms_push_leg_names_the_prefill_engine_and_its_port() -> None:
    pair = Pair(SYSTEMS[SystemName.UPSTREAM_PUSH], "http://p", "http://d", 20001, None)
    params = _decode_params(pair, "t-1")
    assert (params["remote_engine_id"], params["remote_port"]) == ("prefill-0", 20001)
    assert params["do_remote_prefill"] is True
    assert _prefill_params(pair, "t-1")["do_remote_decode"] is True


def test_a_directory_goes_on_with_more_systems_but_not_with_other_options(tmp_path: Path) -> None:
    given = {"systems": ["shuttle-push"], "background": ["0"], "repeats": 6}
    claim(HandoffPlan.from_mapping(given), tmp_path)
    claim(HandoffPlan.from_mapping(given | {"systems": ["upstream-pull"]}), tmp_path)
    kept = read_plan(HandoffPlan, tmp_path)
    assert kept.systems == ("shuttle-push", "upstream-pull")
    with pytest.raises(ConfigError, match=f"--out: {tmp_path} holds a run with other options"):
        claim(HandoffPlan.from_mapping(given | {"repeats": 7}), tmp_path)


def test_options_of_the_command_line_make_the_same_plan_as_its_file(tmp_path: Path, monkeypatch) -> None:
    claimed = []
    monkeypatch.setattr("kvshuttle.bench.handoff.run_handoff", lambda plan, *_, **__: claimed.append(plan))
    options = ["--system", "shuttle-push", "--background", "0", "--prompt-tokens", "1024", "--no-quiet-wait"]
    main(["bench", "handoff", "--out", str(tmp_path), *options])
    (plan,) = claimed
    assert plan == HandoffPlan.from_mapping(json.loads(json.dumps(mapping_of(plan))))
    assert (plan.systems, plan.prompt_tokens, plan.is_quiet_wait) == (("shuttle-push",), ("1024",), False)


def test_a_report_of_a_directory_that_is_no_run_is_refused(tmp_path: Path, capsys) -> None:
    assert main(["bench", "report", "--out", str(tmp_path)]) == 2
    assert "is no run of this benchmark" in capsys.readouterr().err
