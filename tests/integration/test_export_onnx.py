"""``export_onnx`` and ``fusible export``: what onnxruntime gives is what the models give, and weights lie in the file in 8 or 4 bits."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from convert_families import transformers
from exported_models import FORMATS, bound, elsewhere
from onnx.reference import ReferenceEvaluator
from pretrained_models import DECODERS, FAMILIES, drawn, given, reference, saved

import fusible
from fusible.cli import main
from fusible.errors import ArgumentError, DTypeError, MissingModuleError
from fusible.models import export_onnx, from_pretrained

TYPES = {"fp8": onnx.TensorProto.FLOAT8E4M3FN, "block": onnx.TensorProto.FLOAT8E4M3FN, "mxfp8": onnx.TensorProto.FLOAT8E4M3FN}
TYPES["nvfp4"] = onnx.TensorProto.FLOAT4E2M1
BLOCKS = {"fp8": 0, "block": 128, "mxfp8": 32, "nvfp4": 16}
OTHER_SIZES = [drawn(3, 11), drawn(1, 2, seed=4)]


def _run(path: Path, tokens: torch.Tensor) -> np.ndarray:
    """By onnxruntime."""
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    assert [output.name for output in session.get_outputs()] == ["logits"]
    return np.asarray(session.run(None, {session.get_inputs()[0].name: tokens.numpy()})[0])


def _check(path: Path, model: Any) -> onnx.ModelProto:
    """The file is valid, and gives what the model gives."""
    onnx.checker.check_model(str(path), full_check=True)
    for tokens in OTHER_SIZES:
        with torch.no_grad():
            want = model(tokens)
        want = getattr(want, "logits", want)
        np.testing.assert_allclose(_run(path, tokens), want.numpy(), rtol=0, atol=bound(want))
    return onnx.load(path)


def _attribute(node: onnx.NodeProto, name: str) -> int:
    return next((attribute.i for attribute in node.attribute if attribute.name == name), 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", DECODERS)
def test_a_family_is_a_file_of_any_size(name: str, tmp_path: Path) -> None:
    model = from_pretrained(saved(name, tmp_path))
    export_onnx(model, tmp_path / "model.onnx")
    made = _check(tmp_path / "model.onnx", model)
    sizes = [dim.dim_param for dim in made.graph.input[0].type.tensor_type.shape.dim]
    assert made.graph.input[0].name == "tokens" and sizes == ["batch", "sequence"]
    kinds = {node.op_type for node in made.graph.node}
    assert not kinds & {"QuantizeLinear", "DequantizeLinear"} and str(tmp_path).encode() not in made.SerializeToString()


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in DECODERS])
def test_an_encoder_is_a_file_of_any_size(name: str, tmp_path: Path) -> None:
    model, (inputs, _) = from_pretrained(saved(name, tmp_path)), given(name)
    export_onnx(model, tmp_path / "model.onnx")
    onnx.checker.check_model(str(tmp_path / "model.onnx"), full_check=True)
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]
    assert names == ["inputs", "tokens"][: len(inputs)]
    for values in (inputs, [value[:1] for value in inputs]):
        with torch.no_grad():
            want = model(*values)
        found = session.run(None, {name: value.numpy() for name, value in zip(names, values, strict=True)})[0]
        np.testing.assert_allclose(np.asarray(found), want.numpy(), rtol=0, atol=bound(want))


@pytest.mark.parametrize("opset", [23, pytest.param(21, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["mxfp8", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fp8", "block"))])
def test_weights_lie_in_8_bits(name: str, opset: int, tmp_path: Path) -> None:
    model = from_pretrained(saved("llama", tmp_path), FORMATS[name], dtype=torch.float32)
    export_onnx(model, tmp_path / "model.onnx", opset=opset)
    made = _check(tmp_path / "model.onnx", model)
    assert made.opset_import[0].version == opset and str(tmp_path).encode() not in made.SerializeToString()
    weights = {one.name: one for one in made.graph.initializer if one.data_type == TYPES[name]}
    readers = [node for node in made.graph.node if node.op_type == "DequantizeLinear"]
    assert len(weights) == len(readers) == 2 * 4  # q, k and v as one, out, gate and up as one, down
    assert all(node.input[0] in weights and _attribute(node, "block_size") == BLOCKS[name] for node in readers)
    codes: Any = model.get_submodule("body.0.1").weight
    stored = codes._data if name == "fp8" else codes._rowwise_data
    assert weights["body.0.1.weight_codes"].raw_data == stored.numpy().tobytes()


def test_weights_lie_in_4_bits(tmp_path: Path) -> None:
    """onnxruntime's CPUs have no floats of 4 bits yet: onnx's own evaluator runs the file."""
    model = from_pretrained(saved("llama", tmp_path), FORMATS["nvfp4"], dtype=torch.float32)
    export_onnx(model, tmp_path / "model.onnx")
    onnx.checker.check_model(str(tmp_path / "model.onnx"), full_check=True)
    made = onnx.load(tmp_path / "model.onnx")
    codes: Any = model.get_submodule("body.0.1").weight
    weights = {one.name: one for one in made.graph.initializer if one.data_type == onnx.TensorProto.FLOAT4E2M1}
    readers = [node for node in made.graph.node if node.op_type == "DequantizeLinear"]
    assert len(weights) == 8 and sum(node.input[0] in weights for node in readers) == 8 and len(readers) == 16
    assert weights["body.0.1.weight_codes"].raw_data == codes._rowwise_data.numpy().tobytes()
    tokens = OTHER_SIZES[0]
    found: Any = ReferenceEvaluator(made).run(None, {"tokens": tokens.numpy()})
    want = model(tokens)
    np.testing.assert_allclose(found[0], want.numpy(), rtol=0, atol=bound(want))
    with pytest.raises(ArgumentError, match=r"the opset of an ONNX file: expected 23 for weights in 4 bits, got 21; .*\."):
        export_onnx(model, tmp_path / "older.onnx", opset=21)
    assert not (tmp_path / "older.onnx").exists()


def _converted(name: str, recipe: fusible.Recipe | None) -> Any:
    model = DECODERS[name].make(dtype=torch.float32).eval()
    model.load_state_dict(reference(name).state_dict())
    return fusible.convert(model, recipe)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "qwen2_moe"])
def test_a_converted_model_is_a_file(name: str, tmp_path: Path) -> None:
    model = _converted(name, None)
    export_onnx(model, tmp_path / "model.onnx", drawn(2, 8))
    assert _check(tmp_path / "model.onnx", model).graph.input[0].name == "input_ids"


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [fusible.Float8CurrentScaling(), fusible.DelayedScaling()], ids=str)
def test_a_recipe_quantizes_in_the_file(recipe: fusible.Recipe, tmp_path: Path) -> None:
    model = _converted("llama", recipe)
    for seed in range(2):  # delayed scaling has seen something
        model.train()(drawn(2, 8, seed=seed)).logits.sum().backward()
    export_onnx(model.eval(), tmp_path / "model.onnx", drawn(2, 8))
    onnx.checker.check_model(str(tmp_path / "model.onnx"), full_check=True)
    made, tokens = onnx.load(tmp_path / "model.onnx"), OTHER_SIZES[0]
    kinds = [node.op_type for node in made.graph.node]
    assert kinds.count("QuantizeLinear") == 2 * 4 and kinds.count("DequantizeLinear") == 2 * 2 * 4
    with torch.no_grad():
        want, exact = model(tokens).logits, reference("llama")(tokens).logits
    found = torch.from_numpy(_run(tmp_path / "model.onnx", tokens))
    # numbers between two codes may fall to either; without quantized activations it would be some 0.7
    assert (found - want).norm() < 0.5 * (want - exact).norm()


@pytest.mark.slow
def test_large_weights_lie_beside_the_file(tmp_path: Path) -> None:
    model = from_pretrained(saved("llama", tmp_path), FORMATS["fp8"], dtype=torch.float32)
    export_onnx(model, tmp_path / "made" / "model.onnx", external_data=True)
    assert {path.name for path in (tmp_path / "made").iterdir()} == {"model.onnx", "model.onnx.data"}
    graph = onnx.load(tmp_path / "made" / "model.onnx", load_external_data=False).graph
    codes = [one for one in graph.initializer if one.data_type == TYPES["fp8"]]
    assert len(codes) == 8 and all(one.data_location == onnx.TensorProto.EXTERNAL and not one.raw_data for one in codes)
    _check(tmp_path / "made" / "model.onnx", model)


def test_a_wrong_call_is_one_sentence_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = from_pretrained(saved("llama", tmp_path))
    place = tmp_path / "model.onnx"
    place.write_bytes(b"former")
    for options, error, text in [
        ({"opset": 20}, ArgumentError, r"the opset of an ONNX file: expected from 21 to 24, got 20; choose one of these\."),
        ({"opset": "23"}, ArgumentError, r"the opset of an ONNX file: expected from 21 to 24, got '23'; choose one of these\."),
        ({"external_data": 1}, DTypeError, r"external_data of export_onnx: expected True or False or None, got 1; pass one of these\."),
    ]:
        with pytest.raises(error, match=text):
            export_onnx(model, place, **options)
    with pytest.raises(DTypeError, match=r"path of export_onnx: expected a file's path, got 3; pass a str or a Path\."):
        export_onnx(model, 3)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"expected inference, got one in training mode"):
        export_onnx(model.train(), place)
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(MissingModuleError, match=r"the package onnxscript: expected an installed package, got none; install fusible\[onnx\]\."):
        export_onnx(model.eval(), place)
    assert place.read_bytes() == b"former"


def test_the_command_writes_each_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, tokens = str(saved("llama", tmp_path)), OTHER_SIZES[0]
    assert main(["export", folder, "--format", "fp8", "--out", str(tmp_path / "new" / "model.onnx")]) == 0
    model = from_pretrained(folder, FORMATS["fp8"], dtype=torch.float32)
    _check(tmp_path / "new" / "model.onnx", model)
    assert main(["export", folder, "--to", "torch", "--format", "fp8", "--out", str(tmp_path / "model.pt2")]) == 0
    assert capsys.readouterr().out.count(" MB.\n") == 2
    with torch.no_grad():
        want = model(tokens)
        torch.testing.assert_close(torch.export.load(tmp_path / "model.pt2").module()(tokens), want, rtol=0, atol=bound(want))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's about its own code
def test_the_command_writes_a_compiled_package(tmp_path: Path) -> None:
    folder = str(saved("llama", tmp_path))
    assert main(["export", folder, "--to", "aoti", "--out", str(tmp_path / "model.pt2")]) == 0
    want = reference("llama")(OTHER_SIZES[0]).logits
    (found,) = elsewhere("package", tmp_path / "model.pt2", OTHER_SIZES[:1])
    torch.testing.assert_close(found, want, rtol=0, atol=bound(want))


def test_what_the_command_cannot_take_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "model.onnx")
    for words, text in [
        (["--to", "tensorrt", "--out", out], "--to: expected onnx, torch or aoti, got 'tensorrt'; name one of these."),
        (["--to", "torch", "--out", out], f"--out: expected a name that ends with .pt2, got {out!r}; name it so, or choose another --to."),
        (["--dtype", "fp4", "--out", out], "--dtype: expected float32, bfloat16 or float16, got 'fp4'; name one of these."),
        (["--to", "aoti", "--opset", "21", "--out", out[:-4] + "pt2"], "--opset: expected --to onnx beside it, got --to aoti; leave it out."),
    ]:
        assert main(["export", str(tmp_path), *words]) == 2
        assert capsys.readouterr().err == f"{text}\n"


transformers.logging.set_verbosity_error()
