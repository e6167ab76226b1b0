"""Everything that the lazy compiler asks of jaxlib's unpublished names, one test each.

It needs numpy, ml_dtypes, pytest and jaxlib alone: ``make test-jaxlib VERSION=0.8.3`` runs it on another version.
"""

from __future__ import annotations

import gc
import importlib
import io
import threading
import tomllib
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from fusible.lazy import dtypes
from fusible.lazy.dtypes import DTYPES, dtype
from fusible.lazy.engine import pjrt
from fusible.lazy.engine.engine import EngineRefusal, Program
from fusible.lazy.engine.host import aligned, pointer
from fusible.lazy.stablehlo import mlir as bindings

ENGINE = pjrt.PJRT()
F32 = dtypes.float32

_NAMES = {
    "jaxlib.version": ("__version__",),
    "jaxlib.xla_client": (
        "CompileOptions",
        "DeviceList",
        "HloSharding",
        "SingleDeviceSharding",
        "array_result_handler",
        "batched_device_put",
        "make_cpu_client",
    ),
    "jaxlib.mlir.ir": (
        "BoolAttr",
        "Context",
        "DenseElementsAttr",
        "DenseI64ArrayAttr",
        "DenseIntElementsAttr",
        "DialectRegistry",
        "FlatSymbolRefAttr",
        "InsertionPoint",
        "IntegerAttr",
        "Location",
        "MLIRError",
        "Module",
        "RankedTensorType",
        "Type",
    ),
    "jaxlib.mlir._mlir_libs._jax_mlir_ext": ("register_dialects",),
    "jaxlib.mlir.dialects.chlo": ("register_dialect",),
    "jaxlib.mlir.dialects.func": ("CallOp", "FuncOp", "ReturnOp"),
    "jaxlib.mlir.dialects.stablehlo": (
        "eval_module",
        "get_version_from_compatibility_requirement",
        "register_dialect",
        "register_stablehlo_passes",
        "serialize_portable_artifact",
    ),
    "jaxlib.mlir.passmanager": ("PassManager",),
}


@pytest.mark.parametrize("module", _NAMES)
def test_the_names_are_there(module: str) -> None:
    missing = [name for name in _NAMES[module] if not hasattr(importlib.import_module(module), name)]
    assert not missing


def test_the_version_is_within_the_range_that_is_declared() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    (pin,) = project["project"]["optional-dependencies"]["xla"]
    low, high = (tuple(map(int, bound.split("."))) for bound in pin.removeprefix("jaxlib>=").split(",<"))
    version = tuple(int(part) for part in importlib.import_module("jaxlib.version").__version__.split(".")[:3])
    assert low <= version < high


def _text(body: str, inputs: str, output: str) -> str:
    return f"module {{ func.func @main({inputs}) -> {output} {{ {body} }} }}"


def _bytecode(text: str) -> bytes:
    """The bytecode that the bindings write of a module's text."""
    mlir = bindings.get()
    stream = io.BytesIO()
    with mlir.context:
        mlir.ir.Module.parse(text).operation.write_bytecode(stream)
    return stream.getvalue()


def _same(of: dtype, shape: tuple[int, ...]) -> Program:
    kind = f"tensor<{'x'.join([*map(str, shape), of.mlir])}>"
    return ENGINE.compile(_bytecode(_text(f"return %a : {kind}", f"%a: {kind}", kind)), [(shape, of)], [(shape, of)])


def _double() -> Program:
    text = _text("%0 = stablehlo.add %a, %a : tensor<4xf32> return %0 : tensor<4xf32>", "%a: tensor<4xf32>", "tensor<4xf32>")
    return ENGINE.compile(_bytecode(text), [((4,), F32)], [((4,), F32)])


def test_the_bindings_parse_every_element_type_and_verify() -> None:
    mlir = bindings.get()
    with mlir.context, mlir.ir.Location.unknown():
        for of in DTYPES.values():
            assert str(mlir.element(of)) == of.mlir
        wrong = '"stablehlo.add"(%a, %a) : (tensor<4xf32>, tensor<4xf32>) -> tensor<5xf32>'
        with pytest.raises(mlir.ir.MLIRError, match="here"):
            text = _text(f'%0 = {wrong} loc("here") return %0 : tensor<5xf32>', "%a: tensor<4xf32>", "tensor<5xf32>")
            mlir.ir.Module.parse(text).operation.verify()


def test_a_location_keeps_its_name_file_line_and_column() -> None:
    mlir = bindings.get()
    with mlir.context:
        location = mlir.ir.Location.name("op:t0->t1", mlir.ir.Location.file("user.py", 3, 7))
        assert str(location) == 'loc("op:t0->t1"("user.py":3:7))'


@pytest.mark.parametrize("of", DTYPES.values(), ids=str)
def test_every_element_type_goes_in_and_comes_out_bit_for_bit(of: dtype) -> None:
    bits = np.arange(9, dtype=f"u{of.numpy.itemsize}")
    given = bits % 2 == 0 if of.kind == "bool" else (bits.astype(np.int8) - 4).astype(of.numpy) if of is dtypes.int4 else bits.view(of.numpy)
    (got,) = _same(of, (3, 3))([given.reshape(3, 3)])
    assert got.dtype == of.numpy and got.shape == (3, 3) and got.tobytes() == given.tobytes()


@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (2, 1, 5)])
def test_every_shape_goes_in_and_comes_out(shape: tuple[int, ...]) -> None:
    given = np.arange(np.prod(shape, dtype=int), dtype=np.float64).reshape(shape)
    (got,) = _same(dtypes.float64, shape)([given])
    assert got.shape == shape and got.tolist() == given.tolist()


@pytest.mark.parametrize("of", DTYPES.values(), ids=str)
def test_which_memory_is_shared(of: dtype) -> None:
    array = aligned(np.zeros(200, of.numpy))
    for given in (array, array[64:], array[1:]):
        assert (pjrt.place(given, of).unsafe_buffer_pointer() == pointer(given)) is pjrt.shares(given, of)
    assert pjrt.shares(array, of) is (of is not dtypes.int4) and not pjrt.shares(array[1:], of)


def test_aligned_memory_is_read_in_place_and_other_memory_is_copied() -> None:
    program = _double()
    shifted = aligned(np.arange(8, dtype=np.float32))[1:5]
    assert pointer(shifted) % 64
    assert program([shifted])[0].tolist() == [2, 4, 6, 8]


def test_results_are_writable_outlive_the_program_and_are_not_shared() -> None:
    program = _double()
    given = aligned(np.ones(4, np.float32))
    (first,), (second,) = program([given]), program([given])
    first[:] = 7
    del program
    gc.collect()
    assert first.tolist() == [7] * 4 and second.tolist() == [2] * 4 and given.tolist() == [1] * 4


def test_a_call_reads_nothing_after_it_returned() -> None:
    text = _text(
        "%0 = stablehlo.dot_general %a, %a, contracting_dims = [1] x [0] : (tensor<300x300xf32>, tensor<300x300xf32>) -> tensor<300x300xf32> "
        "return %0 : tensor<300x300xf32>",
        "%a: tensor<300x300xf32>",
        "tensor<300x300xf32>",
    )
    program = ENGINE.compile(_bytecode(text), [((300, 300), F32)], [((300, 300), F32)])
    for value in range(1, 5):
        given = aligned(np.full((300, 300), value, np.float32))
        (got,) = program([given])
        given[:] = 0
        assert (got == 300 * value**2).all()


def test_no_precision_is_kept_beyond_a_rounding() -> None:
    body = "%0 = stablehlo.add %a, %b : tensor<bf16> %1 = stablehlo.subtract %0, %a : tensor<bf16> return %1 : tensor<bf16>"
    scalar = ((), dtypes.bfloat16)
    program = ENGINE.compile(_bytecode(_text(body, "%a: tensor<bf16>, %b: tensor<bf16>", "tensor<bf16>")), [scalar, scalar], [scalar])
    operands = [np.array(v, ml_dtypes.bfloat16) for v in (256.0, 0.5)]
    assert float(program(operands)[0]) == 0.0


def test_bytecode_and_the_portable_artifact_are_compiled_alike() -> None:
    bytecode = _bytecode(_text("%0 = stablehlo.tanh %a : tensor<4xf32> return %0 : tensor<4xf32>", "%a: tensor<4xf32>", "tensor<4xf32>"))
    types = [((4,), F32)]
    x = np.linspace(-1, 1, 4, dtype=np.float32)
    results = [ENGINE.compile(form, types, types)([x])[0].tobytes() for form in (bytecode, bindings.portable(bytecode))]
    assert results[0] == results[1]
    np.testing.assert_allclose(np.frombuffer(results[0], np.float32), np.tanh(x), rtol=4e-7)


def test_a_binary_is_written_and_read() -> None:
    program = _double()
    binary = program.serialize()
    assert isinstance(binary, bytes) and binary
    again = ENGINE.load(binary, program.inputs, program.outputs)
    assert again([np.arange(4, dtype=np.float32)])[0].tolist() == [0, 2, 4, 6]


def test_what_is_no_binary_is_refused() -> None:
    with pytest.raises(EngineRefusal):
        ENGINE.load(b"no binary", [], [])


def test_what_is_no_module_and_what_calls_an_unknown_target_are_refused() -> None:
    body = "%0 = stablehlo.custom_call @nobody(%a) : (tensor<4xf32>) -> tensor<4xf32> return %0 : tensor<4xf32>"
    unknown = _text(body, "%a: tensor<4xf32>", "tensor<4xf32>")
    with pytest.raises(EngineRefusal, match="nobody"):
        ENGINE.compile(_bytecode(unknown), [((4,), F32)], [((4,), F32)])
    with pytest.raises(EngineRefusal):
        ENGINE.compile(b"no module", [], [])


def test_the_fingerprint_names_the_version() -> None:
    assert importlib.import_module("jaxlib.version").__version__ in ENGINE.fingerprint()


def test_calls_from_several_threads_do_not_meet() -> None:
    program = _double()
    wrong: list[Any] = []

    def work(seed: int) -> None:
        given = np.full(4, seed, np.float32)
        for _ in range(100):
            if program([given])[0].tolist() != [2 * seed] * 4:
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_reference_interpreter_evaluates() -> None:
    mlir = bindings.get()
    body = "%0 = stablehlo.add %a, %a : tensor<4xf32> return %0 : tensor<4xf32>"
    with mlir.context, mlir.ir.Location.unknown():
        module = mlir.ir.Module.parse(_text(body, "%a: tensor<4xf32>", "tensor<4xf32>"))
        (out,) = mlir.hlo.eval_module(module, [mlir.dense(np.arange(4, dtype=np.float32), F32)])
        assert np.array(out).tolist() == [0, 2, 4, 6]
