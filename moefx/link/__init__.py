"""From a scheduled graph to a program: runtime calls, emitted Python, loops over equal layers, bound parameters."""
