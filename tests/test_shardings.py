import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from muon_shard.shardings import Memory, assumed_spec, place_leaves

MESH = AbstractMesh((2, 4), ("replica", "fsdp"))


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((16, 32), (("replica", "fsdp"), ())),
        ((6, 32), ((), ("replica", "fsdp"))),
        ((3, 16, 5), ((), ("replica", "fsdp"), ())),
        ((8, 5, 7), (("replica", "fsdp"), (), ())),
        ((12, 5), (("fsdp",), ())),
        ((5, 7), ((), ())),
    ],
)
def test_assumed_spec_is_the_first_dividing_dimension(shape, spec):
    assert assumed_spec(shape, ((),) * len(shape), ("replica", "fsdp"), MESH) == spec


def test_sources_in_order():
    mesh = jax.make_mesh((2, 4), ("replica", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    w = jax.device_put(np.ones((16, 8), np.float32), NamedSharding(mesh, P("fsdp")))
    place = lambda x, given=None, memory=None: place_leaves({"w": x}, given, memory or Memory(), "test")[0]  # noqa: E731
    assert place(w, P(None, "fsdp")).source == "param_shardings"
    assert place(w).source == "its sharding"
    assert place(np.ones((2, 2))).source == "one device"
    seen, memory = [], Memory()
    memory.remember({"w": w})
    jax.jit(lambda x: seen.append(place(x, memory=memory)) or x)(w)
    assert (seen[-1].source, seen[-1].partition_spec) == ("init", P("fsdp", None))
    with pytest.warns(UserWarning, match="assuming"):
        jax.jit(lambda x: seen.append(place(x)) or x + 1)(w)
    assert seen[-1].source == "assumed"
    explicit = jax.make_mesh((2, 4), ("replica", "fsdp"), axis_types=(AxisType.Explicit,) * 2)
    x = jax.device_put(np.ones((16, 8), np.float32), NamedSharding(explicit, P(None, "fsdp")))
    jax.jit(lambda x: seen.append(place(x)) or x)(x)
    assert (seen[-1].source, seen[-1].partition_spec) == ("its type", P(None, "fsdp"))


def test_memory_of_another_mesh_is_not_used():
    meshes = [jax.make_mesh((8,), (name,), axis_types=(AxisType.Auto,)) for name in "ab"]
    memory, seen = Memory(), []
    memory.remember({"w": jax.device_put(np.ones((16, 8)), NamedSharding(meshes[0], P("a")))})
    x = jax.device_put(np.ones((16, 8)), NamedSharding(meshes[1], P("b")))
    with pytest.warns(UserWarning, match="assuming"):
        jax.jit(lambda x: seen.append(place_leaves({"w": x}, None, memory, "test")[0]) or x)(x)
    assert seen[0].source == "assumed"
