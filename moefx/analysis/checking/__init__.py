"""Is it right: a raised region beside the user's own code, and whole graphs before and after a pass."""
