"""The all-to-all "dedup"."""

from __future__ import annotations

DEDUP = "dedup"
VALUES = {"alltoall": {DEDUP: "a token that goes to several experts of one node crosses to it once. The order of sums "
                              "changes, and experts that are cut over `esp` need the split \"s3\"."}}  # fmt: skip
