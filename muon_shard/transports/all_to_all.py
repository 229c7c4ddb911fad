"""One `all_to_all` over the exchange axes brings each owner its matrices, the same one takes the results back."""

import jax
from jax import lax

from muon_shard.cost import Collective
from muon_shard.transports.base import Transport


class AllToAll(Transport):
    """One hop over all exchange axes at once: the fewest bytes."""

    name = "all_to_all"

    def refuses(self, exchange: tuple[str, ...]) -> str:
        return "" if exchange else "no matrix axis is sharded"

    def why(self, exchange: tuple[str, ...], batch: tuple[str, ...]) -> str:
        return f"scattered over {'+'.join(exchange)}"

    def collectives(
        self, exchange: tuple[str, ...], ways: int, bytes_in: int, bytes_out: int
    ) -> tuple[Collective, ...]:
        return (
            Collective("all-to-all", exchange, ways, bytes_in, "blocks to owners"),
            Collective("all-to-all", exchange, ways, bytes_out, "results back"),
        )

    def carry(self, buffer: jax.Array, exchange: tuple[str, ...]) -> jax.Array:
        return lax.all_to_all(buffer, exchange, split_axis=0, concat_axis=0, tiled=True)
