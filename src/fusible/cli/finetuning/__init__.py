"""``fusible train --model``: training of a language model from a checkpoint, or from a configuration, on the user's own files."""

from __future__ import annotations
