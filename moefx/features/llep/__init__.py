"""LLEP: rows of overloaded experts go, with the experts' weights, to the ranks with the least load."""
