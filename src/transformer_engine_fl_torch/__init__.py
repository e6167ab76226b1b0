"""``fusible.tex`` under the name by which programs for multi-backend Transformer Engine import it."""

import sys

from fusible import tex

sys.modules[__name__] = tex
