"""One source, two executors: the eager one and the compiled one give the same numbers, and those of a float64 model.

What may differ is stated as a relative Frobenius error. A sum of ``LENGTH`` terms in fp32 is off by ``WORK = sqrt(LENGTH) * eps``, root mean
square. A value that is off by ``WORK`` before it is rounded with a relative step ``eps`` goes to the other side with probability ``WORK / eps``,
and is then off by ``eps``: root mean square ``sqrt(WORK * eps)``. ``ROUNDINGS`` values are rounded on the longest way, and a single one of the
shortest gradient may be.
"""

from __future__ import annotations

import gc
import math
import multiprocessing
import subprocess
import sys
import threading
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from executor_models import CASES, Case, Formats, H, gradients
from torch import Tensor

import fusible.pytorch as fp
from fusible import errors
from fusible.lazy.engine.host import aligned
from fusible.pytorch.engine import executors
from fusible.quantized import Recipe

pytest.importorskip("jaxlib")

STEPS = 4
LENGTH = 64
ROUNDINGS = 8
WORK = math.sqrt(LENGTH) * torch.finfo(torch.float32).eps
FP32 = ROUNDINGS * WORK
FP8 = torch.finfo(torch.float8_e5m2).eps

RECIPES: dict[str, Recipe | None] = {
    "plain": None,
    "delayed": fp.DelayedScaling(amax_history_len=3),
    "current": fp.Float8CurrentScaling(),
    "powers of two": fp.Float8CurrentScaling(use_power_2_scales=True),
}
CONFIGURATIONS = {
    "mlp": ("float32 plain", "float32 delayed", "float32 current", "bfloat16 plain", "bfloat16 delayed", "bfloat16 powers of two", "float16 plain"),
    "attention": ("float32 plain", "float32 delayed", "bfloat16 plain", "bfloat16 powers of two"),
    "grouped": ("float32 plain", "float32 current", "bfloat16 plain", "bfloat16 delayed"),
}


def configurations() -> list[Any]:
    return [
        pytest.param(case, getattr(torch, (dtype_and_recipe := text.split(" ", 1))[0]), dtype_and_recipe[1], id=f"{case.name}-{text}")
        for case in CASES
        for text in CONFIGURATIONS[case.name]
    ]


def between_executors(case: Case, dtype: torch.dtype, recipe: str) -> float:
    own = torch.finfo(dtype).eps
    steps = ([] if dtype is torch.float32 else [own]) + ([] if recipe == "plain" else [FP8])
    return FP32 + own / math.sqrt(H) + sum(ROUNDINGS * math.sqrt(WORK * step) for step in steps) + of_products(case, dtype, recipe)


def of_products(case: Case, dtype: torch.dtype, recipe: str) -> float:
    """Products of bfloat16 pairs round probabilities and score gradients by half a step, which two coarser roundings behind them magnify."""
    if case.name == "mlp" or dtype is not torch.bfloat16:
        return 0.0
    inner = math.sqrt(2) * torch.finfo(dtype).eps / 2
    return inner if recipe == "plain" else inner + 2 * math.sqrt(inner * FP8)


def from_float64(dtype: torch.dtype, recipe: str) -> float:
    """The activations' own roundings of half a step, and what these do to two coarser ones behind them."""
    own = FP32 if dtype is torch.float32 else math.sqrt(ROUNDINGS) * torch.finfo(dtype).eps / 2
    return own if recipe == "plain" else own + 2 * math.sqrt(own * FP8)


def error(got: Tensor, expected: Tensor) -> float:
    assert got.shape == expected.shape and bool(got.isfinite().all())
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


def pair(case: Case, dtype: torch.dtype) -> tuple[fp.Sequential, fp.Sequential]:
    """The model, and its twin that is compiled."""
    torch.manual_seed(7)
    eager, compiled = case.build(dtype), case.build(dtype).compile(executor="xla")
    compiled.load_state_dict(eager.state_dict())
    return eager, compiled


def runner_of(model: fp.Sequential) -> Any:
    (runner,) = model._runners.values()
    return runner


def formats_of(model: fp.Sequential, recipe: str) -> Formats | None:
    if recipe == "plain":
        return None
    runner = runner_of(model)
    positions = [i for i, op in enumerate(runner.pipeline.ops) if type(op).__name__ == "MMT"]
    return Formats(positions, runner.scaling.current.scales if recipe == "delayed" else None, recipe == "powers of two")


def check_states(eager: fp.Sequential, compiled: fp.Sequential, bound: float) -> None:
    """Scales and windows of amaxes agree; those of weights, which are no results, exactly."""
    first, second = (runner_of(model).scaling.current for model in (eager, compiled))
    for name in ("forward", "backward"):
        a, b = getattr(first, name), getattr(second, name)
        assert a.slots == b.slots
        for slot, *columns in zip(a.slots, a.scale, b.scale, a.amax_history.T, b.amax_history.T, strict=True):
            tolerance = 0.0 if slot.endswith("weight") else bound
            torch.testing.assert_close(columns[0], columns[1], rtol=tolerance, atol=0)
            torch.testing.assert_close(columns[2], columns[3], rtol=tolerance, atol=0)


@pytest.mark.parametrize(("case", "dtype", "recipe"), configurations())
def test_training_agrees(case: Case, dtype: torch.dtype, recipe: str) -> None:
    models = pair(case, dtype)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in models]
    for step in range(STEPS):
        x = case.input(step, dtype)
        dy = case.input(step + 50, dtype).view(x.shape)
        with fp.autocast(enabled=recipe != "plain", recipe=RECIPES[recipe]):
            eager, compiled = (gradients(case, model, x, dy, step) for model in models)
        exact = case.in_float64(models[0], x, dy, step, formats_of(models[0], recipe))
        names = ("y", "dx", *(name for name, _ in models[0].named_parameters()))
        for name, a, b, c in zip(names, eager, compiled, exact, strict=True):
            assert a.dtype is b.dtype
            assert error(b, a) <= between_executors(case, dtype, recipe), f"{name} of step {step}"
            for got in (a, b):
                assert error(got, c) <= from_float64(dtype, recipe), f"{name} of step {step} against float64"
        if recipe == "delayed":
            check_states(*models, FP32 if dtype is torch.float32 else between_executors(case, dtype, recipe))
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad():
            for theirs, ours in zip(models[1].parameters(), models[0].parameters(), strict=True):
                theirs.copy_(ours)
    quantizes_weights = recipe != "plain"
    assert runner_of(models[1]).executor.compiled == 2 + quantizes_weights, "forward, backward, and the quantization of the weights"


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_inference_agrees_and_is_a_program_of_its_own(case: Case) -> None:
    models = pair(case, torch.float32)
    with torch.no_grad():
        eager, compiled = (case.call(model, case.input(0, torch.float32), 0) for model in models)
    assert error(compiled, eager) <= FP32
    assert runner_of(models[1]).executor.compiled == 1


def test_one_program_serves_sequences_of_any_lengths_with_the_same_bound() -> None:
    """The longest sequence counts as the next power of two."""
    case = CASES[2]
    _, model = pair(case, torch.float32)
    for lengths in ((9, 4, 3), (3, 3, 10), (16, 0, 0), (1, 15, 0)):
        with torch.no_grad():
            model(torch.zeros(16, H), torch.tensor(lengths, dtype=torch.int32))
    assert runner_of(model).executor.compiled == 1


def test_another_shape_is_another_program() -> None:
    _, model = pair(CASES[0], torch.float32)
    with torch.no_grad():
        for tokens in (4, 5, 4, 5):
            model(torch.zeros(tokens, H))
    assert runner_of(model).executor.compiled == 2


def test_dropout_draws_the_same_mask() -> None:
    models = [fp.Sequential(fp.Linear(H, H), fp.Dropout(0.4)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    models[1].compile("xla")
    x = torch.randn(64, H)
    results = []
    for model in models:
        torch.manual_seed(3)
        y = model(x)
        (dweight,) = torch.autograd.grad(y.sum(), [model[0].weight])
        results.append((y.detach(), dweight))
    (y, dweight), (compiled_y, compiled_dweight) = results
    assert torch.equal(y == 0, compiled_y == 0) and 0.3 < (y == 0).float().mean() < 0.5
    assert error(compiled_y, y) <= FP32 and error(compiled_dweight, dweight) <= FP32
    assert not torch.equal(models[1](x) == 0, compiled_y == 0)


def test_a_strided_gradient_and_a_strided_input_are_read_in_their_own_order() -> None:
    models = pair(CASES[0], torch.float32)
    x = torch.randn(H, 12, generator=torch.Generator().manual_seed(1)).t()
    results = []
    for model in models:
        leaf = x.detach().requires_grad_()
        model(leaf).sum().backward()
        results.append(leaf.grad)
    assert error(results[1], results[0]) <= FP32  # type: ignore[arg-type]


def test_what_a_program_passes_through_is_not_copied() -> None:
    executor = executors.make_executor("xla")
    x, y = torch.randn(3), torch.randn(3)

    def program(leaves: list[Any]) -> tuple[list[Any], Any]:
        total = leaves[0] + leaves[1] if isinstance(leaves[0], Tensor) else leaves[0].add(leaves[1])
        return [leaves[1], total, leaves[0], total], ("static", len(leaves))

    (second, total, first, again), static = executor("key", program, [x, y])
    assert second is y and first is x and again is total and static == ("static", 2)
    assert torch.equal(total, x + y)
    (only,), _ = executor("identity", lambda leaves: ([leaves[0]], None), [x])
    assert only is x


def test_a_result_outlives_its_executor_and_is_writable() -> None:
    executor = executors.make_executor("xla")
    (y,), _ = executor("key", lambda leaves: ([leaves[0] * 2.0], None), [torch.ones(1000)])
    del executor
    assert torch.equal(y.add_(1), torch.full((1000,), 3.0))


def test_an_execution_has_finished_when_its_results_are_there() -> None:
    """Parameters are read where they lie, so the caller may write to them only after the pass. Sums of ones are exact."""
    executor = executors.make_executor("xla")
    x, weight = torch.ones(1024, 1024), torch.ones(1024, 1024)

    def program(leaves: list[Any]) -> tuple[list[Any], Any]:
        y = leaves[0]
        for _ in range(3):
            y = (y @ leaves[1]) * 2.0**-10
        return [y], None

    for fill in (1.0, 2.0, 1.0):
        weight.fill_(fill)
        (y,), _ = executor("key", program, [x, weight])
        weight.zero_()
        x.zero_()
        assert torch.equal(y, torch.full_like(y, fill**3))
        x.fill_(1.0)


def test_a_failing_program_leaves_nothing_behind() -> None:
    executor: Any = executors.make_executor("xla")

    def fail(leaves: list[Any]) -> Any:
        raise RuntimeError("no")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="no"):
            executor("key", fail, [torch.ones(1)])
    assert executor.compiled == 0
    assert executor("key", lambda leaves: ([leaves[0] + 1.0], None), [torch.ones(1)])[0][0].item() == 2


def test_a_type_without_a_lazy_counterpart_is_refused() -> None:
    with pytest.raises(errors.DTypeError, match="got float64; cast it, or use executor='eager'"):
        executors.make_executor("xla")("key", lambda leaves: (leaves, None), [torch.ones(1, dtype=torch.float64)])


def test_threads_share_one_program() -> None:
    case = CASES[0]
    eager, model = pair(case, torch.float32)
    expected = case.call(eager, case.input(0, torch.float32), 0)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(20):
                assert error(case.call(model, case.input(0, torch.float32), 0), expected) <= FP32
        except BaseException as caught:
            failures.append(caught)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert runner_of(model).executor.compiled == 1


def _in_child(model: fp.Sequential, into: Any) -> None:
    try:
        model(torch.zeros(4, H))
    except errors.ForkError as caught:
        into.put(str(caught))


def test_a_forked_child_is_told_to_spawn() -> None:
    _, model = pair(CASES[0], torch.float32)
    model(torch.zeros(4, H))
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    child = context.Process(target=_in_child, args=(model, answers))
    child.start()
    assert "spawn" in answers.get(timeout=30)
    child.join()


def test_nothing_is_loaded_before_it_is_asked_for() -> None:
    use = "import sys, fusible, fusible.pytorch as p; p.Sequential(p.Linear(4, 4))"
    check = "assert not {'jaxlib', 'fusible.pytorch.engine.xla_executor'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", f"{use}; {check}"], check=True)


def test_without_jaxlib_the_executor_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(errors.BackendError, match=r"^the executor 'xla': expected jaxlib, got .*install fusible\[xla\]"):
        fp.Sequential(fp.Linear(4, 4)).compile("xla")


def test_a_compiled_program_reads_what_its_inputs_are_now() -> None:
    """Their buffers are kept from call to call: memory that is written, replaced, freed, or stands for its negative is read as such."""
    torch.manual_seed(0)
    first, second = (fp.Sequential(fp.Linear(16, 16)).compile("xla") for _ in range(2))
    x = torch.randn(16, 16)

    def expected(model: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, *(p.detach() for p in model.parameters()))

    with torch.no_grad():
        for change in (
            lambda p: p.add_(1.0),
            lambda p: setattr(p, "data", torch.randn(p.shape)),
            lambda p: p.untyped_storage().copy_(torch.randn(p.shape).untyped_storage()),
            lambda p: None,
        ):
            torch.testing.assert_close(first(x), expected(first, x))
            for parameter in first.parameters():
                change(parameter)
            y = first(x)
            torch.testing.assert_close(y, expected(first, x))
            torch.testing.assert_close(second(y), expected(second, y))
            x.mul_(1.5)
            torch.testing.assert_close(first(x), expected(first, x))
            y.mul_(-2.0)
            torch.testing.assert_close(second(y), expected(second, y))
            torch.testing.assert_close(second(y.t()), expected(second, y.t()))
            torch.testing.assert_close(second(y[1:9]), expected(second, y[1:9]))
            turned = torch._neg_view(y)  # pyright: ignore[reportPrivateImportUsage]
            torch.testing.assert_close(second(turned), expected(second, turned))


def test_a_compiled_program_keeps_no_memory_of_a_parameter_that_went_elsewhere() -> None:
    model = fp.Sequential(fp.Linear(16, 16)).compile("xla")
    weight, memory = next(model.parameters()), aligned(np.ones((16, 16), np.float32))
    weight.data, freed = torch.from_numpy(memory), weakref.ref(memory.base)
    with torch.no_grad():
        model(torch.ones(16, 16))
    del memory
    assert freed() is not None
    weight.data = torch.zeros(16, 16)
    gc.collect()
    assert freed() is None, "before the program runs again"
