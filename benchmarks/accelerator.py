"""Newton–Schulz and the optimizer step on one device: a GPU or TPU where there is one, else small sizes on CPU.

One line of JSON. `peaks`: TFLOP/s of a large square product for each arithmetic, the fastest round. `shapes`: per
arithmetic and shape, for each form milliseconds (medians), TFLOP/s as if it did the direct form's FLOPs, and `of_peak`,
these over the rate of the large product in the same round (medians); a form that saves FLOPs may exceed 1. Batches also
in one program per matrix. `step`: the optimizer step of a transformer, on accelerators one of 1B parameters, ours
against optax and AdamW.

| arithmetic | what it is |
| --- | --- |
| `float32 highest` | float32 in and out, products at full precision |
| `float32` | products at JAX's default precision: TF32 on GPU, bfloat16 passes on TPU |
| `bfloat16` | bfloat16 in and out |
"""

import argparse
import dataclasses
import functools
import json
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import muon_shard
from benchmarks import rounds as timing
from benchmarks.peers import LEARNING_RATE
from muon_shard.cost import ns_flops
from muon_shard.newton_schulz import NewtonSchulz
from muon_shard.newton_schulz.coefficients import slopes
from muon_shard.newton_schulz.orthogonalize import Method

ARITHMETIC: dict[str, tuple[str, str | None]] = {
    "float32 highest": ("float32", "highest"),
    "float32": ("float32", None),
    "bfloat16": ("bfloat16", None),
}
FORMS: tuple[Method, ...] = ("direct", "gram", "auto")
Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is measured.

    Attributes:
        square: rows and columns of the product that gives the peak.
        shapes: m×n with m ≤ n, batches in front.
        layers: of the transformer, with its `width`, the width of its keys and values, and of its feed-forward.
        width: as said.
        narrow: of keys and values.
        inner: of the feed-forward.
        least: seconds that one measurement takes at least.
    """

    square: int
    shapes: tuple[Shape, ...]
    layers: int
    width: int
    narrow: int
    inner: int
    least: float

    def transformer(self) -> dict[str, Shape]:
        """Its matrices, name → shape."""
        layer = {"q": (self.width, self.width), "k": (self.width, self.narrow), "v": (self.width, self.narrow)}
        layer |= {"o": (self.width, self.width), "gate": (self.width, self.inner)}
        layer |= {"up": (self.width, self.inner), "down": (self.inner, self.width)}
        return {f"{i}.{name}": shape for i in range(self.layers) for name, shape in layer.items()}


SMALL = Sizes(512, ((128, 512), (256, 256), (16, 64, 128), (74, 24, 80)), 2, 128, 32, 512, 0.0)
FULL = Sizes(
    8192,
    (
        *((1024, 1024), (1024, 4096), (2048, 2048), (2048, 8192), (4096, 4096), (4096, 11008), (7168, 18432)),
        *((74, 24, 10240), (512, 128, 128), (256, 128, 512), (64, 256, 1024), (64, 512, 512), (32, 1024, 1024)),
    ),
    # The matrices of Llama 3.2 1B, 973M parameters.
    *(16, 2048, 512, 8192),
    0.05,
)


def product(square: int, dtype: str, precision: str | None) -> Callable[[], jax.Array]:
    """A large product of two matrices."""
    a, b = (jax.random.normal(jax.random.key(i), (square, square), dtype) for i in range(2))
    run = jax.jit(lambda a, b: jnp.matmul(a, b, precision=precision))
    return lambda: run(a, b)


def rates(times: timing.Seconds, flops: dict[str, int]) -> dict[str, list[float]]:
    """FLOP/s of each way in each round."""
    return {name: [flops[name] / seconds for seconds in each] for name, each in times.items()}


def peak(sizes: Sizes, dtype: str, precision: str | None, rounds: int) -> float:
    """TFLOP/s of the large product."""
    times = timing.interleaved({"peak": product(sizes.square, dtype, precision)}, rounds, least=sizes.least)
    return significant(max(rates(times, {"peak": 2 * sizes.square**3})["peak"]) / 1e12)


def newton_schulz(sizes: Sizes, shape: Shape, dtype: str, precision: str | None, rounds: int) -> dict[str, Any]:
    """Every form on one shape."""
    x, (m, n) = jax.random.normal(jax.random.key(0), shape, dtype), shape[-2:]
    found: dict[str, Any] = {}
    ways: dict[str, Callable[[], Any]] = {"peak": product(sizes.square, dtype, precision)}
    for method in FORMS:
        runs = NewtonSchulz(5, "frobenius", method, slopes("standard", 5), precision, jax.default_backend())
        try:
            found[method] = {"form": runs.form(m, n, dtype).name}
        except ValueError as error:  # no Gram form is safe in this arithmetic
            found[method] = {"refused": str(error)}
            continue
        run = jax.jit(functools.partial(muon_shard.orthogonalize, method=method, precision=precision))
        ways[method] = lambda run=run: run(x)
    if len(shape) == 3:
        each, xs = jax.jit(lambda x: muon_shard.orthogonalize(x, precision=precision)), list(x)
        ways["one program each"], found["one program each"] = lambda: [each(x) for x in xs], {}
    flops = dict.fromkeys(ways, ns_flops(m, n) * (shape[0] if len(shape) == 3 else 1))
    times = timing.interleaved(ways, rounds, least=sizes.least)
    reached = rates(times, flops | {"peak": 2 * sizes.square**3})
    for name, took in timing.milliseconds(times).items():
        if name != "peak":
            share = statistics.median(a / b for a, b in zip(reached[name], reached["peak"], strict=True))
            rate = significant(statistics.median(reached[name]) / 1e12)
            found[name] |= {"ms": took, "tflops": rate, "of_peak": significant(share)}
            found[name] |= {"to_auto": timing.ratio(times, name, "auto")}
    return found


def optimizer_step(sizes: Sizes, dtype: str, rounds: int, tick: timing.Tick) -> dict[str, Any]:
    """Ours, optax and AdamW on one device; what does not fit into its memory says so."""
    shapes = sizes.transformer()
    params, grads = (
        {
            name: jax.random.normal(jax.random.key(i + seed), shape, dtype)
            for i, (name, shape) in enumerate(shapes.items())
        }
        for seed in (0, len(shapes))
    )
    direct = sum(ns_flops(*shape) for shape in shapes.values())
    report = {"parameters": sum(x.size for x in params.values()), "direct_flops": direct}
    ways = {
        "ours": muon_shard.muon(LEARNING_RATE),
        "optax": optax.contrib.muon(LEARNING_RATE),
        "adamw": optax.adamw(LEARNING_RATE),
    }
    try:
        steps = {name: timing.compile_step(tx, tx.init(params), grads, params) for name, tx in ways.items()}
        apart = largest_apart(*(steps[name].run(grads, params) for name in ("ours", "optax")))
        runs = {name: lambda step=step: step.run(grads, params) for name, step in steps.items()}
        times = timing.interleaved(runs, rounds, tick)
    except jax.errors.JaxRuntimeError as error:
        return report | {"failed": str(error).splitlines()[0]}
    found = {
        name: {
            "ms": took,
            "to_ours": timing.ratio(times, name, "ours"),
            "temp_bytes": steps[name].facts()["temp_bytes"],
        }
        for name, took in timing.milliseconds(times).items()
    }
    for name in ("ours", "optax"):
        found[name]["tflops"] = significant(direct / statistics.median(times[name]) / 1e12)
    return report | {"relative_difference": significant(apart), "ways": found}


def largest_apart(got: dict[str, jax.Array], want: dict[str, jax.Array]) -> float:
    """Largest |got − want| over all entries, relative to the largest |want|; on the device, leaf by leaf."""

    @jax.jit
    def both(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return jnp.abs(a - b).max(), jnp.abs(b).max()

    apart, sizes = zip(*(both(got[name], want[name]) for name in want), strict=True)
    return float(max(apart)) / float(max(sizes))


def significant(x: float) -> float:
    """Three digits."""
    return float(f"{x:.3g}")


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accelerator",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, 2 rounds")
    parser.add_argument("--rounds", type=int, help="7, or 2 with --quick")
    parser.add_argument("--arithmetic", nargs="+", choices=ARITHMETIC, default=list(ARITHMETIC))
    parser.add_argument("--shapes", nargs="*", type=lambda s: tuple(map(int, s.split("x"))), help="like 64x256x1024")
    args = parser.parse_args()
    rounds = args.rounds or (2 if args.quick else 7)
    device = jax.devices()[0]
    full = device.platform != "cpu" and not args.quick
    sizes = FULL if full else SMALL
    sizes = sizes if args.shapes is None else dataclasses.replace(sizes, shapes=tuple(args.shapes))
    dtypes = list(dict.fromkeys(ARITHMETIC[name][0] for name in args.arithmetic))
    report: dict[str, Any] = {
        "jax": jax.__version__,
        "platform": device.platform,
        "device": device.device_kind,
        "sizes": "full" if full else "small",
        "rounds": rounds,
        "square": sizes.square,
        "peaks": {},
        "shapes": {name: {} for name in args.arithmetic},
        "step": {},
    }
    total = len(args.arithmetic) * (1 + len(sizes.shapes)) + len(dtypes) * (rounds + 1)
    with timing.progress("one device", total) as tick:
        for name in args.arithmetic:
            report["peaks"][name] = peak(sizes, *ARITHMETIC[name], rounds)
            tick()
            for shape in sizes.shapes:
                found = newton_schulz(sizes, shape, *ARITHMETIC[name], rounds)
                report["shapes"][name]["x".join(map(str, shape))] = found
                tick()
        for dtype in dtypes:
            report["step"][dtype] = optimizer_step(sizes, dtype, rounds, tick)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
