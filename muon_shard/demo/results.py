"""What the demo found: plain records, ready for a table, a plot or JSON."""

from __future__ import annotations

import dataclasses
import statistics
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class OptimizerResult:
    """One optimizer's run. Losses are in nats per byte."""

    name: str
    losses: tuple[float, ...]  # of the training batch, before each step
    held_out_loss: float  # after the last step
    step_milliseconds: float  # the optimizer alone: median of tx.update + apply_updates
    collectives: dict[str, int]  # in the compiled optimizer step

    @property
    def final_loss(self) -> float:
        """Mean over the last tenth of the steps: single batches are noisy."""
        return statistics.fmean(self.losses[-max(1, len(self.losses) // 10) :])


@dataclasses.dataclass(frozen=True)
class DemoResult:
    """All runs, and how far the two Muons came apart."""

    devices: str
    mesh: tuple[tuple[str, int], ...]
    optimizers: tuple[OptimizerResult, ...]  # muon_shard, optax's Muon, AdamW
    first_step_difference: float  # max |weight difference| of the two Muons after one step
    final_difference: float  # … and after the last
    seconds: float  # the whole demo
    plot: Path
    record: Path
