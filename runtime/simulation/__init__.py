"""Simulated hardware and virtual time behind the actors' own ports, so that the code that serves is what is tested."""
