"""Saved values that wait for the backward in the host's memory, and MPipeMoE's strategies S1 to S4."""
