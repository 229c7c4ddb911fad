"""What the demo is asked to do: one frozen record, nothing computed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

MeshShape = Mapping[str, int] | tuple[tuple[str, int], ...]


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes of the transformer; layers alternate between dense and mixture of experts."""

    width: int = 256  # d, the residual stream
    heads: int = 4
    layers: int = 4
    hidden: int = 1024  # h of a dense block
    experts: int = 8  # E
    expert_hidden: int = 128  # h of one expert; E experts together hold as much as a dense block
    top_k: int = 2  # experts per token
    vocab: int = 256  # bytes


@dataclasses.dataclass(frozen=True)
class DemoConfig:
    """Everything that steers `muon_shard.demo.run`.

    mesh     axis name → size, as a mapping or as (name, size) pairs; None picks one that fits the devices.
             `expert`, `fsdp` and `tensor` shard the weights, every other name replicates them.
    devices  emulate this many CPU devices; None takes the real ones, or emulates where there is one CPU only.
    batch    sequences per step, over the whole mesh.
    context  bytes per sequence.
    """

    steps: int = 40
    mesh: MeshShape | None = None
    devices: int | None = None
    out: Path = Path("muon-shard-demo")
    seed: int = 0
    batch: int = 16
    context: int = 64
    model: ModelConfig = ModelConfig()
    learning_rate: float = 0.02  # Muon, matrices
    adam_learning_rate: float = 3e-3  # AdamW, and the parameters Muon leaves to Adam
    timing_rounds: int = 5  # optimizer steps timed per optimizer; the median is reported

    def __post_init__(self):
        """Gather every setting that cannot work, then raise once."""
        model = self.model
        counts = {name: getattr(self, name) for name in ("steps", "batch", "context", "timing_rounds")}
        counts["devices"] = 1 if self.devices is None else self.devices
        counts |= {f"mesh axis {name}": size for name, size in dict(self.mesh or {}).items()}
        problems = [f"{name} must be at least 1, got {count}" for name, count in counts.items() if count < 1]
        if model.width % model.heads:
            problems.append(f"width {model.width} is not a multiple of heads {model.heads}")
        if not 1 <= model.top_k <= model.experts:
            problems.append(f"top_k must be between 1 and experts {model.experts}, got {model.top_k}")
        if problems:
            raise ValueError("DemoConfig: " + "; ".join(problems) + ".")

    @classmethod
    def quick(cls, **changes) -> DemoConfig:
        """A smaller model for fewer steps, with any field changed: `DemoConfig.quick(steps=5)`."""
        small = ModelConfig(width=128, layers=2, hidden=512, expert_hidden=64)
        return dataclasses.replace(cls(steps=20, model=small, timing_rounds=3), **changes)
