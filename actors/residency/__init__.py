"""The books of one tier and every decision about them: plain values and functions, no actor, no clock, no I/O."""
