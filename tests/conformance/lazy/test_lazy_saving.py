"""Executables in files: what a file keeps, what another process makes of it, and what is refused."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fusible import lazy
from fusible.errors import ArgumentError, CheckpointError
from fusible.lazy.engine import pjrt

_F32 = lazy.float32
_ROWS = lazy.NamedDimension("rows", 1, 2, 8)


def _model(seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    w1, w2 = (lazy.Tensor(rng.standard_normal(s).astype(np.float32)) for s in ((6, 16), (16, 3)))
    scale = lazy.Tensor([0.5, 1.0, 2.0], dtype=lazy.bfloat16)

    def forward(x: lazy.Tensor, options: dict[str, Any], n: lazy.DimensionSize) -> tuple[lazy.Tensor, lazy.Tensor]:
        hidden = lazy.maximum(x @ w1, 0.0) @ w2 * scale.cast(_F32) + options["bias"][: x.shape[0]]
        return lazy.softmax(hidden, 1), lazy.arange(n) * x.shape[0]

    return forward


def _compiled(seed: int = 0) -> lazy.Executable:
    infos = [lazy.InputInfo((_ROWS, 6), _F32), {"bias": lazy.InputInfo(((8, 8, 9), 3), _F32), "unused": 1}, lazy.DimensionInputInfo((1, 3, 5))]
    return lazy.compile(_model(seed), args=infos)


def _inputs(rows: int) -> tuple[Any, ...]:
    rng = np.random.default_rng(rows)
    return rng.standard_normal((rows, 6)).astype(np.float32), {"bias": rng.standard_normal((9, 3)).astype(np.float32)}, 1 + rows % 5


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[lazy.Executable, Path]:
    executable = _compiled()
    path = tmp_path_factory.mktemp("saved") / "model.fusible"
    executable.save(path)
    return executable, path


def test_a_loaded_executable_is_the_one_that_was_saved(saved: tuple[lazy.Executable, Path]) -> None:
    executable, path = saved
    loaded = lazy.Executable.load(path)
    assert loaded.input_infos == executable.input_infos and loaded.output_infos == executable.output_infos and repr(loaded) == repr(executable)
    for rows in (1, 2, 7):
        for got, want in zip(loaded(*_inputs(rows)), executable(*_inputs(rows)), strict=True):
            np.testing.assert_array_equal(got.numpy(), want.numpy())
    for wrong in (_inputs(9), (_inputs(2)[0], {}, 1), _inputs(2)[:2], (*_inputs(2)[:2], 6)):
        with pytest.raises(ArgumentError) as ours:
            executable(*wrong)
        with pytest.raises(type(ours.value)) as theirs:
            loaded(*wrong)
        assert str(theirs.value).split("\n")[-1] == str(ours.value).split("\n")[-1]
    assert "tensor<?x6xf32>" in loaded.stablehlo.text
    for missing in ("trace", "flat_ir"):
        with pytest.raises(ArgumentError, match="compiled in this process"):
            getattr(loaded, missing)


_CHILD = """
import sys
import numpy as np
from fusible import lazy
loaded = lazy.Executable.load(sys.argv[1])
assert "torch" not in sys.modules
given = np.load(sys.argv[2], allow_pickle=False)
out = loaded(given["x"], {"bias": given["bias"]}, int(given["n"]))
np.savez(sys.argv[3], *[t.numpy() for t in out])
"""


def test_another_process_without_the_model_computes_the_same(saved: tuple[lazy.Executable, Path], tmp_path: Path) -> None:
    executable, path = saved
    x, options, n = _inputs(5)
    np.savez(tmp_path / "in.npz", x=x, bias=options["bias"], n=n)
    command = [sys.executable, "-W", "error", "-c", _CHILD, str(path), str(tmp_path / "in.npz"), str(tmp_path / "out.npz")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    with np.load(tmp_path / "out.npz", allow_pickle=False) as out:
        for got, want in zip(out.values(), executable(x, options, n), strict=True):
            np.testing.assert_array_equal(got, want.numpy())


def test_constants_of_every_dtype_and_a_static_program(tmp_path: Path) -> None:
    kinds = [of for of in vars(lazy).values() if isinstance(of, lazy.dtype) and hasattr(of, "numpy")]
    assert len(kinds) == 15
    constants = [lazy.Tensor(np.array([[0, 1], [1, 0]], np.float32)).cast(of).eval() for of in kinds]
    constants += [lazy.Tensor(3.0), lazy.Tensor(np.zeros((2, 0)))]
    executable = lazy.compile(lambda x: [x, *constants], 1, args=[lazy.InputInfo((2,), _F32, donate=True)])
    executable.save(tmp_path / "program")
    loaded = lazy.Executable.load(tmp_path / "program")
    x, *rest = loaded(lazy.Tensor([1.0, 2.0]))
    assert x.tolist() == [1.0, 2.0]
    for got, want in zip(rest, constants, strict=True):
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        np.testing.assert_array_equal(got.numpy().astype(np.float64), want.numpy().astype(np.float64))
    donated = lazy.Tensor([1.0, 2.0])
    loaded(donated)
    with pytest.raises(ArgumentError, match="donated"):
        donated.numpy()


def test_a_loaded_executable_is_saved_again(saved: tuple[lazy.Executable, Path], tmp_path: Path) -> None:
    first = lazy.Executable.load(saved[1])
    first.save(tmp_path / "again", binary=True)
    again = lazy.Executable.load(tmp_path / "again", trust_binary=True)
    again.save(tmp_path / "third", binary=True)
    third = lazy.Executable.load(tmp_path / "third", trust_binary=True)
    assert (tmp_path / "third").stat().st_size == (tmp_path / "again").stat().st_size
    for rows in (2, 8):
        for got, want in zip(third(*_inputs(rows)), saved[0](*_inputs(rows)), strict=True):
            np.testing.assert_array_equal(got.numpy(), want.numpy())


def test_conditions_between_sizes_are_kept(tmp_path: Path) -> None:
    executable = lazy.compile(lambda x, y: x + y, args=[lazy.InputInfo(((1, 2, 8),), _F32), lazy.InputInfo(((1, 3, 8),), _F32)])
    executable.save(tmp_path / "program")
    loaded = lazy.Executable.load(tmp_path / "program")
    for run in (executable, loaded):
        assert run(np.ones(4, np.float32), np.ones(4, np.float32)).tolist() == [2.0] * 4
        with pytest.raises(
            ArgumentError, match=r"the operands of add at .*test_lazy_saving.*: expected x.0 == y.0 \(of dimension 0 of x, dimension 0 of y\)"
        ):
            run(np.ones(3, np.float32), np.ones(4, np.float32))


def test_a_saved_binary_is_used_only_where_it_is_trusted_and_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executable = _compiled()
    plain, path = tmp_path / "plain", tmp_path / "binary"
    executable.save(plain)
    executable.save(path, binary=True)
    loads: list[bytes | None] = []
    original = pjrt.Program.__init__

    def spy(self: pjrt.Program, load: Any, inputs: Any, outputs: Any, binary: bytes | None = None) -> None:
        loads.append(binary)
        original(self, load, inputs, outputs, binary)

    monkeypatch.setattr(pjrt.Program, "__init__", spy)
    results = [lazy.Executable.load(file, trust_binary=trust)(*_inputs(2)) for file, trust in ((path, True), (path, False), (plain, True))]
    monkeypatch.setattr(pjrt.PJRT, "fingerprint", lambda self: "another engine")
    results.append(lazy.Executable.load(path, trust_binary=True)(*_inputs(2)))
    # The usual sizes are rows=2, 8 rows of bias and n=3; the call has other ones, which the binary does not serve.
    assert [binary is not None for binary in loads] == [True, False, False, False, False, False, False, False]
    for got in results:
        np.testing.assert_array_equal(got[0].numpy(), executable(*_inputs(2))[0].numpy())


def _rewritten(content: bytes, change: Any) -> bytes:
    """A file whose parts ``change`` has edited, with a right digest."""
    head = content.index(b"\n") + 1
    with zipfile.ZipFile(io.BytesIO(content[head + 65 :])) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    change(parts)
    body = io.BytesIO()
    with zipfile.ZipFile(body, "w") as archive:
        for name, part in parts.items():
            archive.writestr(name, part)
    return content[:head] + hashlib.sha256(body.getvalue()).hexdigest().encode() + b"\n" + body.getvalue()


def _with_manifest(**changes: Any) -> Any:
    def change(parts: dict[str, bytes]) -> None:
        parts["executable.json"] = json.dumps({**json.loads(parts["executable.json"]), **changes}).encode()

    return change


def test_damaged_and_foreign_files_are_refused(saved: tuple[lazy.Executable, Path], tmp_path: Path) -> None:
    content = saved[1].read_bytes()
    rng = np.random.default_rng(0)
    damaged = [content[:n] for n in (0, 1, 10, 21, 22, 60, 86, 87, 200, len(content) - 1)]
    damaged += [content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :] for at in (0, 19, 21, 40, *rng.integers(87, len(content), 20).tolist())]
    damaged += [b"PK" + content, b"\x80\x04K\x01.", content.replace(b"executable 1", b"executable 2", 1), content + b" "]
    changes = [
        lambda parts: parts.pop("module.stablehlo"),
        lambda parts: parts.pop("constants.safetensors"),
        lambda parts: parts.pop("executable.json"),
        lambda parts: parts.update({"module.stablehlo": b"ML\xefR nothing"}),
        lambda parts: parts.update({"constants.safetensors": b"\x08" + bytes(7) + b"{}      "}),
        lambda parts: parts.update({"executable.json": b"[]"}),
        lambda parts: parts.update({"executable.json": b"\xff"}),
        _with_manifest(results=[]),
        _with_manifest(results=[[[[[1, "rows"]], 4], "float32", "gpu:0"], [[[[1, "n"]]], "float32", "gpu:0"]]),
        _with_manifest(results=[[[[[2, "rows"]], 3], "float32", "gpu:0"], [[[[1, "n"]]], "float32", "gpu:0"]]),
        _with_manifest(results=[[[[[1, "rows"]], 3], "float64", "gpu:0"], [[[[1, "n"]]], "float32", "gpu:0"]]),
        _with_manifest(results=[[[[[1, "unknown"]]], "float32", "gpu:0"]]),
        _with_manifest(results=[[[[[1, {"**": [1, 2]}]]], "float32", "gpu:0"]]),
        _with_manifest(parameters=[["x", False, {"tensor": "x", "shape": [3], "dtype": "float31", "donate": False}]]),
        _with_manifest(conditions=[[[[1, {"//": ["rows", 0]}]], "==", 1, "a", "b"]]),
        _with_manifest(conditions=[[1, "<>", 2, "a", "b"]]),
        _with_manifest(parameters=[["x", False, {"tensor": "x", "shape": [[4, 2, 8]], "dtype": "float32", "donate": False}]]),
        _with_manifest(results=[[[[[1, "rows"]], 3], "float32", "tpu"], [[[[1, "n"]]], "float32", "gpu:0"]]),
        _with_manifest(constants=[]),
        _with_manifest(level="high"),
        *[_with_manifest(**entry) for entry in ({"level": True}, {"single": 0}, {"single": "x"}, {"name": 7}, {"extra": 1})],
    ]
    damaged += [_rewritten(content, change) for change in changes]
    path = tmp_path / "damaged"
    for i, data in enumerate(damaged):
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match="damaged: expected an intact file of Executable.save, got"):
            lazy.Executable.load(path)
            pytest.fail(f"file {i} was loaded")
    with_binary = tmp_path / "with binary"
    saved[0].save(with_binary, binary=True)
    path.write_bytes(_rewritten(with_binary.read_bytes(), _with_manifest(results=[[[4], "float32", "gpu:0"]] * 2)))
    with pytest.raises(CheckpointError, match="the types"):
        lazy.Executable.load(path, trust_binary=True)
    with pytest.raises(FileNotFoundError):
        lazy.Executable.load(tmp_path / "missing")


def test_a_save_that_fails_leaves_the_old_file(saved: tuple[lazy.Executable, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model"
    path.write_bytes(b"old")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("no space")))
    with pytest.raises(OSError, match="no space"):
        saved[0].save(path)
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["model"]
    monkeypatch.undo()
    saved[0].save(path)
    assert lazy.Executable.load(path)(*_inputs(2))[0].shape == (2, 3) and os.listdir(tmp_path) == ["model"]


def test_keys_that_json_lacks_are_refused(tmp_path: Path) -> None:
    executable = lazy.compile(lambda state: state[1.5], args=[{1.5: lazy.InputInfo((2,), _F32)}])
    with pytest.raises(ArgumentError, match="the argument state .*: expected texts or ints as keys"):
        executable.save(tmp_path / "program")
    assert not os.listdir(tmp_path)
