"""Fusible operations, recipes and quantized tensors by the names of NVIDIA's package, where that is not installed."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from doc_pages import ROOT
from te_names_hidden import HIDE, hide

from fusible import compat, quantized
from fusible.compat import finder
from fusible.compat.te_names import PACKAGES
from fusible.errors import ArgumentError, FusibleError
from fusible.pytorch import ops

TE = "transformer_engine"
EXAMPLE = """
from transformer_engine.pytorch.ops.op import (
    OperationContext,
    FusibleOperation,
    BasicOperation,
    FusedOperation,
)
from transformer_engine.pytorch.ops.op import BasicOperation, OperationContext

# Define a custom fusible operation
class MyOperation(BasicOperation):
    def op_forward(self, ctx: OperationContext, input, **kwargs):
        ctx.save_for_backward(input)
        return input * 2

    def op_backward(self, ctx: OperationContext, grad_output):
        (input,) = ctx.saved_tensors
        return grad_output * 2
"""
"""The published example of an operation of one's own."""


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    hide(monkeypatch)
    compat.install()
    yield
    compat.uninstall()


@pytest.fixture
def te(installed: None) -> ModuleType:
    return importlib.import_module(f"{TE}.pytorch")


@pytest.mark.usefixtures("installed")
def test_an_operation_of_ones_own_runs_alone_and_among_others() -> None:
    namespace: dict[str, Any] = {}
    exec(EXAMPLE, namespace)
    operation, te_ops = namespace["MyOperation"], importlib.import_module(f"{TE}.pytorch.ops")
    x = torch.randn(3, 4, requires_grad=True)
    y = operation()(x)
    y.backward(x.detach())
    assert torch.equal(y, 2 * x) and torch.equal(x.grad, 2 * x)  # type: ignore[arg-type]

    linear = te_ops.Linear(4, 5)
    x.grad = None
    y = te_ops.Sequential(operation(), linear, operation(), operation())(x)
    y.sum().backward()
    assert torch.equal(y, 4 * linear(2 * x))  # factors of two are exact at any place
    wanted = 8 * linear.weight.detach().sum(0).expand(3, 4)
    torch.testing.assert_close(x.grad, wanted, rtol=0, atol=8 * 5 * 2.5 * 2.0**-24)  # sums of 5 weights up to 1/2, in another order


def rows() -> list[tuple[str, list[str], str]]:
    """Of the table of the documentation: the module, the names, and the module that they lead to."""
    page = (ROOT / "docs" / "compat.md").read_text()
    section = page[page.index("## Without NVIDIA's package") :]
    lines = re.findall(r"^\| (`transformer_engine.*) \| (.*) \| (.*) \|$", section[: section.index("\n## ", 1)], re.MULTILINE)
    found = [(re.findall(r"`([\w.]+)`", first), re.findall(r"`(\w+)`", second), third.strip("`")) for first, second, third in lines]
    files = [(modules[0].rpartition(".")[0] + file, [], target) for modules, _, target in found for file in modules[1:]]
    return [(modules[0], named, target) for modules, named, target in found] + files


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("module", "names", "target"), rows())
def test_the_documented_names_lead_where_the_table_says(module: str, names: list[str], target: str) -> None:
    shown = importlib.import_module(module)
    for name in names:
        assert getattr(shown, name) is getattr(importlib.import_module(target), name)
        assert name in dir(shown)


def test_the_table_tells_of_every_module_but_a_few() -> None:
    told = {module for module, _, _ in rows()}
    untold = {name for name in PACKAGES if not any(name == module or name.startswith(f"{module}.") for module in told)}
    assert untold == {TE, f"{TE}.common"}
    assert {name for name in PACKAGES if name.startswith(f"{TE}.pytorch.") and name.count(".") == 2} - told == {
        f"{TE}.pytorch.{name}" for name in ("fp8", "float8_tensor", "utils")
    }


BEYOND = ("ErfGEGLU", "ErfGELU")
"""Operations of which NVIDIA's package has none."""


@pytest.mark.usefixtures("installed")
def test_every_operation_of_ours_has_its_name_and_its_file() -> None:
    te_ops = importlib.import_module(f"{TE}.pytorch.ops")
    star: dict[str, Any] = {}
    exec(f"from {TE}.pytorch.ops import *", star)
    basic = [name for name in importlib.import_module("fusible.pytorch.ops.basic").__all__ if name not in BEYOND]
    assert set(basic) <= set(star) and all(star[name] is getattr(ops, name) is getattr(te_ops, name) for name in basic)
    files = [name for name in PACKAGES if name.startswith(f"{TE}.pytorch.ops.basic.")]
    by_file = {name for file in files for name in importlib.import_module(file).__all__ if not name.endswith("_KEY")}
    assert by_file == set(importlib.import_module(f"{TE}.pytorch.ops.basic").__all__) >= set(basic)


def _bound(path: Path) -> set[str]:
    """The names that a file binds, without running it; imports are among them, those by a star of ``.basic`` too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
            if "*" in found:
                found = found - {"*"} | _bound(path.parent / "basic" / "__init__.py")
        elif isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return found


@pytest.mark.skipif(importlib.util.find_spec(TE) is None, reason="NVIDIA's Python package is not installed")
@pytest.mark.parametrize("module", [name for name in PACKAGES if PACKAGES[name].names])
def test_the_names_are_where_nvidias_package_has_them(module: str) -> None:
    spec = importlib.util.find_spec(TE)
    assert spec is not None and spec.submodule_search_locations is not None
    path = Path(spec.submodule_search_locations[0], *module.split(".")[1:])
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    names = set(PACKAGES[module].names or ())
    assert names <= _bound(file)
    if module in (f"{TE}.pytorch.ops.basic", f"{TE}.pytorch.ops.fused"):
        assert names == _bound(file) - {"register_backward_fusion", "register_forward_fusion"}
    if module.startswith(f"{TE}.pytorch.ops.basic."):
        assert names >= {node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef) and node.name[0] != "_"}


def test_nothing_is_imported_before_it_is_asked_for() -> None:
    program = f"""{HIDE}
import fusible
assert [name for name in sys.modules if name.startswith("fusible.")] == ["fusible.version"], "at import"
from fusible import compat
compat.install()
import transformer_engine.pytorch as te, transformer_engine.common.recipe
from transformer_engine.pytorch import ops
from transformer_engine.pytorch.ops import fused
assert te.ops is ops
assert not [name for name in sys.modules if name.startswith("fusible.pytorch")], "at install"
te.ops.Bias
assert "fusible.pytorch.ops" in sys.modules
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("te.FusedMLAQUpProjFunction", AttributeError),
        ("from transformer_engine.pytorch import FusedMLAQUpProjFunction", ImportError),
        ("import transformer_engine.pytorch.ep", ModuleNotFoundError),
        ("from transformer_engine.pytorch.ep import EpBuffer", ModuleNotFoundError),
    ],
)
def test_what_is_not_there_is_one_sentence_that_says_what_is(te: ModuleType, line: str, kind: type[Exception]) -> None:
    wanted = (
        "transformer_engine.pytorch as Fusible has it: expected one of modules, ops, optimizers, autocast, quantized_model_init, permutations, "
        "losses, quantizers and quantized tensors, got (FusedMLAQUpProjFunction, which is written in Triton and CuTe .* frontend|ep); "
        r"use one, or install NVIDIA's Python package for the rest\."
    )
    with pytest.raises(kind) as raised:
        exec(line, {"te": te})
    assert isinstance(raised.value, FusibleError) and re.fullmatch(wanted, str(raised.value))


@pytest.mark.usefixtures("installed")
def test_a_small_module_names_all_that_it_has(te: ModuleType) -> None:
    with pytest.raises(ImportError, match="expected one of BasicOperation, FusedOperation, FusibleOperation, OperationContext, got"):
        exec("from transformer_engine.pytorch.ops.op import Operation")
    with pytest.raises(ImportError, match="transformer_engine as Fusible has it: expected one of common, plugins, pytorch"):
        importlib.import_module(f"{TE}.jax")
    assert not hasattr(te, "FusedMLAQUpProjFunction") and not hasattr(te, "__path_of_nothing__")


@pytest.mark.usefixtures("installed")
def test_fused_operations_appear_as_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    target = ModuleType("fusible.pytorch.ops.fused")
    monkeypatch.setitem(sys.modules, "fusible.pytorch.ops.fused", target)
    fused = importlib.import_module(f"{TE}.pytorch.ops.fused")
    with pytest.raises(AttributeError):
        fused.BackwardAddRMSNorm  # noqa: B018
    vars(target).update(BackwardAddRMSNorm=int, Other=str)
    assert fused.BackwardAddRMSNorm is importlib.import_module(f"{TE}.pytorch.ops.fused.backward_add_rmsnorm").BackwardAddRMSNorm is int
    assert fused.__all__ == ["BackwardAddRMSNorm"] and not hasattr(fused, "Other")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An installed package of the name, with less in it than the tables have."""
    for name in [name for name in sys.modules if name.partition(".")[0] == TE]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / TE / "pytorch").mkdir(parents=True)
    (tmp_path / TE / "__init__.py").write_text("real = True\n")
    (tmp_path / TE / "pytorch" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    compat.uninstall()
    for name in [name for name in sys.modules if name.partition(".")[0] == TE]:
        del sys.modules[name]


@pytest.mark.usefixtures("package")
def test_nothing_is_mixed_into_an_installed_package() -> None:
    compat.install()
    assert importlib.import_module(TE).real
    for name in ("pytorch.ops", "pytorch.quantized_tensor", "common"):
        with pytest.raises(ModuleNotFoundError, match=f"No module named '{TE}.{name}'"):
            importlib.import_module(f"{TE}.{name}")


@pytest.mark.usefixtures("package")
def test_an_installed_package_is_replaced_on_demand() -> None:
    compat.install(replace_package=True)
    assert importlib.import_module(f"{TE}.pytorch.ops").Bias is ops.Bias
    assert not hasattr(sys.modules[TE], "real")
    compat.uninstall()
    assert importlib.import_module(TE).real


@pytest.mark.usefixtures("package")
def test_a_package_in_use_is_not_replaced() -> None:
    importlib.import_module(TE)
    with pytest.raises(ArgumentError, match="the modules imported so far: expected no transformer_engine"):
        compat.install(replace_package=True)
    assert not compat.installed()


def test_uninstalling_takes_all_of_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch)
    compat.install()
    te = importlib.import_module(f"{TE}.pytorch")
    assert te.ops.op.BasicOperation is ops.BasicOperation
    compat.uninstall()
    assert not [name for name in sys.modules if name.partition(".")[0] == TE]
    assert not any(isinstance(found, finder.Names) for found in sys.meta_path)
    assert te.autocast(False).recipe is None  # what a script holds, it may use


def test_contexts_take_the_arguments_in_nvidias_order(te: ModuleType) -> None:
    state = importlib.import_module(f"{TE}.pytorch.quantization").FP8GlobalStateManager
    recipe = quantized.MXFP8BlockScaling()
    assert not state.is_fp8_enabled() and state.get_fp8_recipe() == te.get_default_recipe() == quantized.DelayedScaling()
    for context in (te.autocast(True, False, recipe), te.fp8_autocast(enabled=True, fp8_recipe=recipe), te.fp8_autocast(True, False, recipe)):
        with context:
            assert state.is_fp8_enabled() and state.get_fp8_recipe() is recipe and state.get_fp8_group() is None
            with te.autocast(enabled=False):
                assert not state.is_fp8_enabled()
    assert te.autocast().recipe == te.get_default_recipe() and not state.is_fp8_calibration()
    with pytest.raises(NotImplementedError, match="autocast: expected calibrating=False"):
        te.autocast(calibrating=True)


def test_what_models_are_made_with_can_be_asked(te: ModuleType) -> None:
    state = importlib.import_module(f"{TE}.pytorch.quantization").FP8GlobalStateManager
    assert not state.with_fp8_parameters() and not state.with_high_precision_init_val()
    with te.quantized_model_init(recipe=quantized.MXFP8BlockScaling(), preserve_high_precision_init_val=True):
        assert state.with_fp8_parameters() and state.with_high_precision_init_val()
        with te.quantized_model_init(enabled=False, preserve_high_precision_init_val=True):
            assert not state.with_fp8_parameters() and not state.with_high_precision_init_val()
        with te.fp8_model_init():
            assert state.with_fp8_parameters() and not state.with_high_precision_init_val()
    assert not state.with_fp8_parameters()


def test_the_state_can_be_reset(te: ModuleType) -> None:
    state = importlib.import_module(f"{TE}.pytorch.quantization").FP8GlobalStateManager
    with te.autocast(), te.quantized_model_init():
        state.reset()
        assert not state.is_fp8_enabled() and not state.with_fp8_parameters()
        with te.autocast():
            assert state.is_fp8_enabled()
        assert not state.is_fp8_enabled()
    assert not state.is_fp8_enabled()


def test_frameworks_find_a_distribution_of_the_name(te: ModuleType) -> None:
    version = importlib.metadata.version("transformer-engine")
    assert version == importlib.metadata.version("transformer_engine") == importlib.import_module(TE).__version__
    assert importlib.metadata.metadata("transformer-engine")["Name"] == TE
    assert TE in {distribution.name for distribution in importlib.metadata.distributions()}


def test_the_recipe_in_force_reaches_the_operations(te: ModuleType) -> None:
    linear, x = te.ops.Linear(64, 64, bias=False), torch.randn(32, 64)
    quantizer = te.MXFP8Quantizer(te.DType.kFloat8E4M3)
    exact = quantizer(x).dequantize().double() @ quantizer(linear.weight.detach()).dequantize().double().T
    with te.autocast(recipe=quantized.MXFP8BlockScaling()):
        y = linear(x)
    # A sum of 64 products in fp32, whose operands are the quantized ones.
    scale = quantizer(x).dequantize().double().abs() @ quantizer(linear.weight.detach()).dequantize().double().abs().T
    assert ((y.double() - exact).abs() <= 64 * 2.0**-24 * scale).all()
    assert not torch.equal(y, linear(x))


@pytest.mark.parametrize("name", ["fp8", "mxfp8", "fp8_block_scaling", "nvfp4"])
def test_whether_a_format_is_supported_is_what_tex_says(te: ModuleType, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = getattr(te, f"is_{name}_available")
    state = importlib.import_module(f"{TE}.pytorch.quantization").FP8GlobalStateManager
    assert ask() is True and ask(return_reason=True) == (True, "") == getattr(state, f"is_{name}_available")()
    assert getattr(importlib.import_module(f"{TE}.pytorch.fp8"), f"check_{name}_support")() == (True, "")
    monkeypatch.setattr(importlib.import_module("fusible.compat.te_quantization"), "support", lambda room, quantizer: (False, quantizer))
    assert ask() is False and ask(return_reason=True)[1].endswith("Quantizer")


def test_element_types_are_those_of_the_kernels(te: ModuleType) -> None:
    constants = importlib.import_module(f"{TE}.pytorch.constants")
    for dtype, code in constants.TE_DType.items():
        assert isinstance(code, te.DType) and constants.TE_DType_To_Torch[code] is dtype
    assert constants.TE_DType[torch.bfloat16] is te.DType.kBFloat16
    assert te.DType.cast(7) is te.DType.cast(te.DType.kFloat8E4M3) is te.DType.kFloat8E4M3
    with pytest.raises(ValueError, match="99"):
        te.DType.cast(99)
    assert (constants.FP8FwdTensorIdx.GEMM1_WEIGHT, constants.FP8BwdTensorIdx.GRAD_OUTPUT1) == (1, 0)
    assert (constants.MXFP8_BLOCK_SCALING_SIZE, constants.NVFP4_BLOCK_SCALING_SIZE) == (32, 16)


def test_a_fusion_of_ones_own_is_used(te: ModuleType) -> None:
    ops_of_te = te.ops

    class ShiftedTwice(ops_of_te.FusedOperation):
        calls = 0

        def fuser_forward(self, basic_op_ctxs: Any, input_: Any, **unused: Any) -> Any:
            ShiftedTwice.calls += 1
            return input_ + self.basic_ops[0].bias + self.basic_ops[1].bias, [(), ()]

    def fuse(ops: list[Any], *, recipe: Any = None) -> list[Any]:
        return [ShiftedTwice(ops)] if [type(op) for op in ops] == [ops_of_te.Bias] * 2 else ops

    model = ops_of_te.Sequential(ops_of_te.Bias(4), ops_of_te.Bias(4))
    x = torch.randn(2, 4)
    with ops_of_te.register_forward_fusion(fuse):
        y = model(x)
    y.sum().backward()
    assert ShiftedTwice.calls == 1 and torch.equal(y, x) and torch.equal(model[0].bias.grad, torch.full((4,), 2.0))
    model(x)
    assert ShiftedTwice.calls == 1
