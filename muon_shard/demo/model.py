"""A small decoder-only transformer in Flax NNX, with dense and mixture-of-experts blocks.

    token_embed + position_embed → blocks: attention, then feed_forward → final_norm → head

Letters in shapes: b batch, t time, d width, n heads, h hidden, E experts, v vocabulary.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from muon_shard.demo.config import ModelConfig


def _linear(rows: int, cols: int, rngs: nnx.Rngs, **options) -> nnx.Linear:
    """A linear map without bias: its only parameter is `kernel`, f32[rows, cols]."""
    return nnx.Linear(rows, cols, use_bias=False, rngs=rngs, **options)


class Attention(nnx.Module):
    """Causal self-attention with four square kernels f32[d, d]."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.heads = config.heads
        self.query = _linear(config.width, config.width, rngs)
        self.key = _linear(config.width, config.width, rngs)
        self.value = _linear(config.width, config.width, rngs)
        self.out = _linear(config.width, config.width, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[b, t, d] → [b, t, d]."""
        q, k, v = (
            part(x).reshape(*x.shape[:-1], self.heads, -1)  # [b, t, n, d / n]
            for part in (self.query, self.key, self.value)
        )
        return self.out(jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape))


class Mlp(nnx.Module):
    """The dense block: `up` f32[d, h], `down` f32[h, d]."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.up = _linear(config.width, config.hidden, rngs)
        self.down = _linear(config.hidden, config.width, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[b, t, d] → [b, t, d]."""
        return self.down(jax.nn.gelu(self.up(x)))


class MixtureOfExperts(nnx.Module):
    """Top-k routing over stacked experts: `experts_up` f32[E, d, h], `experts_down` f32[E, h, d].

    Every expert sees every token; the router's weights, zero for the experts not chosen, select afterwards.
    The gradients are those of sparse dispatch, at a cost that does not matter at this size. There is no
    load-balancing loss: a demo's few steps do not collapse the routing.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.top_k = config.top_k
        self.router = _linear(config.width, config.experts, rngs)
        up = (config.experts, config.width, config.expert_hidden)
        down = (config.experts, config.expert_hidden, config.width)
        init = nnx.initializers.lecun_normal(batch_axis=0)
        self.experts_up = nnx.Param(init(rngs.params(), up, jnp.float32))
        self.experts_down = nnx.Param(init(rngs.params(), down, jnp.float32))

    def route(self, x: jax.Array) -> jax.Array:
        """[b, t, d] → weights [b, t, E], which sum to one over the k chosen experts."""
        logits = self.router(x)
        weakest = jax.lax.top_k(logits, self.top_k)[0][..., -1:]
        return jax.nn.softmax(jnp.where(logits >= weakest, logits, -jnp.inf))

    def __call__(self, x: jax.Array) -> jax.Array:
        """[b, t, d] → [b, t, d]."""
        hidden = jax.nn.gelu(jnp.einsum("btd,Edh->btEh", x, self.experts_up[...]))
        return jnp.einsum("btEh,Ehd->btd", hidden * self.route(x)[..., None], self.experts_down[...])


class Block(nnx.Module):
    """Pre-norm residual block; feed-forward is dense on even layers, a mixture of experts on odd ones."""

    def __init__(self, config: ModelConfig, layer: int, rngs: nnx.Rngs):
        self.attention_norm = nnx.RMSNorm(config.width, rngs=rngs)
        self.attention = Attention(config, rngs)
        self.feed_forward_norm = nnx.RMSNorm(config.width, rngs=rngs)
        self.feed_forward = (MixtureOfExperts if layer % 2 else Mlp)(config, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[b, t, d] → [b, t, d]."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class Transformer(nnx.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, config: ModelConfig, context: int, rngs: nnx.Rngs):
        small = nnx.initializers.normal(0.02)  # near-uniform predictions at the start: loss ≈ log v
        self.token_embed = nnx.Embed(config.vocab, config.width, rngs=rngs)
        self.position_embed = nnx.Embed(context, config.width, embedding_init=small, rngs=rngs)
        self.blocks = nnx.List([Block(config, layer, rngs) for layer in range(config.layers)])
        self.final_norm = nnx.RMSNorm(config.width, rngs=rngs)
        self.head = _linear(config.width, config.vocab, rngs, kernel_init=small)

    def __call__(self, tokens: jax.Array, activations: jax.sharding.Sharding | None = None) -> jax.Array:
        """i32[b, t] → f32[b, t, v]. `activations` shards [b, t, d]; without it the compiler chooses."""

        def keep(x: jax.Array) -> jax.Array:
            return x if activations is None else jax.lax.with_sharding_constraint(x, activations)

        x = keep(self.token_embed(tokens) + self.position_embed(jnp.arange(tokens.shape[-1])))
        for block in self.blocks:
            x = keep(block(x))
        return self.head(self.final_norm(x))
