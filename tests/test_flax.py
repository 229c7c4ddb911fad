"""flax: NNX models annotated or plain, linen `TrainState`, boxed parameters; against one device."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import muon_shard

TOLERANCE = 5e-5  # of the largest change of each parameter, float32
DIMS = muon_shard.labels.by_path
MAKES = {
    "ours": lambda **more: muon_shard.muon(0.1, muon_weight_dimension_numbers=DIMS, **more),
    "optax": lambda: optax.contrib.muon(0.1, muon_weight_dimension_numbers=DIMS),
}
X = np.random.default_rng(0).standard_normal((8, 16)).astype(np.float32)
SPECS = {"up": P("fsdp", None), "down": P(None, "fsdp")}


def make_mesh(axis_type="auto"):
    kind = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}[axis_type]
    return jax.make_mesh((2, 4), ("replica", "fsdp"), axis_types=(kind,) * 2)


class Model(nnx.Module):
    """Two kernels and a norm; annotated ones are born sharded on the mesh of the context."""

    def __init__(self, annotated):
        rngs, make = nnx.Rngs(0), nnx.initializers.lecun_normal()
        inits = {name: nnx.with_partitioning(make, tuple(spec)) if annotated else make for name, spec in SPECS.items()}
        self.up = nnx.Linear(16, 32, rngs=rngs, kernel_init=inits["up"])
        self.norm = nnx.LayerNorm(32, rngs=rngs)
        self.down = nnx.Linear(32, 16, rngs=rngs, kernel_init=inits["down"])

    def __call__(self, x):
        return self.down(self.norm(jnp.tanh(self.up(x))))


def loss_of(model):
    return ((model(X) - X) ** 2).mean()


@nnx.jit
def nnx_step(model, optimizer):
    loss, grads = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, grads)
    return loss


def placed(mesh):
    """A model of plain arrays, laid on the mesh by hand."""
    model = Model(annotated=False)
    for name, linear in (("up", model.up), ("down", model.down)):
        linear.kernel[...] = jax.device_put(linear.kernel[...], NamedSharding(mesh, SPECS[name]))
    rest = nnx.state(model, lambda path, _: path[-1] != "kernel")
    nnx.update(model, jax.device_put(rest, NamedSharding(mesh, P())))
    return model


def train(model, optimizer, steps=3):
    losses = [float(nnx_step(model, optimizer)) for _ in range(steps)]
    return losses, nnx.to_pure_dict(nnx.state(model, nnx.Param))


@functools.lru_cache
def reference():
    """Parameters before, losses, parameters after three steps of `optax.contrib.muon` on one device."""
    model = Model(annotated=False)
    start = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    losses, params = train(model, nnx.Optimizer(model, MAKES["optax"](), wrt=nnx.Param))
    return start, losses, jax.tree.map(np.asarray, params)


def assert_trained(losses, params):
    start, want_losses, want = reference()
    np.testing.assert_allclose(losses, want_losses, rtol=1e-5)
    for g, w, s in zip(*map(jax.tree.leaves, (params, want, start)), strict=True):
        assert np.abs(np.asarray(g) - w).max() <= TOLERANCE * np.abs(np.asarray(w) - s).max()
    for name, spec in SPECS.items():
        kernel = params[name]["kernel"]
        assert kernel.sharding.is_equivalent_to(NamedSharding(kernel.sharding.mesh, spec), 2), name


@pytest.fixture
def no_assumptions(recwarn):
    yield
    assert not [str(w.message) for w in recwarn if "muon_shard" in str(w.message)]


@pytest.mark.parametrize(
    ("how", "axis_type"),
    [
        ("annotated", "auto"),
        ("annotated", "explicit"),
        ("annotated in jit", "auto"),
        ("specs", "auto"),
        ("placed", "auto"),
    ],
)
def test_nnx(how, axis_type, no_assumptions):
    def create():
        model = placed(mesh) if how == "placed" else Model(annotated=True)
        params = nnx.state(model, nnx.Param)
        more = {"param_shardings": nnx.get_partition_spec(params)} if how == "specs" else {}
        return model, nnx.Optimizer(model, MAKES["ours"](**more), wrt=nnx.Param)

    mesh = make_mesh(axis_type)
    with jax.set_mesh(mesh):
        trained = train(*(nnx.jit(create) if how == "annotated in jit" else create)())
    assert_trained(*trained)


def test_nnx_on_one_device():
    model = Model(annotated=False)
    optimizer = nnx.Optimizer(model, MAKES["ours"](), wrt=nnx.Param)
    losses, _ = train(model, optimizer)
    np.testing.assert_allclose(losses, reference()[1], rtol=1e-5)


def test_nnx_state_shardings():
    """The target for a restore, of a model that exists as shapes only."""
    _, params = nnx.get_abstract_model(lambda: Model(annotated=True), make_mesh())
    shardings = muon_shard.opt_state_shardings(MAKES["ours"](), params)
    mu = shardings.inner_states["muon"].inner_state[0].mu
    specs = {name: jax.tree.leaves(mu[name])[0].spec for name in SPECS}
    assert specs == SPECS


class Linen(nn.Module):
    """`Model` in linen; boxed: the kernels are `Partitioned`."""

    boxed: bool

    @nn.compact
    def __call__(self, x):
        init = nn.initializers.lecun_normal()
        up, down = (nn.with_partitioning(init, tuple(spec)) if self.boxed else init for spec in SPECS.values())
        x = nn.LayerNorm(name="norm")(jnp.tanh(nn.Dense(32, kernel_init=up, name="up")(x)))
        return nn.Dense(16, kernel_init=down, name="down")(x)


def as_boxed(model, values):
    """The values of the NNX model in the boxes of linen's."""
    abstract = jax.eval_shape(lambda: model.init(jax.random.key(0), X))["params"]
    return jax.tree.map(
        lambda box, v: box.replace_boxed(v) if hasattr(box, "unbox") else v,
        abstract,
        values,
        is_leaf=lambda x: hasattr(x, "unbox"),
    )


@pytest.mark.parametrize("axis_type", ["auto", "explicit"])
@pytest.mark.parametrize("boxed", [True, False], ids=["boxed", "plain"])
def test_linen_train_state(boxed, axis_type, no_assumptions):
    """Created under jit where boxes tell the shardings, eagerly where only the arrays do."""
    model, mesh = Linen(boxed), make_mesh(axis_type)
    specs = jax.tree.map(lambda x: P(), reference()[0])
    for name, spec in SPECS.items():
        specs[name]["kernel"] = spec
    params = as_boxed(
        model, jax.tree.map(lambda x, s: jax.device_put(x, NamedSharding(mesh, s)), reference()[0], specs)
    )

    def create(params):
        return TrainState.create(apply_fn=model.apply, params=params, tx=MAKES["ours"]())

    @jax.jit
    def step(state):
        loss, grads = jax.value_and_grad(lambda p: ((state.apply_fn({"params": p}, X) - X) ** 2).mean())(state.params)
        return state.apply_gradients(grads=grads), loss

    with jax.set_mesh(mesh):
        state, losses = (jax.jit(create) if boxed else create)(params), []
        for _ in range(3):
            state, loss = step(state)
            losses.append(float(loss))
    assert_trained(losses, nn.unbox(state.params))
