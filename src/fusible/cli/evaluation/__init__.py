"""``fusible evaluate``: what each number format costs a model."""

from __future__ import annotations
