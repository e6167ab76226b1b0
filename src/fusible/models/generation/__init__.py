"""Generation: sampling, and an engine that goes on from many prompts at once."""

from __future__ import annotations

from fusible.facade import public_names as _public_names
from fusible.models.generation.batch import generate
from fusible.models.generation.engine import Engine, EngineCounts
from fusible.models.generation.next_token_model import NextTokenModel
from fusible.models.generation.request import Event, Logprobs, Request
from fusible.models.generation.sampling import Sampling

__all__ = _public_names(globals())
