"""Muon for sharded models in JAX: optax.contrib.muon with one word changed, and no Newton–Schulz work done twice."""

from muon_shard import labels as labels
from muon_shard.audit import audit as audit
from muon_shard.emulate import emulate_devices as emulate_devices
from muon_shard.logical import Blocks as Blocks
from muon_shard.newton_schulz import orthogonalize as orthogonalize
from muon_shard.options import PlanOptions as PlanOptions
from muon_shard.orthogonalizer import CustomOrthogonalizer as CustomOrthogonalizer
from muon_shard.plan import Plan as Plan
from muon_shard.planner import make_plan as make_plan
from muon_shard.simulate import simulate as simulate
from muon_shard.state_shardings import opt_state_shardings as opt_state_shardings
from muon_shard.topology import Link as Link
from muon_shard.topology import Topology as Topology
from muon_shard.transform import STATIC_ARGS as STATIC_ARGS
from muon_shard.transform import muon as muon
from muon_shard.transform import scale_by_muon as scale_by_muon
