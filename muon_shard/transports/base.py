"""The faces of a transport: why it cannot serve a domain, what it costs, its code under `shard_map`."""

import abc
from collections.abc import Sequence

import jax

from muon_shard.cost import Collective, Traffic
from muon_shard.layout import MeshAxes
from muon_shard.pages import Table, pack_pages


class Transport(abc.ABC):
    """Moves pages between the devices of a domain, over its exchange axes.

    Under `shard_map`, `pack` has the pages of this device, leaf by leaf [pages, page], and the table of those for each
    peer, [peers, capacity], the same on all peers. `bring` makes [peers, capacity · page] of what it packed, row p from
    peer p. `back` takes results of that form, row p for peer p, and returns them with row p from owner p.
    """

    name: str
    repeats: bool = False
    """Every device computes every matrix of its domain: there are no owners, and nothing is sent back."""

    @abc.abstractmethod
    def refuses(self, exchange: MeshAxes) -> str:
        """Why this transport cannot serve a domain with these exchange axes; '' if it can."""

    @abc.abstractmethod
    def why(self, exchange: tuple[str, ...], batch: tuple[str, ...]) -> str:
        """How it serves a domain with these exchange and batch axes, in a few words for the plan's table."""

    @abc.abstractmethod
    def collectives(self, traffic: Traffic) -> tuple[Collective, ...]:
        """What the compiled module will hold for the way in and the way back."""

    def pack(self, parts: Sequence[jax.Array], table: Table) -> jax.Array:
        """What this device sends, [pages, page]."""
        return pack_pages(parts, table)

    @abc.abstractmethod
    def bring(self, sent: jax.Array, table: Table, exchange: MeshAxes) -> jax.Array:
        """Matrices to their owners."""

    @abc.abstractmethod
    def back(self, results: jax.Array, exchange: MeshAxes) -> jax.Array:
        """Results to the devices whose shards they are."""


class Exchanging(Transport):
    """A transport that sends each peer its own pages; the way back is the way there."""

    @abc.abstractmethod
    def carry(self, buffer: jax.Array, exchange: MeshAxes) -> jax.Array:
        """Buffer [peers, elements], row p for peer p → row p from peer p."""

    def bring(self, sent: jax.Array, table: Table, exchange: MeshAxes) -> jax.Array:
        return self.carry(sent.reshape(table.numbers.shape[1], -1), exchange)

    def back(self, results: jax.Array, exchange: MeshAxes) -> jax.Array:
        return self.carry(results, exchange)


def names(axes: MeshAxes) -> tuple[str, ...]:
    """Names of mesh axes."""
    return tuple(name for name, _ in axes)
