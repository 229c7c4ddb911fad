"""Pages: which part of a local shard goes to which owner, and where each result comes back. Numpy only."""

import dataclasses
import functools

import numpy as np

from muon_shard.cost import Traffic
from muon_shard.layout import Kind, MeshAxes

ANY = -1
"""In a table: whatever page lies there, nobody reads it."""


@dataclasses.dataclass(frozen=True)
class Packing:
    """Everything `execute` needs to move the matrices of one domain.

    Devices with the same coordinates over `rows` divide the matrices they hold among themselves; these are the axes
    that shard a batch dimension, and those over which work is repeated. `shared` are the other axes that replicate.

    A device's pool is its local shards, leaf after leaf, matrix after matrix, each padded to whole pages. `kinds` lists
    the kinds of matrices, `sizes` the elements of each that travel (a local block, or half a Gram matrix), `leaves` the
    (kind index, local matrices) of each leaf in pool order. `counts[device][kind]`
    is how many matrices of a kind a device owns, `slots[device][kind]` how many its program computes (more than it owns
    where programs were merged; surplus slots hold filler that is never read). Devices are numbered row-major over
    `mesh_axes`.
    """

    mesh_axes: MeshAxes
    exchange: tuple[str, ...]
    rows: tuple[str, ...]
    shared: tuple[str, ...]
    page: int
    kinds: tuple[Kind, ...]
    sizes: tuple[int, ...]
    leaves: tuple[tuple[int, int], ...]
    counts: tuple[tuple[int, ...], ...]
    slots: tuple[tuple[int, ...], ...]

    @functools.cached_property
    def kind_pages(self) -> tuple[int, ...]:
        return tuple(-(-size // self.page) for size in self.sizes)

    @property
    def exchange_axes(self) -> MeshAxes:
        """The exchange axes with their sizes."""
        sizes = dict(self.mesh_axes)
        return tuple((name, sizes[name]) for name in self.exchange)

    def traffic(
        self,
        item: int,
        out: int,
        scales: int = 0,
        turned: tuple[tuple[MeshAxes, int], ...] = (),
        gathered: tuple[tuple[MeshAxes, int], ...] = (),
    ) -> Traffic:
        """What moves, for elements of `item` bytes going in and `out` bytes coming back; see `Traffic`."""
        sizes = dict(self.mesh_axes)
        return Traffic(
            self.exchange_axes,
            tuple((name, sizes[name]) for name in self.shared),
            self.pool_pages * self.page,
            self.capacity * self.page,
            self.returned * self.page,
            item,
            out,
            scales,
            turned,
            gathered,
        )

    @property
    def pool_pages(self) -> int:
        return sum(count * self.kind_pages[kind] for kind, count in self.leaves)

    @functools.cached_property
    def capacity(self) -> int:
        """Pages that each device sends to each peer."""
        return int((np.array(self.slots, np.int64) @ np.array(self.kind_pages, np.int64)).max())

    @functools.cached_property
    def returned(self) -> int:
        """Pages that each replica gives to the others: those of the matrices owned in it, at most."""
        pages = np.array(self.counts, np.int64) @ np.array(self.kind_pages, np.int64)
        totals = np.zeros((self.ways(self.rows), self.ways(self.shared)), np.int64)
        np.add.at(totals, (self.index(self.rows), self.index(self.shared)), pages)
        return int(totals.max())

    def ways(self, axes: tuple[str, ...]) -> int:
        sizes = dict(self.mesh_axes)
        return int(np.prod([sizes[a] for a in axes], dtype=np.int64))

    def index(self, axes: tuple[str, ...]) -> np.ndarray:
        """Row-major coordinate of every device over these axes, [devices]."""
        return device_index(self.mesh_axes, axes)

    def owned(self, position: int) -> np.ndarray:
        """Matrices of the leaf at this position of `leaves` that each device owns, [devices]."""
        kind, count = self.leaves[position]
        first = sum(c for k, c in self.leaves[:position] if k == kind)
        counts, row = np.array(self.counts, np.int64)[:, kind], self.index(self.rows)
        ends = np.zeros_like(counts)
        for b in range(self.ways(self.rows)):
            ends[row == b] = np.cumsum(counts[row == b])
        return np.clip(np.minimum(ends, first + count) - np.maximum(ends - counts, first), 0, None)

    @functools.cached_property
    def tables(self) -> "Tables":
        return _tables(self)


@dataclasses.dataclass(frozen=True, eq=False)
class Tables:
    """Where pages go.

    `send` [batch, replica, peers, capacity]: pool page to put in each place (filler: `ANY`).
    `compact` [batch, replica, returned]: place of each page owned in this replica, among the peers × capacity that came
    back. `back` [batch, pool pages]: place of each pool page among the replicas × returned.
    """

    send: np.ndarray
    compact: np.ndarray
    back: np.ndarray


def device_index(mesh_axes: MeshAxes, axes: tuple[str, ...]) -> np.ndarray:
    """Row-major coordinate over `axes` of every device of a mesh, [devices]."""
    sizes = dict(mesh_axes)
    grid = np.indices(tuple(sizes.values()))
    index = np.zeros(tuple(sizes.values()), np.int64)
    for axis in axes:
        index = index * sizes[axis] + grid[list(sizes).index(axis)]
    return index.reshape(-1)


def _item_pages(packing: Packing) -> list[np.ndarray]:
    """First pool page of every local matrix, by kind, in pool order."""
    starts: list[list[np.ndarray]] = [[] for _ in packing.kinds]
    at = 0
    for kind, count in packing.leaves:
        pages = packing.kind_pages[kind]
        starts[kind].append(at + pages * np.arange(count))
        at += pages * count
    return [np.concatenate(s) if s else np.zeros(0, np.int64) for s in starts]


def _tables(packing: Packing) -> Tables:
    """Deals the matrices of each kind to the devices of each row in order, then writes down every page's way."""
    rows, replicas, peers = (
        packing.ways(packing.rows),
        packing.ways(packing.shared),
        packing.ways(packing.exchange),
    )
    row, replica, peer = (
        packing.index(packing.rows),
        packing.index(packing.shared),
        packing.index(packing.exchange),
    )
    send = np.full((rows, replicas, peers, packing.capacity), ANY, np.int32)
    compact = np.zeros((rows, replicas, packing.returned), np.int32)
    back = np.zeros((rows, packing.pool_pages), np.int32)
    items = _item_pages(packing)
    dealt = np.zeros((rows, len(packing.kinds)), np.int64)
    filled = np.zeros((rows, replicas), np.int64)
    for device, (counts, slots) in enumerate(zip(packing.counts, packing.slots, strict=True)):
        b, r, e = row[device], replica[device], peer[device]
        at = 0
        for kind, (count, slot) in enumerate(zip(counts, slots, strict=True)):
            pages = packing.kind_pages[kind]
            first = items[kind][dealt[b, kind] : dealt[b, kind] + count]
            dealt[b, kind] += count
            span = (first[:, None] + np.arange(pages)).reshape(-1)
            send[b, r, e, at : at + span.size] = span
            to = filled[b, r] + np.arange(span.size)
            compact[b, r, to] = e * packing.capacity + at + np.arange(span.size)
            back[b, span] = r * packing.returned + to
            filled[b, r] += span.size
            at += slot * pages
    return Tables(send, compact, back)
