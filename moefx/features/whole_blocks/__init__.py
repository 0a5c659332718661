"""Chunks of whole blocks: attention, norms and dense layers of one part of the batch beside exchanges of another."""
