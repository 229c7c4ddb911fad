"""The benchmark for one accelerator, on CPU: its arithmetic, what it refuses, and that it says what does not fit."""

import json
import sys

import jax
import jax.numpy as jnp
import pytest

from benchmarks import accelerator as bench
from benchmarks.accelerator import ARITHMETIC, FULL, SMALL, largest_apart, newton_schulz, optimizer_step
from muon_shard.cost import ns_flops


def test_the_full_model_has_a_billion_parameters():
    shapes = FULL.transformer()
    assert sum(m * n for m, n in shapes.values()) == pytest.approx(1e9, rel=0.03)
    assert len(shapes) == 7 * 16 and shapes["15.down"] == (8192, 2048)


def test_shapes_are_wide():
    assert all(m <= n for *_, m, n in FULL.shapes + SMALL.shapes)


@pytest.mark.parametrize("arithmetic", ARITHMETIC)
def test_rates_are_direct_flops_over_seconds(arithmetic):
    found = newton_schulz(SMALL, (2, 16, 48), *ARITHMETIC[arithmetic], 1)
    assert found.keys() == {"direct", "gram", "auto", "one program each"}
    for way in found.values():
        assert way["tflops"] * 1e12 == pytest.approx(2 * ns_flops(16, 48) / (way["ms"] / 1e3), rel=0.02)
        assert way["of_peak"] > 0
    assert found["direct"]["form"] == "direct" and found["gram"]["form"].startswith("gram")
    assert found["auto"]["to_auto"] == 1.0


def test_a_form_that_is_not_safe_is_told(monkeypatch):
    monkeypatch.setattr(bench, "slopes", lambda *_: None)
    found = newton_schulz(SMALL, (16, 48), "float32", None, 1)
    assert "no safe form" in found["gram"]["refused"] and "ms" not in found["gram"]
    assert found["direct"]["ms"] > 0


def test_the_peak_is_of_the_arithmetic_asked_for():
    for dtype, precision in ARITHMETIC.values():
        assert bench.product(8, dtype, precision)().dtype == dtype
    assert bench.peak(SMALL, "float32", None, 1) > 0


TINY = bench.Sizes(32, ((8, 16),), 1, 16, 8, 32, 0.0)


def test_what_does_not_fit_says_so(monkeypatch):
    def full(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory\nwhere")

    monkeypatch.setattr(bench.timing, "compile_step", full)
    found = optimizer_step(TINY, "float32", 1, lambda: None)
    assert found["failed"] == "RESOURCE_EXHAUSTED: out of memory" and "ways" not in found


def test_largest_apart():
    want = {"a": jnp.array([1.0, -4.0]), "b": jnp.array([0.5])}
    assert largest_apart(want | {"b": jnp.array([0.7])}, want) == pytest.approx(0.05)


def test_the_command_prints_one_line_of_json(monkeypatch, capsys):
    monkeypatch.setattr(bench, "SMALL", TINY)
    monkeypatch.setattr(bench.Sizes, "transformer", lambda self: {"q": (self.width, self.width), "k": (16, 8)})
    monkeypatch.setattr(sys, "argv", ["accelerator", "--quick", "--arithmetic", "float32", "--shapes", "8x16", "2x8x8"])
    bench.main()
    out, _ = capsys.readouterr()
    report = json.loads(out)
    assert out.count("\n") == 1 and report["sizes"] == "small" and report["platform"] == "cpu"
    assert report["device"] == jax.devices()[0].device_kind
    assert report["shapes"]["float32"].keys() == {"8x16", "2x8x8"} and report["peaks"].keys() == {"float32"}
    assert report["step"].keys() == {"float32"}
    step = report["step"]["float32"]
    assert step["relative_difference"] < 1e-5
    assert step["ways"].keys() == {"ours", "optax", "adamw"}
    assert step["parameters"] == 16 * 16 + 16 * 8
    assert step["direct_flops"] == ns_flops(16, 16) + ns_flops(8, 16)
    assert step["ways"]["ours"]["tflops"] > 0 and "tflops" not in step["ways"]["adamw"]
