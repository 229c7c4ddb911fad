import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.ns_oracle import polynomial, rows_of, steps_of
from muon_shard.newton_schulz import COEFFICIENTS, coefficients
from muon_shard.newton_schulz.coefficients import slopes

SIGMA = np.logspace(-2, 0, 20001)
BANDS = {  # of σ in [.01, 1] after the steps given, as the comments of `COEFFICIENTS` say
    "standard": (5, 0.68, 1.135),
    "dion": (5, 0.977, 1.032),
    "you6": (6, 0.995, 0.9995),
    "polar_express": (5, 0.846, 1.124),
    "deepseek_v4": (10, 0.9999, 1.001),
}


@pytest.mark.parametrize("name", BANDS)
def test_singular_values_end_in_the_documented_band(name):
    steps, low, high = BANDS[name]
    values = polynomial(SIGMA, rows_of(name, steps))
    assert low <= values.min() and values.max() <= high


def test_the_aol_set_ends_near_one_below_87_percent_and_turns_larger_values_around():
    values = polynomial(SIGMA, rows_of("aol"))
    inside = (SIGMA > 0.02) & (SIGMA < 0.87)
    assert 0.987 <= values[inside].min() and values[inside].max() <= 1.085
    assert values[SIGMA > 0.89].max() < -0.6


@pytest.mark.parametrize(
    ("name", "most"), [("standard", 1.1), ("dion", 1.1), ("deepseek_v4", 1.1), ("you6", 1.05), ("polar_express", 1.05)]
)
def test_singular_values_a_little_above_one_stay_bounded(name, most):
    assert np.abs(polynomial(np.linspace(1, most, 1001), rows_of(name))).max() <= 1.25


def test_polar_express_is_the_paper_s_with_a_wider_safety():
    first, second, *_, last = COEFFICIENTS["polar_express"]
    raw = 8.28721201814563, -23.595886519098837, 17.300387312530933
    np.testing.assert_allclose(first, [raw[0] / 1.05, raw[1] / 1.05**3, raw[2] / 1.05**5], rtol=1e-12)
    np.testing.assert_allclose(second[0], 4.107059111542203 / 1.05, rtol=1e-12)
    assert last == (1.875, -1.25, 0.375)


@pytest.mark.parametrize(
    ("name", "steps"),
    [("standard", 5), ("dion", 5), ("you6", 6), ("polar_express", 8), ("aol", 4), ("deepseek_v4", 10)],
)
def test_sets_have_the_steps_they_are_made_for(name, steps):
    assert steps_of(name) == steps
    assert coefficients(name, steps).shape == ((3,) if name == "standard" else (steps, 3))


def test_coefficients_have_optax_shapes():
    assert coefficients("standard", 5).shape == (3,)
    assert coefficients("dion", 5).shape == (5, 3)
    assert coefficients((2.0, -1.5, 0.5), 7).shape == (3,)


@pytest.mark.parametrize("steps", [1, 3, 5])
def test_surplus_rows_are_cut_from_the_end(steps):
    np.testing.assert_allclose(coefficients("dion", steps), np.array(COEFFICIENTS["dion"])[:steps], rtol=1e-6)
    assert slopes("dion", steps) == tuple(row[0] for row in COEFFICIENTS["dion"][:steps])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("nonesuch", "Unknown ns_coeffs preset 'nonesuch'; known: standard, dion, you6, polar_express, aol"),
        ("aol", "ns_coeffs has 4 rows, too few for ns_steps=5"),
        (((1.0, 2.0, 3.0),) * 4, "ns_coeffs has 4 rows, too few for ns_steps=5"),
        ((1.0, 2.0), r"must have shape \(3,\) or \(n, 3\), got \(2,\)"),
        (np.ones((5, 3, 3)), r"got \(5, 3, 3\)"),
        (1.0, r"got \(\)"),
    ],
)
def test_wrong_coefficients_raise(given, message):
    for function in (coefficients, slopes):
        with pytest.raises(ValueError, match=message):
            function(given, 5)


def test_slopes_are_one_per_step_and_known_under_jit():
    assert slopes("standard", 3) == (3.4445,) * 3
    seen = []
    jax.jit(lambda x: seen.append(slopes(((3.0, -2.0, 0.5),) * 2, 2)) or x)(0)
    assert seen == [(3.0, 3.0)]


def test_slopes_of_traced_coefficients_are_unknown():
    seen = []
    jax.jit(lambda rows: seen.append(slopes(rows, 5)) or coefficients(rows, 5))(jnp.ones(3))
    jax.jit(lambda a: seen.append(slopes((a, -1.5, 0.5), 5)) or coefficients((a, -1.5, 0.5), 5))(2.0)
    assert seen == [None, None]
