"""The table of tex functions lies beside this directory; it is shared, not copied."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "tex"))
