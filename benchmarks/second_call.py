"""What the second call costs: traces and compiles over three calls, and how much of the state is donated.

A good step traces once, compiles once, and reuses the memory of the whole state. `--peer optax` is the
comparison: its step counter is born on one device and comes back on the mesh, which costs a second compile.
"""

import argparse
import json

import jax
import optax

import muon_shard
from benchmarks.peers import PEERS
from benchmarks.reference import SETS, laid_on, local_bytes

CALLS = 3
COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileCounter:
    """Counts the compiles of the process while it is open."""

    def __enter__(self):
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def __exit__(self, *_):
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        del duration_secs, kwargs
        self.count += event == COMPILE_EVENT


def measure(set_name: str, name: str) -> dict:
    """Both ways to start: the state as an eager init leaves it, and laid on the mesh."""
    chosen = SETS[set_name]
    mesh = chosen.mesh()
    tx = PEERS[name](mesh, chosen.specs)
    params, grads = chosen.arrays(mesh, 0), chosen.arrays(mesh, 1)
    return {
        "set": set_name,
        "peer": name,
        "jax": jax.__version__,
        "eager_init": calls(tx, tx.init(params), grads, params),
        "state_on_mesh": calls(tx, laid_on(mesh, tx.init(params)), grads, params),
    }


def calls(tx: optax.GradientTransformation, state, grads, params) -> dict:
    """CALLS steps of a jitted, donating update, as a user writes it: no shardings named."""
    traces, compiles = 0, []

    def update(grads, state, params):
        nonlocal traces
        traces += 1  # runs while tracing only
        return tx.update(grads, state, params)

    step = jax.jit(update, donate_argnums=1)
    for _ in range(CALLS):
        with CompileCounter() as counter:
            _, state = jax.block_until_ready(step(grads, state, params))
        compiles.append(counter.count)
    counted = traces
    memory = step.lower(grads, state, params).compile().memory_analysis()
    return {
        "traces": counted,
        "compiles_per_call": compiles,
        "alias_bytes": memory.alias_size_in_bytes if memory else None,
        "state_bytes": local_bytes(state),
    }


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.second_call", description=__doc__)
    parser.add_argument("--set", choices=SETS, default="reference")
    parser.add_argument("--peer", choices=PEERS, default="ours")
    args = parser.parse_args()
    muon_shard.emulate_devices(8)
    print(json.dumps(measure(args.set, args.peer)))


if __name__ == "__main__":
    main()
