"""Operations of a user's own that are CHLO's, as docs/lazy/adding-an-op.md makes them: programs with them are saved, and compute the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fusible import lazy
from fusible.errors import CompileError
from fusible.lazy.flat_ir import FlatIROp, FlatIRTensor
from fusible.lazy.frontend import record
from fusible.lazy.stablehlo.mlir import Mlir
from fusible.lazy.trace import TraceOp

UNARY = [
    *("AcosOp", "AcoshOp", "AsinOp", "AsinhOp", "AtanOp", "AtanhOp", "BesselI1eOp", "CoshOp", "DigammaOp", "ErfInvOp", "ErfOp", "ErfcOp", "LgammaOp"),
    *("SinhOp", "SquareOp", "TanOp"),
]
SIZES = {"fixed": (2, 3), "decided by the call": ((1, 2, 4), 3)}


def function_of(name: str, operands: int = 1) -> Callable[[Any], Any]:
    """Half of CHLO's operation of that name, of as many times x."""

    class OfChlo(FlatIROp):
        def to_mlir(self, mlir: Mlir, operands: Sequence[Any]) -> Any:
            from jaxlib.mlir.dialects import chlo

            return getattr(chlo, name)(*operands).result

    class InTrace(TraceOp):
        """CHLO's operation."""

        def to_flat_ir(self, inputs: Sequence[FlatIRTensor], outputs: Sequence[FlatIRTensor]) -> None:
            OfChlo(list(inputs), list(outputs))

    return lambda x: record(InTrace(), *[x] * operands) * 0.5


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", UNARY)
def test_a_saved_program_gives_what_the_one_in_memory_does(name: str, sizes: str, tmp_path: Path) -> None:
    executable = lazy.compile(function_of(name), args=[lazy.InputInfo(SIZES[sizes], lazy.float32)])
    executable.save(tmp_path / "program")
    loaded = lazy.Executable.load(tmp_path / "program")
    x = np.array([[0.1, 0.5, 0.9], [0.3, 0.7, 0.2]], np.float32) + (name == "AcoshOp")
    wanted = executable(x).numpy()
    assert np.isfinite(wanted).all() and np.allclose(loaded(x).numpy(), wanted, rtol=1e-6, atol=0)


def test_what_no_saved_program_can_have_is_told_in_a_sentence(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    executable = lazy.compile(function_of("BroadcastAddOp", 2), args=[lazy.InputInfo(SIZES["decided by the call"], lazy.float32)])
    capfd.readouterr()
    with pytest.raises(
        CompileError, match=r"a portable program: expected operations that StableHLO has, got .*cstr_broadcastable.*; lower what it says"
    ):
        executable.save(tmp_path / "program")
    assert not (tmp_path / "program").exists() and not capfd.readouterr().err
