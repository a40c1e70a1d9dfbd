"""Fitting in a process of its own: what goes in, what comes out, and how long it may take."""
