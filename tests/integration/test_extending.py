"""The four recipes of ``docs/extending.md``, followed to the letter by a package outside of the source tree.

AwesomeLU brings its own native function, compiled here; it is declared to tex, served by two backends and on lazy tensors, fused, and trained.
Nothing under ``src/`` or ``cppsrc/`` changes, and afterwards nothing is left registered.
"""

from __future__ import annotations

import hashlib
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from doc_pages import ROOT, blocks, write_file
from torch import Tensor

import fusible
from fusible import cpp_extensions, fusions, lazy, nvte, tex
from fusible.errors import NotServedError
from fusible.nvte import DType, Pass, QuantizedType, make_nvte_tensor, running
from fusible.tex.interface.declare import DECLARATIONS
from fusible.tex.selection.registry import registry

GUIDE = ROOT / "docs" / "extending.md"
FP32 = torch.finfo(torch.float32).eps
ROWS, COLUMNS = 17, 12
KINDS = ("forward", "backward", "inference")


def digest() -> str:
    """Of every source file of the package and of its native code."""
    found = hashlib.sha256()
    for path in sorted([*(ROOT / "src").rglob("*.py"), *(ROOT / "cppsrc").rglob("*.[ch]pp")]):
        found.update(f"{path}\0".encode() + path.read_bytes())
    return found.hexdigest()


def registrations() -> tuple[Any, ...]:
    """All that the package can add to: functions of tex, methods of backends, fusions."""
    methods = [sorted(vars(type(backend))) for backend in registry.ordered()]
    return list(DECLARATIONS), sorted(dir(tex.TEXBackendBase)), methods, [fusions.registered(kind) for kind in KINDS]


@pytest.fixture(scope="module")
def awesome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """The guide's package, written to an empty directory and imported from there."""
    before, source = registrations(), digest()
    directory = tmp_path_factory.mktemp("user")
    names = []
    for block in blocks(GUIDE):
        if block.file is not None and write_file(block, directory).suffix == ".py":
            names.append(block.file.removesuffix(".py").replace("/", "."))
    sys.path.insert(0, str(directory))
    importlib.invalidate_caches()
    package = SimpleNamespace(**{name.partition(".")[2]: importlib.import_module(name) for name in names}, directory=directory)
    package.source = source, digest()
    package.fused = [value for name, value in vars(package.fusions).items() if name.endswith("_fused")]
    yield package
    for function in package.fused:
        fusions.unregister_fusion(function)
    for function in (package.kernels.awesomelu, package.kernels.dawesomelu):
        tex.undeclare(function)
    sys.path.remove(str(directory))
    for name in [name for name in sys.modules if name.partition(".")[0] == "awesome"]:
        del sys.modules[name]
    assert registrations() == before
    with pytest.raises(NotServedError, match="awesomelu not implemented"):
        package.kernels.awesomelu(torch.ones(2, 2), None)


@pytest.fixture(params=["torch", "cpu"])
def backend(request: pytest.FixtureRequest, awesome: SimpleNamespace) -> Iterator[str]:
    """Each backend of real tensors, alone in serving."""
    if request.param == "cpu" and awesome.kernels.native is None:
        pytest.skip("there is no compiler here, so AwesomeLU has no native kernel")
    with tex.set_backend(request.param):
        yield request.param


def inputs(dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    """``x`` and ``dy``: wide enough to saturate the gate on both sides."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(ROWS, COLUMNS, generator=generator) * 4).to(dtype), torch.randn(ROWS, COLUMNS, generator=generator).to(dtype)


def forward64(x: Tensor) -> tuple[Tensor, Tensor]:
    """The value in float64, and how far fp32 arithmetic may be off it.

    ``x + 1`` is off by ``eps/2 |x + 1|``, and so is, relatively, the gate; exponential, sum, quotient and product add an ``eps`` each, and another
    compiler's exponential two more.
    """
    x = x.double()
    y = x * torch.sigmoid(x + 1)
    return y, y.abs() * ((x + 1).abs() + 6) * FP32


def backward64(x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient in float64, and how far fp32 arithmetic may be off it: the same of the gate, times the size of what cancels in the bracket."""
    x, dy = x.double(), dy.double()
    s = torch.sigmoid(x + 1)
    return dy * s * (1 + x * (1 - s)), dy.abs() * s * (1 + x.abs()) * ((x + 1).abs() * 2 + 10) * FP32


def bias64(x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of the gradient over rows; each of its additions is off by ``eps`` of what is summed."""
    dx, error = backward64(x, dy)
    return dx.sum(0), error.sum(0) + ROWS * FP32 * dx.abs().sum(0)


def assert_near(got: Tensor, reference: Tensor, error: Tensor, times: float = 1.0) -> None:
    """``got`` is the reference within ``error`` and one rounding to its dtype."""
    bound = times * (error + torch.finfo(got.dtype).eps / 2 * (reference.abs() + error)) + torch.finfo(got.dtype).smallest_normal
    assert got.shape == reference.shape
    worst = ((got.double() - reference).abs() / bound).max().item()
    assert worst <= 1, f"{worst:.2f} of its bound"


def on_lazy(function: Callable[..., Any], *tensors: Tensor) -> list[Tensor]:
    """``function`` on tensors that record, compiled and run."""
    pytest.importorskip("jaxlib")
    kinds = {torch.float32: lazy.float32, torch.bfloat16: lazy.bfloat16}
    program = lazy.compile(function, args=[lazy.InputInfo(tuple(x.shape), kinds[x.dtype]) for x in tensors])
    found = program(*tensors)
    return [torch.from_dlpack(output) for output in (found if isinstance(found, (list, tuple)) else [found])]


def test_the_native_function_is_compiled_wherever_there_is_a_compiler(awesome: SimpleNamespace) -> None:
    if awesome.kernels.native is None:
        with pytest.raises(fusible.errors.BackendError) as error:
            cpp_extensions.build("awesome_native", [awesome.directory / "awesome" / "awesomelu.cpp"])
        pytest.skip(str(error.value))
    x, y = torch.tensor([-1.0, 0.0, 3.0]), torch.empty(3)
    awesome.kernels.native.awesomelu(x, y)
    assert_near(y, *forward64(x))
    with pytest.raises(fusible.errors.DTypeError, match="x: expected float32, got bfloat16"):
        awesome.kernels.native.awesomelu(x.bfloat16(), y)
    with pytest.raises(fusible.errors.ShapeError, match="y: expected 3 elements, got 2"):
        awesome.kernels.native.awesomelu(x, y[:2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients_are_those_of_float64(awesome: SimpleNamespace, backend: str, dtype: torch.dtype) -> None:
    x, dy = inputs(dtype)
    with tex.record() as calls:
        y = awesome.kernels.awesomelu(x, None)
        dx, nothing = awesome.kernels.dawesomelu(dy, x, None)
        dx_too, dbias = awesome.kernels.dawesomelu(dy, x, None, True)
    assert {call.backend for call in calls if "awesomelu" in call.function} == {backend}
    assert y.dtype == dx.dtype == dbias.dtype == dtype and nothing is None
    assert_near(y, *forward64(x))
    assert_near(dx, *backward64(x, dy))
    assert torch.equal(dx, dx_too)
    assert_near(dbias, *bias64(x, dy))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients_on_lazy_tensors_are_those_of_float64(awesome: SimpleNamespace, dtype: torch.dtype) -> None:
    x, dy = inputs(dtype)

    def program(x: lazy.Tensor, dy: lazy.Tensor) -> list[lazy.Tensor]:
        dx, dbias = awesome.kernels.dawesomelu(dy, x, None, True)
        return [awesome.kernels.awesomelu(x, None), dx, dbias]

    y, dx, dbias = on_lazy(program, x, dy)
    assert y.dtype == dx.dtype == dbias.dtype == dtype
    assert_near(y, *forward64(x))
    assert_near(dx, *backward64(x, dy))
    assert_near(dbias, *bias64(x, dy))


def test_the_native_kernel_and_torch_agree(awesome: SimpleNamespace) -> None:
    if awesome.kernels.native is None:
        pytest.skip("there is no compiler here, so AwesomeLU has no native kernel")
    x, dy = inputs(torch.float32)
    found = {}
    for name in ("cpu", "torch"):
        with tex.set_policy(awesomelu=name, dawesomelu=name):
            found[name] = awesome.kernels.awesomelu(x, None), *awesome.kernels.dawesomelu(dy, x, None, True)
    errors = forward64(x)[1], backward64(x, dy)[1], bias64(x, dy)[1]
    for ours, theirs, error in zip(found["cpu"], found["torch"], errors, strict=True):
        assert_near(ours, theirs.double(), error, times=2)


TYPES = [
    QuantizedType(DType.Float8E4M3, "delayed", "0.x"),
    QuantizedType(DType.Float8E5M2, "delayed", "0.x"),
    QuantizedType(DType.Float8E4M3, "current"),
    DType.Float8E5M2,
]


@pytest.mark.parametrize("type", TYPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_8_bit_output_is_the_output_quantized(awesome: SimpleNamespace, backend: str, dtype: torch.dtype, type: nvte.Type) -> None:
    x, dy = (make_nvte_tensor(tensor) for tensor in inputs(dtype))
    scale = torch.tensor([1.75])
    oracle = ml_dtypes.float8_e4m3fn if nvte.element(type) is DType.Float8E4M3 else ml_dtypes.float8_e5m2
    for word, *operands in ((awesome.functions.awesomelu, x), (awesome.functions.dawesomelu, dy, x)):
        plain = word(*operands, x.type)
        with running(Pass("forward", {"0.x": scale})) as state:
            quantized = word(*operands, type)
        assert quantized.type == type and quantized.dtype is nvte.element(type)
        wide = plain.data.float().numpy()
        used = scale.item() if state.amaxes else float(ml_dtypes.finfo(oracle).max) / np.abs(wide).max()
        codes = np.clip(wide * np.float32(used), -float(ml_dtypes.finfo(oracle).max), float(ml_dtypes.finfo(oracle).max)).astype(oracle)
        assert np.array_equal(quantized.data._data.numpy(), codes.view(np.uint8))
        assert np.allclose(quantized.scale_inv.item(), 1 / used, rtol=FP32)
        if getattr(type, "scaling", None) == "delayed":
            assert state.amaxes["0.x"].item() == np.abs(wide).max()
        else:
            assert not state.amaxes


def test_explain_names_the_backends_and_their_reasons(awesome: SimpleNamespace) -> None:
    x = torch.ones(2, 4)
    choice = tex.explain("awesomelu", x, None)
    reasons = dict(choice.others)
    assert reasons["xla"] == "serves tensors on lazy, and these are on cpu"
    if awesome.kernels.native is not None:
        assert choice.backend == "cpu" and reasons["torch"] == "comes after cpu"
    else:
        assert choice.backend == "torch" and reasons["cpu"] == "not implemented by it"
    recording = tex.explain("awesomelu", lazy.full((2, 4), 1.0), None)
    assert dict(recording.others)["torch"] == "serves real tensors, and these record"
    assert recording.backend == "xla"


def test_a_backend_may_refuse_with_a_reason(awesome: SimpleNamespace) -> None:
    former = vars(type(registry.find("torch")))["awesomelu"]

    @tex.implement(awesome.kernels.awesomelu, backend="torch")
    @tex.requires(lambda request: "reads fp32" if request["input"] != ("cpu", torch.float32) else None)
    def particular(backend: Any, input: Tensor, quantizer: Any) -> Tensor:
        return input

    try:
        with tex.set_policy(awesomelu="torch"):
            assert dict(tex.explain("awesomelu", torch.ones(2).bfloat16(), None).others)["torch"] == "reads fp32"
            with pytest.raises(NotServedError, match="torch: reads fp32"):
                awesome.kernels.awesomelu(torch.ones(2).bfloat16(), None)
            assert awesome.kernels.awesomelu(torch.ones(2), None).tolist() == [1, 1]
    finally:
        tex.implement(awesome.kernels.awesomelu, backend="torch")(former)


def test_each_fusion_is_interchangeable_with_its_sequence(awesome: SimpleNamespace, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the proof that every fusion of the package passes: all recipes and dtypes, alone and between products, every choice of wanted gradients."""
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "conformance" / "ops"))
    interchange, table = importlib.import_module("ops_interchange"), importlib.import_module("ops_table")
    op = awesome.ops.AwesomeLU
    record = table.Record("AwesomeLU", lambda p, w: [op()], lambda w, d: awesome.modules.AwesomeLU(), lambda x, p, lengths: forward64(x)[0])
    monkeypatch.setitem(table.RECORD_OF, op, record)
    cases = [case for case in interchange.cases() if case.fusion.function in awesome.fused]
    assert len(cases) == 3
    for case in cases:
        for mode in interchange.MODES:
            assert interchange.prove(case, mode) > 0


def test_a_fusion_from_outside_goes_before_the_package_s_own_of_its_length(awesome: SimpleNamespace) -> None:
    def another_mmt_add(mmt: fusible.ops.MMT, add: fusible.ops.Add, x: nvte.Tensor) -> nvte.Tensor:
        return add.inference(mmt.inference(x))

    fusions.register_fusion_inference(another_mmt_add)
    try:
        lengths = [len(fusion.pattern) for fusion in fusions.registered("inference")]
        assert lengths == sorted(lengths, reverse=True)
        explained = fusible.Linear(4, 4).explain(torch.ones(2, 4))
    finally:
        fusions.unregister_fusion(another_mmt_add)
    assert "another_mmt_add" in explained.split("inference")[1]
    assert "another_mmt_add" not in fusible.Linear(4, 4).explain(torch.ones(2, 4))


def test_fused_and_unfused_agree_on_lazy_tensors(awesome: SimpleNamespace) -> None:
    generator = torch.Generator().manual_seed(3)
    weight, bias = torch.randn(COLUMNS, 7, generator=generator), torch.randn(COLUMNS, generator=generator)
    x, dy = torch.randn(ROWS, 7, generator=generator), torch.randn(ROWS, COLUMNS, generator=generator)
    wide = DType.Float32

    def program(*leaves: lazy.Tensor) -> list[lazy.Tensor]:
        x, dy, weight, bias = (make_nvte_tensor(leaf) for leaf in leaves)
        mmt = fusible.ops.MMT(weight, x_dtype=wide, weight_dtype=wide, dy_dtype=wide, y_dtype=wide, dx_dtype=wide, dweight_dtype=wide)
        add = fusible.ops.Add(bias, y_dtype=wide, dx_dtype=wide, dbias_dtype=wide)
        act = awesome.ops.AwesomeLU(x_dtype=wide, dy_dtype=wide, y_dtype=wide, dx_dtype=wide)
        z1, _ = mmt.forward(x)
        z2, add_ctx = add.forward(z1)
        y, act_ctx = act.forward(z2)
        d2, _ = act.backward(act_ctx, dy)
        d1, (dbias,) = add.backward(add_ctx, d2)
        fused_y, ctxs = awesome.fusions.mmt_add_awesomelu_fwd_fused(mmt, add, act, x)
        fused_d1, ((fused_dbias,), nothing) = awesome.fusions.add_awesomelu_bwd_fused(add, act, ctxs[1], ctxs[2], dy)
        assert nothing == []
        inferred = awesome.fusions.mmt_add_awesomelu_inf_fused(mmt, add, act, x)
        return [t.data for t in (y, d1, dbias, fused_y, fused_d1, fused_dbias, inferred)]

    y, d1, dbias, fused_y, fused_d1, fused_dbias, inferred = on_lazy(program, x, dy, weight, bias)
    for unfused, fused in ((y, fused_y), (d1, fused_d1), (dbias, fused_dbias), (y, inferred)):
        largest = unfused.abs().max().item()
        torch.testing.assert_close(fused, unfused, rtol=0, atol=(ROWS + 16) * FP32 * max(1.0, largest))


def model_of(awesome: SimpleNamespace, executor: str) -> fusible.Sequential:
    torch.manual_seed(1)
    return fusible.Sequential(fusible.Linear(8, COLUMNS), awesome.modules.AwesomeLU(), fusible.Linear(COLUMNS, 8)).compile(executor)


@pytest.mark.parametrize("executor", ["eager", "xla"])
def test_gradients_of_a_model_are_those_of_float64(awesome: SimpleNamespace, executor: str) -> None:
    if executor == "xla":
        pytest.importorskip("jaxlib")
    model = model_of(awesome, executor)
    x = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(2))
    first, last = model[0], model[2]
    exact = [p.detach().double().requires_grad_() for p in (first.weight, first.bias, last.weight, last.bias)]
    z = x.double() @ exact[0].T + exact[1]
    reference = (z * torch.sigmoid(z + 1)) @ exact[2].T + exact[3]
    reference.square().sum().backward()
    y = model(x)
    y.square().sum().backward()
    got = [first.weight.grad, first.bias.grad, last.weight.grad, last.bias.grad]
    for ours, theirs in ((y, reference.detach()), *((grad, p.grad) for grad, p in zip(got, exact, strict=True))):
        largest = theirs.abs().max().item()
        assert ((ours.double() - theirs).abs().max() <= 2 * (COLUMNS + ROWS + 16) * FP32 * max(1.0, largest)).item()


def step(awesome: SimpleNamespace, executor: str) -> tuple[fusible.Sequential, list[float], list[tex.Call]]:
    """One step of training under delayed scaling, and the loss before and after."""
    model = model_of(awesome, executor)
    x = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(2)).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    losses = []
    with tex.record() as calls:
        for _ in range(2):
            with fusible.autocast(recipe=fusible.DelayedScaling()):
                loss = (model(x).float() - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return model, losses, calls


def test_one_step_of_training_in_8_bits_by_either_executor(awesome: SimpleNamespace) -> None:
    pytest.importorskip("jaxlib")
    model, eager, calls = step(awesome, "eager")
    native = "torch" if awesome.kernels.native is None else "cpu"
    assert {(call.function, call.backend) for call in calls if "awesomelu" in call.function} == {("awesomelu", native), ("dawesomelu", native)}
    assert eager[1] < eager[0]
    _, compiled, calls = step(awesome, "xla")
    assert {call.backend for call in calls if "awesomelu" in call.function} == {"xla"}
    # The executors may round a value near a tie to different sides: a step of E4M3 (1/8), averaged over the batch.
    assert compiled == pytest.approx(eager, rel=1 / 8 / (ROWS * 8) ** 0.5)
    with fusible.autocast(recipe=fusible.DelayedScaling()):
        forward, backward, inference = model.explain(torch.ones(3, 8).bfloat16()).split("\n\n")[1:]
    assert "mmt_add_awesomelu_fwd_fused" in forward and "-> e4m3[3.x]" in forward
    assert "add_awesomelu_bwd_fused" in backward and "-> e5m2[0.dy]" in backward
    assert "mmt_add_awesomelu_inf_fused" in inference


def test_a_module_with_parameters_of_its_own(awesome: SimpleNamespace) -> None:
    module = awesome.modules.AwesomeLinear(8, COLUMNS, weight_init_method=torch.nn.init.ones_)
    assert repr(module) == "AwesomeLinear(8, 12, bias=True): MMT -> Add -> AwesomeLU"
    assert (module.weight == 1).all() and dict(module.named_parameters()).keys() == {"weight", "bias"}
    assert "Add" not in repr(awesome.modules.AwesomeLinear(8, COLUMNS, bias=False))
    x = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(4))
    y = module(x)
    z = x.double().sum(-1, keepdim=True).expand(ROWS, COLUMNS)
    reference, error = forward64(z)
    # The product's own sum of 8 terms comes first; the slope of AwesomeLU is at most 1.1.
    assert_near(y.detach(), reference, error + 1.1 * 8 * FP32 * x.double().abs().sum(-1, keepdim=True))
    y.sum().backward()
    assert module.weight.grad.shape == (COLUMNS, 8) and module.bias.grad.shape == (COLUMNS,)


def test_no_file_of_the_source_changes(awesome: SimpleNamespace) -> None:
    assert not awesome.directory.is_relative_to(ROOT)
    assert {path.name for path in Path(awesome.directory, "awesome").glob("*.*")} >= {"awesomelu.cpp", "kernels.py", "functions.py", "ops.py"}
    before, after = awesome.source
    assert before == after
