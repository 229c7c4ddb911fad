"""No matrix is scattered (experts sharded on their batch, replicated leaves): nothing moves on the way in."""

import jax

from muon_shard.cost import Collective, Traffic
from muon_shard.layout import MeshAxes
from muon_shard.transports.base import Exchanging, names


class Local(Exchanging):
    """Owners already hold their matrices whole."""

    name = "local"

    def refuses(self, exchange: MeshAxes) -> str:
        return f"matrices are scattered over {'+'.join(names(exchange))}" if exchange else ""

    def why(self, exchange: tuple[str, ...], batch: tuple[str, ...]) -> str:
        return f"apart over {'+'.join(batch)}" if batch else "whole on each device"

    def collectives(self, traffic: Traffic) -> tuple[Collective, ...]:
        return ()

    def carry(self, buffer: jax.Array, exchange: MeshAxes) -> jax.Array:
        return buffer
