"""Second moments of a model's queries, keys, values and attention outputs, streamed.

Nothing is dumped: every chunk of tokens is reduced to D x D sums per layer and KV head, so memory
does not grow with the text. The sums are pairs of float32 numbers (Knuth's two-sum), good to about
48 bits without 64-bit mode, and run on the device inside ``jit``; the host makes float64 of them.

With k, q, v, o the post-RoPE rows of one KV head (q and o run over its group of query heads) and n
the tokens counted, a fit reads:

    mu = sum k / n                          S = sum (k - mu)^T (k - mu) / n
    C = sum q^T q / n                       V = sum v^T v / n
    proxy      = sum w v^T v / sum w,       w_t = k_t C k_t^T
    attention  = sum o^T o / n              (= V^T A^T A V / n of the softmax matrix A)

*Which value covariance.* The paper's target (OSCAR, arXiv 2605.17757, section 3) is the covariance
of the attention output, here "attention": o = A v needs a hook, not a softmax matrix. The published
code (``compute_kv_rotation.py`` at commit 473ff3f9d, method ``sst``) weights tokens instead, here
"proxy". There C is the covariance of the whole text, which takes two passes; one pass is kept here
by using the running C of all tokens so far, the chunk's own included: exact for a single chunk, and
a weight that drifts only while C is still moving. Both targets are always accumulated.

Pre-RoPE moments, for averaging over served positions, would be a second tuple of ``LayerMoments``.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

HIGHEST = lax.Precision.HIGHEST  # TF32 or bf16 products would drown small eigenvalues


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Total:
    """A running sum as the unevaluated pair high + low of float32 arrays (Knuth's two-sum)."""

    high: Float[Array, "*s"]
    low: Float[Array, "*s"]

    @classmethod
    def zeros(cls, *shape: int) -> Total:
        return cls(jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.float32))

    def add(self, x: Float[Array, "*s"]) -> Total:
        total = self.high + x
        carried = total - self.high
        lost = (self.high - (total - carried)) + (x - carried)  # exactly what rounding dropped
        return Total(total, self.low + lost)

    def merge(self, other: Total) -> Total:
        return self.add(other.high).add(other.low)

    def float64(self) -> np.ndarray:
        return np.asarray(self.high, np.float64) + np.array(self.low, np.float64)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerMoments:
    """The sums of one layer; ``pivot`` is subtracted from every key before anything is summed.

    Keys with a large common offset (K-bias models reach hundreds) would lose their covariance in
    float32: E[k k^T] - mu mu^T cancels. The pivot, the first chunk's mean, keeps the sums small.
    """

    tokens: Int[Array, ""]
    pivot: Float[Array, "K D"]
    k: Total  # [K, D]           sum (k - pivot)
    kk: Total  # [K, D, D]       sum (k - pivot)^T (k - pivot)
    qq: Total  # [K, D, D]       sum over the group's heads
    vv: Total  # [K, Dv, Dv]
    weight: Total  # [K]         sum w
    wvv: Total  # [K, Dv, Dv]    sum w v^T v
    oo: Total  # [K, Dv, Dv]     sum over the group's heads

    @classmethod
    def zeros(cls, kv_heads: int, head_dim: int, v_head_dim: int) -> LayerMoments:
        keys = (kv_heads, head_dim, head_dim)
        values = (kv_heads, v_head_dim, v_head_dim)
        return cls(
            tokens=jnp.zeros((), jnp.int32),
            pivot=jnp.zeros((kv_heads, head_dim), jnp.float32),
            k=Total.zeros(kv_heads, head_dim),
            kk=Total.zeros(*keys),
            qq=Total.zeros(*keys),
            vv=Total.zeros(*values),
            weight=Total.zeros(kv_heads),
            wvv=Total.zeros(*values),
            oo=Total.zeros(*values),
        )

    def update(self, q: Array, k: Array, v: Array, o: Array, counted: Array) -> LayerMoments:
        """Add rows q, o [R, K, G, D], k, v [R, K, D] where ``counted`` bool[R] is set."""
        # select, not multiply: padding may hold NaN
        clear = lambda x: jnp.where(  # noqa: E731
            counted.reshape(-1, *[1] * (x.ndim - 1)), x.astype(jnp.float32), 0.0
        )
        q, v, o, keys = clear(q), clear(v), clear(o), clear(k)
        added = counted.sum().astype(jnp.int32)
        tokens = self.tokens + added
        mean = keys.sum(0) / jnp.maximum(added, 1)
        pivot = jnp.where(self.tokens == 0, mean, self.pivot)
        shifted = clear(keys - pivot)
        qq = self.qq.add(jnp.einsum("rkgd,rkge->kde", q, q, precision=HIGHEST))
        query = qq.high / jnp.maximum(tokens, 1)  # C, all tokens so far
        weight = jnp.einsum("rkd,kde,rke->rk", keys, query, keys, precision=HIGHEST)
        weight = jnp.maximum(weight, 0.0)  # positive in exact arithmetic
        outer = lambda x, y: jnp.einsum("rkd,rke->kde", x, y, precision=HIGHEST)  # noqa: E731
        return LayerMoments(
            tokens=tokens,
            pivot=pivot,
            k=self.k.add(shifted.sum(0)),
            kk=self.kk.add(outer(shifted, shifted)),
            qq=qq,
            vv=self.vv.add(outer(v, v)),
            weight=self.weight.add(weight.sum(0)),
            wvv=self.wvv.add(outer(weight[..., None] * v, v)),
            oo=self.oo.add(jnp.einsum("rkgd,rkge->kde", o, o, precision=HIGHEST)),
        )

    def merge(self, other: LayerMoments) -> LayerMoments:
        """The sums of both; the other's keys are moved to this pivot first."""
        pivot = jnp.where(self.tokens == 0, other.pivot, self.pivot)
        step = other.pivot - pivot  # other's k - pivot = (k - other.pivot) + step
        n = other.tokens.astype(jnp.float32)
        cross = other.k.high[:, :, None] * step[:, None, :]  # [K, D, D]
        square = n * step[:, :, None] * step[:, None, :]
        return LayerMoments(
            tokens=self.tokens + other.tokens,
            pivot=pivot,
            k=self.k.merge(other.k).add(n * step),
            kk=self.kk.merge(other.kk).add(cross).add(cross.swapaxes(1, 2)).add(square),
            qq=self.qq.merge(other.qq),
            vv=self.vv.merge(other.vv),
            weight=self.weight.merge(other.weight),
            wvv=self.wvv.merge(other.wvv),
            oo=self.oo.merge(other.oo),
        )


@dataclasses.dataclass(frozen=True)
class LayerStatistics:
    """What a fit reads of one layer, float64 and exactly symmetric; see the module's formulas."""

    tokens: int
    mean: np.ndarray  # mu [K, D]
    key: np.ndarray  # S [K, D, D], centred
    query: np.ndarray  # C [K, D, D]
    value: np.ndarray  # V [K, Dv, Dv], not centred
    proxy: np.ndarray  # [K, Dv, Dv]; zeros where all weights are 0
    attention: np.ndarray  # [K, Dv, Dv]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Moments:
    """Second moments of every layer: a pytree, changed by ``update``, usable inside ``jit``.

    >>> moments = Moments.zeros(layers=1, kv_heads=1, head_dim=2)
    >>> q = jnp.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])[None, :, None]
    >>> k = jnp.array([[2.0, 0.0], [0.0, 1.0], [1.0, 0.0]])[None, :, None]
    >>> moments = moments.update(0, q, k, v=k, attn_out=k)
    >>> moments.statistics(0).mean.round(4).tolist()
    [[1.0, 0.3333]]
    """

    layers: tuple[LayerMoments, ...]

    @classmethod
    def zeros(
        cls, *, layers: int, kv_heads: int, head_dim: int, v_head_dim: int | None = None
    ) -> Moments:
        """Empty sums. ``v_head_dim`` defaults to ``head_dim``."""
        for name, size in (("layers", layers), ("kv_heads", kv_heads), ("head_dim", head_dim)):
            if size < 1:
                raise ValueError(f"{name}={size}: must be at least 1")
        one = LayerMoments.zeros(kv_heads, head_dim, v_head_dim or head_dim)
        return cls(tuple(jax.tree.map(jnp.copy, one) for _ in range(layers)))

    def update(
        self,
        layer: int,
        q: Float[Array, "_B _Q _N _D"],
        k: Float[Array, "_B _Q _K _D"],
        v: Float[Array, "_B _Q _K _Dv"],
        attn_out: Float[Array, "_B _Q _N _Dv"],
        *,
        mask: Bool[Array, "_B _Q"] | None = None,
    ) -> Moments:
        """Add a chunk of one layer.

        Args:
            layer: 0-based, a Python int.
            q, k: post-RoPE, as the cache gets them; query head h belongs to KV head h // (N / K).
            attn_out: the attention output before the output projection.
            mask: which tokens count; None counts all. Leave out padding and the tokens of the sink,
                which never reach a page and whose keys are far from the rest.

        Raises:
            ValueError: a layer that does not exist, or shapes that disagree.
        """
        if not 0 <= layer < len(self.layers):
            raise ValueError(f"layer={layer}: these moments have layers 0..{len(self.layers) - 1}")
        kv_heads, head_dim = self.layers[layer].pivot.shape
        v_head_dim = self.layers[layer].vv.high.shape[-1]
        batch, length, heads = q.shape[:3]
        want = {
            "q": (q.shape, (batch, length, heads, head_dim)),
            "k": (k.shape, (batch, length, kv_heads, head_dim)),
            "v": (v.shape, (batch, length, kv_heads, v_head_dim)),
            "attn_out": (attn_out.shape, (batch, length, heads, v_head_dim)),
        }
        for name, (have, shape) in want.items():
            if have != shape:
                raise ValueError(f"{name} of layer {layer} has shape {have}: must be {shape}")
        if heads % kv_heads:
            raise ValueError(f"q has {heads} heads: must be a multiple of {kv_heads} KV heads")
        if mask is not None and mask.shape != (batch, length):
            raise ValueError(f"mask has shape {mask.shape}: must be {(batch, length)}")
        group = (batch * length, kv_heads, heads // kv_heads)
        counted = jnp.ones(batch * length, bool) if mask is None else mask.reshape(-1)
        updated = self.layers[layer].update(
            q.reshape(*group, head_dim),
            k.reshape(-1, kv_heads, head_dim),
            v.reshape(-1, kv_heads, v_head_dim),
            attn_out.reshape(*group, v_head_dim),
            counted,
        )
        return Moments((*self.layers[:layer], updated, *self.layers[layer + 1 :]))

    def merge(self, other: Moments) -> Moments:
        """The moments of both texts together."""
        if len(self.layers) != len(other.layers):
            raise ValueError(
                f"other has {len(other.layers)} layers: must be {len(self.layers)} to merge"
            )
        return Moments(tuple(a.merge(b) for a, b in zip(self.layers, other.layers, strict=True)))

    def check_finite(self) -> None:
        """Raise ValueError naming the first layer and tensor that held NaN or infinity."""
        for index, layer in enumerate(self.layers):
            sums = {"q": layer.qq, "k": layer.kk, "v": layer.vv, "attn_out": layer.oo}
            sums["k^T C k"] = layer.weight  # finite rows may still overflow their product
            for tensor, total in sums.items():
                if not np.isfinite(total.float64()).all():
                    raise ValueError(
                        f"layer {index}: {tensor} held values that are not finite; "
                        "no rotation can be fitted"
                    )

    def statistics(self, layer: int) -> LayerStatistics:
        """The layer's means and covariances in float64."""
        sums = self.layers[layer]
        n = max(int(sums.tokens), 1)
        offset = sums.k.float64() / n
        weight = sums.weight.float64()[:, None, None]
        return LayerStatistics(
            tokens=int(sums.tokens),
            mean=np.asarray(sums.pivot, np.float64) + offset,
            key=_symmetric(sums.kk.float64() / n - offset[:, :, None] * offset[:, None, :]),
            query=_symmetric(sums.qq.float64() / n),
            value=_symmetric(sums.vv.float64() / n),
            proxy=_symmetric(sums.wvv.float64() / np.where(weight > 0, weight, 1.0)),
            attention=_symmetric(sums.oo.float64() / n),
        )


def _symmetric(x: np.ndarray) -> np.ndarray:
    return (x + x.swapaxes(-1, -2)) / 2
