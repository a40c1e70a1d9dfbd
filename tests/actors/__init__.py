"""Floor 2, straight-line."""
