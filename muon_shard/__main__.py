"""Command line: parsing only."""

import argparse
import json
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from muon_shard.models import names


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `muon-shard`. Returns 0, 1 if an audit finds a difference, or 2 after one line on wrong input."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        return args.run(args)
    except BrokenPipeError:  # `muon-shard plan … | head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, RuntimeError, ModuleNotFoundError) as error:
        print(f"muon-shard {args.command}: {error}", file=sys.stderr)
        return 2


def parse_mesh(text: str) -> dict[str, int]:
    """`replica=2,fsdp=4` → {'replica': 2, 'fsdp': 4}."""
    axes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if not name.isidentifier() or not size.isdecimal() or int(size) < 1:
            raise argparse.ArgumentTypeError(f"{part!r} is not an axis; write name=size, such as replica=2,fsdp=4")
        if name in axes:
            raise argparse.ArgumentTypeError(f"axis {name!r} is named twice")
        axes[name] = int(size)
    return axes


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="muon-shard", description="Muon for sharded models in JAX: plan it, try it.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    demo = commands.add_parser(
        "demo",
        help="train a small transformer with ours, optax's Muon and AdamW, and compare",
        description="Trains a small transformer on real text, its parameters sharded over 8 emulated "
        "devices, with muon_shard.muon, optax.contrib.muon and AdamW.",
    )
    demo.add_argument("--steps", type=positive, help="training steps per optimizer")
    demo.add_argument("--mesh", type=parse_mesh, help="mesh axes, such as replica=2,fsdp=4 (the default)")
    demo.add_argument(
        "--out", default="muon-shard-demo", help="folder for the plot of the losses (default: %(default)s)"
    )
    demo.add_argument("--devices", type=positive, help="emulate this many CPU devices (default: the real ones, or 8)")
    demo.add_argument("--batch", type=positive, help="sequences per step")
    demo.add_argument("--seed", type=int, help="seed of weights and batches")
    demo.add_argument("--quick", action="store_true", help="a smaller model and fewer steps, for a first look or CI")
    demo.set_defaults(run=_demo)
    plan = commands.add_parser(
        "plan",
        help="print the plan of a public model on a mesh of any size; needs no devices",
        description="Plans the Muon step of a public model and prints who does what, and why.",
        epilog="example: muon-shard plan --model deepseek-v3 --mesh replica=8,fsdp=64",
    )
    plan.add_argument("--model", required=True, help=f"one of {', '.join(names())}")
    plan.add_argument(
        "--mesh",
        type=parse_mesh,
        required=True,
        help="mesh axes; those named fsdp, tensor and expert shard parameters, all others replicate them",
    )
    plan.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="of the momentum (default: %(default)s)",
    )
    plan.add_argument("--ns-steps", type=positive, default=5, help="Newton–Schulz steps (default: %(default)s)")
    plan.add_argument(
        "--max-wave-bytes",
        type=lambda text: text if text == "auto" else positive(text),
        default="auto",
        help="bound on the exchange buffers of a device (default: %(default)s, an eighth of its memory)",
    )
    plan.add_argument(
        "--waves-under-way", type=positive, default=2, help="waves exchanged at a time (default: %(default)s)"
    )
    plan.add_argument(
        "--max-programs", type=positive, default=32, help="bound on programs compiled (default: %(default)s)"
    )
    plan.add_argument("--topology", default="generic", help="the hardware: %(default)s, tpu-v5p, h100, ascend-a3, …")
    plan.add_argument(
        "--transport", default="auto", help="how matrices travel: %(default)s, all_to_all, two_hops, gather, …"
    )
    plan.add_argument(
        "--dedup-axes",
        type=_axes,
        default="auto",
        help="replicas that share work: %(default)s, all, or axes such as replica,pod",
    )
    plan.add_argument(
        "--momentum-sharding", default="params", help="where the momentum lies: %(default)s, or replicas for 1/R of it"
    )
    plan.add_argument("--ns-method", default="auto", help="%(default)s, direct or gram")
    plan.add_argument("--json", action="store_true", help="print the plan as JSON")
    plan.set_defaults(run=_plan)
    _add_simulate(commands)
    audit = commands.add_parser(
        "audit",
        help="check the collectives of a compiled module against a plan",
        description="Reads the text of a compiled module and reports collectives that are extra, missing or resized "
        "against a plan. Exit status 1 if there are any.",
        epilog="The texts are compiled.as_text(), or *after_optimizations.txt of XLA_FLAGS=--xla_dump_to=FOLDER; the "
        "plan is json.dumps(plan.to_json()), or what `muon-shard plan --json` prints.",
    )
    audit.add_argument("module", help="file with the text of the compiled module")
    audit.add_argument("--plan", required=True, help="file with the plan as JSON")
    audit.add_argument("--baseline", help="the module of the same step without Muon; its collectives do not count")
    audit.add_argument("--json", action="store_true", help="print the audit as JSON")
    audit.set_defaults(run=_audit)
    return parser


def _add_simulate(commands: Any) -> None:
    simulate = commands.add_parser(
        "simulate",
        help="predict the step of a public model on a machine, planned every way; needs no devices",
        description="Predicts what the Muon step of a public model takes on a machine: every transport, with and "
        "without sharing over replicas, and the automatic plan.",
        epilog="example: muon-shard simulate --model deepseek-v3 --mesh replica=8,fsdp=64 --topology ascend-a3",
    )
    simulate.add_argument("--model", help=f"one of {', '.join(names())}")
    simulate.add_argument("--mesh", type=parse_mesh, help="mesh axes, as for `muon-shard plan`")
    simulate.add_argument("--topology", help="the hardware: tpu-v5p, h100, ascend-a3, … (default: generic)")
    simulate.add_argument("--dtype", choices=("bfloat16", "float32"), help="of the momentum (default: bfloat16)")
    simulate.add_argument("--plot", metavar="FILE", help="draw the automatic plan's timeline, as PNG, PDF or SVG")
    simulate.add_argument("--trace", metavar="FILE", help="write it as a trace for ui.perfetto.dev")
    simulate.add_argument(
        "--article",
        action="store_const",
        dest="run",
        const=_article,
        help="replay the published figures of HyperParallel's Muon instead; takes no option but --json",
    )
    simulate.add_argument("--json", action="store_true", help="print the table as JSON")
    simulate.set_defaults(run=_simulate)


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def _axes(text: str) -> str | tuple[str, ...]:
    return text if text in ("auto", "all") else tuple(filter(None, text.split(",")))


def _demo(args: argparse.Namespace) -> int:
    from rich.console import Console

    from muon_shard.demo import DemoConfig, run

    given = {
        name: value
        for name in ("steps", "mesh", "devices", "seed", "batch")
        if (value := getattr(args, name)) is not None
    }
    make = DemoConfig.quick if args.quick else DemoConfig
    run(make(out=pathlib.Path(args.out), **given), Console())
    return 0


def _plan(args: argparse.Namespace) -> int:
    from muon_shard import labels, models
    from muon_shard.options import PlanOptions
    from muon_shard.planner import make_plan

    params = models.abstract_params(models.load(args.model), args.mesh, args.dtype)
    plan = make_plan(
        params,
        options=PlanOptions(
            topology=args.topology,
            transport=args.transport,
            dedup_axes=args.dedup_axes,
            ns_method=args.ns_method,
            max_wave_bytes=args.max_wave_bytes,
            waves_under_way=args.waves_under_way,
            max_programs=args.max_programs,
            momentum_sharding=args.momentum_sharding,
        ),
        ns_steps=args.ns_steps,
        muon_weight_dimension_numbers=labels.by_path,
    )
    print(json.dumps(plan.to_json()) if args.json else plan)
    return 0


def _simulate(args: argparse.Namespace) -> int:
    from rich.console import Console

    from muon_shard.compare import compare_model, write

    if args.model is None or args.mesh is None:
        raise ValueError("give --model and --mesh, or --article. See muon-shard simulate --help.")
    compared = compare_model(
        args.model, args.mesh, args.topology or "generic", args.dtype or "bfloat16", Console(stderr=True)
    )
    write(compared, args.plot, args.trace)
    print(json.dumps(compared.to_json()) if args.json else compared)
    return 0


def _article(args: argparse.Namespace) -> int:
    from muon_shard.article import replay

    given = [f"--{name}" for name in ("model", "mesh", "topology", "dtype", "plot", "trace") if getattr(args, name)]
    if given:
        raise ValueError(f"--article has a model, a mesh and a machine of its own; leave out {', '.join(given)}.")
    replayed = replay()
    print(json.dumps(replayed.to_json()) if args.json else replayed)
    return 0


def _audit(args: argparse.Namespace) -> int:
    from muon_shard.audit import audit

    try:
        plan = json.loads(_read(args.plan))
    except json.JSONDecodeError as error:
        raise ValueError(f"{args.plan} is not JSON: {error}") from error
    audited = audit(_read(args.module), plan, _read(args.baseline) if args.baseline else None)
    print(json.dumps(audited.to_json()) if args.json else audited)
    return 0 if audited.ok else 1


def _read(path: str) -> str:
    try:
        return pathlib.Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ValueError(f"cannot read {path}: {reason}") from error


if __name__ == "__main__":
    sys.exit(main())
