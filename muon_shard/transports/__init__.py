"""How matrices reach their owners and come back; one file each."""

from muon_shard.transports.all_to_all import AllToAll as AllToAll
from muon_shard.transports.base import Transport as Transport
from muon_shard.transports.local import Local as Local
