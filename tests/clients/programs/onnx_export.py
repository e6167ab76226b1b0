"""NVIDIA's modules as an ONNX file: ``onnx_export.py MODES``, a JSON list. Prints of each mode how far the file's results are from the modules', and
how many tensors it quantizes.

The file is run by onnx's reference evaluator; TensorRT's operators, which quantize there, are written out here by ml_dtypes.
"""

import json
import logging
import sys
import tempfile
import warnings
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import torch
import transformer_engine.pytorch as te
from client_recipes import autocast
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from transformer_engine.pytorch.export import onnx_export, te_translation_table

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)
WIDTH, ROWS, LARGEST, BLOCK = 64, 32, 448.0, 32


class Quantize(OpRun):
    op_domain = "trt"

    def _run(self, x: np.ndarray, scale_inv: np.ndarray) -> tuple[np.ndarray]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ((x / scale_inv).clip(-LARGEST, LARGEST).astype(ml_dtypes.float8_e4m3fn).view(np.uint8),)


class Dequantize(OpRun):
    op_domain = "trt"

    def _run(self, data: np.ndarray, scale_inv: np.ndarray) -> tuple[np.ndarray]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return (data.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale_inv,)


class QuantizeBlocks(OpRun):
    op_domain = "trt"

    def _run(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:  # pyright: ignore[reportIncompatibleMethodOverride]
        blocks = x.reshape(-1, BLOCK)
        exponents = np.ceil(np.log2(np.maximum(np.abs(blocks).max(-1, keepdims=True), 2.0**-100) / LARGEST))
        data = (blocks / 2**exponents).astype(ml_dtypes.float8_e4m3fn).view(np.uint8).reshape(x.shape)
        return data, (exponents + 127).astype(np.uint8)


class DequantizeBlocks(OpRun):
    op_domain = "trt"

    def _run(self, data: np.ndarray, scale_inv: np.ndarray) -> tuple[np.ndarray]:  # pyright: ignore[reportIncompatibleMethodOverride]
        values = data.view(ml_dtypes.float8_e4m3fn).astype(np.float32).reshape(-1, BLOCK) * 2.0 ** (scale_inv.astype(np.float32) - 127)
        return (values.astype(np.float32).reshape(data.shape),)


NAMES = {
    "TRT_FP8QuantizeLinear": Quantize,
    "TRT_FP8DequantizeLinear": Dequantize,
    "TRT_MXFP8DynamicQuantize": QuantizeBlocks,
    "TRT_MXFP8DequantizeLinear": DequantizeBlocks,
}
OPERATORS = [type(name, (operator,), {"op_domain": "trt"}) for name, operator in NAMES.items()]


def exported(mode: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(te.LayerNormLinear(WIDTH, 2 * WIDTH), te.LayerNormMLP(2 * WIDTH, WIDTH), te.Linear(2 * WIDTH, WIDTH)).eval()
    x = torch.randn(ROWS, WIDTH, device="cuda")
    with torch.no_grad(), autocast(mode):
        for _ in range(3):  # delayed scaling finds its scales
            expected = model(x)
        with tempfile.TemporaryDirectory() as directory, onnx_export(enabled=True):
            path = f"{directory}/model.onnx"
            torch.onnx.export(model, (x,), path, dynamo=True, custom_translation_table=te_translation_table, verbose=False, optimize=False)
            made = onnx.load(path)
    (found,) = ReferenceEvaluator(made, new_ops=OPERATORS).run(None, {made.graph.input[0].name: x.cpu().numpy()})
    largest = expected.abs().max().item()
    quantized = sum(node.op_type in ("TRT_FP8QuantizeLinear", "TRT_MXFP8DynamicQuantize") for node in made.graph.node)
    return {"apart": float(np.abs(found - expected.cpu().numpy()).max()) / largest, "quantized": quantized}


if __name__ == "__main__":
    print(json.dumps([exported(mode) for mode in json.loads(sys.argv[1])]))
