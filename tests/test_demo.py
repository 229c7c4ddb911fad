"""The demo: its pieces here, the whole of it once in a fresh process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers

nnx = pytest.importorskip("flax.nnx")
pytest.importorskip("matplotlib")

from muon_shard import demo  # noqa: E402
from muon_shard.demo import config, devices, measure, model, sharding, text  # noqa: E402
from muon_shard.demo.train import largest_difference, make_task  # noqa: E402
from muon_shard.labels import by_path  # noqa: E402

TINY = config.ModelConfig(width=16, heads=2, layers=2, hidden=32, experts=4, expert_hidden=8)


def mesh_of(**axes) -> Mesh:
    auto = (AxisType.Auto,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=auto)


# Text


def test_corpus_is_english_bytes_and_holds_a_tenth_out():
    corpus = text.load_corpus()
    assert len(corpus.train) > 100_000
    assert len(corpus.held_out) / len(corpus.train) == pytest.approx(1 / 9, rel=0.01)
    assert b"statement" in corpus.train.tobytes() and b"statement" in corpus.held_out.tobytes()


def test_batches_are_windows_of_the_text():
    data = np.frombuffer(bytes(range(100)), np.uint8)
    batches = text.sample_batches(data, count=3, batch=4, context=10, seed=0)
    assert batches.shape == (3, 4, 11) and batches.dtype == np.int32
    assert (np.diff(batches, axis=-1) == 1).all()


def test_batches_repeat_with_the_seed_and_only_then():
    data = text.load_corpus().train
    one, same, other = (text.sample_batches(data, 2, 4, 8, seed) for seed in (0, 0, 1))
    assert (one == same).all() and (one != other).any()


def test_a_context_longer_than_the_text_is_refused():
    with pytest.raises(ValueError, match="context 10 is too long for a text of 10 bytes"):
        text.sample_batches(np.zeros(10, np.uint8), 1, 1, 10, 0)


# Model


def test_a_byte_does_not_see_the_future():
    net = model.Transformer(TINY, 8, nnx.Rngs(0))
    tokens = jnp.arange(16).reshape(2, 8)
    before, after = net(tokens), net(tokens.at[:, 5].set(200))
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert (before[:, 5:] != after[:, 5:]).any()


def test_the_router_chooses_k_experts_and_shares_one_unit_of_weight():
    moe = model.MixtureOfExperts(TINY, nnx.Rngs(0))
    weights = moe.route(jax.random.normal(jax.random.key(1), (2, 3, TINY.width)))
    assert weights.shape == (2, 3, TINY.experts)
    assert ((weights > 0).sum(-1) == TINY.top_k).all()
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-6)


def test_masked_dense_dispatch_equals_running_the_chosen_experts_alone():
    moe = model.MixtureOfExperts(TINY, nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (1, 1, TINY.width))
    weights, expected = moe.route(x)[0, 0], 0
    for expert in np.flatnonzero(weights):
        hidden = jax.nn.gelu(x[0, 0] @ moe.experts_up[...][expert])
        expected += weights[expert] * (hidden @ moe.experts_down[...][expert])
    np.testing.assert_allclose(moe(x)[0, 0], expected, rtol=1e-4, atol=1e-6)


def test_labels_by_path_send_matrices_and_experts_to_muon_and_the_rest_to_adam():
    task = make_task(demo.DemoConfig(steps=1, batch=2, context=8, model=TINY), mesh_of(fsdp=1))
    numbers = by_path(task.params)
    assert numbers["token_embed"]["embedding"] is None
    assert numbers["position_embed"]["embedding"] is None
    assert numbers["head"]["kernel"] is None
    assert numbers["blocks"][0]["attention_norm"]["scale"] is None
    assert numbers["blocks"][0]["attention"]["query"]["kernel"] == MuonDimensionNumbers(0, 1)
    assert numbers["blocks"][0]["feed_forward"]["up"]["kernel"] == MuonDimensionNumbers(0, 1)
    assert numbers["blocks"][1]["feed_forward"]["router"]["kernel"] is None
    assert numbers["blocks"][1]["feed_forward"]["experts_up"] == MuonDimensionNumbers(1, 2)


# Shardings and devices


@pytest.mark.parametrize(
    ("axes", "shape", "spec"),
    [
        (dict(fsdp=2), (8, 6), P("fsdp", None)),
        (dict(fsdp=2), (3, 6), P(None, "fsdp")),
        (dict(fsdp=2), (3, 5), P(None, None)),
        (dict(fsdp=2), (4,), P(None)),
        (dict(fsdp=2), (4, 6, 8), P("fsdp", None, None)),
        (dict(fsdp=2), (3, 6, 8), P(None, "fsdp", None)),
        (dict(replica=2, fsdp=2), (8, 6), P("fsdp", None)),
        (dict(fsdp=2, tensor=2), (8, 6), P("fsdp", "tensor")),
        (dict(expert=2, fsdp=2), (4, 6, 8), P("expert", "fsdp", None)),
        (dict(fsdp=1), (8, 6), P(None, None)),
    ],
)
def test_weights_are_sharded_where_they_divide(axes, shape, spec):
    assert sharding.weight_spec(shape, mesh_of(**axes)) == spec


def test_the_batch_is_split_over_the_axes_that_divide_it():
    mesh = mesh_of(replica=2, fsdp=2, tensor=2)
    assert sharding.batch_axes(mesh, 8) == ("replica", "fsdp")
    assert sharding.batch_axes(mesh, 2) == ("replica",)
    assert sharding.batch_axes(mesh, 3) == ()


def test_loss_and_gradients_do_not_depend_on_the_mesh():
    small = demo.DemoConfig(steps=1, batch=4, context=8, model=TINY)
    results = []
    for mesh in (mesh_of(fsdp=1), mesh_of(replica=2, fsdp=2)):
        task = make_task(small, mesh)
        loss, grads = task.loss_and_grads(task.params, jax.device_put(task.batches[0], task.tokens))
        matches = lambda g, p: g.sharding.is_equivalent_to(p.sharding, p.ndim)  # noqa: E731
        assert all(jax.tree.leaves(jax.tree.map(matches, grads, task.params)))
        results.append((float(loss), jax.device_get(grads)))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-5)
    assert largest_difference(results[0][1], results[1][1]) < 1e-5


def test_a_mesh_of_another_size_than_the_devices_is_refused_in_one_line():
    asked = demo.DemoConfig(mesh=(("replica", 2), ("fsdp", 3)))
    with pytest.raises(ValueError, match=r"mesh replica=2,fsdp=3 needs 6 devices, but there are 2 ") as error:
        devices.make_mesh(asked, jax.devices()[:2])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("count", "axes"), [(1, {"fsdp": 1}), (3, {"fsdp": 3}), (8, {"replica": 2, "fsdp": 4})])
def test_the_default_mesh_uses_all_devices(count, axes):
    assert dict(devices.make_mesh(demo.DemoConfig(), jax.devices()[:count]).shape) == axes


# Settings and measuring


def test_settings_that_cannot_work_are_refused_together():
    with pytest.raises(ValueError, match="steps must be at least 1, got 0; width 10 is not a multiple of heads 4"):
        demo.DemoConfig(steps=0, model=config.ModelConfig(width=10))


def test_the_quick_form_takes_changes():
    quick = demo.DemoConfig.quick(steps=3, batch=2)
    assert (quick.steps, quick.batch) == (3, 2) and quick.model.layers < demo.DemoConfig().model.layers


def test_collectives_are_counted_in_a_compiled_module():
    mesh = mesh_of(fsdp=2)
    arrays = [
        jax.device_put(jnp.ones((4, 4)), NamedSharding(mesh, spec)) for spec in (P("fsdp", None), P(None, "fsdp"))
    ]
    add = jax.jit(lambda x, y: x.sum(), out_shardings=NamedSharding(mesh, P()))
    counts = measure.count_collectives(add.lower(*arrays).compile().as_text())
    assert counts["all-reduce"] == 1 and sum(counts.values()) == 1


def test_an_asynchronous_pair_counts_once():
    hlo = """
      %all-gather-start.1 = (f32[2], f32[4]) all-gather-start(%p), dimensions={0}
      %all-gather-done.1 = f32[4] all-gather-done(%all-gather-start.1)
      ROOT %all-to-all.3 = f32[4] all-to-all(%all-gather-done.1), dimensions={0}
    """
    counts = measure.count_collectives(hlo)
    assert (counts["all-gather"], counts["all-to-all"]) == (1, 1) and sum(counts.values()) == 2


# The whole

QUICK = """
import pathlib, sys
from rich.console import Console
from muon_shard.demo import DemoConfig, run
run(DemoConfig.quick(devices=8, steps=12, out=pathlib.Path(sys.argv[1])), Console(width=100))
"""


@pytest.mark.slow
def test_the_quick_form_trains_and_reports(tmp_path: Path):
    root = Path(__file__).parents[1]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(root), os.getenv("PYTHONPATH")])),
    }
    environment.pop("XLA_FLAGS", None)  # a device count set there would contradict the one asked for
    done = subprocess.run(
        [sys.executable, "-c", QUICK, str(tmp_path / "out")], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    for words in ("8 emulated CPU devices", "Optimizers compared", "optimizer step, ms", "all-to-all"):
        assert words in done.stdout

    record = json.loads((tmp_path / "out" / "demo.json").read_text())
    ours, reference, adamw = record["optimizers"]
    for run in (ours, reference, adamw):
        assert len(run["losses"]) == 12
        assert run["losses"][-1] < run["losses"][0] - 1
    assert record["first_step_difference"] < 1e-5
    # Later weights may differ more, where rounding flips a choice of experts; the curves stay together.
    np.testing.assert_allclose(ours["losses"], reference["losses"], atol=0.01)
    assert sum(ours["collectives"].values()) < sum(reference["collectives"].values())
    assert (tmp_path / "out" / "loss.png").read_bytes().startswith(b"\x89PNG")
