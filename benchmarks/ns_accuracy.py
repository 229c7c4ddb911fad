"""Errors of Newton–Schulz against the singular values in float64: coefficient set × form × dtype × input.

One line of JSON with ‖got − want‖ ÷ ‖want‖ in Frobenius norms. A way is a dtype and a form: direct, gram as chosen on
CPU, or Gram form with the products of other hardware (split, half), emulated by rounded operands. A set runs with the
steps it is made for. `--plot` also draws what the sets make of singular values, and errors by condition number.
"""

import argparse
import functools
import importlib.util
import json
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import track

from benchmarks.ns_oracle import (
    compose,
    decompose,
    low_rank,
    polynomial,
    relative_errors,
    rows_of,
    steps_of,
    with_condition,
)
from muon_shard.newton_schulz.coefficients import COEFFICIENTS, slopes
from muon_shard.newton_schulz.forms import Form, choose, segments
from muon_shard.newton_schulz.iterate import iterate
from muon_shard.newton_schulz.orthogonalize import batched
from muon_shard.newton_schulz.products import PRODUCTS

WAYS = (
    *(("float32", "direct"), ("float32", "gram")),
    *(("bfloat16", "direct"), ("bfloat16", "gram"), ("bfloat16", "split"), ("bfloat16", "half")),
)
CONDITIONS = tuple(10.0**i for i in range(9))
ROWS = 64
ASPECT = 4


def form_of(how: str, coeffs: str, steps: int, dtype: str = "float32", blocks: int = 1) -> Form:
    """'direct' or 'gram' as chosen on CPU for a small matrix, 'split' or 'half': Gram form with such products."""
    a = slopes(coeffs, steps) or ()
    if how in ("direct", "gram"):
        form, _ = choose(ROWS, ROWS * ASPECT, dtype, a, steps, how, "cpu", False)
    else:
        form = Form(segments(a, PRODUCTS[how].delta), PRODUCTS[how])
    return Form(form.segments, form.products, blocks)


# By default XLA on CPU keeps more digits between operations than bfloat16 has.
@functools.partial(
    jax.jit,
    static_argnames=("form", "preconditioning"),
    compiler_options={"xla_allow_excess_precision": False},
)
def run(x: jax.Array, rows: jax.Array, form: Form, preconditioning: str = "frobenius") -> jax.Array:
    """A form on matrices [..., m, n], m ≤ n, at once."""
    return iterate(x, rows, jnp.float32(0), form, preconditioning, None, batched)


class Rounded:
    """Matrices [..., m, n] rounded to a dtype, and their singular values and vectors."""

    def __init__(self, x: np.ndarray, dtype: str):
        self.x = jnp.asarray(x, dtype)
        self.plain = np.complex128 if np.iscomplexobj(x) else np.float64
        self.parts = decompose(np.asarray(self.x).astype(self.plain))

    def errors(self, rows: np.ndarray, form: Form) -> np.ndarray:
        """Of a form, for each matrix."""
        real = jnp.promote_types(self.x.real.dtype, jnp.float32)
        got = np.asarray(run(self.x, jnp.asarray(rows, real), form)).astype(self.plain)
        return relative_errors(got, compose(self.parts, rows))


def inputs(seed: int = 0) -> dict[str, np.ndarray]:
    """The kinds of matrices in the table."""
    rng = np.random.default_rng(seed)
    shape = ROWS, ROWS * ASPECT
    return {
        "gaussian square": rng.standard_normal((ROWS, ROWS)),
        "gaussian wide": rng.standard_normal(shape),
        "rank 1": low_rank(rng, *shape, 1),
        **{f"condition 1e{i}": with_condition(rng, *shape, 10.0**i) for i in (2, 4, 6)},
    }


def table(
    sets: Iterable[str] = tuple(COEFFICIENTS),
    ways: Iterable[tuple[str, str]] = WAYS,
    kinds: Mapping[str, np.ndarray] | None = None,
) -> dict[str, dict[str, dict[str, float]]]:
    """Errors by set, way ('float32 gram') and kind of input."""
    kinds, ways = kinds or inputs(), tuple(ways)
    names: dict[tuple[int, ...], list[str]] = {}
    for kind, x in kinds.items():
        names.setdefault(x.shape, []).append(kind)
    batches = {}
    for shape, members in names.items():
        # XLA on CPU treats a batch of one differently.
        x = np.stack([kinds[kind] for kind in members]) if len(members) > 1 else kinds[members[0]]
        batches |= {(dtype, shape): Rounded(x, dtype) for dtype in {dtype for dtype, _ in ways}}
    report: dict[str, dict[str, dict[str, float]]] = {}
    for coeffs in sets:
        steps = steps_of(coeffs)
        for dtype, how in ways:
            form, found = form_of(how, coeffs, steps, dtype), {}
            for shape in names:
                each = batches[dtype, shape].errors(rows_of(coeffs), form)
                found |= dict(zip(names[shape], np.atleast_1d(each).tolist(), strict=True))
            report.setdefault(coeffs, {})[f"{dtype} {how}"] = {kind: found[kind] for kind in kinds}
    return report


def by_condition(coeffs: str, ways: Iterable[tuple[str, str]] = WAYS, seed: int = 1) -> dict[str, list[float]]:
    """Errors of each way at `CONDITIONS`."""
    rng = np.random.default_rng(seed)
    x = np.stack([with_condition(rng, ROWS, ROWS * ASPECT, condition) for condition in CONDITIONS])
    batches = {dtype: Rounded(x, dtype) for dtype in {dtype for dtype, _ in ways}}
    return {
        f"{dtype} {how}": batches[dtype].errors(rows_of(coeffs), form_of(how, coeffs, steps_of(coeffs), dtype)).tolist()
        for dtype, how in ways
    }


def draw() -> Any:
    """A matplotlib figure: singular values after all steps per set, and errors by condition number per way."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 6), layout="constrained")
    left, right = figure.subplots(1, 2)
    draw_singular_values(left)
    draw_errors(right)
    for axes in (left, right):
        axes.grid(color="0.9")
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2, frameon=False)
    return figure


def draw_singular_values(axes: Any) -> None:
    """The exact scalar map of each set."""
    sigma = np.logspace(-3, 0, 4000)
    styles: list[Any] = ["-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 3))]
    for coeffs, style in zip(COEFFICIENTS, styles, strict=False):
        values = polynomial(sigma, rows_of(coeffs))
        label = f"{coeffs}, {steps_of(coeffs)} steps"
        if (values < 0).any():
            label += f", negative from {sigma[values < 0].min():.2f}"
        axes.plot(sigma, values, linestyle=style, linewidth=3 if style == ":" else 1.5, label=label)
    axes.set(xscale="log", xlim=(1e-3, 1), ylim=(0, 1.3), title="Singular values after all steps, exact")
    axes.set(xlabel="singular value ÷ norm of the matrix", ylabel="singular value of the result")


def draw_errors(axes: Any) -> None:
    """Errors by condition number of each way."""
    looks = {"direct": ("o", "--"), "gram": ("s", "-"), "split": ("v", ":"), "half": ("^", "-.")}
    colors = {"direct": "tab:red", "gram": "tab:red", "split": "tab:orange", "half": "tab:purple"}
    for way, values in by_condition("standard").items():
        dtype, how = way.split()
        marker, line = looks[how]
        name = way if how in ("direct", "gram") else f"{dtype} gram, {how} products"
        color = "tab:blue" if dtype == "float32" else colors[how]
        axes.plot(CONDITIONS, values, marker=marker, color=color, linestyle=line, label=name)
    axes.set(xscale="log", yscale="log", ylim=(1e-7, 1), title=f"Error of 'standard' on {ROWS}×{ROWS * ASPECT}")
    axes.set(xlabel="condition number", ylabel="relative error in the Frobenius norm")


def main() -> None:
    """Parse the command line, print one line of JSON, draw where asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ns_accuracy", description=__doc__)
    parser.add_argument("--plot", metavar="FILE.png", help="also draw; needs matplotlib")
    args = parser.parse_args()
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib. Consider pip install muon_shard[plot].")
    found = table(track(COEFFICIENTS, "sets", transient=True, console=Console(stderr=True)))
    rounded = {
        coeffs: {way: {kind: float(f"{e:.2g}") for kind, e in kinds.items()} for way, kinds in ways.items()}
        for coeffs, ways in found.items()
    }
    if args.plot:
        draw().savefig(args.plot, dpi=150)
    report = {"platform": jax.default_backend(), "jax": jax.__version__, "shape": [ROWS, ROWS * ASPECT]}
    print(json.dumps(report | {"errors": rounded}))


if __name__ == "__main__":
    main()
