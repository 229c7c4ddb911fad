"""Train a small sharded transformer under muon_shard, optax's Muon and AdamW, and compare them."""

from muon_shard.demo.config import DemoConfig, ModelConfig
from muon_shard.demo.results import DemoResult, OptimizerResult
from muon_shard.demo.runner import run

__all__ = ["DemoConfig", "DemoResult", "ModelConfig", "OptimizerResult", "run"]
