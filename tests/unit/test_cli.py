"""Arguments, configuration files and environment become configurations, or errors that name the option."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import pytest

from kvshuttle import cli
from kvshuttle.cli import launcher_config_from, main, router_config_from
from kvshuttle.config import ConnectorConfig, Device, LauncherConfig, PrefillFailurePolicy, RouterConfig
from kvshuttle.config.knob_docs import attribute_docs
from kvshuttle.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

ENGINES = ["--prefill", "http://127.0.0.1:8100,127.0.0.1:14579", "--decode", "http://127.0.0.1:8200,127.0.0.1:14580"]


def parse(*argv: str) -> Any:
    return cli._build_parser().parse_args(argv)


def test_up_without_options_is_the_default_configuration() -> None:
    assert launcher_config_from(parse("up")) == LauncherConfig()


def test_every_option_of_up_reaches_the_configuration() -> None:
    args = parse(
        *("up", "--model", "/m", "--prefill", "2", "--decode", "3", "--host", "0.0.0.0", "--port", "9000"),
        *("--device", "cpu", "--dtype", "float32", "--kv-cache-gib", "4", "--max-model-len", "2048"),
        *("--engine-arg", "--max-num-seqs 8", "--engine-arg=--seed=1", "--prefill-arg=--x", "--decode-arg=--y"),
        *("--router-arg", "--max-attempts 2", "--connector-option", "lease_s=5", "--startup-timeout-s", "30"),
        *("--connector-option", 'nixl_backends=["LIBFABRIC"]', "--no-restart", "--served-model-name", "m"),
    )
    assert launcher_config_from(args) == LauncherConfig(
        model="/m",
        served_model_name="m",
        num_prefill=2,
        num_decode=3,
        host="0.0.0.0",
        port=9000,
        device=Device.CPU,
        dtype="float32",
        kv_cache_gib=4,
        max_model_len=2048,
        engine_args=("--max-num-seqs", "8", "--seed=1"),
        prefill_args=("--x",),
        decode_args=("--y",),
        router_args=("--max-attempts", "2"),
        connector_options={"lease_s": 5, "nixl_backends": ["LIBFABRIC"]},
        startup_timeout_s=30.0,
        is_restarting=False,
    )


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["up", "--port", "70000"], "--port: 0 to 65535, got 70000"),
        (["up", "--prefill", "0"], "--prefill: 1 or more, got 0"),
        (["up", "--kv-cache-gib", "0"], "--kv-cache-gib: 1 or more"),
        (["up", "--max-model-len", "-1"], "--max-model-len: 1 or more"),
        (["up", "--startup-timeout-s", "0"], "--startup-timeout-s: a number of seconds above 0"),
        (["up", "--connector-option", "lease_s"], "--connector-option: write KEY=VALUE"),
        (["up", "--connector-option", "lease=1"], "kv_connector_extra_config.lease: unknown key"),
        (["up", "--connector-option", "side_channel_port=1"], "--connector-option side_channel_port: the launcher"),
        (["up", "--engine-arg", '"unbalanced'], "--engine-arg: '\"unbalanced' cannot be split like a shell does"),
        (["up", "--router-arg", "a'b"], "--router-arg: "),
        (["up", "--router-arg", "--port 3"], "--router-arg: --port is an option of the launcher itself"),
        (["up", "--startup-timeout-s", "inf"], "--startup-timeout-s: a finite number, got inf"),
        (["up", "--dtype", "int3"], "--dtype: one of auto, half, float16, bfloat16, float, float32, got 'int3'"),
        (["up", "--prefill", "100000"], "--prefill: up to 1,000, got 100000"),
        (["up", "--decode", str(10**22)], "--decode: up to 1,000, got 1" + "0" * 22),
        (["up", "--port", "0", "--prefill", "999"], "--prefill, --decode: 1,000 engines, and this machine has "),
        (
            ["up", "--port", "0", "--kv-cache-gib", "99999"],
            "--kv-cache-gib: 99,999.0 GiB of KV cache for an engine, and",
        ),
        (["up", "--max-model-len", "9" * 400], "--max-model-len: up to 1,000,000,000, got 9999999999"),
        (["up", "--startup-timeout-s", "1e308"], "--startup-timeout-s: up to 1,000,000,000, got 1e+308"),
        (["up", "--stop-timeout-s", "nan"], "--stop-timeout-s: a finite number, got nan"),
        (["up", "--connector-option", "lease_s=1e999"], "lease_s: a finite number, got inf"),
        (["up", "--connector-option", "lease_s=" + "9" * 5000], "lease_s: a number of seconds above 0, got '999"),
        (
            ["up", "--connector-option", f"retention_max_blocks={10**22}"],
            "retention_max_blocks: up to 9,223,372,036,854,775,807, got",
        ),
        (["up", "--connector-option", "lease_s=" + "[" * 100_000], "lease_s: a number of seconds above 0, got '[["),
        (["router", *ENGINES, "--drain-s", "1e308"], "drain_s: up to 1,000,000,000, got 1e+308"),
        (["router", *ENGINES, "--max-connections", str(10**22)], "max_connections: up to 9,223,372,036,854,775"),
        (["router", *ENGINES, "--retry-pause-s", "1e-300"], "retry_pause_s: 0.000001 or more, got 1e-300"),
        (["router", *ENGINES, "--unhealthy-after", str(10**22)], "unhealthy_after: up to 10,000, got 1"),
        (["router"], "at least one prefill engine is needed; name it with --prefill URL,SIDE"),
        (["router", "--prefill", "localhost"], "write http://127.0.0.1:8100,127.0.0.1:14579 instead"),
        (["router", *ENGINES, "--max-attempts", "0"], "max_attempts: 1 or more"),
        (["router", "--config", "/nowhere.toml"], "--config: /nowhere.toml:"),
        (["model", "gpt"], "model: gpt is not bundled; bundled are smollm2"),
    ],
)
def test_a_wrong_setting_ends_with_code_2_and_names_the_option(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KVSHUTTLE_CACHE", str(tmp_path))
    monkeypatch.setattr("kvshuttle.launcher.machine.usable_cores", lambda: (0, 1))
    monkeypatch.setattr("kvshuttle.launcher.fleet.Fleet.start", lambda *_, **__: pytest.fail("it was started"))
    assert main(argv) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        ["--local-prefill-max-tokens", str(2**31 - 1)],
        ["--disaggregate-from-tokens", str(2**63 - 1)],
        ["--max-connections", str(2**31 - 1)],
        ["--max-body-bytes", str(2**40)],
        ["--total-timeout-s", "1e9", "--idle-timeout-s", "1e9"],
    ],
)
def test_a_limit_may_say_that_there_is_none(options: list[str]) -> None:
    assert router_config_from(parse("router", *ENGINES, *options)).max_attempts == 3


@pytest.mark.parametrize("command", ["up", "demo"])
def test_a_lone_flag_is_the_value_of_an_option_that_holds_arguments(command: str) -> None:
    given = [command]
    for option in ("--engine-arg", "--prefill-arg", "--decode-arg", "--router-arg"):
        given += [option, f"-{option}"]
    config = launcher_config_from(parse(*cli._join_arguments([*given, "--prefill", "2"])))
    assert config.engine_args == ("---engine-arg",)
    assert config.prefill_args == ("---prefill-arg",)
    assert config.decode_args == ("---decode-arg",)
    assert config.router_args == ("---router-arg",)
    assert config.num_prefill == 2


def test_main_takes_a_lone_flag_for_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(cli, "_up", lambda args: seen.append(launcher_config_from(args).engine_args) or 0)
    assert main(["up", "--engine-arg", "--enforce-eager"]) == 0
    assert seen == [("--enforce-eager",)]


def test_an_option_that_holds_arguments_needs_some(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["up", "--engine-arg"])
    assert "--engine-arg: expected one argument" in capsys.readouterr().err


def test_the_examples_in_the_routers_help_work_together(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["router", "--help"])
    prefill, decode = re.findall(r"e\.g\.\s+(\S+);", capsys.readouterr().out)
    assert len(router_config_from(parse("router", "--prefill", prefill, "--decode", decode)).engines) == 2


def test_an_unknown_option_ends_with_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["up", "--frobnicate"])
    assert ended.value.code == 2
    assert "--frobnicate" in capsys.readouterr().err


def test_the_routers_options_reach_its_configuration() -> None:
    args = parse(
        *("router", *ENGINES, "--port", "9000", "--max-attempts", "5", "--retry-pause-s", "0.5", "--no-log-requests"),
        *("--prefill-failure-policy", "retry_then_fail", "--prefill-keep-field", "tool_choice"),
    )
    config = router_config_from(args)
    assert [engine.name for engine in config.engines] == ["prefill-0", "decode-0"]
    assert (config.port, config.max_attempts, config.retry_pause_s) == (9000, 5, 0.5)
    assert config.prefill_failure_policy is PrefillFailurePolicy.RETRY_THEN_FAIL
    assert config.prefill_keep_fields == ("tool_choice",)
    assert not config.is_logging_requests


def test_options_win_over_the_routers_file(tmp_path: Path) -> None:
    file = tmp_path / "router.toml"
    file.write_text(
        'port = 9000\nmax_attempts = 7\nprefill = ["http://a:1,a:2"]\ndecode = ["http://b:1,b:2", "http://c:1,c:2"]\n'
    )
    config = router_config_from(parse("router", "--config", str(file), "--port", "9001", *ENGINES[:2]))
    assert (config.port, config.max_attempts) == (9001, 7)
    assert [engine.side_address for engine in config.engines] == ["127.0.0.1:14579", "b:2", "c:2"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"drain_s = {10**400}", "drain_s: up to 1,000,000,000, got 1000"),
        ("drain_s = " + "9" * 5000, "--config: "),
        ("drain_s = nan", "drain_s: a finite number, got nan"),
        (f"max_body_bytes = {2**63}", "max_body_bytes: up to 9,223,372,036,854,775,807, got 9223372036854775808"),
        ("max_attempts = " + "[" * 100_000, "--config: "),
    ],
)
def test_a_number_in_the_routers_file_that_is_out_of_all_proportion_is_refused(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "router.toml"
    file.write_text(f"{text}\n")
    assert main(["router", "--config", str(file), *ENGINES]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert len(told) < 1000


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (LauncherConfig, {}),
        (ConnectorConfig, {}),
        (RouterConfig, {"prefill": ["http://a:1,a:2"], "decode": ["http://b:1,b:2"]}),
    ],
)
def test_no_number_of_a_configuration_may_be_out_of_all_proportion(kind: Any, values: dict[str, Any]) -> None:
    make = kind.from_mapping if kind is RouterConfig else kind
    for knob in fields(kind):
        if isinstance(knob.default, bool) or not isinstance(knob.default, int | float):
            continue
        for wrong in (10**400, float("inf"), float("nan")):
            with pytest.raises(ConfigError, match=knob.name.removeprefix("num_").replace("_", "[-_]")):
                make(**values, **{knob.name: wrong}) if make is kind else make({**values, knob.name: wrong})


def test_an_unknown_key_in_the_routers_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "router.toml"
    file.write_text("prot = 9000\n")
    assert main(["router", "--config", str(file), *ENGINES]) == 2
    assert "prot: unknown key" in capsys.readouterr().err


@pytest.mark.parametrize(("command", "config"), [("up", LauncherConfig), ("router", RouterConfig)])
def test_every_knob_is_an_option_with_its_explanation_as_help(
    command: str, config: type, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit):
        main([command, "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    names = cli._UP_OPTION_NAMES if config is LauncherConfig else cli._ROUTER_OPTION_NAMES
    explained = attribute_docs(config)
    for knob in fields(config):
        if knob.name != "engines":
            assert f"--{names.get(knob.name, knob.name.replace('_', '-'))}" in shown
            assert explained.get(knob.name, "").replace("``", "") in shown


def test_every_knob_of_the_launcher_is_explained() -> None:
    assert {knob.name for knob in fields(LauncherConfig)} == set(attribute_docs(LauncherConfig))


@pytest.mark.parametrize("option", ["--out", "--state", "--log-dir"])
@pytest.mark.parametrize("path", ["", " "])
def test_a_path_that_is_empty_is_refused(option: str, path: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "report"] if option == "--out" else ["up"]
    with pytest.raises(SystemExit) as ended:
        main([*command, option, path])
    assert ended.value.code == 2
    assert f"{option}: a path, or . for the current directory, got {path!r}" in capsys.readouterr().err


def test_commands_for_our_own_processes_are_not_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    assert "doctor" in shown
    assert "guard" not in shown
    assert "convert-gguf" not in shown
