"""Newton–Schulz on a batch: one product over all matrices against one matrix after the other.

`NewtonSchulz` picks the second on CPU. One line of JSON: per shape, milliseconds of both (medians of interleaved
rounds) and their ratio, above 1 where one by one is faster.
"""

import argparse
import json
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from muon_shard.newton_schulz import NewtonSchulz, coefficients

SHAPES = ((64, 32, 64), (16, 64, 64), (64, 128, 128), (16, 128, 512), (8, 256, 1024), (4, 512, 512), (2, 512, 2048))
SHAPES += ((4, 1024, 1024), (74, 24, 10240), (200, 8, 16))


def measure(shape: tuple[int, int, int], rounds: int) -> dict[str, float]:
    """Medians in milliseconds for one [batch, m, n]."""
    run, coeffs, eps = NewtonSchulz(), coefficients("standard", 5), jnp.float32(1e-8)
    x = jnp.asarray(np.random.default_rng(0).standard_normal(shape, dtype=np.float32))
    ways = {"batched": jax.jit(run._batched), "one_by_one": jax.jit(run._one_by_one)}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for round_ in range(rounds + 1):
        for name, way in ways.items():
            start = time.perf_counter()
            jax.block_until_ready(way(x, coeffs, eps))
            if round_:  # the first compiles
                times[name].append(1e3 * (time.perf_counter() - start))
    medians = {name: round(statistics.median(t), 3) for name, t in times.items()}
    return medians | {"ratio": round(medians["batched"] / medians["one_by_one"], 2)}


def main() -> None:
    """Parse the command line and print one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ns_batching", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    shapes = {"x".join(map(str, shape)): measure(shape, rounds) for shape in SHAPES}
    print(json.dumps({"platform": jax.default_backend(), "jax": jax.__version__, "rounds": rounds, "shapes": shapes}))


if __name__ == "__main__":
    main()
