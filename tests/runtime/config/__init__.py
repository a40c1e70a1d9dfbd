"""The configuration, from units to the whole tree."""
