"""Generating text with a model that ``fusible train`` saved."""

from __future__ import annotations
