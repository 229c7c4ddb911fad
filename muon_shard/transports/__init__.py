"""How matrices reach their owners and come back; one file per kind of collective."""

from muon_shard.transports.all_to_all import AllToAll as AllToAll
from muon_shard.transports.all_to_all import TwoHops as TwoHops
from muon_shard.transports.base import Transport as Transport
from muon_shard.transports.base import names as names
from muon_shard.transports.gather import Gather as Gather
from muon_shard.transports.gather import Redundant as Redundant
from muon_shard.transports.gram import Gram as Gram
from muon_shard.transports.local import Local as Local
from muon_shard.transports.ring import Ring as Ring

TRANSPORTS: dict[str, Transport] = {
    t.name: t for t in (Local(), AllToAll(), TwoHops(), Ring(), Gather(), Gram(), Redundant())
}
"""By name."""
