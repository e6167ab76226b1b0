"""Families of models, a file each: what a configuration of theirs makes a model of, and the names of its parameters."""

from __future__ import annotations

from fusible.models.families import bert as _bert
from fusible.models.families import deepseek as _deepseek
from fusible.models.families import gemma as _gemma
from fusible.models.families import gpt2 as _gpt2
from fusible.models.families import llama as _llama
from fusible.models.families import mixtral as _mixtral
from fusible.models.families import phi as _phi
from fusible.models.families import t5 as _t5
from fusible.models.families import vit as _vit
from fusible.models.families import whisper as _whisper
from fusible.models.families.config import Config
from fusible.models.families.registry import FAMILIES, blueprint_of, check_causal, family, left_to_chance

__all__ = ["Config", "FAMILIES", "blueprint_of", "check_causal", "family", "left_to_chance"]
