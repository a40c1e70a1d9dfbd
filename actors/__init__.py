"""Which models are where, and who decides it: plain functions, frozen messages, no I/O. Floor 2."""
