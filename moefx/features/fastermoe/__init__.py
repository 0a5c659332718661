"""FasterMoE's dynamic shadowing, a policy of placement."""
