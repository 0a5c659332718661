"""How rows get to other ranks: all-to-all algorithms as data, codecs, and the packing of static blocks.

Compiler and runtime both plan with it: the one for the meaning and the sizes of a graph, the other to move bytes. It
knows neither of them, and communicates nothing itself.
"""
