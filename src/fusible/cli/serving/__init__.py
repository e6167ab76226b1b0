"""``fusible serve``: a model behind the HTTP interface that clients of OpenAI speak."""

from __future__ import annotations
