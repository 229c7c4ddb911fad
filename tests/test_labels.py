import jax
import numpy as np
import pytest
from optax.contrib import MuonDimensionNumbers as Dims

import muon_shard
from muon_shard.labels import by_path, route


def leaf(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


@pytest.mark.parametrize(
    ("path", "shape", "dims"),
    [
        ("embedding", (1000, 64), None),
        ("wte", (1000, 64), None),
        ("lm_head", (64, 1000), None),
        ("head", (64, 10), None),
        ("ln_1", (3, 64), None),
        ("norm_stack", (12, 64), None),
        ("bias", (12, 64), None),
        ("scale", (12, 64), None),
        ("router", (64, 8), None),
        ("pos_embedding", (128, 64), None),
        ("vector", (64,), None),
        ("scalar", (), None),
        ("kernel", (64, 32), Dims(0, 1)),
        ("heads_proj", (64, 32), Dims(0, 1)),
        ("experts_up", (8, 64, 32), Dims(1, 2)),
        ("layers_experts", (4, 8, 64, 32), Dims(2, 3)),
        ("conv_kernel", (3, 3, 8, 16), Dims((0, 1, 2), 3)),
        ("conv_depthwise", (3, 3, 1, 16), None),
    ],
)
def test_by_path(path, shape, dims):
    assert by_path({path: leaf(*shape)}) == {path: dims}


def test_rules_are_named():
    routes = route({"embed": leaf(10, 4), "w": leaf(4, 4), "v": leaf(4)}, by_path)
    assert [(r.path, r.label, r.rule) for r in routes] == [
        ("params['embed']", "adam", "by_path: an embedding table by name"),
        ("params['v']", "adam", "by_path: rank 1"),
        ("params['w']", "muon", "by_path"),
    ]


def test_the_rank_two_rule_flags_what_it_probably_gets_wrong():
    routes = {r.path: r for r in route({"embed": leaf(10, 4), "stack": leaf(2, 4, 4), "w": leaf(4, 4)})}
    assert routes["params['embed']"].label == "muon" and "an embedding" in routes["params['embed']"].doubt
    assert routes["params['stack']"].label == "adam" and "stack of matrices" in routes["params['stack']"].doubt
    assert not routes["params['w']"].doubt
    text = str(muon_shard.make_plan({"embed": leaf(10, 4), "stack": leaf(2, 4, 4), "w": leaf(4, 4)}))
    assert "2 leaves to Muon, 1 to Adam" in text and "(?)" in text


def test_doubts_are_warned_of_at_init(recwarn):
    muon_shard.muon(0.1).init({"w": np.ones((4, 4), np.float32), "bias": np.ones(4, np.float32)})
    muon_shard.muon(0.1, muon_weight_dimension_numbers=by_path).init({"embed": leaf(10, 4), "w": leaf(4, 4)})
    assert not recwarn
    with pytest.warns(UserWarning, match=r"\['embed'\] to Muon \(an embedding.*\['stack'\] to Adam.*labels.by_path"):
        muon_shard.muon(0.1).init({"embed": leaf(10, 4), "stack": leaf(2, 4, 4)})


def test_routing_sees_global_shapes_only():
    from layouts import CASES

    case = CASES["stacks"]
    host = route(case.host(), case.dims)
    assert host == route(case.put(case.host(), case.make_mesh()), case.dims)


def test_batch_axes_are_the_rest():
    (r,) = route({"w": leaf(4, 3, 8, 2)}, {"w": Dims((-2, 0), 3)})
    assert (r.rows, r.cols, r.batch) == ((2, 0), (3,), (1,))


def test_numpy_trees_route():
    assert route([np.ones((2, 2))])[0].dtype == "float64"
