"""What the operating system tells of the machine and of this process. What it does not tell, as Windows does not tell much, is not made up."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from contextlib import suppress
from pathlib import Path

try:
    import resource
except ImportError:  # of POSIX alone
    resource = None

__all__ = [
    "available_memory",
    "cpu_model",
    "installed_memory",
    "keep_freed_memory",
    "peak_memory",
    "proc_cpuinfo",
    "reset_peak_memory",
    "resident_memory",
    "return_large_blocks",
    "thread_names",
    "usable_processors",
]

_CPUINFO = Path("/proc/cpuinfo")
_MEMINFO = Path("/proc/meminfo")
_TASKS = Path("/proc/self/task")
_STATM = Path("/proc/self/statm")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # of glibc's malloc.h
_NEVER, _ANY_NUMBER = -1, 2**16
_GROUPS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def installed_memory() -> int:
    """Bytes of memory that the machine has; 0 where that is not known."""
    names = getattr(os, "sysconf_names", {})
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if {"SC_PHYS_PAGES", "SC_PAGE_SIZE"} <= names.keys() else 0


def available_memory() -> int:
    """Bytes: what the system can give without taking from others (swap included), or less where a control group or ``ulimit -v`` allows less.

    Where there is no ``/proc`` all of the machine's memory counts as available; where not even that is known, any amount does, and what is too much
    is left to the allocator.
    """
    return max(0, min([_of_system(), *_of_groups(), *_of_process()]))


def peak_memory() -> int:
    """Bytes of this process that were in memory at most so far; 0 where that is not known."""
    if resource is None:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def reset_peak_memory() -> None:
    """Let ``peak_memory`` begin anew, where the system can: on Linux."""
    if _CLEAR_REFS.exists():
        with suppress(OSError):  # of a container that may not
            _CLEAR_REFS.write_text("5")


def resident_memory() -> int:
    """Bytes of this process that are in memory now; where there is no ``/proc``, ``peak_memory()``."""
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if _STATM.exists() else peak_memory()


def thread_names() -> list[str] | None:
    """The names of this process's threads as the system has them, cut to 15 letters; None where there is no ``/proc``."""
    if not _TASKS.exists():
        return None
    names: list[str] = []
    for task in _TASKS.iterdir():
        with suppress(OSError):  # it has ended meanwhile
            names.append((task / "comm").read_text().strip())
    return names


def keep_freed_memory() -> bool:
    """Let this process keep the memory that it frees, for what it allocates next; returns whether it does.

    By itself glibc gives a large block, or the end of its heap, back to the system when that is free, and each step of a training run gets its
    activations anew: page by page, in some tenth of the step's time. Here no block is the system's: all are parts of the heap, whose end stays, too.
    What the process holds in memory stays at its peak instead. Of other C libraries nothing is asked. Source: glibc's manual, "Malloc Tunable
    Parameters".
    """
    return _mallopt(_MMAP_MAX, 0) and _mallopt(_TRIM_THRESHOLD, _NEVER)


def return_large_blocks() -> bool:
    """Let this process take blocks of a mebibyte and more from the system and give them back at once; returns whether it does, which is with glibc.
    What it holds in memory is then what it has allocated: the holes that glibc leaves in its heap otherwise differ from run to run."""
    return _mallopt(_MMAP_MAX, _ANY_NUMBER) and _mallopt(_MMAP_THRESHOLD, 2**20)


def _mallopt(parameter: int, value: int) -> bool:
    library = ctypes.CDLL(None) if os.name == "posix" else None
    return hasattr(library, "gnu_get_libc_version") and bool(library.mallopt(parameter, value))


def usable_processors() -> int:
    """The number of processors that the threads of this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_model() -> str:
    """The name of the CPU."""
    return proc_cpuinfo("model name") or platform.processor() or platform.machine()


def proc_cpuinfo(*names: str) -> str | None:
    """What ``/proc/cpuinfo`` says first under one of ``names``, or None."""
    try:
        with open(_CPUINFO) as lines:
            return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(names)), None)
    except OSError:
        return None


def _of_system() -> int:
    if not _MEMINFO.exists():
        return installed_memory() or sys.maxsize
    sizes = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in _MEMINFO.read_text().splitlines())}
    return sizes.get("MemAvailable", sizes.get("MemFree", 0)) + sizes.get("SwapFree", 0)


def _of_groups() -> list[int]:
    """What the control groups allow in all: what they count as used includes files that can be dropped, so it is not taken off."""
    limits = [path.read_text().strip() for path in _GROUPS if path.exists()]
    return [int(limit) for limit in limits if limit.isdecimal()]


def _of_process() -> list[int]:
    if resource is None or not _STATM.exists():
        return []
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return []
    return [limit - int(_STATM.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")]
