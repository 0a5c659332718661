"""Compiled programs on disk. `shelf.Shelf` is what the compiler asks."""
