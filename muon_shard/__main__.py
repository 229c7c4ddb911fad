"""Command line: parsing only."""

import argparse
import json
import os
import pathlib
import sys
from collections.abc import Sequence

from muon_shard.models import names


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `muon-shard`. Returns 0, or 2 after one line about wrong arguments."""
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
    demo.add_argument("--steps", type=_positive, help="training steps per optimizer")
    demo.add_argument("--mesh", type=parse_mesh, help="mesh axes, such as replica=2,fsdp=4 (the default)")
    demo.add_argument(
        "--out", default="muon-shard-demo", help="folder for the plot of the losses (default: %(default)s)"
    )
    demo.add_argument("--devices", type=_positive, help="emulate this many CPU devices (default: the real ones, or 8)")
    demo.add_argument("--batch", type=_positive, help="sequences per step")
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
    plan.add_argument("--ns-steps", type=_positive, default=5, help="Newton–Schulz steps (default: %(default)s)")
    plan.add_argument(
        "--max-programs", type=_positive, default=32, help="bound on programs compiled (default: %(default)s)"
    )
    plan.add_argument("--json", action="store_true", help="print the plan as JSON")
    plan.set_defaults(run=_plan)
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


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
    from muon_shard.plan import PlanOptions
    from muon_shard.planner import make_plan

    params = models.abstract_params(models.load(args.model), args.mesh, args.dtype)
    plan = make_plan(
        params,
        options=PlanOptions(args.max_programs),
        ns_steps=args.ns_steps,
        muon_weight_dimension_numbers=labels.by_path,
    )
    print(json.dumps(plan.to_json()) if args.json else plan)
    return 0


if __name__ == "__main__":
    sys.exit(main())
