"""No matrix is scattered (experts sharded on their batch, replicated leaves): nothing moves on the way in."""

import jax

from muon_shard.cost import Collective
from muon_shard.transports.base import Transport


class Local(Transport):
    """Owners already hold their matrices whole."""

    name = "local"

    def refuses(self, exchange: tuple[str, ...]) -> str:
        return f"matrices are scattered over {exchange}" if exchange else ""

    def why(self, exchange: tuple[str, ...], batch: tuple[str, ...]) -> str:
        return f"apart over {'+'.join(batch)}" if batch else "whole on each device"

    def collectives(
        self, exchange: tuple[str, ...], ways: int, bytes_in: int, bytes_out: int
    ) -> tuple[Collective, ...]:
        return ()

    def carry(self, buffer: jax.Array, exchange: tuple[str, ...]) -> jax.Array:
        return buffer
