"""What a graph is made of: the record of every op, how dims and types follow, the verifier, the printer and reader."""
