"""`all_to_all` brings each owner its matrices, the same one takes the results back."""

import jax
from jax import lax

from muon_shard.cost import Collective, Traffic
from muon_shard.layout import MeshAxes
from muon_shard.transports.base import Exchanging, names


class AllToAll(Exchanging):
    """One hop over all exchange axes at once: the fewest bytes."""

    name = "all_to_all"

    def refuses(self, exchange: MeshAxes) -> str:
        return "" if exchange else "no matrix axis is sharded"

    def why(self, exchange: tuple[str, ...], batch: tuple[str, ...]) -> str:
        return f"scattered over {'+'.join(exchange)}"

    def collectives(self, traffic: Traffic) -> tuple[Collective, ...]:
        axes, peers, sent = traffic.axes, traffic.peers, traffic.peers * traffic.row
        return (
            Collective("all-to-all", axes, peers, sent * traffic.item, "blocks to owners"),
            Collective("all-to-all", axes, peers, sent * traffic.out, "results back"),
        )

    def carry(self, buffer: jax.Array, exchange: MeshAxes) -> jax.Array:
        return lax.all_to_all(buffer, names(exchange), split_axis=0, concat_axis=0, tiled=True)


class TwoHops(Exchanging):
    """One `all_to_all` per mesh axis in turn: more bytes, but far fewer peers to talk to.

    Every hop moves the whole buffer, transposing one coordinate of the peers at a time.
    """

    name = "two_hops"

    def refuses(self, exchange: MeshAxes) -> str:
        if not exchange:
            return "no matrix axis is sharded"
        return "" if len(exchange) > 1 else f"only one mesh axis, {names(exchange)[0]}, scatters matrices"

    def why(self, exchange: tuple[str, ...], batch: tuple[str, ...]) -> str:
        return f"scattered over {', then '.join(reversed(exchange))}"

    def collectives(self, traffic: Traffic) -> tuple[Collective, ...]:
        sent = traffic.peers * traffic.row
        return tuple(
            Collective("all-to-all", (axis,), ways, sent * size, purpose)
            for size, purpose in ((traffic.item, "blocks to owners"), (traffic.out, "results back"))
            for axis, ways in traffic.exchange
        )

    def carry(self, buffer: jax.Array, exchange: MeshAxes) -> jax.Array:
        grid = buffer.reshape(*(size for _, size in exchange), -1)
        for d, (axis, _) in reversed(list(enumerate(exchange))):  # innermost, the fastest, first
            grid = lax.all_to_all(grid, axis, split_axis=d, concat_axis=d, tiled=True)
        return grid.reshape(buffer.shape)
