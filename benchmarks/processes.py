"""Many processes, as on many hosts: the same updates as in one process, and replicas equal bit for bit.

`python -m benchmarks.processes --processes 2` spawns them on localhost, each with its part of 8 emulated CPU devices,
and compares with one process that has all 8. One line of JSON. On real hosts a worker is what every host runs.
"""

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

import jax
import numpy as np

import muon_shard
from tests.layouts import CASES, Case

DEVICES = 8
STEPS = 3
TIMEOUT = 300  # seconds, for all processes together


def worker(case: Case, process: int, processes: int, port: int, out: Path) -> None:
    """One process: joins the others, takes some steps, and saves the shards it holds of the last updates."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_cpu_enable_async_dispatch", False)  # see muon_shard.emulate_devices
    jax.config.update("jax_num_cpu_devices", DEVICES // processes)
    if processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"localhost:{port}", processes, process)
    mesh = case.make_mesh()
    tx = muon_shard.muon(0.1, muon_weight_dimension_numbers=case.dims)
    params = laid(case, 0, mesh)
    state, update = tx.init(params), jax.jit(tx.update)
    for step in range(STEPS):
        updates, state = update(laid(case, step + 1, mesh), state, params)
    np.savez(out / f"{process}.npz", allow_pickle=False, **shards(updates))


def laid(case: Case, seed: int, mesh: jax.sharding.Mesh) -> dict[str, jax.Array]:
    """Global arrays of which every process makes its own shards."""
    return {
        name: jax.make_array_from_callback(
            x.shape, jax.sharding.NamedSharding(mesh, case.leaves[name].spec), lambda index, x=x: x[index]
        )
        for name, x in case.host(seed).items()
    }


def shards(arrays: dict[str, jax.Array]) -> dict[str, np.ndarray]:
    """Local shards by leaf, place in the leaf, and device."""
    return {
        json.dumps([name, [s.indices(n)[0] for s, n in zip(shard.index, x.shape, strict=True)], shard.device.id]): (
            np.asarray(shard.data)
        )
        for name, x in arrays.items()
        for shard in x.addressable_shards
    }


def launch(case: str, processes: int) -> dict[str, dict[tuple[int, ...], list[np.ndarray]]]:
    """Runs all processes on localhost: per leaf and place in it, the shard of every replica.

    Raises:
        RuntimeError: with the last words of the process that failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.processes", "--case", case, "--processes", str(processes)]
        command += ["--out", folder, "--port", str(free_port()), "--worker"]
        logs = [open(Path(folder) / f"{i}.log", "w+") for i in range(processes)]
        started = [subprocess.Popen([*command, str(i)], stdout=log, stderr=log) for i, log in enumerate(logs)]
        try:
            wait(started, logs)
        finally:
            for process, log in zip(started, logs, strict=True):
                process.kill()  # those that wait for one that failed
                process.wait()
                log.close()
        return collect(sorted(Path(folder).glob("*.npz")))


def wait(started: Sequence[subprocess.Popen], logs: Sequence[TextIO]) -> None:
    """Until all are done or one has failed."""
    end = time.monotonic() + TIMEOUT
    while any(process.poll() is None for process in started) and time.monotonic() < end:
        if any(process.poll() for process in started):
            break
        time.sleep(0.1)
    unfinished = [i for i, process in enumerate(started) if process.poll() != 0]
    failed = next((i for i in unfinished if started[i].poll()), unfinished[0] if unfinished else None)
    if failed is not None:
        logs[failed].seek(0)
        code = started[failed].poll()
        how = f"took more than {TIMEOUT} s" if code is None else f"exited with {code}"
        raise RuntimeError(f"process {failed} of {len(started)} {how}:\n{logs[failed].read()[-2000:]}")


def free_port() -> int:
    """A port of localhost that nobody listens to."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def collect(files: Sequence[Path]) -> dict[str, dict[tuple[int, ...], list[np.ndarray]]]:
    """The shards of all processes, replicas side by side."""
    found: dict[str, dict[tuple[int, ...], list[np.ndarray]]] = {}
    for file in files:
        for key, x in np.load(file).items():
            name, start, _ = json.loads(key)
            found.setdefault(name, {}).setdefault(tuple(start), []).append(x)
    return found


def compare(case: str, processes: int) -> dict:
    """Largest difference to one process, relative to the largest entry, and whether replicas are equal."""
    many, one = launch(case, processes), launch(case, 1)
    largest = {name: max(np.abs(x[0]).max() for x in places.values()) for name, places in one.items()}
    return {
        "case": case,
        "processes": processes,
        "jax": jax.__version__,
        "shards": sum(len(x) for places in many.values() for x in places.values()),
        "replicas_equal": all(
            (x == replicas[0]).all() for places in many.values() for replicas in places.values() for x in replicas
        ),
        "largest_difference": max(
            float(np.abs(x - y).max() / largest[name])
            for name, places in many.items()
            for start, replicas in places.items()
            for x, y in zip(replicas, one[name][start], strict=True)
        ),
    }


def main() -> None:
    """Parse, then launch and compare, or be one of the processes."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.processes", description=__doc__)
    parser.add_argument("--case", choices=CASES, default="hsdp")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--worker", type=int, help="be this process, not the launcher")
    parser.add_argument("--port", type=int)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.worker is None:
        print(json.dumps(compare(args.case, args.processes)))
    else:
        worker(CASES[args.case], args.worker, args.processes, args.port, args.out)


if __name__ == "__main__":
    main()
