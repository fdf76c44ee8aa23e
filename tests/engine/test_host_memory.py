"""How much memory may still be taken: the machine's, and the cgroup's of either version (R22)."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyserve import host_memory

GIB = 1 << 30


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 8 GiB free and no cgroup."""
    (tmp_path / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable:  {8 * GIB >> 10} kB\n")
    for name in ("v1", "v2"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(host_memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(host_memory, "_CGROUP_V2", tmp_path / "v2")
    monkeypatch.setattr(host_memory, "_CGROUP_V1", tmp_path / "v1")
    return tmp_path


def write(folder: Path, **figures: object) -> None:
    for name, value in figures.items():
        (folder / f"memory.{name}").write_text(f"{value}\n")


def test_without_a_cgroup_the_machine_decides(system: Path) -> None:
    assert host_memory.available_bytes() == 8 * GIB


def test_a_cgroup_without_a_limit_changes_nothing(system: Path) -> None:
    write(system / "v2", max="max", current=5 * GIB)
    assert host_memory.available_bytes() == 8 * GIB


def test_the_smaller_limit_counts_and_cached_files_do_not(system: Path) -> None:
    write(system / "v2", max=4 * GIB, current=3 * GIB)
    assert host_memory.available_bytes() == GIB
    write(system / "v2", stat=f"anon 1\ninactive_file {GIB // 2}\nactive_file 9")
    assert host_memory.available_bytes() == GIB * 3 // 2
    write(system / "v1", limit_in_bytes=3 * GIB, usage_in_bytes=3 * GIB, stat="total_inactive_file 4096")
    assert host_memory.available_bytes() == 4096


def test_more_used_than_allowed_is_nothing_left(system: Path) -> None:
    write(system / "v2", max=GIB, current=2 * GIB)
    assert host_memory.available_bytes() == 0


def test_figures_that_cannot_be_read_are_no_limit(system: Path) -> None:
    (system / "meminfo").write_text("garbage\nMemAvailable:\n")
    write(system / "v2", max="1", current="what")
    assert host_memory.available_bytes() == 1 << 62
