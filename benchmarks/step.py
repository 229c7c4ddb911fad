"""One optimizer step, ours against its peers, on 8 emulated devices.

All peers are compiled first, then timed round-robin, so that a noisy machine disturbs all of them alike: read
the ratios, not the milliseconds. Collectives, bytes and temporaries repeat exactly.
"""

import argparse
import dataclasses
import json
import statistics
import time
from typing import Any

import jax
import numpy as np
import optax

import muon_shard
from benchmarks.peers import LEARNING_RATE, PEERS
from benchmarks.reference import SETS, ReferenceSet, laid_on
from muon_shard import hlo

SEEDS = (
    1,
    2,
)  # two different gradients: with one, a wrong momentum would only rescale, which Muon does not see


@dataclasses.dataclass
class Peer:
    """A compiled step `(grads, state, params) -> (updates, state)`, its donated state, and its timings."""

    step: jax.stages.Compiled
    state: Any
    milliseconds: list[float] = dataclasses.field(default_factory=list)

    def run(self, grads, params):
        """One step; returns the updates when they are ready."""
        updates, self.state = self.step(grads, self.state, params)
        return jax.block_until_ready(updates)

    def time(self, grads, params) -> None:
        """One timed step."""
        start = time.perf_counter()
        self.run(grads, params)
        self.milliseconds.append(1e3 * (time.perf_counter() - start))


def build(name: str, chosen: ReferenceSet, mesh, params, grads) -> Peer:
    """Compile the step of peer `name`, updates pinned to the parameters' shardings."""
    tx = PEERS[name](mesh, chosen.specs)
    state = laid_on(mesh, tx.init(params))
    shardings = (chosen.shardings(mesh), jax.tree.map(lambda x: x.sharding, state))
    step = jax.jit(tx.update, out_shardings=shardings, donate_argnums=1)
    return Peer(step.lower(grads, state, params).compile(), state)


def one_device_updates(chosen: ReferenceSet) -> list[dict[str, np.ndarray]]:
    """What `optax.contrib.muon` gives on one device, for each of SEEDS."""
    tx = optax.contrib.muon(LEARNING_RATE)
    device = jax.devices()[0]
    params = jax.device_put(chosen.host_arrays(0), device)
    state, update, out = tx.init(params), jax.jit(tx.update), []
    for seed in SEEDS:
        updates, state = update(jax.device_put(chosen.host_arrays(seed), device), state, params)
        out.append(jax.tree.map(np.asarray, updates))
    return out


def largest_difference(got: dict[str, Any], want: dict[str, np.ndarray]) -> float:
    """Largest |got − want| over all entries."""
    return max(float(np.abs(np.asarray(got[name]) - want[name]).max()) for name in want)


def facts(peer: Peer) -> dict[str, Any]:
    """What repeats exactly: collectives (once where they stand in a loop), bytes and temporaries per device."""
    found = hlo.collectives(peer.step.as_text() or "")
    sizes = {kind: [f.bytes for f in found if f.kind == kind] for kind in hlo.KINDS}
    memory = peer.step.memory_analysis()
    return {
        "collectives": {kind: len(each) for kind, each in sizes.items() if each},
        "collective_bytes": {kind: sum(each) for kind, each in sizes.items() if each},
        "total_bytes": sum(f.bytes for f in found),
        "temp_bytes": memory.temp_size_in_bytes if memory else None,
    }


def measure(set_name: str, names: list[str], rounds: int, against: str) -> dict[str, Any]:
    """Compile, check and time the peers `names` on a set."""
    chosen = SETS[set_name]
    mesh = chosen.mesh()
    params, *grads = [chosen.arrays(mesh, seed) for seed in (0, *SEEDS)]
    peers = {name: build(name, chosen, mesh, params, grads[0]) for name in names}
    report = {name: facts(peer) for name, peer in peers.items()}

    want = one_device_updates(chosen)
    scale = max(float(np.abs(u).max()) for updates in want for u in updates.values())
    for name, peer in peers.items():
        worst = max(largest_difference(peer.run(g, params), w) for g, w in zip(grads, want, strict=True))
        if name != "adamw":
            report[name] |= {"max_abs_difference": worst, "relative_difference": worst / scale}

    for _ in range(rounds):
        for peer in peers.values():
            peer.time(grads[0], params)
    for name, peer in peers.items():
        report[name]["ms_median"] = round(statistics.median(peer.milliseconds), 2)
        if against in peers:
            # Paired by round: a slow minute of the machine cancels.
            ratios = [a / b for a, b in zip(peer.milliseconds, peers[against].milliseconds, strict=True)]
            report[name][f"ratio_to_{against}"] = round(statistics.median(ratios), 3)
    return {
        "set": set_name,
        "jax": jax.__version__,
        "rounds": rounds,
        "plan": planned(muon_shard.make_plan(params)),
        "peers": report,
    }


def planned(plan: muon_shard.Plan) -> dict[str, Any]:
    """What ours promises: NS FLOPs of the busiest device over the ideal, programs, and result bytes of collectives."""
    ideal = plan.total_flops / plan.devices
    return {
        "flops_over_ideal": round(plan.flops_per_device / ideal, 4),
        "programs": plan.programs,
        "collective_bytes": sum(c.bytes for c in plan.collectives),
    }


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step", description=__doc__)
    parser.add_argument("--set", choices=SETS, default="reference")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--against", choices=PEERS, default="ours", help="the peer that ratios are taken to")
    args = parser.parse_args()
    muon_shard.emulate_devices(8)
    print(json.dumps(measure(args.set, args.peers, args.rounds, args.against)))


if __name__ == "__main__":
    main()
