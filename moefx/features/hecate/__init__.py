"""Hecate's algorithm 1, a policy of placement: the experts with most rows, as many copies as attention hides."""
