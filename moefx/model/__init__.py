"""What a user holds: `compile()` and the module that it returns, its calls, values, checkpoints and statistics."""
