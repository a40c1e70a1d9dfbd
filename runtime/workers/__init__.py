"""Device workers as the front sees them: port, ring, control channel, processes. No torch here."""
