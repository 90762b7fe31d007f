"""Measures cells on a system that stands: warms it up, runs the load generator, joins what client and engines saw."""

from __future__ import annotations

import gzip
import http.client
import math
import os
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from msgspec.structs import replace as with_fields

from kvshuttle.bench.fleets import ARRANGEMENTS
from kvshuttle.bench.grid_figures import PREFILL_NAME, served_in_order, served_requests, step_pace, wrong_prompts
from kvshuttle.bench.grid_plan import WARM_UP_ANSWER_TOKENS, WARM_UP_TOKENS, GridPlan, GridSystem, Prompts
from kvshuttle.bench.grid_records import NOT_KNOWN, CellRecord
from kvshuttle.bench.inspection import total_over
from kvshuttle.bench.legs import complete
from kvshuttle.bench.load import LoadGenerator, LoadOrder, load_arguments, parse_result, write_prompts
from kvshuttle.bench.machine_load import group_cpu_s, machine_busy_s, process_cpu_s
from kvshuttle.bench.run_files import TOKENIZER_DIR
from kvshuttle.bench.systems import MODEL_NAME
from kvshuttle.bench.tracer import Tracer
from kvshuttle.clock import now_s
from kvshuttle.emulate.model_dir import FIRST_WORD, VOCAB_SIZE
from kvshuttle.errors import LaunchFailed, PeerUnreachable, TransportError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from kvshuttle.bench.grid_plan import GridCell
    from kvshuttle.bench.grid_records import Served
    from kvshuttle.bench.load import LoadResult
    from kvshuttle.bench.systems import Places
    from kvshuttle.emulate.trace import Pass
    from kvshuttle.launcher.plan import ProcessPlan

_WARM_UP_ROUNDS = 3
_PROMPTS_OF_A_CELL = 100_000
"""Numbers of prompts that are set aside for each cell."""
_CORRUPTED = "vllm:corrupted_requests_total"
_PREEMPTIONS = "vllm:num_preemptions_total"


@dataclass(slots=True)
class Standing:
    """One system that runs.

    ``groups``: the process group of each engine. ``url``: where its clients go. ``front_pid``: the process there, 0 for
    an engine.
    """

    plan: GridPlan
    system: GridSystem
    engines: Sequence[ProcessPlan]
    groups: Mapping[str, int]
    places: Places
    out_dir: Path
    load: LoadGenerator
    url: str
    front_pid: int
    model_name: str = MODEL_NAME
    tracers: dict[str, Tracer] = field(default_factory=dict)
    _computed: set[tuple[int, int]] = field(default_factory=set)
    """Lengths and seeds whose prompts the prefill engine has in its cache."""

    def warm_up(self) -> None:
        """Connections between engines are made at their first hand-off, which no user waits for twice.

        Raises ``TransportError``.
        """
        num_pairs = self.plan.num_prefill * self.plan.num_decode
        for index in range(_WARM_UP_ROUNDS):
            rng = random.Random(f"{self.system} {index}")
            prompts = [[rng.randrange(FIRST_WORD, VOCAB_SIZE) for _ in range(WARM_UP_TOKENS)] for _ in range(num_pairs)]
            try:
                with ThreadPoolExecutor(num_pairs) as executor:
                    list(executor.map(self._warm_up_with, prompts))
            except (OSError, http.client.HTTPException) as error:
                raise TransportError(f"{self.system}: the first requests failed: {error}") from error
        self.tracers = {engine.name: Tracer(self.places.trace_dir_of(engine.name)) for engine in self.engines}

    def _warm_up_with(self, prompt: list[int]) -> None:
        complete(self.url, prompt, max_tokens=WARM_UP_ANSWER_TOKENS, model=self.model_name)

    def has_computed(self, cell: GridCell) -> bool:
        """False where the plan repeats prompts and the prefill engine does not have this cell's yet."""
        return self.plan.prompts != Prompts.REPEATED or (cell.input_tokens, cell.seed) in self._computed

    def compute(self, cell: GridCell) -> None:
        """Have the prefill engine compute the prompts of a length once. Raises ``LaunchFailed``."""
        most = max(self.plan.num_prompts_of(each) for each in self.plan.cells)
        order = self._order(cell, url=self.engines[0].url, num_prompts=most)
        self._make_load(replace(order, rate=math.inf), cell, output_tokens=1)
        self._computed.add((cell.input_tokens, cell.seed))

    def measure(self, cell: GridCell) -> CellRecord:
        """One run of the load generator. What goes wrong is written down, not raised."""
        record = CellRecord(
            str(self.system), cell.slots, cell.input_tokens, cell.output_tokens, cell.rate, cell.seed, cell.repeat
        )
        try:
            return self._measured(record, cell)
        except (LaunchFailed, PeerUnreachable) as error:
            return with_fields(record, error=str(error))

    def _measured(self, record: CellRecord, cell: GridCell) -> CellRecord:
        order = self._order(cell, url=self.url, num_prompts=self.plan.num_prompts_of(cell))
        self._take_traces()
        counted = [total_over(self.engines, series) for series in (_CORRUPTED, _PREEMPTIONS)]
        before = self._clocks()
        result = parse_result(self._make_load(order, cell, output_tokens=cell.output_tokens))
        used = {name: value_s - before[name] for name, value_s in self._clocks().items()}
        traces = self._take_traces()
        corrupted, preemptions = (
            total_over(self.engines, series) - before
            for series, before in zip((_CORRUPTED, _PREEMPTIONS), counted, strict=True)
        )
        quiet, moving = step_pace(traces)
        return with_fields(
            record,
            requests=self._served(result, traces, cell.output_tokens),
            duration_s=result.duration,
            quiet=quiet,
            moving=moving,
            num_preemptions=int(preemptions),
            front_cpu_s=used.get("front", NOT_KNOWN),
            prefill_cpu_s=used.get("prefill", NOT_KNOWN),
            decode_cpu_s=used["decode"],
            busy_cores=used["machine"] / used["passed"],
            load_average=os.getloadavg()[0],
            error=_corruption(wrong_prompts(traces), int(corrupted)),
        )

    def _served(self, result: LoadResult, traces: Mapping[str, Sequence[Pass]], output_tokens: int) -> list[Served]:
        """Only of an emulated engine is it known what it must answer."""
        if ARRANGEMENTS[self.system].is_real:
            return served_in_order(result, traces, output_tokens=output_tokens)
        return served_requests(result, traces, output_tokens=output_tokens)

    def _make_load(self, order: LoadOrder, cell: GridCell, *, output_tokens: int) -> bytes:
        """Run the load generator. Returns what it wrote, which is kept, compressed."""
        order.result_path.parent.mkdir(parents=True, exist_ok=True)
        write_prompts(
            order.dataset_path,
            first=self._first_prompt(cell),
            num_prompts=order.num_prompts,
            input_tokens=order.input_tokens,
            output_tokens=output_tokens,
        )
        log_path = self.out_dir / "logs" / str(self.system) / f"load-{cell.file_name}.log"
        log_path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self.load.run(load_arguments(order), log_path=log_path, timeout_s=self.plan.cell_timeout_s)
            data = order.result_path.read_bytes()
        except OSError as error:
            raise LaunchFailed(f"the load generator wrote no result: {error}") from error
        finally:
            order.dataset_path.unlink()
        order.result_path.with_suffix(".json.gz").write_bytes(gzip.compress(data))
        order.result_path.unlink()
        return data

    def _order(self, cell: GridCell, *, url: str, num_prompts: int) -> LoadOrder:
        directory = self.out_dir / "raw" / str(self.system)
        return LoadOrder(
            url,
            self.out_dir / TOKENIZER_DIR,
            directory / f"{cell.file_name}.prompts.jsonl",
            directory / f"{cell.file_name}.json",
            num_prompts,
            cell.input_tokens,
            self.plan.sent_rate(cell.rate),
            self.plan.burstiness,
            cell.seed,
            self.model_name,
        )

    def _first_prompt(self, cell: GridCell) -> int:
        """The number of a cell's first prompt: the same for all cells of a seed, or one that no other cell has."""
        if self.plan.prompts == Prompts.REPEATED:
            return cell.seed * _PROMPTS_OF_A_CELL
        cells = self.plan.cells
        index = list(GridSystem).index(self.system) * len(cells) + cells.index(cell)
        return index * _PROMPTS_OF_A_CELL

    def _take_traces(self) -> dict[str, list[Pass]]:
        return {engine: tracer.take() for engine, tracer in self.tracers.items()}

    def _clocks(self) -> dict[str, float]:
        """Seconds that have passed, and CPU seconds used, by what; what this system does not have is left out."""
        clocks_s = {"passed": now_s(), "machine": machine_busy_s()}
        if self.front_pid:
            clocks_s["front"] = process_cpu_s(self.front_pid)
        for name, group in self.groups.items():
            role = "prefill" if name.startswith(PREFILL_NAME) else "decode"
            clocks_s[role] = clocks_s.get(role, 0.0) + group_cpu_s(group)
        return clocks_s


def _corruption(wrong: Mapping[str, str], num_counted: int) -> str:
    """Why a cell does not count at all: what the emulation itself found, or vLLM counted."""
    if wrong:
        return f"wrong KV in {len(wrong)} requests: {next(iter(wrong.values()))}"
    return f"vLLM counts {num_counted} corrupted requests" if num_counted else ""
