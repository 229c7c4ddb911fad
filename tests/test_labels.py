import re

import jax
import numpy as np
import pytest
from optax.contrib import MuonDimensionNumbers as Dims

import muon_shard
from muon_shard.labels import by_path, flax_modules, from_rules, hugging_face, maxtext, route


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
        ("conv1d", (4, 16, 32), Dims((0, 1), 2)),
        ("conv1d", (64, 1, 4), None),  # [C, 1, K]
        ("short_filter", (64, 1, 4), None),
        ("router_bias", (12, 64), None),
        ("tied_embedding", (1000, 64), None),
    ],
)
def test_by_path(path, shape, dims):
    assert by_path({path: leaf(*shape)}) == {path: dims}


HEADS = Dims(-3, (-2, -1)), Dims((-3, -2), -1)


@pytest.mark.parametrize(
    ("rules", "path", "shape", "dims"),
    [
        (flax_modules, "blocks/0/attention/query/kernel", (64, 4, 16), HEADS[0]),
        (flax_modules, "blocks/0/attention/out/kernel", (4, 16, 64), HEADS[1]),
        (flax_modules, "layers/attention/key/kernel", (12, 64, 4, 16), HEADS[0]),  # scanned
        (flax_modules, "layers/attention/out/kernel", (12, 4, 16, 64), HEADS[1]),
        (flax_modules, "layers/attention/query/bias", (12, 4, 16), None),
        (flax_modules, "layers/LayerNorm_0/scale", (12, 64), None),
        (flax_modules, "layers/mlp/Dense_0/kernel", (12, 64, 256), Dims(1, 2)),
        (flax_modules, "Embed_0/embedding", (1000, 64), None),
        (flax_modules, "Conv_0/kernel", (3, 3, 8, 16), Dims((0, 1, 2), 3)),
        (maxtext, "params/decoder/layers/self_attention/query/kernel", (64, 12, 4, 16), Dims(0, (-2, -1))),
        (maxtext, "params/decoder/layers/self_attention/out/kernel", (4, 12, 16, 64), Dims((0, -2), -1)),
        (maxtext, "params/decoder/layers_0/self_attention/out/kernel", (4, 16, 64), Dims((0, -2), -1)),
        (maxtext, "params/decoder/layers/self_attention/wkv_b/kernel", (32, 12, 4, 16), Dims(0, (-2, -1))),
        (maxtext, "params/decoder/layers/mlp/wi_0/kernel", (64, 12, 256), Dims(0, -1)),
        (maxtext, "params/decoder/layers_0/mlp/wo/kernel", (256, 64), Dims(0, -1)),
        (maxtext, "params/decoder/moe_layers/DeepSeekMoeBlock_0/MoeBlock_0/wi_0", (8, 12, 64, 96), Dims(-2, -1)),
        (maxtext, "params/decoder/moe_layers/DeepSeekMoeBlock_0/MoeBlock_0/gate/kernel", (64, 12, 8), None),
        (maxtext, "params/decoder/layers/pre_self_attention_layer_norm/scale", (64, 12), None),
        (maxtext, "params/token_embedder/embedding", (1000, 64), None),
        (maxtext, "params/decoder/logits_dense/kernel", (64, 1000), None),
        (hugging_face, "transformer/h/0/attn/c_attn/kernel", (192, 64), Dims(1, 0)),
        (hugging_face, "transformer/h/0/ln_1/scale", (64,), None),
        (hugging_face, "transformer/wte/embedding", (1000, 64), None),
        (hugging_face, "model/layers/0/self_attn/q_proj/kernel", (64, 64), Dims(0, 1)),
        (hugging_face, "lm_head/kernel", (64, 1000), None),
        (hugging_face, "bert/encoder/layer/0/attention/self/query/kernel", (64, 64), Dims(0, 1)),
        (hugging_face, "bert/embeddings/token_type_embeddings/embedding", (2, 64), None),
        (hugging_face, "cls/predictions/decoder/kernel", (64, 1000), None),
    ],
)
def test_common_trees(rules, path, shape, dims):
    tree = leaf(*shape)
    for key in reversed(path.split("/")):
        tree = {key: tree}
    (r,) = route(tree, rules)
    assert r.label == ("adam" if dims is None else "muon") and not r.doubt, r
    assert dims is None or (r.rows, r.cols) == tuple(
        tuple(a % len(shape) for a in ((axes,) if isinstance(axes, int) else axes)) for axes in dims
    )


def test_flax_modules_are_named_as_the_rules_expect():
    from flax import nnx

    class Layer(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.attention = nnx.MultiHeadAttention(4, 64, decode=False, rngs=rngs)
            self.conv = nnx.Conv(8, 16, (3, 3), rngs=rngs)
            self.embed = nnx.Embed(10, 4, rngs=rngs)

    shapes = nnx.state(nnx.eval_shape(Layer), nnx.Param)
    routes = {r.path: r for r in route(shapes, flax_modules)}
    got = {path: (r.rows, r.cols) for path, r in routes.items() if r.label == "muon"}
    at = "params['attention']['{}']['kernel'].value"
    assert got == {at.format(name): ((0,), (1, 2)) for name in ("query", "key", "value")} | {
        at.format("out"): ((0, 1), (2,)),
        "params['conv']['kernel'].value": ((0, 1, 2), (3,)),
    }


def test_own_rules_come_first_and_are_named():
    rules = from_rules([("mixer/(up|down)", Dims(0, -1)), ("^gate$", "adam"), ("mixer", Dims(-2, -1))])
    tree = {"mixer": {"up": leaf(8, 3, 8), "w": leaf(3, 8, 4)}, "gate": leaf(8, 8), "embed": leaf(9, 8)}
    assert {r.path: (r.label, r.rule, r.rows) for r in route(tree, rules)} == {
        "params['mixer']['up']": ("muon", "from_rules: 'mixer/(up|down)'", (0,)),
        "params['mixer']['w']": ("muon", "from_rules: 'mixer'", (1,)),
        "params['gate']": ("adam", "from_rules: '^gate$'", ()),
        "params['embed']": ("adam", "by_path: an embedding table by name", ()),
    }
    assert "from_rules: '^gate$'" in str(muon_shard.make_plan(tree, muon_weight_dimension_numbers=rules))
    tx = muon_shard.muon(0.1, muon_weight_dimension_numbers=rules)
    params = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), tree)
    jax.eval_shape(lambda: tx.update(params, tx.init(params), params))


def test_wrong_rules_are_all_listed():
    message = r"(?s)entry 0, .*neither.*'adam'.*entry 1, 'x': not a pair.*entry 2, .*regular expression"
    with pytest.raises(ValueError, match=message):
        from_rules([("w", "sgd"), "x", ("(", "adam")])  # type: ignore[list-item]


def test_no_matrix_at_all_is_an_error():
    rules = from_rules([("", "adam")])
    with pytest.raises(ValueError, match=r"not one is a Muon leaf.*\n\* params\['w'\].*from_rules: ''"):
        muon_shard.muon(0.1, muon_weight_dimension_numbers=rules).init({"w": leaf(4, 4)})


def test_a_guess_is_warned_of_once_and_shown():
    tree = {"mixing": leaf(4, 8, 16), "layers": {"w": leaf(4, 8, 16)}, "experts": leaf(2, 8, 16)}
    tx = muon_shard.muon(0.1, muon_weight_dimension_numbers=by_path)
    with pytest.warns(UserWarning, match=r"a guess sends params\['mixing'\] to Muon .*8 × 16\).*from_rules") as seen:
        tx.init(tree)
    assert len(seen) == 1 and "layers" not in str(seen[0].message)


def test_scanned_stacks_agree_with_their_layers():
    """Biases [L, d] stay with Adam, weights are orthogonalized layer by layer, wherever the layers' axis is."""
    rng = np.random.default_rng(0)
    layers = [rng.standard_normal((8, 16)).astype(np.float32) for _ in range(3)]
    trees = {
        "first": {"layers": {"w": np.stack(layers), "bias": np.ones((3, 16), np.float32)}},
        "second": {"layers": {"mlp": {"kernel": np.stack(layers, 1)}, "bias": np.ones((16, 3), np.float32)}},
    }
    alone = muon_shard.muon(0.1)
    want = [alone.update([x], alone.init([x]), [x])[0][0] for x in layers]
    for name, rules, axis in (("first", by_path, 0), ("second", maxtext, 1)):
        tx, tree = muon_shard.muon(0.1, muon_weight_dimension_numbers=rules), trees[name]
        assert [r.label for r in route(tree, rules)] == ["adam", "muon"]
        got = max(jax.tree.leaves(tx.update(tree, tx.init(tree), tree)[0]), key=lambda x: x.ndim)
        np.testing.assert_allclose(got, np.stack(want, axis), atol=1e-5)


def test_convolutions_agree_with_their_matrices():
    kernel = np.random.default_rng(0).standard_normal((3, 3, 8, 16)).astype(np.float32)
    tx = muon_shard.muon(0.1, muon_weight_dimension_numbers=by_path)
    params, flat = {"conv": kernel}, {"conv": kernel.reshape(72, 16)}
    got, _ = tx.update(params, tx.init(params), params)
    want, _ = tx.update(flat, tx.init(flat), flat)
    np.testing.assert_allclose(got["conv"].reshape(72, 16), want["conv"], atol=1e-6)


def test_rules_are_named():
    routes = route({"embed": leaf(10, 4), "w": leaf(4, 4), "v": leaf(4)}, by_path)
    assert [(r.path, r.label, r.rule) for r in routes] == [
        ("params['embed']", "adam", "by_path: an embedding table by name"),
        ("params['v']", "adam", "by_path: rank 1"),
        ("params['w']", "muon", "by_path: rank 2"),
    ]


def test_the_printed_plan_says_where_leaves_go_and_why():
    text = str(muon_shard.make_plan({"embed": leaf(10, 4), "w": leaf(4, 4)}, muon_weight_dimension_numbers=by_path))
    assert "1 leaf to Muon, 1 to Adam" in text
    assert re.search(r"embed +\[10, 4\] +adam +by_path: an embedding table by name", text)
    assert re.search(r"w +\[4, 4\] +muon +by_path: rank 2", text)


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


def test_a_rule_that_matches_nothing_is_named():
    rules = from_rules([("qkv_proj", Dims(0, 1)), ("up", Dims(0, 1))])
    with pytest.warns(UserWarning, match="'qkv_proj' of from_rules: no leaf matches. Paths look like 'qkv'"):
        muon_shard.muon(0.1, muon_weight_dimension_numbers=rules).init({"qkv": np.ones((4, 4)), "up": np.ones((4, 4))})


def test_rules_taken_for_a_schedule_say_so():
    with pytest.raises(ValueError, match="static_args=muon_shard.STATIC_ARGS"):
        by_path(np.zeros([], np.int32))
