"""Benches: one file per question, each prints one table and writes one JSON."""
