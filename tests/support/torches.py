"""Which torch the tests run on, where that matters (docs/limits.md)."""

from __future__ import annotations

import torch

IS_2_11 = torch.__version__.startswith("2.11.")
