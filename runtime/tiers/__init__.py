"""Where weights lie: the header reader, the disk and host tiers, verification and conversion; never torch."""
