"""What a step depends on beside the state of a run: its learning rate, and the seed of what it draws."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

from fusible.errors import check_number

__all__ = ["Cosine", "hash_seed"]


@dataclass(frozen=True)
class Cosine:
    """Linear warm-up over ``warmup`` steps times a cosine from ``peak`` at step 0 to ``floor * peak`` at ``decay_steps``, where it stays.

    It does not depend on how many steps a run takes, so a run that is resumed for more steps is the run that had them from the beginning. Raises
    ``ArgumentError`` for numbers out of range.
    """

    peak: float
    warmup: int
    decay_steps: int
    floor: float = 0.05

    def __post_init__(self) -> None:
        check_number(self.peak, "peak of Cosine", least=0)
        check_number(self.warmup, "warmup of Cosine", least=0)
        check_number(self.decay_steps, "decay_steps of Cosine", least=1)
        check_number(self.floor, "floor of Cosine", least=0)

    def __call__(self, step: int) -> float:
        """The learning rate of a step, the first one being 0."""
        progress = min(1.0, step / self.decay_steps)
        cosine = self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * progress))
        return self.peak * cosine * min(1.0, (step + 1) / max(1, self.warmup))


def hash_seed(seed: int, step: int) -> int:
    """A seed for each step: the first 8 bytes of SHA-256 of ``"seed:step"``."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{step}".encode()).digest()[:8], "little") >> 1
