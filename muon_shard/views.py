"""What of a domain's matrices travels: the face between `execute` and `blocks` or `gram_space`."""

import abc
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from muon_shard.layout import Kind, Layout
from muon_shard.orthogonalizer import Orthogonalizer
from muon_shard.packing import Packing


@dataclasses.dataclass(frozen=True)
class View(abc.ABC):
    """One domain under `shard_map`.

    Attributes:
        layouts: of its leaves.
        packing: where their pages go.
        orthogonalizer: what owners run.
        dtype: of the matrices.
        out_dtype: of the updates.
    """

    layouts: tuple[Layout, ...]
    packing: Packing
    orthogonalizer: Orthogonalizer
    dtype: str
    out_dtype: str

    @property
    @abc.abstractmethod
    def returned(self) -> jnp.dtype:
        """Dtype of what owners send back."""

    @abc.abstractmethod
    def pack(self, shards: list[jax.Array]) -> tuple[jax.Array, Any]:
        """The local shards as pages, [pool pages, page], and what `unpack` needs of them."""

    @abc.abstractmethod
    def batch(self, kind: Kind) -> tuple[int, ...]:
        """Matrices that agree in this, and in dtype, are orthogonalized in one batch."""

    @abc.abstractmethod
    def assemble(self, received: jax.Array, kind: Kind, count: int) -> jax.Array:
        """What an owner received of `count` matrices of a kind, [peers, count · padded size] → [count, …]."""

    @abc.abstractmethod
    def orthogonalize(self, x: jax.Array, operands: tuple[jax.Array, ...]) -> jax.Array:
        """A batch of what `assemble` gave → a batch of results."""

    @abc.abstractmethod
    def disassemble(self, y: jax.Array, kind: Kind) -> jax.Array:
        """Results of one kind as owners send them, [peers, count · padded size]."""

    @abc.abstractmethod
    def unpack(self, pages: jax.Array, table: Any, kept: Any) -> list[jax.Array]:
        """The updates' local shards from the pages that `table` lists in pool order."""
