"""The reference interpreter of StableHLO, in a process of its own: it aborts where it does not know an operation.

``interpret`` takes programs with their inputs and returns their outputs. Run as a script on a folder, this file is the other process.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fusible.lazy import dtypes
from fusible.lazy.flat_ir.flat_ir import FlatIR
from fusible.lazy.flat_ir.ops import BitcastConvertOp, ConvertOp
from fusible.lazy.flat_ir.tensor import FlatIRTensor

__all__ = ["interpret"]

Array = np.ndarray[Any, Any]

_CARRIERS = {
    dtypes.bfloat16: (BitcastConvertOp, dtypes.int16),
    dtypes.float8: (BitcastConvertOp, dtypes.uint8),
    dtypes.float8e5m2: (BitcastConvertOp, dtypes.uint8),
    dtypes.int4: (ConvertOp, dtypes.int8),
}
"""What the bindings give no array of leaves the interpreter as another type."""


def interpret(programs: Sequence[tuple[FlatIR, Sequence[Array]]], folder: Path) -> list[list[Array]]:
    """The outputs of every program, computed by the interpreter; ``folder`` is for the files that go to and fro.

    Raises ``RuntimeError`` with the interpreter's diagnostic where it refuses or aborts, after the number of the program.
    """
    for i, (flat, inputs) in enumerate(programs):
        (folder / f"{i}.mlir").write_bytes(_carried(flat).to_stablehlo().bytecode)
        np.savez(folder / f"{i}.in.npz", *[array.view(f"u{array.itemsize}") if array.dtype.isbuiltin != 1 else array for array in inputs])
        (folder / f"{i}.json").write_text(json.dumps([str(t.dtype) for t in flat.inputs]))
    done = subprocess.run([sys.executable, __file__, str(folder), str(len(programs))], capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise RuntimeError(f"{done.stdout} {done.stderr[-2000:]}")
    results = []
    for i, (flat, _) in enumerate(programs):
        with np.load(folder / f"{i}.out.npz") as file:
            arrays = [file[name] for name in file.files]
        results.append([_restored(array, t) for array, t in zip(arrays, flat.outputs, strict=True)])
    return results


def _carried(flat: FlatIR) -> FlatIR:
    ops, outputs = list(flat.ops), []
    for i, t in enumerate(flat.outputs):
        if t.dtype in _CARRIERS:
            op, of = _CARRIERS[t.dtype]
            out = FlatIRTensor(t.shape, of, name=f"carried{i}")
            ops.append(op([t], [out]))
            t = out
        outputs.append(t)
    return FlatIR(flat.inputs, ops, outputs)


def _restored(array: Array, t: FlatIRTensor) -> Array:
    op, _ = _CARRIERS.get(t.dtype, (None, None))
    made = array.view(t.dtype.numpy) if op is BitcastConvertOp else array.astype(t.dtype.numpy)
    return made.reshape(t.shape)


def _work(folder: Path, count: int) -> None:
    """In the other process: run every program of the folder."""
    from jaxlib.mlir import passmanager

    from fusible.lazy.stablehlo import mlir as bindings

    mlir = bindings.get()
    mlir.hlo.register_stablehlo_passes()
    with mlir.context, mlir.ir.Location.unknown():
        legalize = passmanager.PassManager.parse("builtin.module(func.func(chlo-legalize-to-stablehlo))")
        for i in range(count):
            print(f"program {i}", flush=True)
            module = mlir.ir.Module.parse((folder / f"{i}.mlir").read_bytes())
            legalize.run(module.operation)
            names = json.loads((folder / f"{i}.json").read_text())
            with np.load(folder / f"{i}.in.npz") as file:
                arrays = [file[name] for name in file.files]
            given = [_dense(mlir, array, dtypes.DTYPES[name]) for array, name in zip(arrays, names, strict=True)]
            outputs = mlir.hlo.eval_module(module, given)
            np.savez(folder / f"{i}.out.npz", *[np.array(out) for out in outputs])


def _dense(mlir: Any, array: Array, of: dtypes.dtype) -> Any:
    return mlir.dense(array.view(of.numpy) if array.dtype != of.numpy else array, of)


if __name__ == "__main__":
    _work(Path(sys.argv[1]), int(sys.argv[2]))
