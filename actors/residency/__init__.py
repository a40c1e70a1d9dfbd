"""The books of residency: identity, states, ledger, plans, wishes. Pure values and moves, no clock, no I/O."""
