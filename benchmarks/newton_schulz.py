"""Speed of Newton–Schulz: the form that is chosen against the direct form in full, per shape, in one run.

One line of JSON: per shape the form, milliseconds (medians of interleaved rounds), and ratios to ours (medians of the
rounds' ratios), above 1 where ours is faster. Peers: `direct`, matrix by matrix where ours does so; for batches also
`batched`, one product over the whole batch, and `separate`, one textbook form per matrix in one jit.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import track

import muon_shard
from muon_shard.newton_schulz import NewtonSchulz
from muon_shard.newton_schulz.coefficients import coefficients, slopes
from muon_shard.newton_schulz.forms import Form
from muon_shard.newton_schulz.iterate import iterate
from muon_shard.newton_schulz.orthogonalize import batched as whole
from muon_shard.newton_schulz.orthogonalize import one_by_one
from muon_shard.newton_schulz.products import PRODUCTS

SHAPES = (
    *((1024, 4096), (1024, 2048), (2048, 2048), (1024, 1024), (512, 512), (512, 2048), (256, 1024)),
    *((74, 24, 10240), (200, 8, 16), (64, 32, 64), (64, 32, 128), (64, 64, 64), (32, 64, 256), (16, 128, 128)),
    *((16, 128, 256), (16, 128, 512), (8, 256, 256), (8, 256, 512), (4, 512, 768), (4, 512, 1024), (2, 512, 2048)),
)


def batched(x: jax.Array) -> jax.Array:
    """The direct form, its products neither taken apart by matrices nor by blocks."""
    rows = jnp.broadcast_to(coefficients("standard", 5), (5, 3))
    return iterate(x, rows, jnp.float32(1e-8), Form((1,) * 5, PRODUCTS["same"]), "frobenius", None, whole)


def direct(x: jax.Array) -> jax.Array:
    """The same, by matrices where ours does so."""
    return one_by_one(batched, x) if x.ndim > 2 and jax.default_backend() == "cpu" else batched(x)


def textbook(x: jax.Array) -> jax.Array:
    """One m×n matrix, m ≤ n, as Muon is usually written down: divide by the norm, then the steps."""
    a, b, c = coefficients("standard", 5)

    def step(_: int, x: jax.Array) -> jax.Array:
        r = x @ x.T
        return a * x + (b * r + c * r @ r) @ x

    return jax.lax.fori_loop(0, 5, step, x / (jnp.linalg.norm(x) + 1e-8))


def separate(x: jax.Array) -> jax.Array:
    """One textbook form per matrix, the results put together as ours come."""
    return jnp.stack([textbook(one) for one in x])


def measure(shape: tuple[int, ...], dtype: str, rounds: int) -> dict[str, str | float]:
    """Medians in milliseconds for one shape."""
    ways: dict[str, Callable] = {"ours": muon_shard.orthogonalize, "direct": direct}
    if len(shape) == 3:
        ways |= {"batched": batched, "separate": separate}
    ways = {name: jax.jit(way) for name, way in ways.items()}
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal(shape, dtype=np.float32), dtype)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for round_ in range(rounds + 1):
        # In another order each round: a small batch is slower right after many separate ones.
        for name in rng.permutation(list(ways)):
            way, start = ways[name], time.perf_counter()
            jax.block_until_ready(way(x))
            if round_:  # the first compiles
                times[name].append(1e3 * (time.perf_counter() - start))
    form = NewtonSchulz(slopes=slopes("standard", 5), platform=jax.default_backend()).form(shape[-2], shape[-1], dtype)
    ratios = {
        f"{name}_over_ours": round(statistics.median(a / b for a, b in zip(t, times["ours"], strict=True)), 2)
        for name, t in times.items()
        if name != "ours"
    }
    return {"form": form.name} | {name: round(statistics.median(t), 3) for name, t in times.items()} | ratios


def main() -> None:
    """Parse the command line and print one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.newton_schulz", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), type=lambda s: tuple(map(int, s.split("x"))))
    args = parser.parse_args()
    shapes = {
        "x".join(map(str, shape)): measure(shape, args.dtype, args.rounds)
        for shape in track(args.shapes, "shapes", transient=True, console=Console(stderr=True))
    }
    print(json.dumps({"platform": jax.default_backend(), "jax": jax.__version__, **(vars(args) | {"shapes": shapes})}))


if __name__ == "__main__":
    main()
