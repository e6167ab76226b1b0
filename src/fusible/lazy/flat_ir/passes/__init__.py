"""Named passes, each from one valid FlatIR to another that computes the same."""

from collections.abc import Callable

from fusible.lazy.flat_ir.flat_ir import FlatIR
from fusible.lazy.flat_ir.passes.common_subexpression import common_subexpression
from fusible.lazy.flat_ir.passes.dead_code import dead_code

__all__ = ["DEFAULT_PASSES", "PASSES", "Pass", "common_subexpression", "dead_code"]

Pass = Callable[[FlatIR], FlatIR]

PASSES: dict[str, Pass] = {"common-subexpression": common_subexpression, "dead-code": dead_code}
"""Every pass by its name."""

DEFAULT_PASSES: tuple[Pass, ...] = (common_subexpression, dead_code)
