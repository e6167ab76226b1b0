"""``fusible scale``: what it prints."""

from __future__ import annotations

import json

import pytest

from fusible.cli import main
from fusible.distributed.cost import ARCHITECTURES


def test_the_best_layouts_are_shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["scale", "--model", "llama-7b", "--gpus", "8", "--batch", "64", "--rows", "2"]) == 0
    said = capsys.readouterr().out
    assert "llama-7b on 8 x H100 SXM in bf16, 64 sequences of 4,096 tokens" in said and "The best layout: " in said
    assert main(["scale", "--model", "llama-7b", "--gpus", "8", "--batch", "64", "--rows", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    first, second = found["layouts"]
    assert (found["model"], found["gpus"], found["recipe"]) == ("llama-7b", 8, "bf16")
    assert first["time"]["total"] <= second["time"]["total"] and first["memory"]["peak"] < 80e9
    assert f"{first['time']['tokens_per_second']:,.0f}" in said and f"{first['memory']['peak'] / 1e9:,.1f}" in said
    assert "gather_quantized" not in said and found["layouts"][0]["layout"]["gather_quantized"] is False
    assert main(["scale", "--model", "llama-7b", "--gpus", "8", "--batch", "64", "--rows", "1", "--recipe", "current"]) == 0
    assert "Weights are gathered as the recipe quantizes them" in capsys.readouterr().out


def test_help_names_every_model(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["scale", "--help"])
    said = capsys.readouterr().out
    assert all(name in said for name in ARCHITECTURES)
