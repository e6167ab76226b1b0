"""The text of a training run: parts, windows, the unigram model."""

from __future__ import annotations

import math

import pytest
import torch

from fusible.cli.training.text import Text, read_text
from fusible.errors import ArgumentError


def a_text(training: bytes, held_out: bytes) -> Text:
    return Text("test", "", torch.tensor(list(training), dtype=torch.uint8), torch.tensor(list(held_out), dtype=torch.uint8))


def test_the_last_tenth_is_held_out(tmp_path) -> None:
    path = tmp_path / "text"
    path.write_bytes(bytes(range(200)))
    text = read_text(str(path), 4)
    assert text.training.tolist() == list(range(180)) and text.held_out.tolist() == list(range(180, 200))


def test_a_text_holds_out_at_least_one_window(tmp_path) -> None:
    path = tmp_path / "text"
    path.write_bytes(bytes(50))
    assert read_text(str(path), 4).evaluation(4)[0].shape == (1, 4)
    with pytest.raises(ArgumentError, match="expected at least 60 bytes"):
        read_text(str(path), 5)


def test_the_documentation_is_the_same_text_each_time() -> None:
    first, second = read_text(None, 128), read_text(None, 128)
    assert first.describe() == second.describe()
    assert first.describe()["bytes"] > 300_000 and first.source == "pydoc_data.topics"


def test_a_batch_depends_on_seed_and_step_alone() -> None:
    text = a_text(bytes(range(256)) * 4, b"0123456789")
    torch.manual_seed(0)
    inputs, following = text.batch(1, 2, 3, 8)
    torch.manual_seed(5)
    again, _ = text.batch(1, 2, 3, 8)
    assert torch.equal(inputs, again) and inputs.shape == following.shape == (3, 8)
    assert torch.equal(inputs[:, 1:], following[:, :-1])
    assert not torch.equal(inputs, text.batch(1, 3, 3, 8)[0]) and not torch.equal(inputs, text.batch(2, 2, 3, 8)[0])


def test_batches_reach_both_ends_of_the_text_and_no_further() -> None:
    text = a_text(bytes(range(10)), b"")
    seen = torch.cat([text.batch(0, step, 8, 4)[1] for step in range(50)])
    assert seen.min() == 1 and seen.max() == 9


def test_evaluation_windows_lie_side_by_side() -> None:
    inputs, following = a_text(b"", bytes(range(11))).evaluation(3)
    assert inputs.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert following.tolist() == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]


def test_a_long_text_is_evaluated_in_512_windows_spread_over_it() -> None:
    inputs, _ = a_text(b"", bytes(range(256)) * 40).evaluation(2)
    assert inputs.shape == (512, 2)
    assert torch.equal(inputs[1], torch.tensor([18, 19]))


def test_the_unigram_loss_is_the_cross_entropy_of_smoothed_counts() -> None:
    assert a_text(b"aab", b"ab").unigram_loss() == pytest.approx(-(math.log(3 / 259) + math.log(2 / 259)) / 2)
