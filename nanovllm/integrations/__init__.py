"""Other programs' seams, over the public API alone. Each file imports its program, which is an extra."""
