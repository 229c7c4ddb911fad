"""All that steers a plan, in one frozen record."""

import dataclasses
import operator
from typing import Any, SupportsIndex

from muon_shard.newton_schulz.forms import METHODS
from muon_shard.presets import AUTO, machine
from muon_shard.topology import Topology
from muon_shard.transports import TRANSPORTS

MOMENTUM_SHARDINGS = ("params", "replicas")


@dataclasses.dataclass(frozen=True)
class PlanOptions:
    """What a user may pin; 'auto' decides by cost.

    Attributes:
        topology: the hardware: a preset's name such as 'tpu-v5p', a `Topology`, or 'auto' for what the mesh's devices
            tell.
        transport: how scattered matrices travel, one of `muon_shard.transports.TRANSPORTS`, for all domains.
        dedup_axes: mesh axes that replicate the momentum, over which work is shared: 'all', a tuple of names, or 'auto'
            for those where the compute saved is worth the gather of results.
        ns_method: form of Newton–Schulz: 'auto' takes the cheapest for each shape, 'direct' or 'gram' insist.
        max_wave_bytes: bounds the exchange buffers of one device: what does not fit is exchanged in several waves.
            'auto': an eighth of the device's memory. A matrix is never cut, so the plan says where it had to exceed
            this.
        waves_under_way: waves that may be under way at a time. With 1 each begins when the one before has ended, which
            takes the least memory; with 2 one can talk while the other computes; with as many as there are, none waits.
            The simulator lets one follow the other, so predictions do not depend on it.
        max_programs: bounds how many different device programs are compiled for one wave (compile time grows with it);
            when the assignment needs more, programs are merged and the FLOPs this costs show in `Plan.balance`.
        momentum_sharding: where Muon's momentum lies: 'params' as the parameters, or 'replicas' also cut over the axes
            that replicate them, as in ZeRO-1 (arXiv 1910.02054): 1/R of the memory on R replicas. Gradients are then
            brought to the momentum, and updates are gathered over these axes. Sizes are never padded: an axis that
            divides no dimension of a leaf still replicates its momentum. Adam's moments stay as the parameters. Not
            inside a `shard_map` of one's own.
    """

    topology: str | Topology = "auto"
    transport: str = "auto"
    dedup_axes: str | tuple[str, ...] = "auto"
    ns_method: str = "auto"
    max_wave_bytes: int | str = "auto"
    waves_under_way: int = 2
    max_programs: int = 32
    momentum_sharding: str = "params"

    def __post_init__(self) -> None:
        if isinstance(self.topology, str) and self.topology != AUTO:
            machine(self.topology)  # raises for an unknown name
        if self.transport not in ("auto", *TRANSPORTS):
            raise ValueError(
                f"PlanOptions: unknown transport {self.transport!r}; known: {', '.join(('auto', *TRANSPORTS))}."
            )
        if isinstance(self.dedup_axes, str) and self.dedup_axes not in ("auto", "all"):
            raise ValueError(
                f"PlanOptions: dedup_axes must be 'auto', 'all' or a tuple of mesh axes, got {self.dedup_axes!r}."
            )
        if not isinstance(self.dedup_axes, str):
            object.__setattr__(self, "dedup_axes", tuple(self.dedup_axes))
        if self.ns_method not in METHODS:
            raise ValueError(f"PlanOptions: unknown ns_method {self.ns_method!r}; known: {', '.join(METHODS)}.")
        for name in ("max_wave_bytes", "waves_under_way", "max_programs"):
            self._require_count(name, getattr(self, name))
        if self.momentum_sharding not in MOMENTUM_SHARDINGS:
            raise ValueError(
                f"PlanOptions: momentum_sharding must be {' or '.join(map(repr, MOMENTUM_SHARDINGS))}, "
                f"got {self.momentum_sharding!r}."
            )

    def _require_count(self, name: str, given: Any) -> None:
        """A positive integer, numpy's taken as Python's: equal options share a plan."""
        if name == "max_wave_bytes" and isinstance(given, str) and given == "auto":
            return
        if not isinstance(given, SupportsIndex) or operator.index(given) < 1:
            what = "'auto' or at least 1" if name == "max_wave_bytes" else "at least 1"
            raise ValueError(f"PlanOptions: {name} must be {what}, an integer; got {given!r}.")
        object.__setattr__(self, name, operator.index(given))
