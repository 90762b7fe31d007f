"""What the doctor makes of facts, and how facts are read off a machine's files."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from kvshuttle.launcher import doctor as doctor_module
from kvshuttle.launcher import survey as survey_module
from kvshuttle.launcher.doctor import Level, diagnose, report_of, run_doctor
from kvshuttle.launcher.survey import Facts, NetworkDevice, Probe, network_devices, providers_in

if TYPE_CHECKING:
    from pathlib import Path

MLX = NetworkDevice("mlx5_0", "mlx5_core", 1, ("port 1: InfiniBand 400 Gb/sec",))
EFA = NetworkDevice("rdmap0s31", "efa", 1, ("port 1: Unspecified 200 Gb/sec",))
HEALTHY = Facts(
    python=(3, 11),
    system="Linux",
    architecture="x86_64",
    num_cores=2,
    num_gpus=0,
    shm_bytes=8 * 1024**3,
    memlock_bytes=-1,
    torch=Probe({"version": "2.13.0+cpu", "cuda": False}),
    vllm=Probe({"version": "0.32.0", "platform": "CpuPlatform"}),
    nixl=Probe({"plugins": ["LIBFABRIC", "UCX"], "backends": {"UCX": "", "LIBFABRIC": "NIXL_ERR_NOT_FOUND"}}),
    devices=(),
    has_device_files=False,
    has_gpu_rdma=False,
    fabric_providers=None,
    ucx_env={},
)
WITH_RDMA = replace(HEALTHY, devices=(MLX,), has_device_files=True)
WITH_EFA = replace(
    HEALTHY,
    devices=(EFA,),
    has_device_files=True,
    nixl=Probe({"plugins": ["LIBFABRIC"], "backends": {"LIBFABRIC": ""}}),
)


WITHOUT_UCX = replace(HEALTHY, nixl=Probe({"plugins": ["UCX"], "backends": {"UCX": "NIXL_ERR_BACKEND"}}))


def finding(facts: Facts, subject: str):
    """The last finding on ``subject``."""
    return [found for found in diagnose(facts) if found.subject == subject][-1]


def test_a_sound_machine_without_rdma_has_no_problem_but_is_told_that_it_means_tcp() -> None:
    assert [found.level for found in diagnose(HEALTHY)].count(Level.PROBLEM) == 0
    network = finding(HEALTHY, "network")
    assert network.level is Level.WARNING
    assert "silently runs over TCP" in network.text


def test_working_rdma_is_named_with_its_device() -> None:
    network = finding(WITH_RDMA, "network")
    assert network.level is Level.OK
    assert "mlx5_0" in network.text


@pytest.mark.parametrize(
    ("facts", "part"),
    [
        (replace(WITH_RDMA, has_device_files=False), "/dev/infiniband is not"),
        (replace(WITH_RDMA, ucx_env={"UCX_TLS": "tcp,sm"}), "UCX_TLS=tcp,sm excludes it"),
        (replace(WITH_RDMA, ucx_env={"UCX_TLS": "^ib,rc,ud,dc,srd"}), "excludes it"),
        (replace(WITH_RDMA, devices=(replace(MLX, active_ports=()),)), "no RDMA or EFA device"),
        (
            replace(WITH_EFA, nixl=Probe({"plugins": [], "backends": {"LIBFABRIC": "NOT_FOUND"}})),
            "LIBFABRIC backend does not start",
        ),
        (replace(WITH_EFA, fabric_providers=("tcp", "shm")), "no efa provider"),
    ],
)
def test_every_way_to_end_up_on_tcp_is_a_warning_that_says_which(facts: Facts, part: str) -> None:
    network = finding(facts, "network")
    assert network.level is Level.WARNING
    assert part in network.text
    assert network.fix


@pytest.mark.parametrize("chosen", ["all", "rc,tcp", "rc_mlx5,sm", "^tcp", "ib"])
def test_ucx_settings_that_leave_rdma_are_fine(chosen: str) -> None:
    assert finding(replace(WITH_RDMA, ucx_env={"UCX_TLS": chosen}), "network").level is Level.OK


@pytest.mark.parametrize("chosen", ["all", "tcp", "sm,tcp", "^ib"])
def test_a_setting_that_keeps_tcp_is_not_blamed_for_a_ucx_that_does_not_start(chosen: str) -> None:
    assert finding(replace(WITHOUT_UCX, ucx_env={"UCX_TLS": chosen}), "UCX_TLS").level is Level.OK


def test_a_failed_probe_keeps_the_last_five_lines_of_what_it_said() -> None:
    script = "import sys; sys.exit('\\n'.join(f'line {index}' for index in range(9)))"
    assert survey_module._probe(script, {}).error == "line 4\nline 5\nline 6\nline 7\nline 8"


def test_several_lines_of_an_error_stay_in_their_column() -> None:
    lines = report_of(diagnose(replace(HEALTHY, torch=Probe({}, "first\nsecond")))).splitlines()
    (index,) = [index for index, line in enumerate(lines) if "first" in line]
    assert lines[index + 1].strip() == "second"
    assert lines[index + 1].index("second") == lines[index].index("does not import")


@pytest.mark.parametrize(("secret", "is_wrong"), [("short", True), ("x" * 16, False), ("", False)])
def test_a_secret_that_is_too_short_is_seen(secret: str, is_wrong: bool) -> None:
    assert bool(survey_module._secret_error({"KVSHUTTLE_SECRET": secret})) is is_wrong


def test_a_down_port_is_named() -> None:
    facts = replace(WITH_RDMA, devices=(MLX, NetworkDevice("mlx5_1", "mlx5_core", 1, ())))
    texts = [found.text for found in diagnose(facts) if found.subject == "network"]
    assert any("mlx5_1" in text and "no active port" in text for text in texts)


def test_efa_needs_the_backend_to_be_chosen_and_says_how() -> None:
    network = finding(WITH_EFA, "network")
    assert network.level is Level.OK
    assert 'nixl_backends=["LIBFABRIC"]' in network.fix


def test_a_libfabric_that_does_not_start_is_a_problem_only_where_there_is_efa() -> None:
    assert finding(HEALTHY, "NIXL LIBFABRIC").level is Level.OK
    broken = replace(WITH_EFA, nixl=HEALTHY.nixl)
    assert finding(broken, "NIXL LIBFABRIC").level is Level.PROBLEM


@pytest.mark.parametrize(
    ("facts", "subject"),
    [
        (replace(HEALTHY, python=(3, 10)), "Python"),
        (replace(HEALTHY, system="Darwin"), "Python"),
        (replace(HEALTHY, torch=Probe({}, "No module named 'torch'")), "torch"),
        (replace(HEALTHY, vllm=Probe({}, "No module named 'vllm'")), "vLLM"),
        (replace(HEALTHY, vllm=Probe({"version": "0.27.0", "platform": "CpuPlatform"})), "vLLM"),
        (replace(HEALTHY, nixl=Probe({}, "No module named 'nixl_cu12'")), "NIXL"),
        (replace(HEALTHY, nixl=Probe({"plugins": [], "backends": {"UCX": "NIXL_ERR_BACKEND"}})), "NIXL UCX"),
        (replace(HEALTHY, ucx_env={"UCX_TLS": "sm,self"}), "UCX_TLS"),
        (replace(WITHOUT_UCX, ucx_env={"UCX_TLS": "rc"}), "UCX_TLS"),
        (replace(WITHOUT_UCX, ucx_env={"UCX_TLS": "^tcp"}), "UCX_TLS"),
        (replace(HEALTHY, secret_error="KVSHUTTLE_SECRET: too short"), "secret"),
    ],
)
def test_what_cannot_work_is_a_problem_with_a_fix(facts: Facts, subject: str) -> None:
    found = finding(facts, subject)
    assert found.level is Level.PROBLEM
    assert found.fix


@pytest.mark.parametrize(
    ("version", "level"),
    [
        ("0.27.0", Level.PROBLEM),
        ("0.27.1", Level.OK),
        ("0.31.3", Level.OK),
        ("0.32.0+cpu", Level.OK),
        ("0.32.4", Level.OK),
        ("0.33.0", Level.WARNING),
        ("1.0.0", Level.WARNING),
    ],
)
def test_vllm_is_judged_by_what_was_tried(version: str, level: Level) -> None:
    facts = replace(HEALTHY, vllm=Probe({"version": version, "platform": "CpuPlatform"}))
    assert finding(facts, "vLLM").level is level


def test_limits_that_hurt_rdma_are_told_only_where_there_is_rdma() -> None:
    limited = {"memlock_bytes": 65536, "num_gpus": 8, "torch": Probe({"version": "2", "cuda": True})}
    subjects = [found.subject for found in diagnose(replace(WITH_RDMA, **limited))]
    assert {"memlock", "GPU RDMA"} <= set(subjects)
    subjects = [found.subject for found in diagnose(replace(HEALTHY, **limited))]
    assert not {"memlock", "GPU RDMA"} & set(subjects)


def test_small_shared_memory_is_a_warning() -> None:
    assert finding(replace(HEALTHY, shm_bytes=64 * 1024**2), "shared memory").level is Level.WARNING


@pytest.mark.parametrize(("facts", "code"), [(HEALTHY, 0), (replace(HEALTHY, python=(3, 9)), 1)])
def test_only_problems_change_the_exit_code(monkeypatch: pytest.MonkeyPatch, facts: Facts, code: int) -> None:
    monkeypatch.setattr(doctor_module, "survey", lambda env: facts)
    said: list[str] = []
    assert run_doctor({}, is_json=True, say=said.append) == code
    findings = json.loads(said[0])
    assert {"subject", "level", "text", "fix"} == set(findings[0])
    assert any(found["level"] == "problem" for found in findings) is bool(code)


def test_the_report_shows_each_finding_and_each_fix() -> None:
    findings = diagnose(HEALTHY)
    report = report_of(findings)
    for found in findings:
        assert found.text in report
        assert found.fix in report


def test_devices_are_read_off_sysfs(tmp_path: Path) -> None:
    (tmp_path / "drivers" / "mlx5_core").mkdir(parents=True)
    for name, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        port = tmp_path / "class" / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "link_layer").write_text("InfiniBand\n")
        (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
        (tmp_path / "class" / name / "device").mkdir()
        (tmp_path / "class" / name / "device" / "driver").symlink_to(tmp_path / "drivers" / "mlx5_core")
    assert network_devices(tmp_path / "class") == (
        NetworkDevice("mlx5_0", "mlx5_core", 1, ("port 1: InfiniBand 400 Gb/sec (4X NDR)",)),
        NetworkDevice("mlx5_1", "mlx5_core", 1, ()),
    )
    assert network_devices(tmp_path / "absent") == ()


def test_providers_are_the_lines_that_are_not_indented() -> None:
    assert providers_in("efa:\n    version: 119.0\ntcp:\n    version: 119.0\n") == ("efa", "tcp")
