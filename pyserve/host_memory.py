"""How much memory this process may still take: the machine's free memory and the limit of its cgroup, in bytes."""

from __future__ import annotations

from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP_V2 = Path("/sys/fs/cgroup")
_CGROUP_V1 = Path("/sys/fs/cgroup/memory")


def available_bytes() -> int:
    """The smaller of what the machine has free and what the cgroup allows; a limit that cannot be read is none."""
    return min(_machine_available_bytes(), _cgroup_available_bytes())


def _machine_available_bytes() -> int:
    try:
        for line in _MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return 1 << 62


def _cgroup_available_bytes() -> int:
    version_2 = _remaining(_CGROUP_V2, "memory.max", "memory.current", "inactive_file")
    version_1 = _remaining(_CGROUP_V1, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    return min(version_2, version_1)


def _remaining(group: Path, limit: str, used: str, cached: str) -> int:
    """Cached files count as used there, and give way by themselves: the model's file, and what is parked on disk."""
    try:
        left = int((group / limit).read_text()) - int((group / used).read_text())
    except (OSError, ValueError):  # no such cgroup, or the word "max"
        return 1 << 62
    return max(0, left + _figure(group / "memory.stat", cached))


def _figure(path: Path, name: str) -> int:
    try:
        return next(int(line.split()[1]) for line in path.read_text().splitlines() if line.startswith(f"{name} "))
    except (OSError, ValueError, IndexError, StopIteration):
        return 0
