"""What emulated engines take for granted of vLLM's own NIXL connectors, to run them without NIXL's progress thread."""

from support import quiet_vllm  # noqa: F401 - before anything that imports vLLM

# isort: split
import sys
import time

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker

from kvshuttle.emulate.worker import _pace_progress_thread, _switch_progress_thread_off


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
