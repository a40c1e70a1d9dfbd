"""Floor 2, tested without hardware and without waiting."""
