"""llama.cpp computes what the plain decoder does, from the file that is written for it, so that `fusible bench --only peers` measures one model."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fusible.cli.bench.llama_cpp import PACKAGES, installed, write_gguf
from fusible.cli.bench.plain import DecoderShape, PlainDecoder

SHAPE = DecoderShape(layers=3, hidden=64, heads=4, groups=2, inner=128, vocabulary=320)
PROMPT = [5, 300, 17, 264, 3, 90]

ASK = """
import json, sys
import xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_parallel, params.warmup, params.verbosity = sys.argv[1], 64, 1, False, 0
asked = {"prompt": json.loads(sys.argv[2]), "n_predict": 1, "temperature": 0, "logprobs": 20}
found = xllamacpp.Server(params).handle_completions(asked)["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
print(json.dumps({token["id"]: token["logprob"] for token in found}))
"""


def logprobs(file: Path) -> dict[int, float]:
    """Of the likeliest tokens after ``PROMPT``, by llama.cpp in a process of its own."""
    ended = subprocess.run([sys.executable, "-c", ASK, str(file), json.dumps(PROMPT)], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr[-2000:]
    return {int(token): value for token, value in json.loads(ended.stdout.splitlines()[-1]).items()}


# A bf16 model adds roundings of 2^-9 in square, some eight a block, in either; 8-bit integers round a weight by up to 1/254 of its block's largest
# magnitude, about 2.5 times what it is itself, 4-bit ones by 1/16.
ROUNDED = {
    "BF16": 2**-9 * math.sqrt(2 * 8 * 2 * SHAPE.layers),
    "Q8_0": 0.01 * math.sqrt(8 * SHAPE.layers),
    "Q4_0": 0.08 * math.sqrt(8 * SHAPE.layers),
}


@pytest.mark.parametrize("name", ROUNDED)
def test_a_file_has_the_weights_of_the_decoder(name: str, tmp_path: Path) -> None:
    decoder = PlainDecoder(SHAPE)
    write_gguf(tmp_path / "model.gguf", decoder, name)
    found = logprobs(tmp_path / "model.gguf")
    decoder.start(1, len(PROMPT))
    logits = decoder.step(torch.tensor([PROMPT]))[0].float()
    tokens = torch.tensor(list(found))
    got, wanted = torch.tensor(list(found.values())), logits.log_softmax(-1)[tokens]
    assert len(tokens) == 20 and (got - wanted).abs().max() < 3 * ROUNDED[name] * logits.std()
    if name != "Q4_0":  # whose roundings exceed the distance of the likeliest from the next
        assert tokens[got.argmax()] == logits.argmax()


def test_the_table_has_both_formats(tmp_path: Path) -> None:
    words = ["bench", "--quick", "--rounds", "1", "--only", "peers", "--json", str(tmp_path / "peers.json")]
    ended = subprocess.run([sys.executable, "-m", "fusible", *words], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr[-2000:]
    measured: dict[str, Any] = json.loads((tmp_path / "peers.json").read_text())["tables"]["peers"]
    packages = [name for name in PACKAGES if installed(name)]
    assert measured["beside"] == "llama.cpp" and len(measured["rows"]) == 6 * len(packages) > 0
    assert all(row["unit"] == "tokens/s" and row["torch"] > 0 and row["fusible"] > 0 for row in measured["rows"])
    firsts = {word.split()[1] for word in measured["notes"][0].removesuffix(".").split("token after the prompt is ")[1].split(", ")}
    assert len(firsts) == 1, measured["notes"][0]
