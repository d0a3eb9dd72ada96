"""A container's processors and memory are those of its control group, not those of the machine that it runs on."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mdsmix.engines import memory as limits
from mdsmix.engines.memory import cpu_count, default_cap

GIB = 1 << 30
Group = Callable[..., None]


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Group:
    """Writes what /sys/fs/cgroup and /proc/self/cgroup hold, on a machine of 128 processors and 64 GiB."""
    monkeypatch.setattr(limits, "_GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(limits, "_MEMBER", tmp_path / "self")
    monkeypatch.setattr(limits, "_machine", lambda: 64 * GIB)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(128)), raising=False)

    def write(member: str, files: dict[str, str]) -> None:
        (tmp_path / "self").write_text(member)
        for name, text in files.items():
            path = tmp_path / "cgroup" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")

    return write


def test_a_quota_bounds_the_processors(group: Group) -> None:
    for text, processors in (
        ("max 100000", 128),
        ("400000 100000", 4),
        ("250000 100000", 3),
        ("50000 100000", 1),
        ("20000 10000", 2),
        ("99900000 100000", 128),
    ):
        group("4:cpu,memory:/elsewhere\n0::/pod/box\n", {"pod/box/cpu.max": text})
        assert cpu_count() == processors


def test_the_least_quota_of_the_group_and_those_above_counts(group: Group) -> None:
    files = {"pod/box/cpu.max": "800000 100000", "pod/cpu.max": "300000 100000"}
    group("0::/pod/box\n", files | {"other/cpu.max": "100000 100000"})
    assert cpu_count() == 3


def test_within_a_container_the_root_is_its_group(group: Group) -> None:
    """Its path is that of the machine, which the container does not see."""
    group("0::/not/there\n", {"cpu.max": "200000 100000", "memory.max": str(GIB)})
    assert (cpu_count(), default_cap()) == (2, GIB // 2)


def test_without_control_groups_the_machine_counts(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (cpu_count(), default_cap()) == (128, 32 * GIB)
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 10)
    assert cpu_count() == 10, "as on macOS"


def test_fewer_processors_than_the_quota_stay_fewer(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    group("0::/\n", {"cpu.max": "800000 100000"})
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 5})
    assert cpu_count() == 2


@pytest.mark.parametrize(
    ("member", "files", "cap"),
    [
        ("0::/pod/box\n", {"pod/box/memory.max": "max", "pod/memory.max": 3 * GIB}, 3 * GIB // 2),
        ("0::/pod/box\n", {"pod/memory.max": 3 * GIB, "memory.max": GIB}, GIB // 2),
        ("0::/\n", {"memory.max": 64 << 20}, limits.LEAST_BYTES),
    ],
)
def test_half_of_the_least_memory_is_the_cap(
    group: Group, member: str, files: dict[str, object], cap: int
) -> None:
    group(member, {name: str(text) for name, text in files.items()})
    assert default_cap() == cap
