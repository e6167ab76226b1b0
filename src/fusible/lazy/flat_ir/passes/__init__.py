"""Named passes, each from one valid FlatIR to another that computes the same."""

from fusible.lazy.flat_ir.flat_ir import Pass
from fusible.lazy.flat_ir.passes.constant_folding import constant_folding
from fusible.lazy.flat_ir.passes.dead_code import dead_code
from fusible.lazy.flat_ir.passes.dot_layout import dot_layout
from fusible.lazy.flat_ir.passes.function_deduplication import function_deduplication
from fusible.lazy.flat_ir.passes.merging import common_subexpression, constant_deduplication

__all__ = [
    "DEFAULT_PASSES",
    "PASSES",
    "Pass",
    "common_subexpression",
    "constant_deduplication",
    "constant_folding",
    "dead_code",
    "dot_layout",
    "function_deduplication",
]


PASSES: dict[str, Pass] = {
    "function-deduplication": function_deduplication,
    "constant-folding": constant_folding,
    "constant-deduplication": constant_deduplication,
    "common-subexpression": common_subexpression,
    "dot-layout": dot_layout,
    "dead-code": dead_code,
}
"""Every pass by its name, in an order in which they may run."""

DEFAULT_PASSES: tuple[Pass, ...] = (constant_folding, common_subexpression, dot_layout, dead_code)
"""The passes that every program goes through. Merging common subexpressions merges constants too."""
