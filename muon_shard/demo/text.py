"""Real English at no download: the language reference that ships with Python, as bytes."""

from __future__ import annotations

import dataclasses
from pydoc_data.topics import topics

import numpy as np


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Bytes as integers: train u8[n], held_out u8[m]; no byte is in both."""

    train: np.ndarray
    held_out: np.ndarray


def load_corpus(held_out_percent: int = 10) -> Corpus:
    """The end of every topic is held out, so both parts speak about the same things."""
    train, held_out = [], []
    for name in sorted(topics):
        text = f"{topics[name].strip()}\n\n".encode()
        cut = len(text) * (100 - held_out_percent) // 100
        train.append(text[:cut])
        held_out.append(text[cut:])
    return Corpus(*(np.frombuffer(b"".join(parts), np.uint8) for parts in (train, held_out)))


def sample_batches(data: np.ndarray, count: int, batch: int, context: int, seed: int) -> np.ndarray:
    """`count` batches of random windows of u8[n]: i32[count, batch, context + 1].

    The extra byte makes inputs and targets one slice apart. The same seed gives the same batches: optimizers
    can be compared step by step.
    """
    if len(data) <= context:
        raise ValueError(f"context {context} is too long for a text of {len(data)} bytes.")
    starts = np.random.default_rng(seed).integers(0, len(data) - context, size=(count, batch, 1))
    return data[starts + np.arange(context + 1)].astype(np.int32)
