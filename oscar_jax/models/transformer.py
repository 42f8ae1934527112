"""The decoder: one module that is Qwen3, Llama (SmolLM2), Qwen2.5 or Gemma 3 by its config.

It knows tokens, positions and weights. Keys and values go to ``attend``, a function of the caller
that owns whatever cache there is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from oscar_jax.model_config import ModelConfig
from oscar_jax.models import rope
from pallas_kernels.gemv import between, counters, linear
from pallas_kernels.gemv.xla import rms_norm
from pallas_kernels.heads import rotate

# (state, layer, q[B, Q, N, D], k[B, Q, K, D], v[B, Q, K, D]) -> (out[B, Q, N, D], state); q and k
# are post-RoPE and everything is in the compute dtype. The scale D**-0.5 is attend's to apply.
Attend = Callable[[Any, int, jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]

# Gives the tensor of a Hugging Face name and a shape, in the compute dtype.
TakeWeight = Callable[[str, tuple[int, ...]], jax.Array]


class Linear(nnx.Module):
    """Projections of one input as one weight [out, in], the checkpoint's rows in their order.

    One weight rather than three: a product with a row or two takes its bytes' time and then a few
    microseconds of its own.

    Args:
        parts: Hugging Face name (without ``.weight``) to outputs of each projection.
    """

    def __init__(
        self, take: TakeWeight, parts: Mapping[str, int], into: int, *, bias: bool = False
    ):
        joined = lambda end, *shape: jnp.concatenate(  # noqa: E731
            [take(f"{name}.{end}", (out, *shape)) for name, out in parts.items()]
        )
        self.weight = nnx.Param(joined("weight", into))
        self.bias = nnx.Param(joined("bias")) if bias else None
        self.sizes = tuple((name.rpartition(".")[2], out) for name, out in parts.items())

    def rows(self, name: str) -> Float[Array, "O I"]:
        """One projection's own weight, by the last part of its name."""
        first = 0
        for part, out in self.sizes:
            if part == name:
                return self.weight[...][first : first + out]
            first += out
        raise ValueError(f"name={name!r}: must be one of {[part for part, _ in self.sizes]}")


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + eps) * gain, in float32; the gain is the weight, Gemma's 1 + weight."""

    def __init__(self, config: ModelConfig, take: TakeWeight, name: str, size: int):
        self.weight = nnx.Param(take(f"{name}.weight", (size,)))
        self.eps = config.rms_norm_eps
        self.from_one = config.is_gemma

    @property
    def gain(self) -> Float[Array, " E"]:
        weight = self.weight[...]
        # in float32: rounding 1 + w to bfloat16 would lose most of a small w
        return 1 + weight.astype(jnp.float32) if self.from_one else weight

    def __call__(self, x: Float[Array, "*rows E"]) -> Float[Array, "*rows E"]:
        return rms_norm(x, self.gain, self.eps)


class Attention(nnx.Module):
    """Projections, the optional QK-norm, RoPE; the attention itself is ``attend``."""

    def __init__(self, config: ModelConfig, take: TakeWeight, name: str):
        size, d = config.hidden_size, config.head_dim
        self.heads, self.kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, d
        counts = {"q_proj": self.heads, "k_proj": self.kv_heads, "v_proj": self.kv_heads}
        parts = {f"{name}.{part}": heads * d for part, heads in counts.items()}
        self.qkv_proj = Linear(take, parts, size, bias=config.qkv_bias)
        self.o_proj = Linear(take, {f"{name}.o_proj": size}, self.heads * d)
        normed, self.eps = config.qk_norm, config.rms_norm_eps
        self.q_norm = RMSNorm(config, take, f"{name}.q_norm", d) if normed else None
        self.k_norm = RMSNorm(config, take, f"{name}.k_norm", d) if normed else None
        self.query_scale = 1.0  # beyond the D**-0.5 of ``attend``
        if config.query_scalar is not None:
            self.query_scale = (d / config.query_scalar) ** 0.5

    def __call__(
        self,
        y: Float[Array, "B Q O"],
        cos: Float[Array, "B Q 1 H"],
        sin: Float[Array, "B Q 1 H"],
        layer: int,
        attend: Attend,
        state: Any,
    ) -> tuple[Float[Array, "B Q I"], Any]:
        """From the product with ``qkv_proj`` to what ``o_proj`` multiplies."""
        bias, dtype = self.qkv_proj.bias, self.o_proj.weight.dtype
        y = y if bias is None else y + bias[...]
        gains = [None if norm is None else norm.gain for norm in (self.q_norm, self.k_norm)]
        if self.query_scale != 1 and gains[0] is not None:
            gains[0] = gains[0] * self.query_scale
        q, k, v = rotate(
            y.reshape(*y.shape[:2], -1, self.head_dim),
            cos,
            sin,
            *gains,
            heads=self.heads,
            eps=self.eps,
            dtype=dtype,
        )
        out, state = attend(state, layer, q, k, v)
        return out.reshape(*y.shape[:2], -1), state


class MLP(nnx.Module):
    """The weights of down(act(gate(x)) * up(x)); act is SiLU, Gemma's the tanh form of GELU."""

    def __init__(self, config: ModelConfig, take: TakeWeight, name: str):
        size, inner = config.hidden_size, config.intermediate_size
        parts = {f"{name}.gate_proj": inner, f"{name}.up_proj": inner}
        self.gate_up_proj = Linear(take, parts, size)
        self.down_proj = Linear(take, {f"{name}.down_proj": size}, inner)


class DecoderLayer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), cut where a kernel can take most of it.

    ``project`` makes what the attention takes of x. ``finish`` takes the attention's answer and
    makes the layer's result and, in the same op, what the next layer's attention takes of that.
    """

    def __init__(self, config: ModelConfig, take: TakeWeight, name: str):
        norm = lambda part: RMSNorm(config, take, f"{name}.{part}", config.hidden_size)  # noqa: E731
        self.input_layernorm = norm("input_layernorm")
        self.self_attn = Attention(config, take, f"{name}.self_attn")
        self.post_attention_layernorm = norm("post_attention_layernorm")
        self.mlp = MLP(config, take, f"{name}.mlp")

    def project(self, x: Float[Array, "B Q E"]) -> Float[Array, "B Q O"]:
        norm, weight = self.input_layernorm, self.self_attn.qkv_proj.weight[...]
        return linear(x, weight, gain=norm.weight[...], eps=norm.eps)

    def finish(
        self,
        answer: Float[Array, "B Q I"],
        x: Float[Array, "B Q E"],
        held: Array,
        following: DecoderLayer | None,
    ) -> tuple[Float[Array, "B Q E"], Float[Array, "B Q O"] | None, Array]:
        """``held``: the counters of ``between``, passed from layer to layer."""
        norm = self.post_attention_layernorm
        after = (
            ()
            if following is None
            else (
                following.input_layernorm.weight[...],
                following.self_attn.qkv_proj.weight[...],
            )
        )
        return between(
            answer,
            x,
            self.self_attn.o_proj.weight[...],
            norm.weight[...],
            self.mlp.gate_up_proj.weight[...],
            self.mlp.down_proj.weight[...],
            held,
            *after,
            eps=norm.eps,
        )


class GemmaLayer(nnx.Module):
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x))): the same cut, in plain products.

    The norms between a product and its residual keep it from being one op of ``between``.
    """

    def __init__(self, config: ModelConfig, take: TakeWeight, name: str):
        norm = lambda part: RMSNorm(config, take, f"{name}.{part}", config.hidden_size)  # noqa: E731
        self.input_layernorm = norm("input_layernorm")
        self.self_attn = Attention(config, take, f"{name}.self_attn")
        self.post_attention_layernorm = norm("post_attention_layernorm")
        self.pre_feedforward_layernorm = norm("pre_feedforward_layernorm")
        self.mlp = MLP(config, take, f"{name}.mlp")
        self.post_feedforward_layernorm = norm("post_feedforward_layernorm")

    def project(self, x: Float[Array, "B Q E"]) -> Float[Array, "B Q O"]:
        weight = self.self_attn.qkv_proj.weight[...]
        return linear(self.input_layernorm(x).astype(weight.dtype), weight)

    def finish(
        self,
        answer: Float[Array, "B Q I"],
        x: Float[Array, "B Q E"],
        held: Array,
        following: GemmaLayer | None,
    ) -> tuple[Float[Array, "B Q E"], Float[Array, "B Q O"] | None, Array]:
        """As ``DecoderLayer.finish``."""
        h = x + self.post_attention_layernorm(linear(answer, self.self_attn.o_proj.weight[...]))
        weight = self.mlp.gate_up_proj.weight[...]
        both = linear(self.pre_feedforward_layernorm(h).astype(weight.dtype), weight)
        gate, up = jnp.split(both, 2, axis=-1)
        inner = (jax.nn.gelu(gate, approximate=True) * up).astype(weight.dtype)
        h = h + self.post_feedforward_layernorm(linear(inner, self.mlp.down_proj.weight[...]))
        return h, None if following is None else following.project(h), held


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
        kind: Any = GemmaLayer if config.is_gemma else DecoderLayer
        self.layers = nnx.List(
            [kind(config, take, f"model.layers.{i}") for i in range(config.num_layers)]
        )
        self.norm = RMSNorm(config, take, "model.norm", config.hidden_size)
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
        windows = self.config.sliding_windows
        angles = {
            local: rope.cos_sin(self.config, positions, local=local)
            for local in {window is not None for window in windows}
        }
        x = self.embed_tokens[...][tokens].astype(jnp.float32)  # [B, Q, E]
        if self.config.is_gemma:
            x = x * self.config.hidden_size**0.5
        y, held = self.layers[0].project(x), counters()  # [B, Q, O]
        for index, layer in enumerate(self.layers):
            last = index + 1 == len(self.layers)
            with jax.named_scope(f"layer_{index}"):
                turns = angles[windows[index] is not None]
                answer, state = layer.self_attn(y, *turns, index, attend, state)
                following = None if last else self.layers[index + 1]
                x, ahead, held = layer.finish(answer, x, held, following)
                y = y if ahead is None else ahead
        return self.norm(x).astype(self.embed_tokens.dtype), state

    def logits(self, h: Float[Array, "*rows E"]) -> Float[Array, "*rows V"]:
        """h @ head^T in float32, [..., V]; the head is the embedding table when tied."""
        return linear(h, self._head[...])

    @property
    def _head(self) -> nnx.Param:
        return self.embed_tokens if self.lm_head is None else self.lm_head


def causal_attend(config: ModelConfig) -> Attend:
    """Plain causal attention within one call: the whole sequence at once, nothing cached.

    softmax(q k^T D^-0.5 + mask) v with float32 softmax; q [B, Q, N, D], k and v [B, Q, K, D]; in a
    window layer a query sees itself and the ``window - 1`` tokens before it. The reference that
    caches are compared with. ``state`` is untouched.
    """
    windows = config.sliding_windows

    def attend(
        state: Any, layer: int, q: jax.Array, k: jax.Array, v: jax.Array
    ) -> tuple[jax.Array, Any]:
        window = windows[layer]
        before = None if window is None else (window - 1, 0)
        out = jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=before)
        return out, state

    return attend
