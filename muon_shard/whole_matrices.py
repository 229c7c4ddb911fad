"""Matrices travel as blocks: local shards as pages, pages of all peers as whole matrices, and back."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from muon_shard.layout import Kind
from muon_shard.packing import Packing
from muon_shard.pages import take_pages
from muon_shard.parts import join, split
from muon_shard.views import View


class WholeMatrices(View):
    """Owners hold whole matrices."""

    @property
    def returned(self) -> jnp.dtype:
        return jnp.dtype(self.out_dtype)

    def pack(self, blocks: list[jax.Array]) -> tuple[list[jax.Array], None]:
        page = self.packing.page
        return [to_pages(rows, page).reshape(-1, page) for rows in blocks], None

    def assemble(self, received: jax.Array, kind: Kind, count: int) -> list[jax.Array]:
        ways, order = _grid(kind, self.packing)
        blocks = received.reshape(-1, count, received.shape[1] // count)[:, :, : kind.elements]
        x = blocks.reshape(*ways, count, *kind.block).transpose(order).reshape(count, *kind.shape)
        return split(x, kind)

    def orthogonalize(self, x: jax.Array, operands: tuple[jax.Array, ...]) -> jax.Array:
        return self.orthogonalizer(x, *operands)

    def disassemble(self, ys: list[jax.Array], kind: Kind) -> jax.Array:
        ways, order = _grid(kind, self.packing)
        y = join([y.astype(self.out_dtype) for y in ys], kind)
        placed = (*ways, y.shape[0], *kind.block)
        blocks = y.reshape([placed[i] for i in order]).transpose(np.argsort(order))
        blocks = blocks.reshape(-1, y.shape[0], kind.elements)
        return to_pages(blocks, self.packing.page).reshape(blocks.shape[0], -1)

    def unpack(self, pages: jax.Array, table: Any, kept: None) -> list[jax.Array]:
        rows = rows_of_leaves(pages, table, self.packing)
        return [x[:, : kind.elements] for x, kind in zip(rows, self.kinds, strict=True)]


def to_pages(rows: jax.Array, page: int) -> jax.Array:
    """Rows filled up to whole pages."""
    return jnp.pad(rows, ((0, 0),) * (rows.ndim - 1) + ((0, -rows.shape[-1] % page),))


def rows_of_leaves(pages: jax.Array, table: Any, packing: Packing) -> list[jax.Array]:
    """For each leaf [matrices, padded size] from the pages `table` lists; one by one: every byte is copied once."""
    rows, at = [], 0
    for kind, count in packing.leaves:
        end = at + count * packing.kind_pages[kind]
        rows.append(take_pages(pages, table[at:end]).reshape(count, -1))
        at = end
    return rows


def _grid(kind: Kind, packing: Packing) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes of the exchange axes, and the order of [exchange axes…, matrix, block dims…] that places blocks."""
    sizes = dict(packing.mesh_axes)
    order = [len(packing.exchange)]
    for d, axes in enumerate(kind.axes):
        order += [*(packing.exchange.index(a) for a in axes), len(packing.exchange) + 1 + d]
    return tuple(sizes[a] for a in packing.exchange), tuple(order)
