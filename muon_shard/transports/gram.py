"""Gram matrices to owners, Q to everyone: matrices themselves never move."""

import math

import jax
from jax import lax

from muon_shard.cost import Collective, Traffic
from muon_shard.layout import MeshAxes
from muon_shard.pages import Table
from muon_shard.transports.base import Transport, names


class Gram(Transport):
    """For skinny matrices cut along the long side: R = XXᴴ is a sum over the devices, and QX is local.

    Pages are halves of m×m matrices in float32. A matrix whose short side is cut is first turned, its columns cut
    instead, by an `all_to_all` over the axes of the short side.
    """

    name = "gram"

    def refuses(self, exchange: MeshAxes) -> str:
        return "" if exchange else "no matrix axis is sharded"

    def why(self, exchange: tuple[str, ...], batch: tuple[str, ...]) -> str:
        return f"only Gram matrices travel over {'+'.join(exchange)}"

    def collectives(self, traffic: Traffic) -> tuple[Collective, ...]:
        axes, peers = traffic.axes, traffic.peers
        return (
            *_turns(traffic, "short sides together"),
            Collective("all-reduce", axes, peers, traffic.scales, "scales"),
            Collective("all-to-all", axes, peers, peers * traffic.row * traffic.item, "Gram matrices to owners"),
            Collective("all-gather", axes, peers, peers * traffic.row * traffic.out, "results to all"),
            *_turns(traffic, "results back"),
        )

    def bring(self, sent: jax.Array, table: Table, exchange: MeshAxes) -> jax.Array:
        # A `psum_scatter` receives the same bytes, but XLA on TPU makes an all-reduce of it, or pads it.
        sent = sent.reshape(table.numbers.shape[1], -1)
        parts = lax.all_to_all(sent, names(exchange), split_axis=0, concat_axis=0, tiled=True)
        return parts.sum(0, keepdims=True)

    def back(self, results: jax.Array, exchange: MeshAxes) -> jax.Array:
        return lax.all_gather(results, names(exchange), axis=0, tiled=True)


def _turns(traffic: Traffic, purpose: str) -> list[Collective]:
    """The hop that turns matrices whose short side is cut."""
    return [
        Collective("all-to-all", names(axes), math.prod(size for _, size in axes), moved, purpose)
        for axes, moved in traffic.turned
    ]
