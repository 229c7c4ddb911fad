"""What of a domain's matrices travels: the face between `execute` and `whole_matrices` or `gram_space`."""

import abc
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from muon_shard.layout import Kind
from muon_shard.orthogonalizer import Orthogonalizer
from muon_shard.packing import Packing


@dataclasses.dataclass(frozen=True)
class View(abc.ABC):
    """One domain under `shard_map`.

    Attributes:
        packing: which matrices these are, and where their pages go.
        orthogonalizer: what owners run.
        dtype: of the matrices.
        out_dtype: of the updates.
    """

    packing: Packing
    orthogonalizer: Orthogonalizer
    dtype: str
    out_dtype: str

    @property
    @abc.abstractmethod
    def returned(self) -> jnp.dtype:
        """Dtype of what owners send back."""

    @abc.abstractmethod
    def pack(self, blocks: list[jax.Array]) -> tuple[list[jax.Array], Any]:
        """Local blocks, [matrices, elements] per leaf → its pages, [pages, page], and what `unpack` needs of them."""

    @property
    def kinds(self) -> list[Kind]:
        """Of the matrices of each leaf."""
        return [self.packing.kinds[kind] for kind, _ in self.packing.leaves]

    @abc.abstractmethod
    def assemble(self, received: jax.Array, kind: Kind, count: int) -> list[jax.Array]:
        """What an owner received of `count` matrices of a kind, [peers, count · padded size] → arrays of problems.

        Problems, [how many, …], that agree in shape and dtype are orthogonalized in one batch.
        """

    @abc.abstractmethod
    def orthogonalize(self, x: jax.Array, operands: tuple[jax.Array, ...]) -> jax.Array:
        """A batch of what `assemble` gave → a batch of results."""

    @abc.abstractmethod
    def disassemble(self, ys: list[jax.Array], kind: Kind) -> jax.Array:
        """Results of one kind, array by array, as owners send them, [peers, count · padded size]."""

    @abc.abstractmethod
    def unpack(self, pages: jax.Array, table: Any, kept: Any) -> list[jax.Array]:
        """The updates' local blocks, as `pack` had them, from the pages that `table` lists in pool order."""
