"""What worker classes of ours take for granted of vLLM: of its NIXL connectors' agents, and of its model runner."""

from support import quiet_vllm  # noqa: F401 - before anything that imports vLLM

# isort: split
import contextlib
import inspect
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from kvshuttle.emulate import model as emulated_model
from kvshuttle.emulate import traced_worker
from kvshuttle.emulate.geometry import Geometry
from kvshuttle.emulate.model import EmulatedModel
from kvshuttle.emulate.neighbours import Neighbours
from kvshuttle.emulate.profile import Contention, DecodeCost, PrefillCost, Profile
from kvshuttle.emulate.settings import additional_config
from kvshuttle.emulate.trace import read_trace
from kvshuttle.emulate.traced_worker import TracedWorker
from kvshuttle.emulate.worker import EmulatedWorker, _pace_progress_thread, _switch_progress_thread_off


@pytest.mark.nixl
def test_an_agent_without_its_progress_thread_locks_what_vllms_threads_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base_worker, "nixl_agent_config", base_worker.nixl_agent_config)
    _switch_progress_thread_off()
    config = base_worker.nixl_agent_config(num_threads=4, capture_telemetry=True)
    assert (config.enable_pthread, config.num_threads, config.capture_telemetry) == (False, 4, True)
    assert config.sync_mode.name == "NIXL_THREAD_SYNC_STRICT"


@pytest.mark.nixl
def test_a_paced_progress_thread_takes_no_core(monkeypatch: pytest.MonkeyPatch) -> None:
    interface = sys.modules[base_worker.nixl_agent_config.__module__]
    monkeypatch.setattr(interface, "nixlBind", interface.nixlBind)
    _pace_progress_thread(1000)
    agent = interface.nixl_agent("paced", base_worker.nixl_agent_config(num_threads=4))
    began_s = time.process_time()
    time.sleep(1.0)
    assert time.process_time() - began_s < 0.2
    assert agent.get_agent_metadata()


def test_a_worker_that_computes_times_the_model_that_its_runner_calls(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(traced_worker.CPUWorker, "initialize_from_config", lambda *_: None)
    metadata = SimpleNamespace(
        seq_lens=torch.tensor([3]), query_start_loc=torch.tensor([0, 3]), block_table=torch.tensor([[5]])
    )
    monkeypatch.setattr(
        traced_worker, "get_forward_context", lambda: SimpleNamespace(attn_metadata={"layer": metadata})
    )
    tokens = np.array([[7, 8, 9]], dtype=np.int32)
    batch = SimpleNamespace(num_reqs=1, req_ids=["r"], num_prompt_tokens=np.array([3]), token_ids_cpu=tokens)
    model = Doubling()
    worker = object.__new__(TracedWorker)
    worker.vllm_config = SimpleNamespace(additional_config=additional_config(trace_dir=str(tmp_path)))
    worker.model_runner = SimpleNamespace(get_model=lambda: model, input_batch=batch)
    worker.initialize_from_config(None)
    assert model.compute_logits(model(torch.tensor([1.0]))).item() == 4.0
    (path,) = tmp_path.iterdir()
    ((forward,), _) = read_trace(path)
    assert [(request.start, request.end, request.num_prompt_tokens) for request in forward.requests] == [(0, 3, 3)]


@pytest.mark.parametrize("slowdown", [None, 1.5])
def test_an_emulated_step_lasts_longer_beside_another_engine_where_the_profile_says_so(
    slowdown: float | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(traced_worker.CPUWorker, "initialize_from_config", lambda *_: None)
    monkeypatch.setattr(emulated_model, "get_forward_context", lambda: SimpleNamespace(attn_metadata={"layer": ROW}))
    model = emulated_model_with(None if slowdown is None else Contention(prefill=slowdown, decode=1.0))
    worker = object.__new__(EmulatedWorker)
    worker.vllm_config = SimpleNamespace(
        additional_config=additional_config(trace_dir=str(tmp_path / "trace")),
        model_config=SimpleNamespace(model=str(tmp_path)),
    )
    tokens = np.array([[300, 301, 302]], dtype=np.int32)
    batch = SimpleNamespace(num_reqs=1, req_ids=["r"], num_prompt_tokens=np.array([3]), token_ids_cpu=tokens)
    worker.model_runner = SimpleNamespace(get_model=lambda: model, input_batch=batch)
    worker.initialize_from_config(None)
    with contextlib.closing(Neighbours(tmp_path / "neighbours", engine=1)) as other:
        assert not other.is_computing()
        with other.computing():
            model.forward(torch.tensor([300, 301, 302]), torch.arange(3))
        assert not other.is_computing()
    model.forward(torch.tensor([300, 301, 302]), torch.arange(3))
    if model._neighbours is not None:
        model._neighbours.close()
    ((beside, alone), _) = read_trace(next((tmp_path / "trace").iterdir()))
    assert alone.planned_s == pytest.approx(0.02)
    assert beside.planned_s == pytest.approx(0.02 * (slowdown or 1.0))
    assert beside.end_s - beside.start_s >= beside.planned_s - 1e-5


ROW = SimpleNamespace(
    seq_lens=torch.tensor([3]), query_start_loc=torch.tensor([0, 3]), block_table=torch.tensor([[5]], dtype=torch.int32)
)


def emulated_model_with(contention: Contention | None) -> EmulatedModel:
    """Without vLLM's attention layers: one page for each, and a step of 20 ms."""
    model = EmulatedModel.__new__(EmulatedModel)
    torch.nn.Module.__init__(model)
    decode = DecodeCost((1,), (1,), ((20.0,),))
    model._profile = Profile("any", "made up", Geometry(1, 1, 64), PrefillCost(20.0, 0.0, 0.0), decode, contention)
    model.layers = [SimpleNamespace(kv_cache=torch.zeros(8, 1, 8, 64))]
    model._neighbours = None
    return model


def test_vllms_runner_calls_what_is_timed() -> None:
    text = inspect.getsource(GPUModelRunner)
    assert "return self.model(\n" in text
    assert "logits = self.model.compute_logits(sample_hidden_states)" in text


class Doubling(torch.nn.Module):
    """A model of one factor."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return 2 * values

    def compute_logits(self, values: torch.Tensor) -> torch.Tensor:
        return 2 * values
