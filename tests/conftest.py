"""Settings of every test run: no test waits for a property to be found again, and none depends on how loaded the machine is."""

from __future__ import annotations

import gc
import hashlib
import os
import sys
import tempfile
from collections.abc import Generator, Iterator

import pytest
import torch
from hypothesis import settings

from fusible import cpp_extensions
from fusible.lazy.checks import CHECKS
from fusible.lazy.flat_ir.checker import check_flat_ir
from fusible.lazy.trace.checker import check_trace

settings.register_profile("fusible", deadline=None, max_examples=50, derandomize=True)
settings.load_profile("fusible")

if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1:
    # The workers fill the cores already: kernels that wait for each other's threads made a run four times as long. Processes that tests start
    # inherit it, so that their sums are made in the same order.
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"

if not torch.cuda.is_available():
    # Triton is loaded once in a process, and its kernels run in its interpreter only where it was told so by then.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# What inductor has compiled for another build of torch, or for other instructions, is not to be taken for what it would compile here: it finds it by
# the program alone, and such code reads and writes past the ends of tensors.
_USER = os.getuid() if hasattr(os, "getuid") else 0
_COMPILED = f"torchinductor-{_USER}-{torch.__version__}-{torch.backends.cpu.get_cpu_capability()}".replace(" ", "-")
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(tempfile.gettempdir(), _COMPILED))

# A first backward behind a first fake tensor starts threads for devices that torch then believes in, and no forked child can go backward any more.
torch.ones(1, requires_grad=True).sum().backward()

# Every trace that a test lowers, and every FlatIR before and after each pass, is a valid one.
CHECKS.update(Trace=check_trace, FlatIR=check_flat_ir)


# Twenty thousand tests are collected, of which nothing is garbage: looking for some among them costs each worker five seconds, and tests that
# collect it a third of a second each.
gc.disable()


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--order", help="'reversed', or a seed: the files are run in a random order, and the tests of each in another")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that hang on what ran before them fail in another order."""
    order = config.getoption("--order")
    if order == "reversed":
        items.reverse()
    elif order is not None:
        items.sort(key=lambda item: [hash_of(f"{order} {name}") for name in (item.nodeid.partition("::")[0], item.nodeid)])


def hash_of(text: str) -> bytes:
    """The same in every process."""
    return hashlib.sha256(text.encode()).digest()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    """A process group exchanges the hook that shows errors, for one that shows the rank: the tests behind see Python's. And the native kernels are
    held to the level that they were held to, whichever the test has set."""
    hook, level = sys.excepthook, cpp_extensions.get_level() if cpp_extensions.available else ""
    try:
        return (yield)
    finally:
        sys.excepthook = hook
        if cpp_extensions.available:
            cpp_extensions.set_level(level)


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    """This process as a group of processes, for collectives."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()
