"""A step of an optimizer happens as a whole or not at all: what it refuses, what is interrupted, what is loaded."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from interrupting import check_interrupts, same
from torch import nn

import fusible
from fusible import tex
from fusible.errors import ArgumentError, CheckpointError
from fusible.pytorch import ops
from fusible.pytorch.engine.uninterrupted import uninterrupted
from fusible.tex.formats import is_quantized

# An interrupt that hits a weak reference's callback is reported by the interpreter, and lost.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

Make = Callable[[], torch.optim.Optimizer]


def _parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    made = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in ((5, 3), (7,), (2, 2))]
    made.append(nn.Parameter(torch.randn(4, 6, generator=generator).to(dtype).t()))  # not contiguous
    for p in made:
        p.grad = torch.randn(p.shape, generator=generator).to(dtype)
    return made


def _groups(dtype: torch.dtype = torch.float32) -> list[dict[str, Any]]:
    first, *rest = _parameters(dtype)
    return [{"params": [first]}, {"params": rest, "lr": 0.2}]


def _quantized() -> list[nn.Parameter]:
    torch.manual_seed(0)
    with fusible.quantized_model_init(recipe=fusible.MXFP8BlockScaling()):
        made = list(ops.Linear(32, 32).parameters())
    for p in made:
        p.grad = torch.randn(p.shape)
    return made


SGD = {"lr": 0.1, "momentum": 0.9}
MAKERS: dict[str, Make] = {
    "adam": lambda: fusible.FusedAdam(_groups(), lr=0.1),
    "adam-master": lambda: fusible.FusedAdam(_groups(torch.bfloat16), lr=0.1, master_weights=True),
    "adam-quantized": lambda: fusible.FusedAdam(_quantized(), lr=0.1),
    "adam-xla": lambda: fusible.FusedAdam(_groups(), lr=0.1, executor="xla"),
    "sgd": lambda: fusible.FusedSGD(_groups(), **SGD),  # type: ignore[arg-type]
    "sgd-master": lambda: fusible.FusedSGD(_groups(torch.float16), master_weights=True, **SGD),  # type: ignore[arg-type]
    "sgd-quantized": lambda: fusible.FusedSGD(_quantized(), **SGD),  # type: ignore[arg-type]
    "sgd-xla": lambda: fusible.FusedSGD(_groups(), executor="xla", **SGD),  # type: ignore[arg-type]
}
QUICK = {"adam": 14, "adam-master": 8, "adam-quantized": 8, "sgd": 14, "sgd-master": 6}


def _values(optimizer: torch.optim.Optimizer) -> Any:
    """All that a step may change: parameters, with their versions' doings told by the values; state; groups."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    values = [p.detach().dequantize() if is_quantized(p) else p.detach().clone() for p in parameters]
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    return copy.deepcopy([values, [dict(optimizer.state.get(p, {})) for p in parameters], groups])


def _stepped(make: Make, steps: int) -> Callable[[], Any]:
    """An optimizer after some steps, and what is interrupted: the next one."""

    def made() -> tuple[Callable[[], Any], Callable[[], Any]]:
        optimizer = make()
        for _ in range(steps):
            optimizer.step()
        return optimizer.step, lambda: _values(optimizer)

    return made


@contextlib.contextmanager
def _served_by(backend: str) -> Iterator[None]:
    with tex.set_backend(backend):
        yield


@pytest.mark.parametrize("name", QUICK)
def test_an_interrupted_step_has_happened_or_not(name: str) -> None:
    done = check_interrupts(_stepped(MAKERS[name], 1), QUICK[name])
    assert done < QUICK[name]
    assert check_interrupts(_stepped(MAKERS[name], 0), 3, phase=11) <= 3


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("name", MAKERS)
def test_many_interrupted_steps_have_happened_or_not(name: str, backend: str) -> None:
    with _served_by(backend):
        check_interrupts(_stepped(MAKERS[name], 1), 60)
        check_interrupts(_stepped(MAKERS[name], 0), 40, phase=5)


@pytest.mark.slow
def test_signals_interrupt_between_steps_alone() -> None:
    """A timer's signal that raises, 200 times; now before the writes, now after."""

    def raise_(*_: Any) -> None:
        raise KeyboardInterrupt

    former = signal.signal(signal.SIGALRM, raise_)
    whole = MAKERS["adam"]()
    states = [_values(whole)]
    for _ in range(400):
        whole.step()
        states.append(_values(whole))
    optimizer, at = MAKERS["adam"](), 0
    try:
        for i in range(200):
            try:
                signal.setitimer(signal.ITIMER_REAL, 20e-6 + 1e-6 * (7 * i % 200))
                while at < 399:
                    optimizer.step()
                    at += 1
            except KeyboardInterrupt:
                pass
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
                torch.set_grad_enabled(True)
            step = optimizer.param_groups[0]["step"]
            assert step in (at, at + 1) and same(_values(optimizer), states[step])
            optimizer, at = MAKERS["adam"](), 0
    finally:
        signal.signal(signal.SIGALRM, former)


def _sparse(optimizer: torch.optim.Optimizer) -> None:
    p = optimizer.param_groups[1]["params"][1]
    p.grad = p.grad.to_sparse()


def _without_memory(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[1]["params"][1].grad.untyped_storage().resize_(0)


def _elsewhere(optimizer: torch.optim.Optimizer) -> None:
    p = optimizer.param_groups[1]["params"][1]
    optimizer.state[p] = {name: value.to("meta") for name, value in optimizer.state[p].items()}


def _smaller(optimizer: torch.optim.Optimizer) -> None:
    p = optimizer.param_groups[1]["params"][1]
    optimizer.state[p] = {name: value[:1] for name, value in optimizer.state[p].items()}


def _incomplete(optimizer: torch.optim.Optimizer) -> None:
    optimizer.state[optimizer.param_groups[1]["params"][1]] = {"unknown": torch.zeros(1)}


def _integers(optimizer: torch.optim.Optimizer) -> None:
    p = nn.Parameter(torch.ones(3, dtype=torch.int32), requires_grad=False)
    p.grad = torch.ones(3, dtype=torch.int32)
    optimizer.add_param_group({"params": [p]})


def _complex(optimizer: torch.optim.Optimizer) -> None:
    p = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    p.grad = torch.ones(3, dtype=torch.complex64)
    optimizer.add_param_group({"params": [p]})


def _negative(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[1]["lr"] = -1.0


def _infinite(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[1]["weight_decay"] = float("inf")


REFUSALS: dict[str, tuple[Callable[[torch.optim.Optimizer], None], str]] = {
    "sparse": (_sparse, "dense gradients"),
    "memory": (_without_memory, "tensors with memory"),
    "device": (_elsewhere, "one device"),
    "shape": (_smaller, "equal shapes"),
    "state": (_incomplete, "the state of parameters"),
    "int32": (_integers, "floating-point numbers"),
    "complex": (_complex, "floating-point numbers"),
    "rate": (_negative, "lr of .*: expected a finite number of at least 0"),
    "decay": (_infinite, "weight_decay of .*: expected a finite number of at least 0"),
}


@pytest.mark.parametrize("name", ["adam", "adam-master", "sgd", "sgd-master"])
@pytest.mark.parametrize("refusal", REFUSALS)
def test_a_refused_step_changes_nothing(name: str, refusal: str) -> None:
    """The fault lies in the last group or parameter; those before it are as they were, and the step does not count."""
    spoil, message = REFUSALS[refusal]
    optimizer = MAKERS[name]()
    optimizer.step()
    spoil(optimizer)
    state = {p: dict(of) for p, of in optimizer.state.items()}
    before = _values(optimizer) if refusal != "device" else [_values(optimizer)[0], optimizer.param_groups[0].get("step")]
    with pytest.raises((ArgumentError, fusible.errors.ShapeError), match=message) as caught:
        optimizer.step()
    assert ": expected " in str(caught.value) and "\n" not in str(caught.value)
    after = _values(optimizer) if refusal != "device" else [_values(optimizer)[0], optimizer.param_groups[0].get("step")]
    assert same(before, after) and {p: dict(of) for p, of in optimizer.state.items()}.keys() == state.keys()


@pytest.mark.parametrize("name", MAKERS)
def test_a_closure_that_raises_changes_nothing(name: str) -> None:
    optimizer = MAKERS[name]()
    before = _values(optimizer)

    def closure() -> float:
        raise ValueError("no loss today")

    with pytest.raises(ValueError, match="no loss"):
        optimizer.step(closure)  # type: ignore[arg-type]
    assert same(before, _values(optimizer)) and not optimizer.state


def test_a_step_that_found_infinities_is_skipped_by_the_scaler() -> None:
    optimizer, scaler = MAKERS["adam"](), torch.amp.GradScaler("cpu")
    before = _values(optimizer)
    optimizer.param_groups[1]["params"][0].grad[0] = torch.inf
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    assert same(before, _values(optimizer))


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_a_refused_or_interrupted_state_dict_changes_nothing(name: str) -> None:
    def made() -> tuple[Callable[[], Any], Callable[[], Any]]:
        source, optimizer = MAKERS[name](), MAKERS[name]()
        source.step()
        source.step()
        optimizer.step()
        saved = copy.deepcopy(source.state_dict())
        return lambda: optimizer.load_state_dict(saved), lambda: _values(optimizer)

    check_interrupts(made, 12)
    optimizer = MAKERS[name]()
    optimizer.step()
    before, saved = _values(optimizer), optimizer.state_dict()
    slot = next(iter(saved["state"][3]))
    shape, master = saved["state"][3][slot].shape, "master_param"
    whole = {key: torch.zeros(shape) for key in saved["state"][3]}
    refused = [({slot: torch.zeros(2)}, slot), ({**whole, master: torch.zeros(2)}, master)]
    if name == "adam":  # momentum may begin later, moments do not
        refused.append(({master: torch.zeros(shape)}, slot))
    for spoilt, of in refused:
        wanted = f"{of} of parameter 3 .*: expected"
        with pytest.raises(CheckpointError, match=wanted):
            optimizer.load_state_dict({**saved, "state": {**saved["state"], 3: spoilt}})
        assert same(before, _values(optimizer))


def test_torchs_state_dicts_are_taken() -> None:
    pairs: list[tuple[Any, Any]] = [
        (torch.optim.AdamW, fusible.FusedAdam),
        (lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9), lambda p, lr: fusible.FusedSGD(p, lr=lr, momentum=0.9)),
    ]
    for theirs_of, ours_of in pairs:
        theirs, ours = theirs_of(_parameters(), lr=0.1), ours_of(_parameters(), lr=0.1)
        for _ in range(3):
            theirs.step()
        ours.load_state_dict(theirs.state_dict())
        with torch.no_grad():
            for p, q in zip(ours.param_groups[0]["params"], theirs.param_groups[0]["params"], strict=True):
                p.copy_(q)
        theirs.step()
        ours.step()
        for p, q in zip(ours.param_groups[0]["params"], theirs.param_groups[0]["params"], strict=True):
            assert (p - q).abs().max() <= 16 * torch.finfo(torch.float32).eps * (q.abs().max() + 1)
    other = torch.optim.AdamW(_parameters(), amsgrad=True)
    other.step()
    with pytest.raises(CheckpointError, match="a state dict for FusedAdam: expected no amsgrad"):
        fusible.FusedAdam(_parameters()).load_state_dict(other.state_dict())


def test_signals_wait_while_they_must() -> None:
    came = []
    handlers = {signal.SIGALRM: lambda *_: came.append("alarm"), signal.SIGINT: signal.default_int_handler}  # a shell's background jobs ignore it
    former = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        with uninterrupted():
            signal.raise_signal(signal.SIGALRM)
            assert not came
        assert came == ["alarm"]
        with pytest.raises(KeyboardInterrupt), uninterrupted():
            signal.raise_signal(signal.SIGINT)
            came.append("whole")
        assert came == ["alarm", "whole"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def test_an_exception_that_another_thread_sends_comes_before_or_after() -> None:
    """One each time it is asked for, and waited for, so that none strays."""
    optimizer, twin = MAKERS["adam"](), MAKERS["adam"]()
    asked, main = threading.Semaphore(0), threading.main_thread().ident

    def send() -> None:
        for i in range(20):
            asked.acquire()
            threading.Event().wait(0.001 + 0.0001 * i)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(main or 0), ctypes.py_object(InterruptedError))

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    for _ in range(20):
        try:
            asked.release()
            while True:
                optimizer.step()
        except InterruptedError:
            torch.set_grad_enabled(True)
        while twin.param_groups[0]["step"] < optimizer.param_groups[0]["step"]:
            twin.step()
        assert same(_values(optimizer), _values(twin))
    thread.join()
