"""Telemetry, all of it derived from events."""
