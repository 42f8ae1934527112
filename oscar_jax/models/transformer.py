"""The decoder: one module that is Qwen3, Llama (SmolLM2) or Qwen2.5 by its config.

It knows tokens, positions and weights. Keys and values go to ``attend``, a function of the caller
that owns whatever cache there is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from oscar_jax.model_config import ModelConfig
from oscar_jax.models import rope

# (state, layer, q[B, Q, N, D], k[B, Q, K, D], v[B, Q, K, D]) -> (out[B, Q, N, D], state); q and k
# are post-RoPE and everything is in the compute dtype. The scale D**-0.5 is attend's to apply.
Attend = Callable[[Any, int, jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]

# Gives the tensor of a Hugging Face name and a shape, in the compute dtype.
TakeWeight = Callable[[str, tuple[int, ...]], jax.Array]

# On a CPU, float32 products win from about this many rows (2 cores with AVX512-BF16, SmolLM2's
# layers: 256 rows 338 ms against 744 ms, 64 rows 357 against 204, 2 rows 230 against 21).
_CPU_FLOAT32_ROWS = 128


def project(x: Float[Array, "*rows I"], weight: Float[Array, "O I"]) -> Float[Array, "*rows O"]:
    """x @ weight^T in float32: x is rounded to the weight's dtype, products are summed in float32.

    Weights keep the checkpoint's [out, in] layout: with two bf16 rows XLA's CPU product is twice as
    fast that way (SmolLM2's step: 25 ms against 51). Float32 weights mean float32: no TF32.
    """
    contract = (((x.ndim - 1,), (1,)), ((), ()))
    x = x.astype(weight.dtype)

    def native(x: jax.Array, weight: jax.Array) -> jax.Array:
        precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
        return lax.dot_general(
            x, weight, contract, precision=precision, preferred_element_type=jnp.float32
        )

    def widened(x: jax.Array, weight: jax.Array) -> jax.Array:
        return lax.dot_general(x.astype(jnp.float32), weight.astype(jnp.float32), contract)

    if x.dtype == jnp.float32 or x.size // x.shape[-1] < _CPU_FLOAT32_ROWS:
        return native(x, weight)
    return lax.platform_dependent(x, weight, cpu=widened, default=native)


class Linear(nnx.Module):
    """y = x W^T (+ b) in float32; ``weight`` [out, in] as checkpoints store it."""

    def __init__(self, take: TakeWeight, name: str, out: int, into: int, *, bias: bool = False):
        self.weight = nnx.Param(take(f"{name}.weight", (out, into)))
        self.bias = nnx.Param(take(f"{name}.bias", (out,))) if bias else None

    def __call__(self, x: Float[Array, "*rows I"]) -> Float[Array, "*rows O"]:
        y = project(x, self.weight[...])
        return y if self.bias is None else y + self.bias[...]


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + eps) * weight, in float32."""

    def __init__(self, take: TakeWeight, name: str, size: int, eps: float):
        self.weight = nnx.Param(take(f"{name}.weight", (size,)))
        self.eps = eps

    def __call__(self, x: Float[Array, "*rows E"]) -> Float[Array, "*rows E"]:
        scale = lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.eps)
        return self.weight[...].astype(jnp.float32) * (x * scale)


class Attention(nnx.Module):
    """Projections, the optional QK-norm of Qwen3, RoPE; the attention itself is ``attend``."""

    def __init__(self, config: ModelConfig, take: TakeWeight, name: str):
        size, d, bias = config.hidden_size, config.head_dim, config.qkv_bias
        self.heads, self.kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, d
        self.q_proj = Linear(take, f"{name}.q_proj", self.heads * d, size, bias=bias)
        self.k_proj = Linear(take, f"{name}.k_proj", self.kv_heads * d, size, bias=bias)
        self.v_proj = Linear(take, f"{name}.v_proj", self.kv_heads * d, size, bias=bias)
        self.o_proj = Linear(take, f"{name}.o_proj", size, self.heads * d)
        normed, eps = config.qk_norm, config.rms_norm_eps
        self.q_norm = RMSNorm(take, f"{name}.q_norm", d, eps) if normed else None
        self.k_norm = RMSNorm(take, f"{name}.k_norm", d, eps) if normed else None

    def __call__(
        self,
        x: Float[Array, "B Q E"],
        cos: Float[Array, "B Q 1 H"],
        sin: Float[Array, "B Q 1 H"],
        layer: int,
        attend: Attend,
        state: Any,
    ) -> tuple[Float[Array, "B Q E"], Any]:
        batch, length, _ = x.shape
        q = self.q_proj(x).reshape(batch, length, self.heads, self.head_dim)
        k = self.k_proj(x).reshape(batch, length, self.kv_heads, self.head_dim)
        v = self.v_proj(x).reshape(batch, length, self.kv_heads, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rope.rotate(q, cos, sin), rope.rotate(k, cos, sin)
        dtype = self.q_proj.weight.dtype
        out, state = attend(state, layer, q.astype(dtype), k.astype(dtype), v.astype(dtype))
        return self.o_proj(out.reshape(batch, length, -1)), state


class MLP(nnx.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, take: TakeWeight, name: str):
        size, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = Linear(take, f"{name}.gate_proj", inner, size)
        self.up_proj = Linear(take, f"{name}.up_proj", inner, size)
        self.down_proj = Linear(take, f"{name}.down_proj", size, inner)

    def __call__(self, x: Float[Array, "B Q E"]) -> Float[Array, "B Q E"]:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, take: TakeWeight, name: str):
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(take, f"{name}.input_layernorm", size, eps)
        self.self_attn = Attention(config, take, f"{name}.self_attn")
        self.post_attention_layernorm = RMSNorm(take, f"{name}.post_attention_layernorm", size, eps)
        self.mlp = MLP(config, take, f"{name}.mlp")

    def __call__(
        self,
        x: Float[Array, "B Q E"],
        cos: Float[Array, "B Q 1 H"],
        sin: Float[Array, "B Q 1 H"],
        layer: int,
        attend: Attend,
        state: Any,
    ) -> tuple[Float[Array, "B Q E"], Any]:
        out, state = self.self_attn(self.input_layernorm(x), cos, sin, layer, attend, state)
        x = x + out
        return x + self.mlp(self.post_attention_layernorm(x)), state


class Decoder(nnx.Module):
    """A decoder-only transformer without a cache of its own.

    Layers are separate modules with separate arrays and a Python loop unrolls them: a scan over
    stacked weights copies every layer's slice first (8B on an H200: 11.1 ms a step against 4.1).
    In a token loop use ``graphdef, weights = nnx.split(decoder)`` once, and inside ``jax.jit``
    ``nnx.merge(graphdef, weights).hidden(...)``; ``nnx.jit`` costs milliseconds a call.

    Products take their operands in the compute dtype (that of the weights) and everything between
    them is float32: the residual stream, norms, RoPE, biases and the gate. Against float32
    throughout, SmolLM2 in bfloat16 is then at KL 0.0002 where rounding every step gives 0.0006,
    enough to turn its near-tied answer to "What is the capital of France?".

    Args:
        config: the architecture.
        take: called once per tensor, in the order of the layers, with its Hugging Face name and
            shape; returns it in the compute dtype (bfloat16 or float32). It is the only source of
            weights: nothing is initialised here.
    """

    def __init__(self, config: ModelConfig, take: TakeWeight):
        table = (config.vocab_size, config.hidden_size)
        self.config = config
        self.embed_tokens = nnx.Param(take("model.embed_tokens.weight", table))
        self.layers = nnx.List(
            [DecoderLayer(config, take, f"model.layers.{i}") for i in range(config.num_layers)]
        )
        self.norm = RMSNorm(take, "model.norm", config.hidden_size, config.rms_norm_eps)
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else nnx.Param(take("lm_head.weight", table))

    def hidden(
        self,
        tokens: Int[Array, "B Q"],
        positions: Int[Array, "B Q"],
        attend: Attend,
        state: Any,
    ) -> tuple[Float[Array, "B Q E"], Any]:
        """Runs all layers and the final norm.

        Args:
            tokens: ids in [0, vocab_size).
            positions: absolute positions, 0-based, in tokens.
            attend: stores k and v and answers the queries; called once per layer, in order.
            state: any pytree, passed through ``attend`` from layer to layer.

        Returns:
            (h [B, Q, E] in the compute dtype, the last state).
        """
        cos, sin = rope.cos_sin(self.config, positions)
        x = self.embed_tokens[...][tokens].astype(jnp.float32)  # [B, Q, E]
        for index, layer in enumerate(self.layers):
            with jax.named_scope(f"layer_{index}"):
                x, state = layer(x, cos, sin, index, attend, state)
        return self.norm(x).astype(self.embed_tokens.dtype), state

    def logits(self, h: Float[Array, "*rows E"]) -> Float[Array, "*rows V"]:
        """h @ head^T in float32, [..., V]; the head is the embedding table when tied."""
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        return project(h, head[...])


def causal_attend(
    state: Any, layer: int, q: jax.Array, k: jax.Array, v: jax.Array
) -> tuple[jax.Array, Any]:
    """Plain causal attention within one call: the whole sequence at once, nothing cached.

    softmax(q k^T D^-0.5 + mask) v with float32 softmax; q [B, Q, N, D], k and v [B, Q, K, D]. The
    reference that caches are compared with, and what calibration runs on. ``state`` is untouched.
    """
    return jax.nn.dot_product_attention(q, k, v, is_causal=True), state
