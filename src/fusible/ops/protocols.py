"""Protocols that few ops have: mixins, to be named before ``Op`` among a class's bases. Who needs one asks ``isinstance(op, ...)``.

They are classes without a metaclass, so that asking is as cheap as reading an attribute; a ``typing.Protocol`` would look the members up each time.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from fusible import nvte
from fusible.ops.messages import Communicates

__all__ = ["AttentionOperands", "CachedKeys", "Incremental", "OpaqueCode", "ShardsRows"]


class OpaqueCode:
    """An op whose passes compute elsewhere than by nvte's functions, as a user's operation in plain torch does: they can be neither replayed nor
    compiled, and what they return is looked at where it becomes ours."""

    @property
    def direct_only(self) -> bool:
        return True


class CachedKeys(NamedTuple):
    """What an op keeps of each token of a sequence: keys and values of ``groups`` heads of ``width`` columns, in ``type``; values of ``value_width``,
    where that is another, 0 where they are found in the keys."""

    groups: int
    width: int
    type: nvte.Type | None
    value_width: int | None = None


class Incremental:
    """An op that looks at whole sequences (``sequences`` is of its ``call_inputs``) and whose inference goes on with the further tokens of them.

    Any other op that is given ``sequences`` refuses a call with a cache; one that is not given them takes tokens one by one, and needs none.
    """

    @property
    def cached(self) -> CachedKeys | None:
        """What it keeps of a sequence, None for nothing. Inference finds it as an ``nvte.KVCache`` in the running pass, under the op's position."""
        return None

    @property
    def goes_on(self) -> bool:
        """Whether, with its options, inference on further tokens gives what it gives on whole sequences."""
        return self.cached is not None


class AttentionOperands:
    """An op that is attention, whose operands a recipe may want in 8 bits (``fp8_dpa``): the plan then sets ``qkv_dtype`` and ``do_dtype``."""

    qkv_dtype: nvte.Type | None = None
    do_dtype: nvte.Type | None = None
    side_names: tuple[str, ...] = ()
    """The kinds of its side inputs (``"kv"``, ``"mask"``), in order. ``side_inputs`` has the names that the pipeline gives them."""


class ShardsRows(Communicates):
    """An op of the processes of a group at which rows are shared out, or come together."""

    reshards: Literal["gathers", "scatters"] | None = None
    """``"gathers"`` where x has the rows of one process and y those of all, ``"scatters"`` where it is the other way; None where neither."""

    def rows_of_y(self, rows: int) -> int:
        size = self.process.size if self.process is not None else 1
        return rows * size if self.reshards == "gathers" else rows // size if self.reshards == "scatters" else rows
