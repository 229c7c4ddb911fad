"""Everything to everyone by `all_gather`: owners compute and give all results to all, or every device computes all."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from muon_shard.cost import Collective, Traffic
from muon_shard.layout import MeshAxes
from muon_shard.pages import Table
from muon_shard.transports.base import Transport, names


class Gather(Transport):
    """De-duplicated as in the HyperParallel article: gather in one stage per axis, owners compute, gather back.

    Peers times the bytes of `all_to_all`, but no device needs a connection to each other one.
    """

    name = "gather"

    def refuses(self, exchange: MeshAxes) -> str:
        return "" if exchange else "no matrix axis is sharded"

    def why(self, exchange: tuple[str, ...], batch: tuple[str, ...]) -> str:
        return f"gathered over {', then '.join(reversed(exchange))}, owners give all to all"

    def collectives(self, traffic: Traffic) -> tuple[Collective, ...]:
        return (
            *_stages(traffic.exchange, traffic.pool * traffic.item, "blocks to all"),
            *_stages(traffic.exchange, traffic.peers * traffic.row * traffic.out, "results to all"),
        )

    def pack(self, parts: Sequence[jax.Array], table: Table) -> jax.Array:
        return jnp.concatenate(parts)

    def bring(self, sent: jax.Array, table: Table, exchange: MeshAxes) -> jax.Array:
        pools = _gather(sent, exchange)
        mine = jnp.asarray(table.here)[lax.axis_index(names(exchange))]
        return jnp.take(pools, mine, axis=1, mode="clip").reshape(pools.shape[0], -1)

    def back(self, results: jax.Array, exchange: MeshAxes) -> jax.Array:
        return _gather(results, exchange)[:, lax.axis_index(names(exchange))]


class Redundant(Gather):
    """Every device gathers and computes everything and keeps its slice: what is done without a plan."""

    name = "redundant"
    repeats = True

    def why(self, exchange: tuple[str, ...], batch: tuple[str, ...]) -> str:
        return f"gathered over {', then '.join(reversed(exchange))}, everyone computes"

    def collectives(self, traffic: Traffic) -> tuple[Collective, ...]:
        return _stages(traffic.exchange, traffic.pool * traffic.item, "blocks to all")

    def back(self, results: jax.Array, exchange: MeshAxes) -> jax.Array:
        return results


def _stages(exchange: MeshAxes, size: int, purpose: str) -> tuple[Collective, ...]:
    """One `all_gather` per axis, innermost first, of `size` bytes on each device."""
    found = []
    for axis, ways in reversed(exchange):
        size *= ways
        found.append(Collective("all-gather", (axis,), ways, size, purpose))
    return tuple(found)


def _gather(x: jax.Array, exchange: MeshAxes) -> jax.Array:
    """[…] → [peers, …], the innermost axis, the fastest, first."""
    shape = x.shape
    for axis, _ in reversed(exchange):
        x = lax.all_gather(x, axis, axis=0, tiled=False)
    return x.reshape(-1, *shape)
