"""What an activation costs: two files of C++, two of Python, and one line or row in a list of each. All else is made of the row."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from doc_pages import ROOT

SRELU = re.compile("(?<!tanh)(?<!tanh_)srelu", re.IGNORECASE)
"""Not ``ScaledTanhSReLU``: that is another one, an operation in plain torch."""

LISTS = {"cppsrc/activation/list.hpp", "src/fusible/tex/activations.py"}
DEFINITIONS = {"cppsrc/activation/pointwise.hpp", "src/fusible/tex/formulas/pointwise.py"}

ROW = """
    Activation("xtanh", "XTanh", "``x * tanh(x)``.", "``grad * (t + x (1 - t^2))`` with ``t = tanh(x)``.", scaled="ScaledXTanh"),
)

_VARIANTS"""
GATE = """
    _gate("xtanhglu", "XTanhGLU", "xtanh"),
)

ACTIVATIONS"""
FORMULAS = """
    def xtanh(self, x: Any) -> Any:
        return x * self.xp.tanh(x)

    def dxtanh(self, g: Any, x: Any) -> Any:
        t = self.xp.tanh(x)
        return g * (t + x * (1.0 - t * t))
"""
PROGRAM = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__]  # they know the source tree alone
import torch
import fusible
import fusible.pytorch.ops as operations
from fusible import fusions, nvte, ops, tex
from fusible.compat.te_modules.layernorm_mlp import LayerNormMLP
from fusible.nvte import DType, make_nvte_tensor

generator = torch.Generator().manual_seed(0)
x, dy = (torch.randn(6, 8, generator=generator, dtype=torch.float64) for _ in range(2))
point = x.clone().requires_grad_()
y = point * torch.tanh(point)
(dx,) = torch.autograd.grad(y, point, dy)
near = torch.testing.assert_close

near(tex.xtanh(x, None), y.detach())
dbias, found = tex.dbias_dxtanh(dy, x, None)
near((dbias, found, tex.dxtanh(dy, x, None)), (dx.sum(0), dx, dx))
near(tex.xtanhglu(x, None), y.detach()[:, :4] * x[:, 4:])
near(tex.scaled_xtanh(x, dy[:, 0].contiguous(), None), y.detach() * dy[:, :1])
x, dy, y, dx, point = x.float(), dy.float(), y.float(), dx.float(), x.float().requires_grad_()
near(nvte.dxtanh(make_nvte_tensor(dy), make_nvte_tensor(x), DType.Float32).data, dx)
near(ops.XTanh(x_dtype=None, y_dtype=DType.Float32).inference(make_nvte_tensor(x)).data, y)
for module in (fusible.XTanh(), operations.XTanh()):
    near(module(point), y)
    near(torch.autograd.grad(module(point), point, dy)[0], dx)
near(operations.ScaledXTanh()(x, dy[:, 0].contiguous()), y * dy[:, :1])
assert fusions.add_xtanh_bwd_fused in {fusion.function for fusion in fusions.registered("backward")}
assert "add_xtanh_bwd_fused" in fusible.Sequential(fusible.Linear(8, 8), fusible.XTanh()).explain(x)
assert LayerNormMLP(8, 8, activation="xtanhglu", device="cpu")(x).shape == x.shape
assert fusible.XTanh.__module__ == "fusible.pytorch.modules.activation" and "x * tanh(x)" in fusible.XTanh.__doc__
"""


def names_it(path: Path) -> bool:
    """Whether a file of the source names SReLU otherwise than as a reference, a name of NVIDIA's, or what ``make stub`` writes."""
    inside = path.relative_to(ROOT).as_posix()
    if "__pycache__" in inside or path.suffix not in (".py", ".pyi", ".hpp", ".cpp", ".txt") or inside.startswith("src/fusible/conformance/"):
        return False
    text = path.read_text()
    return bool(SRELU.search(text)) and inside != "src/fusible/compat/te_names.py" and "Written by `make stub`" not in text


def test_srelu_stands_in_four_files_of_which_two_are_lists() -> None:
    files = [path for folder in ("src", "cppsrc") for path in (ROOT / folder).rglob("*") if path.is_file()]
    assert {path.relative_to(ROOT).as_posix() for path in files if names_it(path)} == LISTS | DEFINITIONS


def insert(path: Path, before: str, text: str) -> None:
    source = path.read_text()
    assert source.count(before) == 1, f"{path} has {before!r} {source.count(before)} times"
    path.write_text(source.replace(before, text))


def test_of_a_row_and_two_formulas_comes_everything(tmp_path: Path) -> None:
    package = tmp_path / "fusible"
    shutil.copytree(ROOT / "src" / "fusible", package, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    insert(package / "tex" / "activations.py", "\n)\n\n_VARIANTS", ROW)
    insert(package / "tex" / "activations.py", "\n)\n\nACTIVATIONS", GATE)
    formulas = package / "tex" / "formulas" / "pointwise.py"
    formulas.write_text(formulas.read_text() + FORMULAS)
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
