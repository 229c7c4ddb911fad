"""What benchmarks print, in small: for the tests of what reads it."""

import json


def _peer(ms, ratio, sent, temp):
    return {
        "collectives": {kind: 2 for kind in sent},
        "collective_bytes": sent,
        "total_bytes": sum(sent.values()),
        "temp_bytes": temp,
        "ms_median": ms,
        "ratio_to_ours": ratio,
    }


STEP = {
    "set": "reference",
    "rounds": 3,
    "peers": {
        "ours": _peer(100.0, 1.0, {"all-to-all": 10_000_000, "all-gather": 5_000_000}, 40_000_000),
        "optax": _peer(450.0, 4.4, {"all-gather": 300_000_000}, 50_000_000),
        "redundant": _peer(790.0, 7.9, {"all-gather": 30_000_000}, 90_000_000),
        "gather": _peer(120.0, 1.2, {"all-gather": 60_000_000}, 60_000_000),
        "adamw": _peer(10.0, 0.1, {}, 0),
    },
}


def _row(mesh, devices, flops, total, **more):
    return {
        "mesh": mesh,
        "devices": devices,
        "matrices": 48,
        "flops_per_device": flops,
        "compiled_flops": flops,
        "total_flops": total,
        "best_possible": 0.9 if devices == 64 else 1.0,
        "received_bytes": 1_000_000 * devices,
        "temp_bytes": 50_000_000,
        "compile_seconds": 1.5,
        **more,
    }


G = 10**9
SCALING = {
    "rounds": 2,
    "strong": [
        _row({"fsdp": 1}, 1, 64 * G, 64 * G, efficiency=1.0, ms_median=1000.0),
        _row({"fsdp": 8}, 8, 8 * G, 64 * G, efficiency=1.0, ms_median=1100.0),
        _row({"replica": 2, "fsdp": 4}, 8, 8 * G, 64 * G, efficiency=1.0, ms_median=1200.0),
        _row({"fsdp": 64}, 64, 2 * G, 64 * G, efficiency=0.5),
    ],
    "weak": [_row({"fsdp": n}, n, 8 * G, n * 8 * G, efficiency=1.0) for n in (8, 64)],
    "planning": [
        {"model": "m", "devices": n, "plan_seconds": 0.1 * n, "eval_shape_seconds": 0.2, "balance": 0.99}
        for n in (8, 4096)
    ],
}
TRANSPORTS = {
    "rounds": 1,
    "topology": {},
    "square": {
        "transports": {
            "ring": {"measured_ms": 20.0, "predicted_ms": 30.0, "received_bytes": 2_000_000},
            "gather": {"measured_ms": 40.0, "predicted_ms": 10.0, "received_bytes": 9_000_000},
        }
    },
}
NEWTON_SCHULZ = {
    "rounds": 1,
    "shapes": {
        "8x16": {"form": "gram", "direct_over_ours": 2.03},
        "74x24x80": {"form": "direct", "direct_over_ours": 1.0, "batched_over_ours": 6.5, "separate_over_ours": 3.7},
    },
}


def _trained(loss, steps):
    return {"steps": steps, "held_out_loss": loss, "losses": [5.5, loss]}


END_TO_END = {
    "rounds": 2,
    "device": "8 emulated CPU devices",
    "context": 16,
    "batches": {
        batch: {
            name: {
                "model_ms": 10.0 * int(batch),
                "optimizer_ms": ms,
                "share": 0.25,
                "equal_steps": _trained(loss, 20),
                "equal_time": _trained(loss + 0.1, 20 + change),
            }
            for name, ms, loss, change in (
                ("muon_shard.muon", 20.0, 3.0, 0),
                ("optax.contrib.muon", 90.0, 3.0, -5),
                ("optax.adamw", 5.0, 3.5, 2),
            )
        }
        for batch in ("8", "32")
    },
}


def _figure(cases, *ratios):
    return {
        "ratios": [{"name": name, "published": p, "predicted": q} for name, p, q in ratios],
        "cases": cases,
    }


ARTICLE = {
    "rounds": 1,
    "figures": {
        "fig7": _figure(
            [{"mesh": {}, "matrices": {"[24, 80]": 74}, "measured": 22.0}], ("fusion of 74 × [24, 10240]", 30.8, 33.6)
        ),
        "fig10": _figure(
            [
                {"mesh": {"replica": r, "fsdp": 8 // r}, "matrices": {}, "measured": 0.8 * r, "flops": 1.0 * r}
                for r in (2, 8)
            ],
            ("replica sharing, whole step", 2, 2.07),
            ("replica sharing, compute", 7, 7.5),
        ),
        "headline": _figure(
            [{"mesh": {"replica": 2, "fsdp": 4}, "matrices": {}, "measured": 5.0, "to_ours": {"redundant": 6.5}}],
            ("all together", 6, 16.6),
        ),
    },
}
BREADTH = {
    "rounds": 1,
    "cases": [
        {
            "model": "transformer",
            "layout": layout,
            "dtype": "float32",
            "ways": {"ours": {"to_ours": 1.0}, "optax": {"to_ours": 3.0}, "redundant": {"to_ours": 6.0}},
        }
        for layout in ("FSDP", "HSDP")
    ],
}
ACCELERATOR = {
    "rounds": 1,
    "device": "a card",
    "peaks": {"bfloat16": 700.0},
    "shapes": {
        "bfloat16": {
            "64x128": {
                "auto": {"form": "gram", "ms": 0.5, "tflops": 400.0, "of_peak": 0.571},
                "gram": {"refused": "not safe"},
            }
        }
    },
    "step": {
        "float32": {"parameters": 10**9, "failed": "out of memory"},
        "bfloat16": {"parameters": 10**9, "ways": {"ours": {"ms": 1234.5, "to_ours": 1.0, "temp_bytes": 5_000_000}}},
    },
}
MACHINE = {
    "commit": "0123456789abcdef",
    "versions": {"python": "3.12", "jax": "0.12.0", "optax": "0.2.8"},
    "platform": "x86_64",
    "cores": 2,
    "device": "cpu",
    "date": "2026-01-01",
}
ALL = (STEP, SCALING, TRANSPORTS, NEWTON_SCHULZ, END_TO_END, ARTICLE, BREADTH, ACCELERATOR)


def results_file(path, outputs=ALL):
    """A file as `python -m benchmarks` writes it, with one run that failed."""
    runs = {f"run {i}": {"command": "…", "seconds": 1.0, "measured": output} for i, output in enumerate(outputs)}
    runs["failed"] = {"command": "…", "seconds": 1.0, "failed": ["…"], "exit": 1}
    path.write_text(json.dumps({"machine": MACHINE, "runs": runs}), encoding="utf-8")
    return path
