"""``fusible.tex`` under the name by which programs for multi-backend Transformer Engine import it."""

import sys

from fusible import tex
from fusible.compat.finder import alias_submodules

sys.modules[__name__] = tex
alias_submodules(__name__, tex.__name__)
