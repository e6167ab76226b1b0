"""Native kernels within compiled programs: every size by them, beside the references; the same numbers as eager calls; files; refusals."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_tex_table as reference
import torch
from test_xla_table import CASES, few
from xla_runner import RUNNER

import fusible
from fusible import cpp_extensions, lazy, tex
from fusible.conformance.table import Record
from fusible.errors import ExecutionError
from fusible.quantized import Float8BlockQuantizer, MXFP8Quantizer
from fusible.tex.backends.xla import native

pytest.importorskip("jaxlib")
pytestmark = pytest.mark.skipif(not cpp_extensions.available, reason="no compiled kernels")

KERNELS = {
    "attention_backward": {"fused_attn_bwd", "prim_attention_backward"},
    "attention_forward": {"fused_attn_fwd", "prim_attention"},
    "amax": {"quantize", "generic_gemm"},
    "activation": {"gelu", "erf_gelu", "qgelu", "relu", "sigmoid", "silu", "srelu"},
    "activation_backward": {"dgelu", "dsilu", "dbias_dgelu", "dbias_drelu"},
    "gated_activation": {"geglu", "swiglu", "clamped_swiglu", "situglu"},
    "gated_activation_backward": {"dgeglu", "dswiglu", "clamped_dswiglu"},
    "gemm": {"generic_gemm"},
    "norm_bwd": {"layernorm_bwd", "rmsnorm_bwd", "rmsnorm_bwd_add", "prim_layernorm_bwd_add"},
    "norm_fwd": {"layernorm_fwd", "rmsnorm_fwd"},
    "quantize": {"quantize", "multi_tensor_quantize", "bgrad_quantize"},
    "quantize_block_fp8": {"quantize"},
    "quantize_mxfp8": {"quantize", "split_quantize"},
    "quantize_nvfp4": {"quantize"},
    "rope": {"fused_rope_forward", "fused_rope_backward"},
    "transform_columns": {"multi_tensor_quantize"},
}
"""The kernels that programs call, and functions of tex that come to them."""

SERVED = [case for case in CASES if isinstance(case.values[0], Record) and case.values[0].function in set().union(*KERNELS.values())]


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """The native functions that are recorded, whatever the size of what they take."""
    made: Counter[str] = Counter()
    record = native.call

    def counted(function: str, arguments: Any) -> Any:
        made[function] += 1
        return record(function, arguments)

    monkeypatch.setattr(native, "_WORTH", 1)
    monkeypatch.setattr(native, "call", counted)
    yield made


@pytest.mark.parametrize(("entry", "dtype"), SERVED)
def test_a_kernel_in_a_program_matches_the_float64_reference(entry: Record, dtype: torch.dtype, called: Counter[str]) -> None:
    reference.test_matches_the_float64_reference(RUNNER, few(entry, 12), dtype)
    wanted = {kernel for kernel, functions in KERNELS.items() if entry.function in functions}
    assert wanted & set(called), (entry.function, called)


def test_every_kernel_of_the_table_is_offered_to_programs() -> None:
    assert set(KERNELS) <= set(cpp_extensions.xla_functions())
    assert not {"set_level", "set_num_threads"} & set(cpp_extensions.xla_functions())


RECIPES = {
    "bf16": None,
    "delayed": fusible.DelayedScaling(),
    "current": fusible.Float8CurrentScaling(),
    "block": fusible.Float8BlockScaling(),
    "mxfp8": fusible.MXFP8BlockScaling(),
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_compiled_step_has_the_bits_of_an_eager_one(name: str) -> None:
    """Where every product, norm, cast and activation is a kernel's, two steps and their gradients, in bfloat16."""
    if RECIPES[name] is None and not cpp_extensions.multiplies_halves():
        pytest.skip("without dot products of bfloat16, programs leave products of it to XLA")
    results = []
    for executor in ("eager", "xla"):
        torch.manual_seed(0)
        layers = fusible.LayerNorm(256), fusible.Linear(256, 512), fusible.GELU(), fusible.Linear(512, 256)
        model = fusible.Sequential(*layers).compile(executor)
        x, found = torch.randn(256, 256).bfloat16(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            with fusible.autocast(enabled=RECIPES[name] is not None, recipe=RECIPES[name]):
                y = model(x)
            y.float().square().sum().backward()
            found += [y.detach(), *(parameter.grad.clone() for parameter in model.parameters())]
            optimizer.step()
            optimizer.zero_grad()
        results.append(found)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("quantizer", [MXFP8Quantizer(tex.DType.kFloat8E4M3), Float8BlockQuantizer(tex.DType.kFloat8E4M3, block_scaling_dim=1)])
def test_kernels_take_subnormal_numbers_for_what_they_are(quantizer: Any) -> None:
    """On all threads of XLA's, whose own arithmetic takes them for zero."""
    x = torch.randn(512, 512) * 2.0**-128
    (found,) = RUNNER("multi_tensor_quantize", tensor_list=[x], quantizer_list=[quantizer])
    expected = tex.quantize(x, quantizer, None, None).storage_without_autograd()
    assert expected._rowwise_data.count_nonzero() > 100_000
    for of in ("_rowwise_data", "_columnwise_data", "_rowwise_scale_inv", "_columnwise_scale_inv"):
        assert torch.equal(getattr(found, of), getattr(expected, of)), of


def test_explain_tells_which_kernels_the_programs_call() -> None:
    model = fusible.Sequential(fusible.RMSNorm(256), fusible.Linear(256, 256)).compile("xla")
    x = torch.randn(128, 256).bfloat16()
    assert "compiled by XLA" not in model.explain(x)
    with fusible.autocast(recipe=fusible.DelayedScaling()):
        model(x).sum().backward()
        assert "3 programs compiled by XLA, with native calls: gemm 3, norm_bwd 1, norm_fwd 1, quantize 2" in model.explain(x)


_LOAD = """
import numpy as np
import fusible.cpp_extensions as kernels
if {missing}:
    kernels.available, kernels.reason = False, "an installation without them"
from fusible import lazy
program = lazy.Executable.load({path!r}, trust_binary={trusted})
print(program(np.ones((256, 256), np.float32)).numpy().mean())
"""


def test_a_saved_program_calls_the_kernels_in_another_process_or_says_that_there_are_none(tmp_path: Path) -> None:
    program = lazy.compile(lambda x: tex.gelu(x, None), args=[lazy.InputInfo((256, 256), lazy.float32)])
    assert "fusible::native@1" in str(program.flat_ir) and "activation" in str(program.flat_ir)
    for binary in (False, True):
        path = str(tmp_path / f"{binary}.bin")
        program.save(path, binary=binary)
        for missing in (False, True):
            code = _LOAD.format(missing=missing, path=path, trusted=binary)
            run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
            if missing:
                sentence = "a program that calls fusible::native version 1: expected the compiled kernels, got an installation without them; "
                assert run.returncode == 1 and sentence in run.stderr.splitlines()[-1], run.stderr
            else:
                assert run.returncode == 0 and float(run.stdout) == pytest.approx(0.8412, abs=1e-4), run.stderr


def test_what_a_kernel_refuses_while_a_program_runs_is_an_error_of_the_run() -> None:
    """Of data that nobody knows when the program is recorded."""

    def turned(x: lazy.Tensor, freqs: lazy.Tensor, start: lazy.Tensor) -> lazy.Tensor:
        return tex.fused_rope_forward(x, freqs, start, tex.NVTE_QKV_Format.NVTE_BSHD, False, None, 1, 0)

    shapes = (2, 64, 4, 64), (64, 1, 1, 64)
    infos = [*(lazy.InputInfo(shape, lazy.float32) for shape in shapes), lazy.InputInfo((2,), lazy.int32)]
    program = lazy.compile(turned, args=infos)
    x, freqs = (np.ones(shape, np.float32) for shape in shapes)
    program(x, freqs, np.zeros(2, np.int32))
    with pytest.raises(ExecutionError, match="freqs: expected positions of every token") as refused:
        program(x, freqs, np.array([0, 60], np.int32))
    assert "INVALID_ARGUMENT" in str(refused.value)
    assert program(x, freqs, np.zeros(2, np.int32)).shape == shapes[0]


def test_sizes_that_a_call_tells_are_left_to_formulas() -> None:
    """One program for all of them, which no kernel could be told."""

    def computed(x: lazy.Tensor, w: lazy.Tensor) -> tuple[lazy.Tensor, ...]:
        y = tex.rmsnorm_fwd(tex.gelu(x, None), w[0], 1e-5, None, None, tex.DType.kFloat32, 0, False)[0]
        product = w, True, y, False, None, None, None, None, None, False, None, False, None, 0, False, False
        return y, tex.generic_gemm(*product)[0], tex.quantize(y, fusible.quantized.Float8CurrentScalingQuantizer(tex.DType.kFloat8E4M3, "cpu"))._data

    infos = [lazy.InputInfo(((32, 256, 1024), 256), lazy.float32), lazy.InputInfo((256, 256), lazy.float32)]
    program = lazy.compile(computed, args=infos)
    assert "fusible::native" not in str(program.flat_ir)
    w = np.ones((256, 256), np.float32)
    for rows in (64, 640):
        x = np.random.default_rng(0).standard_normal((rows, 256)).astype(np.float32)
        y, product, codes = (result.numpy() for result in program(x, w))
        assert y.shape == product.shape == codes.shape == x.shape
        np.testing.assert_allclose(product, y @ w.T, rtol=1e-4, atol=1e-4)


_STRUCTURES = {
    "Extension": ("XLA_FFI_Extension_Base", {"type": "type", "next": "next"}),
    "Version": ("XLA_FFI_Api_Version", {"major": "major_version", "minor": "minor_version"}),
    "ErrorArguments": ("XLA_FFI_Error_Create_Args", {"message": "message", "code": "errc"}),
    "ErrorDestruction": ("XLA_FFI_Error_Destroy_Args", {"error": "error"}),
    "Api": ("XLA_FFI_Api", {"version": "api_version", "create_error": "XLA_FFI_Error_Create", "destroy_error": "XLA_FFI_Error_Destroy"}),
    "Buffer": ("XLA_FFI_Buffer", {"dtype": "dtype", "data": "data", "rank": "rank", "dims": "dims"}),
    "Text": ("XLA_FFI_ByteSpan", {"data": "ptr", "length": "len"}),
    "Number": ("XLA_FFI_Scalar", {"dtype": "dtype", "value": "value"}),
    "Attributes": ("XLA_FFI_Attrs", {"count": "size", "types": "types", "names": "names", "values": "attrs"}),
    "Metadata": ("XLA_FFI_Metadata", {"version": "api_version"}),
    "MetadataExtension": ("XLA_FFI_Metadata_Extension", {"metadata": "metadata"}),
    "Frame": ("XLA_FFI_CallFrame", {"api": "api", "context": "ctx", "stage": "stage", "operands": "args", "results": "rets", "attributes": "attrs"}),
}
_VALUES = {
    "kMetadata": "XLA_FFI_Extension_Metadata",
    "kInvalidArgument": "XLA_FFI_Error_Code_INVALID_ARGUMENT",
    "kResourceExhausted": "XLA_FFI_Error_Code_RESOURCE_EXHAUSTED",
    "kInternal": "XLA_FFI_Error_Code_INTERNAL",
    "kNumberAttribute": "XLA_FFI_AttrType_SCALAR",
    "kTextAttribute": "XLA_FFI_AttrType_STRING",
    **{
        f"int(fusible::xla::Type::{ours})": f"XLA_FFI_DataType_{theirs}"
        for ours, theirs in {
            "Bool": "PRED", "Int32": "S32", "Int64": "S64", "UInt8": "U8", "Float16": "F16", "Float32": "F32", "Float64": "F64",
            "BFloat16": "BF16", "Float8E5M2": "F8E5M2", "Float8E4M3": "F8E4M3FN",
        }.items()
    },
}  # fmt: skip


def test_the_interface_lies_in_memory_as_the_header_of_xla_has_it(tmp_path: Path) -> None:
    compiler, found = shutil.which("g++") or shutil.which("clang++"), importlib.util.find_spec("jaxlib")
    if compiler is None or found is None or found.origin is None:
        pytest.skip("needs a C++ compiler, and the headers that jaxlib ships")
    root = Path(__file__).parents[3]
    lines = ['#include "fusible/xla_interface.hpp"', '#include "xla/ffi/api/c_api.h"']
    for ours, (theirs, fields) in _STRUCTURES.items():
        lines += [f"static_assert(offsetof(fusible::xla::{ours}, {a}) == offsetof({theirs}, {b}));" for a, b in fields.items()]
    for theirs, field in (("XLA_FFI_Args", "args"), ("XLA_FFI_Rets", "rets")):
        lines += [f"static_assert(offsetof(fusible::xla::Buffers, values) == offsetof({theirs}, {field}));"]
        lines += [f"static_assert(sizeof(fusible::xla::Buffers) == sizeof({theirs}));"]
    lines += [f"static_assert({a if '(' in a else f'fusible::xla::{a}'} == static_cast<int>({b}));" for a, b in _VALUES.items()]
    source = tmp_path / "layout.cpp"
    source.write_text("\n".join([*lines, ""]))
    headers = [f"-I{root / 'cppsrc' / 'include'}", f"-I{Path(found.origin).parent / 'include'}"]
    done = subprocess.run([compiler, "-std=c++17", "-w", "-fsyntax-only", *headers, str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
