"""Faults put into a running server, and what its users may see of them."""
