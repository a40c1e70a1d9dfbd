"""Configuration: YAML text in, one frozen value out. Names only; nothing is decided here."""

from runtime.config.units import Amount, Bytes, Ratio, Seconds
from runtime.config.yaml import Document, Frozen, read, read_file, validate

__all__ = ["Amount", "Bytes", "Document", "Frozen", "Ratio", "Seconds", "read", "read_file", "validate"]
