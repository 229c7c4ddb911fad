"""The optimizers that are compared do the same: what they differ in is who computes and moves what."""

import pytest
from jax.sharding import PartitionSpec as P

from benchmarks.peers import LEARNING_RATE, PEERS
from benchmarks.reference import ReferenceSet
from benchmarks.step import SEEDS, build, largest_difference, one_device_updates
from muon_shard import hlo

LEAVES = {
    "q": ((16, 24), P("fsdp", None)),
    "k": ((16, 24), P("fsdp", None)),
    "v": ((16, 24), P(None, "fsdp")),
    "up": ((32, 8), P("fsdp", None)),
    "down": ((8, 8), P(None, None)),
    "o": ((16, 24), P("fsdp", "replica")),
}
SMALL = ReferenceSet((2, 4), ("replica", "fsdp"), LEAVES)


def built(name):
    mesh = SMALL.mesh()
    params, *grads = (SMALL.arrays(mesh, seed) for seed in (0, *SEEDS))
    return build(name, SMALL, mesh, params, grads[0]), params, grads


@pytest.mark.parametrize("name", [name for name in PEERS if name != "adamw"])
def test_every_peer_applies_the_same_updates(name):
    peer, params, grads = built(name)
    for g, want in zip(grads, one_device_updates(SMALL), strict=True):
        assert largest_difference(peer.run(g, params), want) < 2e-5 * LEARNING_RATE


@pytest.mark.parametrize(("name", "gathers"), [("redundant", 6), ("redundant_stacks", 5)])
def test_equal_shapes_and_specs_are_gathered_at_once_where_they_are_fused(name, gathers):
    found = hlo.collectives(built(name)[0].step.as_text())
    assert [f.kind for f in found] == ["all-gather"] * gathers  # one for each axis; nothing for what lies whole
