"""How much memory this process may still take."""

from __future__ import annotations

import os
import resource
from pathlib import Path

__all__ = ["available_memory"]

_MEMINFO = Path("/proc/meminfo")
_STATM = Path("/proc/self/statm")
_GROUPS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def available_memory() -> int:
    """Bytes: what the system can give without taking from others (swap included), or less where a control group or ``ulimit -v`` allows less.

    Where there is no ``/proc`` all of the machine's memory counts as available.
    """
    return max(0, min([_of_system(), *_of_groups(), *_of_process()]))


def _of_system() -> int:
    if not _MEMINFO.exists():
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    sizes = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in _MEMINFO.read_text().splitlines())}
    return sizes.get("MemAvailable", sizes.get("MemFree", 0)) + sizes.get("SwapFree", 0)


def _of_groups() -> list[int]:
    """What the control groups allow in all: what they count as used includes files that can be dropped, so it is not taken off."""
    limits = [path.read_text().strip() for path in _GROUPS if path.exists()]
    return [int(limit) for limit in limits if limit.isdecimal()]


def _of_process() -> list[int]:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY or not _STATM.exists():
        return []
    return [limit - int(_STATM.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")]
