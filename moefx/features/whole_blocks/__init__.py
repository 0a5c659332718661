"""Chunks of whole blocks: attention, norms and dense layers of a part of the batch beside exchanges of another."""
