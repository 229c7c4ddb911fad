"""The optimizer update, compiled for machines that are not here, against its plan, for every transport.

One row per target, mesh and transport: waves, and how many may be under way, the audit's verdict, result bytes of
collectives as planned and as found, how many nobody planned, temporaries, seconds to compile, and shares of the
collectives' bytes: 'async' have a start and a done, 'work' have a fusion, product, conditional or loop between the
two, 'NS' one that holds products of matrices. A schedule shows that bytes could hide behind work, not that they do.
`--waves` cuts the exchange, so that there is something to hide behind. Nothing runs, so no accelerator is needed, only
its compiler: jax[tpu] or jax[cuda12].
"""

import argparse
import dataclasses
import json
import os
import pathlib
import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import muon_shard
from benchmarks.module_text import Instruction, computations
from muon_shard import hlo
from muon_shard.__main__ import positive
from muon_shard.transports import TRANSPORTS

WIDTH = 100

# What the compiler asks of an H100 SXM; one that is plugged in would tell it the same.
H100 = """
gpu_device_info {
  cuda_compute_capability { major: 9 }
  core_count: 132  fpus_per_core: 128  clock_rate_ghz: 1.98
  threads_per_warp: 32  threads_per_block_limit: 1024  threads_per_core_limit: 2048
  registers_per_block_limit: 65536  registers_per_core_limit: 65536
  shared_memory_per_block: 49152  shared_memory_per_block_optin: 232448  shared_memory_per_core: 233472
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  device_memory_size: 84942979072  memory_bandwidth: 3352320000000  l2_cache_size: 52428800
}
platform_name: "CUDA"
dnn_version_info { major: 9  minor: 10 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""

# Rows of the matrices lie over all axes but `replica`; `two_hops` needs two of them.
SIXTEEN: tuple[dict[str, int], ...] = ({"fsdp": 16}, {"replica": 2, "fsdp": 8}, {"host": 4, "chip": 4})
SIXTY_FOUR: tuple[dict[str, int], ...] = ({"replica": 4, "fsdp": 16}, {"replica": 4, "host": 4, "chip": 4})

# Outside of Google's cloud, libtpu looks for these and complains at length. They do not change what it compiles.
NOWHERE = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
}


@dataclasses.dataclass(frozen=True)
class Target:
    """A machine: how JAX is asked for it, the meshes on it, and what to install where its compiler is missing."""

    platform: str
    topology: str
    meshes: tuple[dict[str, int], ...]
    install: str
    more: tuple[tuple[str, str], ...] = ()

    def devices(self) -> list[Any]:
        """Devices that one can compile for, though they are not here."""
        return topologies.get_topology_desc(self.topology, self.platform, **dict(self.more)).devices


TARGETS = {  # by the name of the topology's preset
    "tpu-v5e": Target("tpu", "v5e:4x4", SIXTEEN, "jax[tpu]"),
    "tpu-v5p": Target("tpu", "v5p:4x4x4", SIXTY_FOUR, "jax[tpu]"),
    "h100": Target("cuda", "", SIXTEEN, "jax[cuda12]", (("topology", "1x2x8"), ("target_config", H100))),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One compilation: so many waves, of which so many may be under way at a time."""

    target: str
    mesh: Mesh
    transport: str
    waves: int = 1
    under_way: int = 2

    def __str__(self) -> str:
        waves = f", {self.waves} waves, {self.under_way} under way" if self.waves > 1 else ""
        return f"{self.target} ({sizes(self.mesh.shape)}) {self.transport}{waves}"

    def options(self, params: Any) -> muon_shard.PlanOptions:
        """Buffers bounded by their part of what one wave takes."""
        options = muon_shard.PlanOptions(topology=self.target, transport=self.transport, waves_under_way=self.under_way)
        if self.waves == 1:
            return options
        one = max(
            wave.buffer_bytes for part in muon_shard.make_plan(params, options=options).parts for wave in part.waves
        )
        return dataclasses.replace(options, max_wave_bytes=-(-one // self.waves))


def sizes(mesh: Mapping[str, int]) -> str:
    """A mesh in words."""
    return ", ".join(f"{name} {size}" for name, size in mesh.items())


def scattered(sizes: Iterable[str]) -> tuple[str, ...]:
    """The mesh axes that rows lie over."""
    return tuple(name for name in sizes if name != "replica")


def model(mesh: Mesh, layers: int, width: int) -> dict[str, jax.ShapeDtypeStruct]:
    """bf16 matrices of transformer layers with few key and value heads, rows over all axes but `replica`."""
    d, where = width, NamedSharding(mesh, P(scattered(mesh.axis_names), None))
    shapes = {"q": (d, d), "o": (d, d), "k": (d, d // 4), "v": (d, d // 4)}
    shapes |= {"gate": (d, 4 * d), "up": (d, 4 * d), "down": (4 * d, d), "out": (4 * d, d)}
    return {
        f"{i}.{name}": jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=where)
        for i in range(layers)
        for name, shape in shapes.items()
    }


def compiled(case: Case, params: Any, compiler_options: dict[str, Any]) -> tuple[jax.stages.Compiled, muon_shard.Plan]:
    """The update, its results where the parameters lie, and its plan."""
    options = case.options(params)
    tx = muon_shard.scale_by_muon(param_shardings=params, plan_options=options)
    shardings = muon_shard.opt_state_shardings(tx, params)
    shapes = jax.eval_shape(tx.init, params)
    state = jax.tree.map(lambda x, on: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on), shapes, shardings)
    out = (jax.tree.map(lambda x: x.sharding, params), shardings)
    lowered = jax.jit(tx.update, out_shardings=out, donate_argnums=1).lower(params, state, params)
    return lowered.compile(compiler_options), muon_shard.make_plan(params, options=options)


def measure(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    """Compile and audit one case; 'error' says what raised."""
    facts = {"target": case.target, "mesh": dict(case.mesh.shape), "transport": case.transport}
    facts["under_way"] = case.under_way
    start = time.perf_counter()
    try:
        module, plan = compiled(case, model(case.mesh, args.layers, args.width), dict(args.compiler_options))
    except Exception as error:  # one transport that does not compile must not hide the others
        return facts | {"error": f"{type(error).__name__}: {error}"}
    seconds, memory = time.perf_counter() - start, module.memory_analysis()
    text, audit = module.as_text() or "", muon_shard.audit(module, plan)
    if args.dump:
        pathlib.Path(args.dump, f"{re.sub('[^a-z0-9_]+', '-', str(case))}.txt").write_text(text, encoding="utf-8")
    return facts | {
        "audit": audit.to_json(),
        "waves": len(plan.parts[0].waves),
        "planned_bytes": sum(row.planned.bytes for row in audit.rows),
        "found_bytes": sum(row.found.bytes for row in audit.rows),
        "extra": sum(row.found.count - row.planned.count for row in audit.extra),
        "temp_bytes": memory.temp_size_in_bytes if memory else 0,
        "compile_seconds": round(seconds, 1),
        **overlap(text),
    }


# Overlap. The text of a compiled module is in the order of its schedule.

_WORK = ("fusion", "dot", "convolution", "conditional", "while", "call")  # `call` runs a CUDA graph
_PRODUCT = re.compile(r'custom_call_target="__(cublas|cudnn|triton)')
_LEAST = 4096  # bytes: what makes less is a counter or a table, and hides nothing
_CHAIN = re.compile(r'chain_id="(\d+)"')


def overlap(text: str) -> dict[str, float]:
    """Shares of the collectives' bytes: asynchronous; with any work between start and done; with NS there."""
    pairs, found = dict(bracketed(text)), hlo.collectives(text)
    total = sum(f.bytes * f.count for f in found) or 1

    def share(between: Collection[str]) -> float:
        return sum(f.bytes * f.count for f in found if pairs.get(f.name) in between) / total

    return {"async": share(("", "work", "NS")), "overlap": share(("work", "NS")), "ns_overlap": share(("NS",))}


def bracketed(text: str) -> Iterator[tuple[str, str]]:
    """Asynchronous collectives by name, and what stands between start and done: 'NS', other 'work', or ''."""
    found, _ = computations(text)
    products = with_products(found)
    running: dict[str, str] = {}
    chains: dict[str, tuple[list[str], str]] = {}
    for computation, body in found.items():
        for i in body:
            if i.opcode.endswith("-start") and '"is_sync":true' not in i.rest:  # GPU prints pairs that block, too
                running[i.name] = ""
            elif i.opcode.endswith("-done") and (start := hlo.names(i.rest.split(")")[0])[0]) in running:
                yield start, running.pop(start)
            elif (i.opcode in _WORK or is_product(i)) and hlo.type_bytes(i.result) >= _LEAST:
                now = "NS" if is_product(i) or products.intersection(i.called) else "work"
                running = {start: "NS" if "NS" in (now, before) else now for start, before in running.items()}
        whole = "\n".join(i.rest for i in body)
        for chain in set(_CHAIN.findall(whole)):  # TPU: of fusions that also hold the work; the first one counts
            starts, between = chains.get(chain, ([], "work"))
            if "AsyncCollectiveStart" in whole:
                starts = [i.name for i in body]
            chains[chain] = (starts, "NS" if computation in products else between)
    for starts, between in chains.values():
        yield from ((name, between) for name in starts)


def with_products(found: Mapping[str, Sequence[Instruction]]) -> set[str]:
    """The computations that hold products of matrices, or call one that does."""
    products = {name for name, body in found.items() if any(map(is_product, body))}
    while more := {
        name
        for name, body in found.items()
        if name not in products and any(products.intersection(i.called) for i in body)
    }:
        products |= more
    return products


def is_product(i: Instruction) -> bool:
    """Whether an instruction is a product of matrices."""
    return i.opcode in ("dot", "convolution") or bool(_PRODUCT.search(i.rest))


# The command


def cases(
    targets: Iterable[str], transports: Iterable[str], console: Console, waves: int = 1, under_way: Sequence[int] = (2,)
) -> Iterator[Case]:
    """Every mesh and transport that go together; one sentence for each target whose compiler is missing."""
    for name in targets:
        target = TARGETS[name]
        try:
            devices = target.devices()
        except Exception as error:  # without its compiler a platform raises whatever it likes
            why = re.split(r"[.;] |\n", str(error).strip())[0].rstrip(".") or type(error).__name__
            note = f"{name} is left out, its compiler is not here ({why}). Consider pip install '{target.install}'."
            console.print(note, markup=False, soft_wrap=True)
            continue
        for axes in target.meshes:
            auto = (AxisType.Auto,) * len(axes)
            mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=auto, devices=devices)
            exchange = tuple((axis, axes[axis]) for axis in scattered(axes))
            legal = [t for t in transports if not TRANSPORTS[t].refuses(exchange)]
            yield from (Case(name, mesh, t, waves, at_a_time) for t in legal for at_a_time in under_way)


def table(reports: Iterable[dict[str, Any]]) -> Table:
    """The facts of all cases, at most 100 columns wide."""
    caption = "planned, found and temporaries in MB on each device; s: seconds to lower and compile"
    out = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), caption=caption, caption_justify="left")
    for heading in ("target", "mesh", "transport", "waves", "audit"):
        out.add_column(heading)
    for heading in ("planned", "found", "extra", "temp", "s", "async", "work", "NS"):
        out.add_column(heading, justify="right")
    before = None
    for report in reports:
        where = (report["target"], sizes(report["mesh"]))
        if before not in (None, where):
            out.add_section()
        out.add_row(*(where if where != before else ("", "")), report["transport"], *cells(report))
        before = where
    return out


def cells(report: dict[str, Any]) -> tuple[str, ...]:
    """One row of the table, from the waves on."""
    if "error" in report:
        return ("", "error")
    judged = [name for name in ("extra", "missing", "resized") if report["audit"][name]]
    planned, found, temp = (f"{report[key] / 1e6:.2f}" for key in ("planned_bytes", "found_bytes", "temp_bytes"))
    waves = str(report["waves"]) if report["waves"] == 1 else f"{report['waves']} by {report['under_way']}"
    shares = (f"{report[key]:.2f}" for key in ("async", "overlap", "ns_overlap"))
    figures = (planned, found, str(report["extra"]), temp, f"{report['compile_seconds']:.0f}", *shares)
    return (waves, ", ".join(judged) or "ok", *figures)


def option(text: str) -> tuple[str, Any]:
    """`name=value`, where `true` and `false` are booleans and digits a number."""
    name, _, value = text.partition("=")
    return name, {"true": True, "false": False}.get(value, int(value) if value.isdigit() else value)


def main() -> None:
    """Parse the command line, compile, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ahead_of_time", description=__doc__)
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=list(TRANSPORTS))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--waves", type=positive, default=1, help="bound the buffers so that there are about as many")
    parser.add_argument(
        "--waves-under-way", nargs="+", type=positive, default=[2], metavar="N", help="one case for each"
    )
    parser.add_argument("--compiler-options", nargs="+", type=option, default=[], metavar="NAME=VALUE")
    parser.add_argument("--dump", metavar="FOLDER", help="also write the text of every module")
    parser.add_argument("--json", metavar="FILE", help="also write all facts, audits included")
    args = parser.parse_args()
    for name, value in NOWHERE.items():
        os.environ.setdefault(name, value)
    jax.config.update("jax_platforms", "cpu")  # whatever is plugged in stays free
    errors = Console(stderr=True)
    chosen, reports = list(cases(args.targets, args.transports, errors, args.waves, args.waves_under_way)), []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=errors, transient=True) as progress:
        task = progress.add_task("", total=len(chosen))
        for case in chosen:
            progress.update(task, description=str(case))
            reports.append(measure(case, args))
            if "error" in reports[-1]:
                progress.console.print(f"{case}: {reports[-1]['error']}", markup=False, soft_wrap=True)
            progress.advance(task)
    if args.json:
        facts = {"jax": jax.__version__, "layers": args.layers, "width": args.width, "cases": reports}
        pathlib.Path(args.json).write_text(json.dumps(facts, indent=1), encoding="utf-8")
    Console(width=WIDTH).print(table(reports) if reports else "Nothing to compile.")


if __name__ == "__main__":
    main()
