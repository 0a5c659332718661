"""What ranks may have parts of: hidden dims of experts, columns and rows of dense products, rows of activations."""
