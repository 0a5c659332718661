"""One file per pass, or part of one. They never import one another."""
