"""The nvidia backend over a stand-in for the native library, which takes NVIDIA's enumerations and classes alone, and notes its calls."""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from te_names_hidden import restored

from fusible import tex
from fusible.quantized import Float8CurrentScalingQuantizer, Float8Quantizer, Float8Tensor, GroupedTensorStorage, MXFP8Quantizer
from fusible.tex.backends import nvidia
from fusible.tex.backends.nvidia import native as finding
from fusible.tex.selection.registry import registry

PACKAGE = "transformer_engine.pytorch"


class Enumeration(enum.Enum):
    """Like pybind's: no integer, but convertible to one."""

    def __int__(self) -> int:
        return self.value


class NativeDType(Enumeration):
    kFloat32 = 4
    kBFloat16 = 6
    kFloat8E4M3 = 7


class NativeBackend(Enumeration):
    NVTE_F16_arbitrary_seqlen = 1


NativeBackend.__name__ = "NVTE_Fused_Attn_Backend"


class QuantizerOfTheirs:
    internal = optimize_for_gemm = False

    def __init__(self, scale: Any, amax: Any, fp8_dtype: Any, *, rowwise: bool = True, columnwise: bool = True) -> None:
        self.scale, self.amax, self.dtype, self.rowwise_usage, self.columnwise_usage = scale, amax, fp8_dtype, rowwise, columnwise


class BlockOfTheirs:
    internal = optimize_for_gemm = False

    def __init__(self, fp8_dtype: Any, *, rowwise: bool = True, columnwise: bool = True) -> None:
        self.dtype, self.rowwise_usage, self.columnwise_usage = fp8_dtype, rowwise, columnwise


class StorageOfTheirs:
    def __init__(self, *, data: Any, fp8_scale_inv: Any, fp8_dtype: Any, fake_dtype: Any = None, data_transpose: Any = None, quantizer: Any = None):
        self._data, self._scale_inv, self._fp8_dtype, self.dtype = data, fp8_scale_inv, fp8_dtype, fake_dtype
        self._transpose, self._quantizer, self._transpose_invalid = data_transpose, quantizer, data_transpose is None

    def size(self) -> tuple[int, ...]:
        return tuple(self._data.shape)

    def get_metadata(self) -> dict[str, Any]:
        return {
            "data": self._data, "data_transpose": self._transpose, "fp8_scale_inv": self._scale_inv, "fp8_dtype": self._fp8_dtype,
            "fake_dtype": self.dtype, "quantizer": self._quantizer,
        }  # fmt: skip


class GroupedOfTheirs(GroupedTensorStorage):
    """Of the same constructor and attributes, and no ``get_metadata``."""

    get_metadata: Any = None


for _class in (QuantizerOfTheirs, StorageOfTheirs, GroupedOfTheirs, BlockOfTheirs):
    _class.__module__ = f"{PACKAGE}.tensor"


class Native(ModuleType):
    """The native library's stand-in."""

    DType, NVTE_Fused_Attn_Backend = NativeDType, NativeBackend

    def __init__(self) -> None:
        super().__init__("transformer_engine_torch")
        self.calls: list[tuple[Any, ...]] = []

    def layernorm_fwd(self, *args: Any) -> list[Any]:
        self.calls.append(args)
        return [args[4] if args[4] is not None else args[0], None, None]

    def quantize(self, tensor: Any, quantizer: Any, output: Any, noop: Any) -> Any:
        assert type(quantizer) is QuantizerOfTheirs
        self.calls.append((tensor, quantizer, output, noop))
        quantizer.amax.fill_(9.0)
        made = output or StorageOfTheirs(data=None, fp8_scale_inv=None, fp8_dtype=quantizer.dtype, fake_dtype=tensor.dtype, quantizer=quantizer)
        made._data, made._scale_inv = torch.full(tensor.shape, 5, dtype=torch.uint8), torch.tensor([0.5])
        made._transpose, made._transpose_invalid = made._data.t().contiguous(), False
        return made

    def group_quantize(self, tensor: Any, quantizer: Any, num_tensors: int, first_dims: Any, *rest: Any) -> Any:
        assert type(quantizer) is BlockOfTheirs
        data = torch.full((tensor.numel(),), 5, dtype=torch.uint8)
        return GroupedOfTheirs(
            tuple(tensor.shape), tensor.dtype, num_tensors=num_tensors, quantizer=quantizer, data=data, scale_inv=torch.ones(num_tensors),
            first_dims=first_dims,
        )  # fmt: skip

    def group_requantize_inplace(self, grouped_x: Any, *rest: Any) -> None:
        assert type(grouped_x) is GroupedOfTheirs and type(grouped_x.quantizer) is BlockOfTheirs
        grouped_x.columnwise_data = grouped_x.rowwise_data + 1

    def get_fused_attn_backend(self, params: Any) -> tuple[Any, str]:
        self.calls.append((params,))
        return NativeBackend.NVTE_F16_arbitrary_seqlen, ""

    def fp8_transpose(self, input: Any, dtype: Any, *, out: Any) -> Any:
        self.calls.append((input, dtype, out))
        return input.t()

    class CommOverlapHelper:
        def __init__(self, *groups: Any) -> None:
            self.groups = groups


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> Iterator[Native]:
    module = Native()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    monkeypatch.setitem(sys.modules, "transformer_engine_torch_nv", module)
    theirs = SimpleNamespace(Float8Quantizer=QuantizerOfTheirs, Float8TensorStorage=StorageOfTheirs, MXFP8Quantizer=BlockOfTheirs)
    theirs.tensor = SimpleNamespace(GroupedTensorStorage=GroupedOfTheirs)
    monkeypatch.setitem(sys.modules, PACKAGE, theirs)  # type: ignore[arg-type]
    monkeypatch.setattr(nvidia.NvidiaBackend, "DEVICES", frozenset({"cpu"}))
    registry.changed()
    yield module
    monkeypatch.undo()
    registry.changed()


@pytest.fixture
def alone(native: Native, monkeypatch: pytest.MonkeyPatch) -> Native:
    """The library where no program but Fusible's modules calls tex."""
    monkeypatch.delitem(sys.modules, "transformer_engine_torch_nv")
    monkeypatch.setitem(sys.modules, "transformer_engine_torch", native)
    registry.changed()
    return native


X = torch.ones(16, 32)


def test_calls_are_positional_with_enumerations_of_the_native_library(native: Native) -> None:
    x = X.bfloat16()
    assert tex.explain("layernorm_fwd", x, x[0], None, 1e-5, None, None, 6, 0, False).backend == "nvidia"
    out = torch.zeros_like(x)
    for otype in (tex.DType.kBFloat16, 6, torch.bfloat16):
        options = {"eps": 1e-5, "ln_out": out, "quantizer": None, "otype": otype, "sm_margin": 0, "zero_centered_gamma": True}
        result = tex.layernorm_fwd(input=x, weight=x[0], bias=None, **options)
        assert result[0] is out
        assert native.calls[-1][6] is NativeDType.kBFloat16 and native.calls[-1][7:] == (0, True)
    tex.fp8_transpose(X.byte(), tex.DType.kFloat8E4M3, out=None)
    assert native.calls[-1][1] is NativeDType.kFloat8E4M3


def test_quantizers_go_in_as_theirs_and_results_come_out_as_ours(native: Native) -> None:
    quantizer = Float8Quantizer(torch.ones(1), torch.zeros(1), tex.DType.kFloat8E4M3, columnwise=False)
    made = tex.quantize(X, quantizer)
    assert type(made) is Float8Tensor and made._fp8_dtype is tex.DType.kFloat8E4M3 and (made._data == 5).all() and made._dtype is torch.float32
    theirs = native.calls[-1][1]
    assert theirs.scale is quantizer.scale and (theirs.rowwise_usage, theirs.columnwise_usage) == (True, False)
    assert quantizer.amax.item() == 9.0
    quantizer.amax = None
    tex.quantize(X, quantizer)
    assert quantizer.amax.item() == 9.0


def test_grouped_tensors_come_out_as_ours_and_go_in_as_theirs(native: Native) -> None:
    quantizer, sizes = MXFP8Quantizer(tex.DType.kFloat8E4M3), torch.tensor([0, 16])
    backend = registry.find("nvidia")
    assert registry.reason_unavailable(backend) is None
    made = backend.group_quantize(X, quantizer, 2, sizes)
    assert type(made) is GroupedTensorStorage and made.quantizer is quantizer and made.first_dims is sizes
    assert (made.rowwise_data == 5).all() and made.logical_shape == (16, 32) and made.num_tensors == 2 and made.fake_dtype is torch.float32
    backend.group_requantize_inplace(made, quantizer, 2, sizes, tex.DType.kFloat32)
    assert type(made) is GroupedTensorStorage and (made.columnwise_data == 6).all() and made.quantizer is quantizer


def test_a_tensor_with_gaps_crosses_as_a_copy_and_what_was_written_comes_back(native: Native) -> None:
    wide, out = torch.arange(1024.0).reshape(16, 64), torch.zeros(16, 64)[:, ::2]
    gaps, negated = wide[:, ::2], torch.complex(X, X).conj().imag
    native.layernorm_fwd = lambda *args: [args[4].copy_(args[0]), None, None]  # type: ignore[attr-defined]
    for x in (gaps, wide.flatten()[1:513].reshape(16, 32), negated, gaps.requires_grad_()):
        version = out._version
        y, _, _ = tex.layernorm_fwd(x, X[0], None, 1e-5, out, None, tex.DType.kFloat32, 0, False)
        assert y is out and torch.equal(out, x) and out._version == version
    with torch.inference_mode():
        mine = torch.zeros(16, 64)[:, ::2]
        tex.layernorm_fwd(wide[:, 1::2] * 1, X[0], None, 1e-5, mine, None, tex.DType.kFloat32, 0, False)
    tex.layernorm_fwd(gaps, X[0], None, 1e-5, mine, None, tex.DType.kFloat32, 0, False)
    assert torch.equal(mine, gaps) and mine.is_inference()
    shown = X[:1].expand(16, 32)
    native.dgelu = lambda *args: [arg.data_ptr() % 16 or arg.is_contiguous() for arg in args[:2]]  # type: ignore[attr-defined]
    assert tex.dgelu(shown, X[:, :1].expand(16, 32), None) == [True, True] and torch.equal(shown, X)


def fp8(x: torch.Tensor, bare: bool = False) -> Any:
    quantizer = Float8Quantizer(torch.ones(1), torch.zeros(1), tex.DType.kFloat8E4M3)
    quantizer.internal = bare  # as operands of a pipeline are: no tensors of torch
    with tex.set_backend("torch"):
        return tex.quantize(x, quantizer)


def multiplied(A: Any, B: Any, bias: Any = None, workspace: Any = None, trans_b: bool = False, grad: bool = False) -> Any:
    size = 0 if workspace is None else workspace.numel()
    epilogue = bias, None, False, None, grad
    return tex.generic_gemm(A, True, B, trans_b, None, None, tex.DType.kFloat32, *epilogue, workspace, size, False, False)


def test_products_are_given_memory_to_work_in(native: Native, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = SimpleNamespace(device=torch.device("cpu"), cuda_stream=0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    native.generic_gemm = lambda *args: [args[12], args[13], args[8]]  # type: ignore[attr-defined]
    A = fp8(X)
    memory, size, bias_type = multiplied(A, A)
    assert memory.nbytes == size > 1 << 25 and bias_type is NativeDType.kBFloat16
    own = torch.empty(1024, dtype=torch.uint8)
    found = multiplied(A, A, workspace=own)
    assert found[0] is own and found[1] == 1024


@pytest.mark.parametrize("bare", [False, True])
def test_products_that_it_takes_are_its_own(alone: Native, monkeypatch: pytest.MonkeyPatch, bare: bool) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(device=torch.device("cpu"), cuda_stream=0))
    alone.generic_gemm = lambda *args: ["native"]  # type: ignore[attr-defined]
    A = fp8(X, bare)
    assert multiplied(A, A) == ["native"]


def test_products_that_it_does_not_take_are_left_to_others(alone: Native) -> None:
    alone.generic_gemm = lambda *args: pytest.fail("the native product was called")  # type: ignore[attr-defined]
    A, narrow, without = fp8(X), fp8(X[:, :24]), fp8(X)
    without._transpose = None
    for product in (
        multiplied(X, X), multiplied(narrow, narrow), multiplied(A, A, X[:, 0].contiguous()),
        tex.generic_gemm(without, False, fp8(X.t().contiguous()), False, None, None, 4, None, None, False, None, False, None, 0, False, False),
    ):  # fmt: skip
        assert product[0].shape in ((16, 16), (32, 32))


def test_what_its_kernels_do_not_take_is_left_to_others(alone: Native, monkeypatch: pytest.MonkeyPatch) -> None:
    options = None, 1e-5, None, None, tex.DType.kBFloat16, 0, False
    assert "input and weight and otype of one dtype" in str(tex.explain("layernorm_fwd", X.bfloat16(), X[0], *options))
    delayed = Float8Quantizer(torch.ones(1), torch.zeros(1), tex.DType.kFloat8E4M3)
    for x in (X[:, :24], X[:10], X[:0]):
        assert tex.quantize(x, delayed)._data.shape == x.shape
    delayed.set_usage(rowwise=False)
    tex.quantize(X, delayed)
    delayed.set_usage(rowwise=True, columnwise=False)
    alone.bgrad_quantize = alone.dbias_dgelu = lambda *args: pytest.fail("the native sum was called")  # type: ignore[attr-defined]
    for dbias, made in (tex.bgrad_quantize(X.bfloat16(), delayed), tex.dbias_dgelu(X, X, delayed)):
        assert dbias.shape == (32,) and made._data.shape == X.shape
    assert not alone.calls
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    registry.changed()
    assert "need capability 10.0, and the GPU has 9.0" in str(tex.explain("quantize", X, MXFP8Quantizer(tex.DType.kFloat8E4M3)))


def test_an_output_of_ours_is_written_and_returned(native: Native) -> None:
    quantizer = Float8Quantizer(torch.ones(1), torch.zeros(1), tex.DType.kFloat8E4M3)
    with tex.set_backend("torch"):
        output = tex.quantize(X, quantizer)
    assert tex.quantize(X, quantizer, output) is output
    assert (output._data == 5).all() and output._scale_inv.item() == 0.5 and not output._transpose_invalid


def test_their_own_objects_pass_as_they_are(native: Native) -> None:
    theirs = QuantizerOfTheirs(torch.ones(1), torch.zeros(1), NativeDType.kFloat8E4M3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "calls", [])
        made = tex.quantize(X, theirs)
        assert native.calls[0][1] is theirs and type(made) is StorageOfTheirs


def test_a_query_and_its_answer(native: Native) -> None:
    asked = SimpleNamespace(qkv_layout=7, qkv_dtype=6, dropout=0.0, scaling_mode=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "NVTE_QKV_Layout", lambda value: ("layout", value), raising=False)
        patch.setattr(native, "NVTEScalingMode", lambda value: ("mode", value), raising=False)
        backend = registry.find("nvidia")
        assert registry.reason_unavailable(backend) is None
        answer = backend.get_fused_attn_backend(asked)
    assert answer == (tex.NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen, "") and type(answer[0]) is tex.NVTE_Fused_Attn_Backend
    assert native.calls[-1][0].qkv_dtype is NativeDType.kBFloat16 and native.calls[-1][0].qkv_layout == ("layout", 7)
    assert native.calls[-1][0].scaling_mode == ("mode", 1)


def test_what_the_native_library_lacks_is_left_to_others(native: Native) -> None:
    decision = tex.explain("gelu", X, None)
    assert decision.backend != "nvidia"
    assert dict(decision.others)["nvidia"] == "the installed native library has no such function"
    native.scaled_softmax_forward = lambda *args: args[0]  # type: ignore[attr-defined]
    reason = dict(tex.explain("scaled_softmax_forward", torch.ones(1, 1, 2, 2), 1.0).others)["nvidia"]
    assert reason == "its native kernel reads float16 and bfloat16, and input is torch.float32"
    delayed = Float8Quantizer(torch.ones(2), None, tex.DType.kFloat8E4M3)
    assert "no delayed scaling" in str(tex.explain("group_quantize", X, delayed, 2, torch.tensor([8, 8])))


def test_a_kernel_that_was_not_seen_to_be_right_serves_nvidias_package_alone(native: Native, monkeypatch: pytest.MonkeyPatch) -> None:
    native.relu = lambda *args: args[0]  # type: ignore[attr-defined]
    assert tex.explain("relu", X, None).backend == "nvidia"
    monkeypatch.delitem(sys.modules, "transformer_engine_torch_nv")
    monkeypatch.setitem(sys.modules, "transformer_engine_torch", native)
    registry.changed()
    assert dict(tex.explain("relu", X, None).others)["nvidia"] == "its native kernel was not seen to give the interface's results on a GPU"


def test_a_class_that_they_do_not_have_is_refused(native: Native) -> None:
    with pytest.raises(NotImplementedError, match="a class that Transformer Engine has"):
        tex.quantize(X, Float8CurrentScalingQuantizer(tex.DType.kFloat8E4M3))


def test_communicators_are_the_native_ones(native: Native) -> None:
    assert tex.CommOverlapHelper("world", "node").groups == ("world", "node")


def test_skipping_and_our_own_name(native: Native, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TE_FL_SKIP_CUDA", "yes")
    assert finding.find() == "skipped by TE_FL_SKIP_CUDA"
    monkeypatch.delenv("TE_FL_SKIP_CUDA")
    assert finding.find() is native
    monkeypatch.delitem(sys.modules, "transformer_engine_torch_nv")
    monkeypatch.setitem(sys.modules, "transformer_engine_torch", tex)
    assert "is Fusible's here" in str(finding.find())
    monkeypatch.setitem(sys.modules, "transformer_engine_torch", native)
    assert finding.find() is native
    monkeypatch.setattr(torch.version, "cuda", None)
    assert finding.find() == "there is no NVIDIA GPU that torch can use"


def test_the_plugin_puts_tex_in_the_native_modules_place(native: Native, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformer_engine_torch", native)
    from fusible.plugin import load_plugins

    with restored():
        load_plugins()
        assert sys.modules["transformer_engine_torch"] is tex and finding.find() is native
