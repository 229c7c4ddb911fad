"""Pages travel to their owners and back to where they came from, simulated in numpy."""

import numpy as np
import pytest
from layouts import CASES, SHARED

import muon_shard
from muon_shard.cost import choose_page


def travel(packing):
    """Sends page numbers through the tables of one domain; what each device gets back, what owners received."""
    tables, devices = packing.tables, np.prod([s for _, s in packing.mesh_axes], dtype=int)
    row, replica, peer = (
        packing.index(packing.rows),
        packing.index(packing.shared),
        packing.index(packing.exchange),
    )
    at = {(b, r, e): d for d, (b, r, e) in enumerate(zip(row, replica, peer, strict=True))}
    pools = np.arange(devices)[:, None] * 10**6 + np.arange(packing.pool_pages)
    sent = {d: pools[d][tables.send[row[d], replica[d]]] for d in range(devices)}
    peers = range(packing.ways(packing.exchange))
    received = {d: np.stack([sent[at[row[d], replica[d], e]][peer[d]] for e in peers]) for d in range(devices)}
    back = {d: np.stack([received[at[row[d], replica[d], e]][peer[d]] for e in peers]) for d in range(devices)}
    mine = {d: back[d].reshape(-1)[tables.compact[row[d], replica[d]]] for d in range(devices)}
    results = {}
    for d in range(devices):
        gathered = np.concatenate([mine[at[row[d], r, peer[d]]] for r in range(packing.ways(packing.shared))])
        results[d] = gathered[tables.back[row[d]]]
    return results, received


@pytest.mark.parametrize("name", CASES)
def test_every_page_comes_back_to_its_place(name):
    case = CASES[name]
    plan = muon_shard.make_plan(case.abstract(case.make_mesh()), muon_weight_dimension_numbers=case.dims)
    for domain in plan.parts[0].domains:
        packing = domain.packing
        results, received = travel(packing)
        for pages in results.values():
            assert np.array_equal(pages % 10**6, np.arange(packing.pool_pages))
        for (
            device,
            blocks,
        ) in received.items():  # an owner holds the same pages from every peer: whole matrices
            used = int(np.array(packing.slots[device]) @ np.array(packing.kind_pages))
            assert (blocks[:, :used] % 10**6 == blocks[0, :used] % 10**6).all()


@pytest.mark.parametrize(
    ("blocks", "page"),
    [
        ({1024: 4, 512: 2}, 512),
        ({4096: 1}, 4096),
        ({1 << 20: 3}, 1 << 20),
        ({7: 2}, 7),
        ({100_003: 1, 4096: 10}, 2048),
    ],
)
def test_choose_page(blocks, page):
    chosen = choose_page(blocks)
    assert chosen == page
    total = sum(size * count for size, count in blocks.items())
    assert sum((-size % chosen) * count for size, count in blocks.items()) <= 0.01 * total


def test_devices_of_one_replica_share_a_table():
    case = CASES["hsdp"]
    params = case.abstract(case.make_mesh())
    plan = muon_shard.make_plan(params, muon_weight_dimension_numbers=case.dims, options=SHARED)
    packing = plan.parts[0].domains[0].packing
    assert packing.tables.send.shape == (1, 2, 4, packing.capacity)
