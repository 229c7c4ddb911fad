"""What benchmarks share: compiled steps, timed in rounds, every round in another order, ratios paired by round.

A slow minute of the machine, or a slow neighbour in the order, disturbs all ways alike: read ratios before
milliseconds.
"""

import contextlib
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
from rich.console import Console
from rich.progress import Progress

from benchmarks.reference import laid_on
from muon_shard import hlo

Seconds = dict[str, list[float]]
Tick = Callable[[], None]


@dataclasses.dataclass
class Step:
    """A compiled optimizer step, `(grads, state, params) -> (updates, state)`, and its state, which is donated."""

    compiled: jax.stages.Compiled
    state: Any

    def run(self, grads: Any, params: Any) -> Any:
        """One step; the updates, when they are ready."""
        updates, self.state = self.compiled(grads, self.state, params)
        return jax.block_until_ready(updates)

    def facts(self) -> dict[str, Any]:
        """What repeats exactly, per device: collectives and their bytes, as often as loops run them; temporaries."""
        found = hlo.collectives(self.compiled.as_text() or "")
        memory = self.compiled.memory_analysis()
        return {
            "collectives": {kind: n for kind in hlo.KINDS if (n := sum(f.count for f in found if f.kind == kind))},
            "collective_bytes": sum(f.bytes * f.count for f in found),
            "temp_bytes": memory.temp_size_in_bytes if memory else None,
        }


@dataclasses.dataclass(frozen=True)
class Problem:
    """Parameters and some different gradients on a mesh; what `optax.contrib.muon` makes of them on one device.

    With one gradient only, a wrong momentum would rescale the update, which Muon does not see.
    """

    mesh: jax.sharding.Mesh
    params: Any
    grads: list[Any]
    wanted: list[Any]

    def measure(
        self, ways: Mapping[str, optax.GradientTransformation], rounds: int, tick: "Tick"
    ) -> tuple["Seconds", dict[str, dict[str, Any]]]:
        """Seconds of one step of each way, and its facts; calls `tick` per way and per round, `ticks` in all."""
        steps, facts = {}, {}
        for name, tx in ways.items():
            steps[name] = compile_step(tx, laid_on(self.mesh, tx.init(self.params)), self.grads[0], self.params)
            worst = 0.0
            for grads, wanted in zip(self.grads, self.wanted, strict=True):
                worst = max(worst, difference(steps[name].run(grads, self.params), wanted))
            facts[name] = steps[name].facts() | {"relative_difference": float(f"{worst:.2g}")}
            tick()
        runs = {name: lambda step=step: step.run(self.grads[0], self.params) for name, step in steps.items()}
        times = interleaved(runs, rounds, tick)
        for name, took in milliseconds(times).items():
            facts[name] = {"ms": took} | facts[name]
        return times, facts


def ticks(ways: int, rounds: int) -> int:
    """Of `Problem.measure`."""
    return ways + rounds + 1


def on_one_device(tx: optax.GradientTransformation, params: Any, grads: Sequence[Any]) -> list[Any]:
    """The updates for one gradient after the other, on the host; all arrays are of the host."""
    device = jax.devices()[0]
    params = jax.device_put(params, device)
    state, update, out = tx.init(params), jax.jit(tx.update), []
    for each in grads:
        updates, state = update(jax.device_put(each, device), state, params)
        out.append(jax.tree.map(np.asarray, updates))
    return out


def compile_step(tx: optax.GradientTransformation, state: Any, grads: Any, params: Any) -> Step:
    """Updates pinned to the shardings of the parameters, the state to its own, and donated."""
    shardings = jax.tree.map(lambda x: x.sharding, (params, state))
    step = jax.jit(tx.update, out_shardings=shardings, donate_argnums=1)
    return Step(step.lower(grads, state, params).compile(), state)


def difference(got: Mapping[str, Any], want: Mapping[str, Any]) -> float:
    """Largest |got − want| over all entries, relative to the largest |want|."""
    got, want = ({k: np.asarray(x).astype(np.float64) for k, x in tree.items()} for tree in (got, want))
    scale = max(float(np.abs(x).max()) for x in want.values())
    return max(float(np.abs(got[k] - want[k]).max()) for k in want) / scale


def interleaved(
    ways: Mapping[str, Callable[[], Any]], rounds: int, tick: Tick = lambda: None, least: float = 0.0
) -> Seconds:
    """Seconds of each way in each round.

    Args:
        ways: what is timed.
        rounds: how many are counted; one more goes before, in which what is not compiled yet compiles.
        tick: called after every round.
        least: seconds that one measurement takes at least; short ways are called several times for it.
    """
    order, found, calls = np.random.default_rng(0), {name: [] for name in ways}, dict.fromkeys(ways, 1)
    for round_ in range(rounds + 1):
        for name in order.permutation(list(ways)):
            took = once(ways[name], calls[name])
            if round_:
                found[name].append(took)
            else:
                calls[name] = max(1, math.ceil(least / once(ways[name], 1))) if least else 1
        tick()
    return found


def once(way: Callable[[], Any], calls: int) -> float:
    """Seconds per call of some calls in a row, until the last result is there."""
    start = time.perf_counter()
    for _ in range(calls - 1):
        way()
    jax.block_until_ready(way())
    return (time.perf_counter() - start) / calls


def ratio(times: Seconds, before: str, after: str) -> float:
    """How many times as long `before` takes: the median of the rounds' ratios."""
    return round(statistics.median(a / b for a, b in zip(times[before], times[after], strict=True)), 2)


def milliseconds(times: Seconds) -> dict[str, float]:
    """Medians."""
    return {name: round(1e3 * statistics.median(each), 3) for name, each in times.items()}


@contextlib.contextmanager
def progress(what: str, total: int) -> Iterator[Tick]:
    """A bar on stderr; gives what moves it by one."""
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)
