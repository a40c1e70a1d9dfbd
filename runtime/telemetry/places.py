"""Which events are about a device, and which about the tiers that feed it.

Every tier is run by the same actor code, so a load on a device also leases, waits and prefetches on the host tier.
"""

from __future__ import annotations

from typing import Final

from actors.residency.model import Tier

BELOW: Final = frozenset({Tier.HOST.value, Tier.DISK.value, Tier.REMOTE.value})
"""What `device` says in events of the tiers below; counting those too would count each cold request twice."""
