"""Buffers that a model updates from its routing, and which of them are summed over ranks."""
