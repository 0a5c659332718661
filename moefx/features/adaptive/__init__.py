"""Which r is best: to how many of the ranks that share an expert a token's rows go. Tutel's adaptive parallelism."""
