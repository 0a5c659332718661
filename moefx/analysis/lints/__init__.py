"""What a captured graph shows of mistakes in a model: it trains, and yet does not do what its author means."""
