"""The three faces of a transport: why it cannot serve a domain, what it costs, its code under `shard_map`."""

import abc

import jax

from muon_shard.cost import Collective


class Transport(abc.ABC):
    """Moves buffers between the devices of a domain, over its exchange axes."""

    name: str

    @abc.abstractmethod
    def refuses(self, exchange: tuple[str, ...]) -> str:
        """Why this transport cannot serve a domain with these exchange axes; '' if it can."""

    @abc.abstractmethod
    def why(self, exchange: tuple[str, ...], batch: tuple[str, ...]) -> str:
        """Why it serves a domain with these exchange and batch axes, in a few words for the plan's table."""

    @abc.abstractmethod
    def collectives(
        self, exchange: tuple[str, ...], ways: int, bytes_in: int, bytes_out: int
    ) -> tuple[Collective, ...]:
        """What the compiled module will hold for buffers of these sizes in bytes (all peers together)."""

    @abc.abstractmethod
    def carry(self, buffer: jax.Array, exchange: tuple[str, ...]) -> jax.Array:
        """Under `shard_map`: buffer [peers, elements], row p for peer p → row p from peer p. Its own inverse."""
