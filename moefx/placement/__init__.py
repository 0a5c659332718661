"""Who holds which expert: where experts live, which ranks have copies of them, and how rows are shared out among them.

Numpy only, pure functions of integers: all ranks that give them the same numbers get the same answers. It communicates
nothing, and knows neither compiler nor runtime.
"""
