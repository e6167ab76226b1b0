"""``fusible export``."""

from __future__ import annotations

import argparse

from fusible.cli.command import Command

__all__ = ["COMMAND"]

_DESCRIPTION = """\
Writes a Hugging Face checkpoint as a file that other programs run: ONNX, a program of torch (torch.export), or one that is compiled for this machine
(AOTInductor). It takes tokens [batch, sequence], of any sizes, and gives logits. Weights in 8 or 4 bits stay so."""


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", help="the model: config.json and safetensors")
    parser.add_argument("--out", metavar="FILE", required=True, help="the file to write: .onnx, or .pt2 of a program of torch")
    parser.add_argument("--to", metavar="KIND", default="onnx", help="onnx, torch or aoti (default: onnx)")
    parser.add_argument("--format", metavar="F", help="what weights are held in: fp8, block, mxfp8 or nvfp4 (default: as they are)")
    parser.add_argument("--dtype", metavar="D", default="float32", help="of the rest: float32, bfloat16 or float16 (default: float32)")
    parser.add_argument("--opset", metavar="N", type=int, help="of ONNX's operators, from 21 on (default: 23)")


COMMAND = Command(
    name="export",
    summary="write a checkpoint as ONNX or as a program of torch",
    description=_DESCRIPTION,
    arguments=_arguments,
    job="fusible.cli.export:export",
)
