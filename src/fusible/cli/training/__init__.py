"""``fusible train``: options, text, model, trainer, checkpoints, reports. Import what you need from the files."""

from __future__ import annotations
