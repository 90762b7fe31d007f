"""`kvshuttle bench calibrate`: times a pair of engines, and writes the profile and the thresholds that follow."""

from __future__ import annotations

import contextlib
import json
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvshuttle.bench.calibrate_plan import engine_address
from kvshuttle.bench.calibrate_report import calibration_markdown, provenance_of
from kvshuttle.bench.calibration import Calibration, figures, slowdown_of_decoding, slowdown_of_prefill
from kvshuttle.bench.handoff_times import HandOffTimer
from kvshuttle.bench.inspection import card_of, max_model_len_of, model_of
from kvshuttle.bench.kv_room import check_length
from kvshuttle.bench.legs import Pair, complete, stream
from kvshuttle.bench.machine_facts import machine_facts
from kvshuttle.bench.plan import PAIR_SLOTS, SystemName
from kvshuttle.bench.real_engines import RealModel, is_traceable, plan_real_engines
from kvshuttle.bench.step_times import MeteredTimes, StepTimes, TracedTimes
from kvshuttle.bench.systems import SYSTEMS, EngineKnobs, Places
from kvshuttle.bench.tracer import Tracer
from kvshuttle.bench.turns_fleet import Host
from kvshuttle.config import LauncherConfig
from kvshuttle.emulate.geometry import Geometry
from kvshuttle.emulate.model_dir import FIRST_WORD, VOCAB_SIZE
from kvshuttle.emulate.profile_file import profile_toml
from kvshuttle.errors import TransportError
from kvshuttle.handoff.params import Peer
from kvshuttle.launcher.fleet import Fleet
from kvshuttle.launcher.machine import free_ports, this_machine
from kvshuttle.launcher.model import cache_dir_from
from kvshuttle.launcher.model_config import context_tokens_in, kv_bytes_per_token_in, read_model_config
from kvshuttle.launcher.plan import FleetPlan, Role, served_name
from kvshuttle.launcher.prepare import find_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from kvshuttle.bench.calibrate_plan import CalibratePlan
    from kvshuttle.handoff.cards import EngineCard
    from kvshuttle.launcher.plan import Machine, ProcessPlan

_WARM_UP_ROUNDS = 2
_LENGTH_OPTIONS = ("--prompt-tokens", "--contexts", "--steps")
_WARM_UP_TOKENS = 160
"""More than a block, also where blocks are as large as on the CPU."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A pair that runs. Times are of whoever computes prompts, and of whoever decodes."""

    pair: Pair
    card: EngineCard
    prefill_times: StepTimes
    decode_times: StepTimes


def run_calibrate(plan: CalibratePlan, out_dir: Path, *, env: Mapping[str, str], say: Callable[[str], None]) -> Path:
    """Measure, write ``NAME.toml``, ``calibration.json`` and ``calibration.md``, and say what to set.

    Returns the profile's path. Raises ``ConfigError``, ``LaunchFailed``, ``TransportError``.
    """
    with running_pair(plan) if plan.prefill else _started_pair(plan, out_dir, env, say) as subject:
        out_dir.mkdir(parents=True, exist_ok=True)
        calibration = _Bench(plan, subject, say).measure()
    facts = machine_facts(None)
    has_contention = calibration.contention() is not None
    provenance = provenance_of(plan, facts, subject.prefill_times.what, has_contention=has_contention)
    profile = calibration.profile(plan.name, provenance, geometry_of(subject.card))
    path = out_dir / f"{plan.name}.toml"
    path.write_text(profile_toml(profile))
    values = {**facts, "times_are_of": subject.prefill_times.what, **figures(calibration, profile)}
    (out_dir / "calibration.json").write_text(json.dumps(values, indent=1) + "\n")
    text = calibration_markdown(calibration, profile, facts)
    (out_dir / "calibration.md").write_text(text)
    say(text)
    say(f"profile: {path}")
    return path


def geometry_of(card: EngineCard) -> Geometry:
    """The KV cache that an engine has. Raises ``ConfigError`` for one that no emulated engine can have."""
    fingerprint = card.fingerprint
    num_kv_heads = fingerprint.num_kv_heads * fingerprint.tensor_parallel_size
    dtype = fingerprint.kv_dtype.removeprefix("torch.")
    return Geometry(fingerprint.num_layers, num_kv_heads, fingerprint.head_size, dtype)


@contextlib.contextmanager
def running_pair(plan: CalibratePlan) -> Iterator[Subject]:
    """The pair that the plan names, timed by vLLM's metrics.

    Raises ``PeerUnreachable``, ``TransportError``, and ``ConfigError`` for requests longer than it takes.
    """
    prefill, decode = engine_address("prefill", plan.prefill), engine_address("decode", plan.decode)
    for url, _ in (prefill, decode):
        check_length(max_model_len_of(url), plan.max_model_len, named_by=_LENGTH_OPTIONS, model=url)
    times = [MeteredTimes(url, plan.step_overhead_ms) for url, _ in (prefill, decode)]
    yield _subject(prefill, decode[0], model_of(decode[0]), times[0], times[1])


@contextlib.contextmanager
def _started_pair(
    plan: CalibratePlan, out_dir: Path, env: Mapping[str, str], say: Callable[[str], None]
) -> Iterator[Subject]:
    """A pair as `kvshuttle up` starts it; on the CPU its workers time themselves."""
    location = find_model(plan.model, cache_dir_from(env), env=env, report=say)
    machine = this_machine()
    _check_pair(plan, location, machine)
    model = RealModel(served_name(LauncherConfig(model=plan.model)), location, plan.dtype)
    places = Places(out_dir / "model", out_dir / "traces")
    host = Host(machine, free_ports(random.Random()), sys.executable)
    knobs = EngineKnobs(plan.max_model_len, plan.chunk_tokens, PAIR_SLOTS, plan.kv_cache_gib, is_quiet_wait=True)
    engines = plan_real_engines(model, [(Role.PREFILL, knobs), (Role.DECODE, knobs)], places, host)
    say(f"starting a pair of engines with {model.name}; this takes about a minute. Logs: {out_dir / 'logs'}")
    with Fleet(FleetPlan(model.name, engines), env=env, log_dir=out_dir / "logs", report=say) as fleet:
        fleet.start(timeout_s=plan.startup_timeout_s)

        def times(engine: ProcessPlan) -> StepTimes:
            if is_traceable(host.machine):
                return TracedTimes(Tracer(places.trace_dir_of(engine.name)))
            return MeteredTimes(engine.url, plan.step_overhead_ms)

        prefill, decode = engines
        address = prefill.url, prefill.side_address
        yield _subject(address, decode.url, model.name, times(prefill), times(decode))


def _check_pair(plan: CalibratePlan, location: Path | str, machine: Machine) -> None:
    """Raises ``ConfigError`` for what engines would die of, as far as the model's directory tells."""
    on_cpu = is_traceable(machine)  # a GPU's KV memory is what it has
    if on_cpu:
        machine.check_memory(plan.kv_cache_gib * 2**30, named_by="--kv-cache-gib")
    if isinstance(location, str):
        return
    config = read_model_config(location)
    check_length(context_tokens_in(config), plan.max_model_len, named_by=_LENGTH_OPTIONS, model=plan.model)
    bytes_per_token = kv_bytes_per_token_in(config, plan.dtype)
    if on_cpu and bytes_per_token:
        plan.check_room(bytes_per_token)


def _subject(
    prefill: tuple[str, str], decode_url: str, model: str, prefill_times: StepTimes, decode_times: StepTimes
) -> Subject:
    url, side = prefill
    card = card_of(side)
    source = Peer(side, card.engine_id, card.incarnation)
    system = SYSTEMS[SystemName.SHUTTLE_PULL]
    pair = Pair(system, url, decode_url, int(side.rpartition(":")[2]), source, model)
    return Subject(pair, card, prefill_times, decode_times)


@dataclass(slots=True)
class _Bench:
    """One pair and the measuring of it."""

    plan: CalibratePlan
    subject: Subject
    say: Callable[[str], None]
    found: Calibration = field(default_factory=Calibration)
    # Not seeded: an engine that runs must not have any of the prompts in its cache.
    rng: random.Random = field(default_factory=random.Random)

    def measure(self) -> Calibration:
        """Everything, once. Raises ``TransportError``."""
        timer = HandOffTimer(self.subject.pair)
        for _ in range(_WARM_UP_ROUNDS):
            for is_push in (False, True):
                timer.hand_off(self._prompt(_WARM_UP_TOKENS), is_push=is_push)
        # One token beyond whole blocks: the last token of a prompt is always computed again.
        prompts = [self._prompt(self.plan.context_tokens[-1] + 1) for _ in range(self.plan.batch_sizes[-1])]
        for index in range(self.plan.repeats):
            self._time_round(index, prompts, timer)
        if self.subject.decode_times.knows_passes and self.found.contention() is None:
            self.say(
                f"contention is not known: no decode step lay within the computing of {self.plan.lengths[-1]} tokens;"
                " give a longer one of --prompt-tokens"
            )
        return self.found

    def _time_round(self, index: int, prompts: list[list[int]], timer: HandOffTimer) -> None:
        """Everything once: a machine that is slower for a while is so for all of it."""
        plan = self.plan
        for position, num_tokens in enumerate(plan.lengths):
            took_ms = self._time_length(num_tokens, timer, is_push=(index + position) % 2 == 1)
        for context in plan.context_tokens:
            self._time_context([prompt[: context + 1] for prompt in prompts], context + plan.steps // 2)
        # Engines on the CPU, which time themselves, share it.
        if self.subject.decode_times.knows_passes:
            self._time_beside(prompts[0], took_ms)
        self.say(f"[{index + 1}/{plan.repeats}] {plan.lengths[-1]} tokens computed in {took_ms:.1f} ms")

    def _time_length(self, num_tokens: int, timer: HandOffTimer, *, is_push: bool) -> float:
        """P computes a prompt alone. Then it has it in its cache, and hands it off without computing it again.

        Returns how many milliseconds it computed.
        """
        pair, times = self.subject.pair, self.subject.prefill_times
        prompt = self._prompt(num_tokens)
        times.begin()
        complete(pair.prefill_url, prompt, max_tokens=1, model=pair.model)
        chunks = times.chunks(num_tokens)
        if sum(chunk.num_tokens for chunk in chunks) != num_tokens:
            raise TransportError(f"{pair.prefill_url}: computed other prompts meanwhile; it must have nothing to do")
        self.subject.decode_times.begin()
        by_length = self.found.pushes if is_push else self.found.pulls
        by_length.setdefault(num_tokens, []).append(timer.hand_off(prompt, is_push=is_push))
        self.found.chunks += [*chunks, *self.subject.decode_times.resumed()]
        return sum(chunk.took_ms for chunk in chunks)

    def _time_context(self, prompts: list[list[int]], context: int) -> None:
        """D computes each prompt first; as far as it has a prefix cache, streams then begin with decoding."""
        pair, times = self.subject.pair, self.subject.decode_times
        for prompt in prompts:
            complete(pair.decode_url, prompt, max_tokens=1, model=pair.model)
        for num_seqs in self.plan.batch_sizes:
            times.begin()
            with ThreadPoolExecutor(num_seqs) as executor:
                list(executor.map(self._decode, prompts[:num_seqs]))
            self.found.decode_ms.setdefault((num_seqs, context), []).append(times.decode_ms(num_seqs))

    def _time_beside(self, prompt: list[int], alone_ms: float) -> None:
        """D decodes one stream, before and while P computes a longest prompt, which took it ``alone_ms`` just now."""
        pair, subject = self.subject.pair, self.subject
        subject.prefill_times.begin()
        subject.decode_times.begin()
        self._decode(prompt)
        with ThreadPoolExecutor(1) as executor:
            other = self._prompt(self.plan.lengths[-1])
            computed = executor.submit(complete, pair.prefill_url, other, max_tokens=1, model=pair.model)
            while not computed.done():
                self._decode(prompt)
            computed.result()
        prompts, decoding = subject.prefill_times.passes(), subject.decode_times.passes()
        for slowed, slowdown in (
            (self.found.prefill_slowed, slowdown_of_prefill(prompts, decoding, alone_ms)),
            (self.found.decode_slowed, slowdown_of_decoding(prompts, decoding)),
        ):
            if slowdown is not None:
                slowed.append(slowdown)

    def _decode(self, prompt: list[int]) -> None:
        """Streamed, as users ask: what that takes the engine takes from its steps."""
        pair = self.subject.pair
        stream(pair.decode_url, prompt, max_tokens=self.plan.steps, model=pair.model, ignore_eos=True)

    def _prompt(self, num_tokens: int) -> list[int]:
        return [self.rng.randrange(FIRST_WORD, VOCAB_SIZE) for _ in range(num_tokens)]
