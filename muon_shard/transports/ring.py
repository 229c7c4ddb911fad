"""`ppermute`, one shift after the other: each device sends straight to the peer that is s places further on."""

import math

import jax
import jax.numpy as jnp
from jax import lax

from muon_shard.cost import Collective, Traffic
from muon_shard.layout import MeshAxes
from muon_shard.transports.base import Exchanging, names


class Ring(Exchanging):
    """As many bytes as one `all_to_all`, in peers − 1 messages that XLA can overlap one by one."""

    name = "ring"

    def refuses(self, exchange: MeshAxes) -> str:
        return "" if exchange else "no matrix axis is sharded"

    def why(self, exchange: tuple[str, ...], batch: tuple[str, ...]) -> str:
        return f"scattered over {'+'.join(exchange)}, shift by shift"

    def collectives(self, traffic: Traffic) -> tuple[Collective, ...]:
        return tuple(
            Collective("collective-permute", axes, traffic.peers, traffic.row * size * count, purpose, count)
            for size, purpose in ((traffic.item, "blocks to owners"), (traffic.out, "results back"))
            for axes, count in _shifts(traffic.exchange)
        )

    def carry(self, buffer: jax.Array, exchange: MeshAxes) -> jax.Array:
        axes, peers = names(exchange), buffer.shape[0]
        me = lax.axis_index(axes)
        ahead = jnp.roll(buffer, -me, axis=0)  # row s is for the peer s places ahead
        behind = [ahead[0]]
        for shift in range(1, peers):
            pairs = [(p, (p + shift) % peers) for p in range(peers)]
            behind.append(lax.ppermute(ahead[shift], axes, pairs))
        # Row s came from s places behind: peer me − s.
        return jnp.roll(jnp.stack(behind[::-1]), me + 1, axis=0)


def _shifts(exchange: MeshAxes) -> list[tuple[tuple[str, ...], int]]:
    """How many of the shifts cross which axes: one by a multiple of all inner sizes leaves the inner axes alone."""
    found, multiples = [], 1
    for k in range(1, len(exchange) + 1):
        outer = math.prod(size for _, size in exchange[:k])
        if outer > multiples:
            found.append((names(exchange[:k]), outer - multiples))
        multiples = outer
    return found
