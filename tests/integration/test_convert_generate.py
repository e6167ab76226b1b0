"""``fusible.convert`` on families of transformers' models: greedy generation, against transformers itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from convert_families import WORDS, Family, every_family

import fusible


def generated(model: Any, family: Family, cache: str) -> Any:
    options: dict[str, Any] = {"max_new_tokens": 32, "min_new_tokens": 32, "do_sample": False, "cache_implementation": cache}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    if family.kind == "speech":
        return model.generate(input_features=family.inputs()["input_features"], **options)
    words = torch.randint(3, WORDS, (2, 9), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(words)
    mask[0, :4] = 0
    return model.generate(input_ids=words * mask, attention_mask=mask, **options)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@every_family
@torch.no_grad()
def test_greedy_generation_gives_the_tokens_of_transformers(family: Family, cache: str) -> None:
    if not family.generates:
        pytest.skip("no words come out of it")
    reference = generated(family.make(), family, cache)
    found = generated(fusible.convert(family.make()), family, cache)
    assert reference.sequences.shape[1] >= 32 and torch.equal(found.sequences, reference.sequences)
    assert len(found.logits) == 32
    assert max(float((a - b).abs().max()) for a, b in zip(found.logits, reference.logits, strict=True)) < 1e-5
