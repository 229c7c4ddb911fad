"""Train a small sharded transformer under muon_shard, optax's Muon and AdamW, and compare them."""

from .config import DemoConfig, ModelConfig
from .results import DemoResult, OptimizerResult
from .runner import run

__all__ = ["DemoConfig", "DemoResult", "ModelConfig", "OptimizerResult", "run"]
