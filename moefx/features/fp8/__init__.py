"""Products per expert of numbers in fp8, with a scale per row."""
