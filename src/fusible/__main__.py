"""``python -m fusible``: the command line."""

from __future__ import annotations

from fusible.cli import main

raise SystemExit(main())
