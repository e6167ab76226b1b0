"""What the command line says to a user's mistake: one sentence on stderr, exit code 2, nothing on stdout, nothing written."""

from __future__ import annotations

import pytest

from fusible.cli import main

SENTENCES = {
    "": "The following arguments are required: COMMAND: see 'fusible --help'.",
    "train --steps x": "Argument --steps: invalid int value: 'x': see 'fusible train --help'.",
    "train --stepz 3": "Unrecognized arguments: --stepz 3: see 'fusible train --help'.",
    "train --step 3": "Unrecognized arguments: --step 3: see 'fusible train --help'.",
    "train --steps 0": "--steps: expected at least 1, got 0; give a larger number.",
    "train --recipe fp8": "--recipe: expected bf16, fp32, delayed, current, mxfp8, block or nvfp4, comma-separated, got 'fp8'; name one of these.",
    "train --recipe ,": "--recipe: expected names, comma-separated, got ','; put a name on both sides of each comma.",
    "train --recipe bf16,bf16": "--recipe: expected different recipes, got bf16,bf16; name each once.",
    "train --executor jit": "--executor: expected eager or xla, got 'jit'; name one of these.",
    "train --hidden 30": "--hidden: expected a multiple of twice the 4 heads (rotary embeddings pair columns), got 30; change one of them.",
    "train --lr nan": "--lr: expected a positive number, got nan; give e.g. 1e-3.",
    "train --lr -1": "--lr: expected a positive number, got -1.0; give e.g. 1e-3.",
    "train --seed -1": "--seed: expected a number from 0 to 2**62 - 1, got -1; give another seed.",
    "train --save-every -1": "--save-every: expected at least 0, got -1; give a number of steps, or 0 for none.",
    "train --text short.txt": "the text {here}/short.txt: expected at least 1290 bytes, got 4; give a longer text or a shorter --seq-len.",
    "train --text none.txt": "--text {here}/none.txt: expected a file that can be read, got No such file or directory; give another.",
    "train --text .": "--text {here}: expected a regular file, got a directory; give another.",
    "train --resume none": "--resume none: expected a checkpoint, got none; name the --out of a run that was saved.",
    "scale": "The following arguments are required: --gpus: see 'fusible scale --help'.",
    "scale --gpus 0": "--gpus: expected at least 1, got 0; give a larger number.",
    "scale --gpus 8 --model gpt": "--model: expected llama-7b, llama-70b or llama-400b-moe, got 'gpt'; name one of these.",
    "scale --gpus 8 --recipe fp8": "--recipe: expected bf16, fp32, delayed, current, mxfp8, block or nvfp4, got 'fp8'; name one of these.",
    "scale --gpus 3 --batch 4": "3 GPUs: expected a layout that fits in the 80 GB of one H100 SXM, got none that divides them so that each has a "
    "sequence; take more GPUs, or another batch.",
    "quantize .": "The following arguments are required: --format, --out: see 'fusible quantize --help'.",
    "quantize . --format int4 --out made": "--format: expected fp8, block, mxfp8, nvfp4 or mxfp4, got 'int4'; name one of these.",
    "quantize . --format fp8 --out made": "config.json: expected a file that can be read, got No such file or directory; name a directory that "
    "save_pretrained, or fusible quantize, has written.",
    "quantize short.txt --format fp8 --out made": "short.txt: expected a directory with config.json and model.safetensors, got a file; name the "
    "directory.",
    "quantize . --format fp8 --out made --shard-size 0": "--shard-size: expected a finite number of at least 1e-06, got 0.0; pass such a number.",
    "train --out short.txt": "--out: expected a folder that can be written, got short.txt; name another.",
}


@pytest.mark.parametrize("line", SENTENCES)
def test_a_mistake_is_answered_by_a_sentence(line: str, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("text")
    try:
        code = main(line.split())
    except SystemExit as stop:
        code = stop.code
    said = capsys.readouterr()
    assert (code, said.out, said.err) == (2, "", SENTENCES[line].format(here=tmp_path) + "\n")
    assert [path.name for path in tmp_path.iterdir()] == ["short.txt"]


def test_help_names_every_option_and_file(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as stop:
        main(["train", "--help"])
    said = capsys.readouterr().out
    assert stop.value.code == 0
    options = "recipe executor steps layers hidden heads seq-len batch lr decay-steps seed text out resume save-every".split()
    files = ["metrics.json", "loss.png", "pipeline.txt", "model.safetensors", "state.safetensors", "state.json", "DIR/<recipe>/"]
    assert [word for word in [*(f"--{option} " for option in options), *files] if word not in said] == []
    assert "default: (" not in said and "default: )" not in said


def test_version(capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert (stop.value.code, capsys.readouterr().out) == (0, "fusible 0.1.0\n")
