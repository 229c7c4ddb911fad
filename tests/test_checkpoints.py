"""Checkpoints move between meshes, and to `optax.contrib.muon` and back; the loss goes on as if nothing happened."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import PartitionSpec as P
from layouts import Case, Leaf

import muon_shard

TOLERANCE = 1e-5  # of the loss, float32, after three more steps
CUTS = {
    "replica2_fsdp4": ({"replica": 2, "fsdp": 4}, P("fsdp"), P(None, "fsdp"), P()),
    "fsdp8": ({"fsdp": 8}, P("fsdp"), P("fsdp"), P("fsdp")),
    "three_axes": ({"replica": 2, "fsdp": 2, "tensor": 2}, P("fsdp", "tensor"), P("tensor", "fsdp"), P("tensor")),
    "one_device": ({"x": 1}, P(), P(), P()),
}
CASES = {
    name: Case(mesh, {"up": Leaf((16, 32), up), "down": Leaf((32, 16), down), "bias": Leaf((32,), bias, None)})
    for name, (mesh, up, down, bias) in CUTS.items()
}
OVER_REPLICAS = ", over replicas"
X = np.random.default_rng(1).standard_normal((64, 16)).astype(np.float32)


def place(name):
    """The transformation and what puts host arrays where it works: 'optax' is on one device, without a mesh."""
    if name == "optax":
        return optax.contrib.muon(0.02), lambda host: jax.tree.map(jnp.asarray, host)
    case, over_replicas = CASES[name.removesuffix(OVER_REPLICAS)], name.endswith(OVER_REPLICAS)
    options = muon_shard.PlanOptions(momentum_sharding="replicas" if over_replicas else "params")
    return muon_shard.muon(0.02, plan_options=options), lambda host: case.put(host, case.make_mesh())


def loss_of(params):
    return jnp.mean((jnp.tanh(X @ params["up"] + params["bias"]) @ params["down"] - X) ** 2)


def train(tx, params, state, steps=3):
    @jax.jit
    def step(params, state):
        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    losses = []
    for _ in range(steps):
        params, state, loss = step(params, state)
        losses.append(float(loss))
    return params, state, losses


@functools.lru_cache
def before(name):
    """What a checkpoint after three steps holds, and the losses of three more without a break."""
    tx, put = place(name)
    params = put(CASES["one_device"].host())
    params, state, _ = train(tx, params, tx.init(params))
    return params, state, train(tx, params, state)[2]


def target(name):
    """Shapes and shardings to restore to; without a mesh, orbax wants a sharding all the same."""
    tx, put = place(name)
    params = put(CASES["one_device"].host())
    single = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    state = jax.eval_shape(tx.init, params)
    shardings = jax.tree.map(lambda _: single, state) if name == "optax" else muon_shard.opt_state_shardings(tx, params)
    as_struct = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)  # noqa: E731
    return tx, jax.tree.map(lambda x: as_struct(x, x.sharding), params), jax.tree.map(as_struct, state, shardings)


@pytest.mark.parametrize(
    ("saved", "restored"),
    [
        ("replica2_fsdp4", "replica2_fsdp4"),
        ("replica2_fsdp4", "fsdp8"),
        ("replica2_fsdp4", "three_axes"),
        ("replica2_fsdp4", "one_device"),
        ("replica2_fsdp4", "optax"),
        ("optax", "replica2_fsdp4"),
        ("replica2_fsdp4", "replica2_fsdp4" + OVER_REPLICAS),
        ("replica2_fsdp4" + OVER_REPLICAS, "replica2_fsdp4"),
        ("replica2_fsdp4" + OVER_REPLICAS, "three_axes" + OVER_REPLICAS),
        ("replica2_fsdp4" + OVER_REPLICAS, "optax"),
    ],
)
def test_training_goes_on(saved, restored, tmp_path, recwarn):
    params, state, want_losses = before(saved)
    tx, like_params, like_state = target(restored)
    with ocp.CheckpointManager(tmp_path) as manager:
        save = ocp.args.StandardSave
        manager.save(3, args=ocp.args.Composite(params=save(params), opt_state=save(state)))
        manager.wait_until_finished()
        restore = ocp.args.StandardRestore
        got = manager.restore(3, args=ocp.args.Composite(params=restore(like_params), opt_state=restore(like_state)))
    assert jax.tree.structure(got.opt_state) == jax.tree.structure(like_state)
    for x, like, want in zip(*map(jax.tree.leaves, (got.opt_state, like_state, state)), strict=True):
        np.testing.assert_array_equal(x, want)  # bitwise: nothing is computed on the way
        assert x.sharding.is_equivalent_to(like.sharding, x.ndim)
    _, _, losses = train(tx, got.params, got.opt_state)
    np.testing.assert_allclose(losses, want_losses, rtol=TOLERANCE)
    assert not [str(w.message) for w in recwarn if "muon_shard" in str(w.message)]
