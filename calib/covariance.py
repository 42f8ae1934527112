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

*Positions.* Post-RoPE moments belong to the positions of the text. Where the model's frequencies
are known, every row is also turned back and its moments kept before RoPE; ``statistics(layer,
positions)`` then gives mu, S and C averaged over any range of served positions in closed form
(``calib.positions``). The value side does not turn.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from calib.positions import averaged_mean, averaged_moment, turned
from calib.sums import HIGHEST, KeySums, Total, second_moment


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BaseMoments:
    """Queries and keys of one layer before RoPE, with the angles that the model turns them by."""

    frequencies: Float[Array, " H"]  # radians per token of the channel pairs (i, i + D/2)
    key: KeySums
    qq: Total  # [K, D, D]

    @classmethod
    def zeros(cls, kv_heads: int, head_dim: int, frequencies: np.ndarray) -> BaseMoments:
        return cls(
            jnp.array(frequencies, jnp.float32),
            KeySums.zeros(kv_heads, head_dim),
            Total.zeros(kv_heads, head_dim, head_dim),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerMoments:
    """The sums of one layer."""

    tokens: Int[Array, ""]
    key: KeySums
    qq: Total  # [K, D, D]       sum over the group's heads
    vv: Total  # [K, Dv, Dv]
    weight: Total  # [K]         sum w
    wvv: Total  # [K, Dv, Dv]    sum w v^T v
    oo: Total  # [K, Dv, Dv]     sum over the group's heads
    base: BaseMoments | None

    @classmethod
    def zeros(
        cls, kv_heads: int, head_dim: int, v_head_dim: int, frequencies: np.ndarray | None
    ) -> LayerMoments:
        values = (kv_heads, v_head_dim, v_head_dim)
        return cls(
            tokens=jnp.zeros((), jnp.int32),
            key=KeySums.zeros(kv_heads, head_dim),
            qq=Total.zeros(kv_heads, head_dim, head_dim),
            vv=Total.zeros(*values),
            weight=Total.zeros(kv_heads),
            wvv=Total.zeros(*values),
            oo=Total.zeros(*values),
            base=(
                None if frequencies is None else BaseMoments.zeros(kv_heads, head_dim, frequencies)
            ),
        )

    def update(
        self, q: Array, k: Array, v: Array, o: Array, counted: Array, positions: Array | None
    ) -> LayerMoments:
        """Add rows q, o [R, K, G, D], k, v [R, K, D] where ``counted`` bool[R] is set."""
        # select, not multiply: padding may hold NaN
        clear = lambda x: jnp.where(  # noqa: E731
            counted.reshape(-1, *[1] * (x.ndim - 1)), x.astype(jnp.float32), 0.0
        )
        q, v, o, keys = clear(q), clear(v), clear(o), clear(k)
        tokens = self.tokens + counted.sum().astype(jnp.int32)
        qq = self.qq.add(_over_group(q))
        query = qq.high / jnp.maximum(tokens, 1)  # C, all tokens so far
        weight = jnp.einsum("rkd,kde,rke->rk", keys, query, keys, precision=HIGHEST)
        weight = jnp.maximum(weight, 0.0)  # positive in exact arithmetic
        base = self.base
        if base is not None and positions is not None:
            back = -positions[None]  # [1, R]
            q, turned_keys = (
                turned(x.reshape(1, len(x), -1, x.shape[-1]), back, base.frequencies)
                for x in (q, keys)
            )
            base = BaseMoments(
                base.frequencies,
                base.key.add(turned_keys[0], counted, self.tokens),
                base.qq.add(_over_group(q.reshape(*o.shape[:3], -1))),
            )
        return LayerMoments(
            tokens=tokens,
            key=self.key.add(keys, counted, self.tokens),
            qq=qq,
            vv=self.vv.add(second_moment(v, v)),
            weight=self.weight.add(weight.sum(0)),
            wvv=self.wvv.add(second_moment(weight[..., None] * v, v)),
            oo=self.oo.add(_over_group(o)),
            base=base,
        )

    @property
    def totals(self) -> dict[str, Total]:
        """By the tensor that is to blame where one is not finite."""
        return {
            "q": self.qq,
            "k": self.key.kk,
            "v": self.vv,
            "attn_out": self.oo,
            "k^T C k": self.weight,  # finite rows may still overflow their product
        }

    def merge(self, other: LayerMoments) -> LayerMoments:
        """The sums of both."""
        base = self.base
        if base is not None and other.base is not None:
            base = BaseMoments(
                base.frequencies,
                base.key.merge(other.base.key, self.tokens, other.tokens),
                base.qq.merge(other.base.qq),
            )
        return LayerMoments(
            tokens=self.tokens + other.tokens,
            key=self.key.merge(other.key, self.tokens, other.tokens),
            qq=self.qq.merge(other.qq),
            vv=self.vv.merge(other.vv),
            weight=self.weight.merge(other.weight),
            wvv=self.wvv.merge(other.wvv),
            oo=self.oo.merge(other.oo),
            base=base,
        )


def _over_group(x: Float[Array, "R K G D"]) -> Float[Array, "K D D"]:
    return jnp.einsum("rkgd,rkge->kde", x, x, precision=HIGHEST)


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
        cls,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        frequencies: np.ndarray | None = None,
    ) -> Moments:
        """Empty sums.

        Args:
            v_head_dim: ``head_dim`` by default.
            frequencies: the RoPE frequencies [D/2] of channel pairs (i, i + D/2) in radians per
                token, or one such row per layer, [layers, D/2]: moments are then also kept before
                RoPE, and ``update`` needs the rows' positions. A channel that does not turn has 0.
        """
        for name, size in (("layers", layers), ("kv_heads", kv_heads), ("head_dim", head_dim)):
            if size < 1:
                raise ValueError(f"{name}={size}: must be at least 1")
        rows: list[np.ndarray | None] = [None] * layers
        if frequencies is not None:
            given = np.asarray(frequencies, np.float32)
            if given.shape not in ((head_dim // 2,), (layers, head_dim // 2)):
                raise ValueError(
                    f"frequencies have shape {given.shape}: must be ({head_dim // 2},), or one row "
                    f"per layer, ({layers}, {head_dim // 2})"
                )
            rows = list(np.broadcast_to(given, (layers, head_dim // 2)))
        return cls(
            tuple(LayerMoments.zeros(kv_heads, head_dim, v_head_dim or head_dim, f) for f in rows)
        )

    def update(
        self,
        layer: int,
        q: Float[Array, "_B _Q _N _D"],
        k: Float[Array, "_B _Q _K _D"],
        v: Float[Array, "_B _Q _K _Dv"],
        attn_out: Float[Array, "_B _Q _N _Dv"],
        *,
        mask: Bool[Array, "_B _Q"] | None = None,
        positions: Int[Array, "_B _Q"] | None = None,
    ) -> Moments:
        """Add a chunk of one layer.

        Args:
            layer: 0-based, a Python int.
            q, k: post-RoPE, as the cache gets them; query head h belongs to KV head h // (N / K).
            attn_out: the attention output before the output projection.
            mask: which tokens count; None counts all. Leave out padding and the tokens of the sink,
                which never reach a page and whose keys are far from the rest.
            positions: where each token stands in its sequence, 0-based; needed if these moments
                were made with ``frequencies``.

        Raises:
            ValueError: a layer that does not exist, shapes that disagree, positions missing.
        """
        if not 0 <= layer < len(self.layers):
            raise ValueError(f"layer={layer}: these moments have layers 0..{len(self.layers) - 1}")
        kv_heads, head_dim = self.layers[layer].key.pivot.shape
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
        for name, given in (("mask", mask), ("positions", positions)):
            if given is not None and given.shape != (batch, length):
                raise ValueError(f"{name} has shape {given.shape}: must be {(batch, length)}")
        if self.layers[layer].base is not None and positions is None:
            raise ValueError("positions=None: these moments have frequencies and need positions")
        group = (batch * length, kv_heads, heads // kv_heads)
        counted = jnp.ones(batch * length, bool) if mask is None else mask.reshape(-1)
        updated = self.layers[layer].update(
            q.reshape(*group, head_dim),
            k.reshape(-1, kv_heads, head_dim),
            v.reshape(-1, kv_heads, v_head_dim),
            attn_out.reshape(*group, v_head_dim),
            counted,
            None if positions is None else positions.reshape(-1),
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
            for tensor, total in layer.totals.items():
                if not np.isfinite(total.float64()).all():
                    raise ValueError(
                        f"layer {index}: {tensor} held values that are not finite; "
                        "no rotation can be fitted"
                    )

    def finite(self) -> Bool[Array, ""]:
        """Whether ``check_finite`` has nothing to raise; for inside ``jit``.

        Nothing is copied to the host, where an 8B's sums are 150 MB.
        """
        totals = [total for layer in self.layers for total in layer.totals.values()]
        return jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(totals)]).all()

    def statistics(self, layer: int, positions: int | None = None) -> LayerStatistics:
        """The layer's means and covariances in float64.

        Args:
            positions: queries and keys as they would be in sequences of up to so many tokens
                (``calib.positions.lengths``); None takes them where they stood.

        Raises:
            ValueError: positions without moments from before RoPE, or below 1.
        """
        sums = self.layers[layer]
        n = max(int(sums.tokens), 1)
        mean, key = sums.key.mean_and_covariance(n)
        query = sums.qq.float64() / n
        if positions is not None:
            mean, key, query = self._averaged(layer, n, positions)
        weight = sums.weight.float64()[:, None, None]
        return LayerStatistics(
            tokens=int(sums.tokens),
            mean=mean,
            key=_symmetric(key),
            query=_symmetric(query),
            value=_symmetric(sums.vv.float64() / n),
            proxy=_symmetric(sums.wvv.float64() / np.where(weight > 0, weight, 1.0)),
            attention=_symmetric(sums.oo.float64() / n),
        )

    def _averaged(
        self, layer: int, n: int, positions: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """mu, S and C in sequences of up to ``positions`` tokens."""
        base = self.layers[layer].base
        if base is None:
            raise ValueError(
                f"positions={positions}: these moments hold nothing from before RoPE; make them "
                "with Moments.zeros(..., frequencies=...)"
            )
        if positions < 1:
            raise ValueError(f"positions={positions}: must be at least 1")
        turn = np.asarray(base.frequencies, np.float64)
        mean, covariance = base.key.mean_and_covariance(n)
        # the spread turns as it is; the mean's own turning becomes spread where it does not cancel
        outer = mean[:, :, None] * mean[:, None, :]
        whole = averaged_mean(mean, turn, positions)
        key = averaged_moment(covariance + outer, turn, positions)
        key -= whole[:, :, None] * whole[:, None, :]
        return whole, key, averaged_moment(base.qq.float64() / n, turn, positions)


def _symmetric(x: np.ndarray) -> np.ndarray:
    return (x + x.swapaxes(-1, -2)) / 2
