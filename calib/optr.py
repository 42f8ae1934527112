"""OptR (arXiv 2608.02691): an orthogonal factor per KV head, learned through the real page format.

The transform of a head becomes X = X_base expm(A - A^T) with A = 0 at the start, on any base X_base
that a recipe fits; the mean and the codec stay the base's. Attention is taken apart as

    P_q V_q W_O - P V W_O  =  (P_q - P) V W_O  +  P_q (V_q - V) W_O

so keys are learned first, then values under the attention that the final keys give:

    keys    KL(P || P_q) + output_weight |(P_q - P) V W_O|^2 / |P V W_O|^2
    values  |P_q (V_q - V) W_O|^2 / |P V W_O|^2

Norms are means over the sampled queries of a KV head's group, each query head with its own D rows
of W_O. A ratio where the paper has an absolute error: its unit is then the model's, and a weight
that suits one layer does not suit the next. P runs over all that a query sees when it is served:
sink and recent window exact, and the pages that are complete (``calib.held_out``).

Adam over all heads of a group of layers at once. What a head learned is kept where it has less loss
than the base on held-out sequences, else the base is.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from tqdm import tqdm

from calib.collect import collect_rows
from calib.held_out import HeldOut
from calib.optr_learner import Learner, OptrSettings
from calib.optr_loss import KeyRows, key_loss, key_rows, value_loss, value_rows
from calib.optr_state import Store
from calib.sums import HIGHEST
from oscar_jax.models import Decoder
from oscar_jax.rotation import Rotation
from pallas_kernels.format import Codec


@dataclasses.dataclass(frozen=True)
class SideLosses:
    """The losses of one side, f64[layers, kv_heads]; ``kept``: the learned factor is used."""

    train_before: np.ndarray
    train_after: np.ndarray
    held_before: np.ndarray
    held_after: np.ndarray
    kept: np.ndarray

    def summary(self, name: str) -> str:
        """One line: how many heads kept what they learned, and the mean losses."""
        train, held = (
            f"{before.mean():.4g} -> {after.mean():.4g}"
            for before, after in (
                (self.train_before, self.train_after),
                (self.held_before, self.held_after),
            )
        )
        return (
            f"OptR, {name}: kept for {self.kept.sum()} of {self.kept.size} heads; mean loss "
            f"{train} on calibration text, {held} held out"
        )


@dataclasses.dataclass(frozen=True)
class Learned:
    """A rotation with what OptR changed in it."""

    rotation: Rotation
    keys: SideLosses
    values: SideLosses
    seconds: float

    def summary(self) -> tuple[str, str]:
        """A line for the keys and one for the values."""
        return self.keys.summary("keys"), self.values.summary("values")


# ---------------------------------------------------------------------------------------- driver


def learn(
    base: Rotation,
    train: HeldOut,
    held_out: HeldOut,
    output: Sequence[np.ndarray],
    settings: OptrSettings | None = None,
    *,
    resume: Path | None = None,
    progress: tqdm | None = None,
) -> Learned:
    """Refine every head of ``base`` by an orthogonal factor.

    Args:
        base: any fitted rotation; its mean and codec stay.
        train, held_out: rows of the model (``calib.collect.collect_rows``) with the same windows.
        output: per layer f32[N, Dv, Dv], ``output_products`` of the same model.
        resume: a directory that keeps the state; an interrupted call with the same arguments goes
            on there and ends with the same bits.
        progress: moved by 1 per step, with the loss beside it; its total is set here.

    Raises:
        ValueError: rows, base and output that do not belong together, rows that are not finite, or
            a resume directory of another run.
    """
    started = time.perf_counter()
    settings = settings or OptrSettings()
    _check(base, train, held_out, output)
    # hashing an 8B's rows takes seconds
    run = {} if resume is None else _run(base, train, held_out, output, settings)
    store = Store(resume, run)
    groups = list(_groups(base, train, held_out, settings.memory))
    if progress is not None:
        progress.reset(total=len(groups) * (settings.steps + settings.value_steps))
    shape = (base.layers, len(base.mu[0]))
    transforms = {
        "keys": [np.asarray(x, np.float64) for x in base.x_k],
        "values": [np.asarray(x, np.float64) for x in base.x_v],
    }
    losses = {
        side: {field.name: np.zeros(shape) for field in dataclasses.fields(SideLosses)}
        for side in transforms
    }
    for layers, codec in groups:
        learner = functools.partial(
            Learner, codec=codec, settings=settings, store=store, bar=progress
        )
        rows = [_stacked(part, layers, base, output) for part in (train, held_out)]
        name = f"{layers[0]:03d}"
        keys, found = learner(f"keys-{name}", key_loss, steps=settings.steps).learn(*rows)
        _place(layers, keys, found, transforms["keys"], losses["keys"])
        x_v, x_o = (jnp.concatenate([x[layer] for layer in layers]) for x in (base.x_v, base.x_o))
        final = jnp.asarray(keys, jnp.float32)
        under = [value_rows(part, final, x_v, x_o, codec=codec) for part in rows]
        del rows  # as large as what is learned from next
        values, found = learner(f"values-{name}", value_loss, steps=settings.value_steps).learn(
            *under
        )
        _place(layers, values, found, transforms["values"], losses["values"])
    as_losses = lambda found: SideLosses(**{**found, "kept": found["kept"].astype(bool)})  # noqa: E731
    return Learned(
        rotation=Rotation.from_transforms(
            transforms["keys"], transforms["values"], [np.asarray(m) for m in base.mu], base.codecs
        ),
        keys=as_losses(losses["keys"]),
        values=as_losses(losses["values"]),
        seconds=time.perf_counter() - started,
    )


def refine(
    decoder: Decoder,
    bases: Mapping[str, Rotation],
    sequences: Sequence[np.ndarray],
    held_out: HeldOut,
    settings: OptrSettings | None = None,
    *,
    resume: Path | None = None,
    progress: bool = True,
) -> dict[str, Learned]:
    """``learn`` from a model's rows, for one or several bases.

    Args:
        decoder: in the dtype it is served in.
        bases: by recipe; each has a folder of its name in ``resume``.
        sequences: i32[T] each, all of one length: what to learn from. Their rows are kept on the
            host: 2 L K D numbers per token in the model's dtype.
        held_out: rows of other sequences.
        progress: show bars on stderr.

    Raises:
        ValueError: what ``learn`` raises, or sequences too short for a page.
    """
    tokens = sum(map(len, sequences))
    with tqdm(total=tokens, desc="rows for OptR", unit=" tokens", disable=not progress) as bar:
        rows = collect_rows(decoder, sequences, held_out.windows, progress=bar)
    output, learned = output_products(decoder), {}
    for name, base in bases.items():
        with tqdm(desc=f"OptR {name}", unit=" steps", disable=not progress) as bar:
            folder = None if resume is None else resume / name
            learned[name] = learn(
                base, rows, held_out, output, settings, resume=folder, progress=bar
            )
    return learned


def output_products(decoder: Decoder) -> list[np.ndarray]:
    """W_j^T W_j of the D columns of ``o_proj`` [E, N D] that query head j has.

    Per layer with pages f32[N, D, D]; norms that follow ``o_proj`` in some models are left out.
    """
    config = decoder.config
    size, products = config.head_dim, []
    for layer in config.paged_layers:
        projection = decoder.layers[layer].self_attn.o_proj
        products.append(np.asarray(_head_products(projection.weight[...], size)))
    return products


@functools.partial(jax.jit, static_argnums=1)
def _head_products(weight: Float[Array, "E M"], size: int) -> Float[Array, "N D D"]:
    heads = weight.astype(jnp.float32).reshape(len(weight), -1, size)
    return jnp.einsum("end,enf->ndf", heads, heads, precision=HIGHEST)


def _stacked(
    rows: HeldOut, layers: Sequence[int], base: Rotation, output: Sequence[np.ndarray]
) -> KeyRows:
    parts = [key_rows(rows, layer, base, jnp.asarray(output[layer])) for layer in layers]
    return jax.tree.map(lambda *one: jnp.concatenate(one), *parts)


def _place(
    layers: Sequence[int],
    factor: np.ndarray,
    found: dict[str, np.ndarray],
    transforms: list[np.ndarray],
    losses: dict[str, np.ndarray],
) -> None:
    """Writes a group's results to where its layers are."""
    for index, layer in enumerate(layers):
        heads = len(transforms[layer])
        own = slice(index * heads, (index + 1) * heads)
        transforms[layer] = transforms[layer] @ factor[own]
        for name, numbers in found.items():
            losses[name][layer] = numbers[own]


def _groups(
    base: Rotation, train: HeldOut, held_out: HeldOut, memory: int
) -> Iterator[tuple[list[int], Codec]]:
    """Layers in a row with one codec whose rows fit ``memory`` together; at least one at a time.

    Layers with BF16 pages are left out: there is nothing to learn.
    """
    size = 0
    for rows in (train, held_out):
        batch, _, kv_heads, width = rows.keys[0].shape
        tokens = rows.visible.shape[1]
        per_token = 3 * width + 2 * rows.queries[0].shape[2] // kv_heads * len(rows.positions)
        size += 4 * batch * kv_heads * tokens * per_token
    together = max(1, memory // size)
    for codec, run in itertools.groupby(range(base.layers), key=lambda layer: base.codecs[layer]):
        if codec is not None:
            for layers in itertools.batched(run, together):
                yield list(layers), codec


def _run(
    base: Rotation,
    train: HeldOut,
    held_out: HeldOut,
    output: Sequence[np.ndarray],
    settings: OptrSettings,
) -> dict[str, Any]:
    """What a resume directory is keyed by."""
    rows = [
        array
        for part in (train, held_out)
        for array in (part.positions, *part.queries, *part.keys, *part.values)
    ]
    windows = train.windows
    return {
        "rows": _hash([*rows, *output]),
        "base": _hash([*base.x_k, *base.x_v, *base.mu]),
        "codecs": [None if codec is None else dataclasses.asdict(codec) for codec in base.codecs],
        "windows": {"sink": windows.sink, "recent": windows.recent},
        "settings": dataclasses.asdict(settings),
        "backend": jax.default_backend(),
    }


def _hash(arrays: Iterable[Any]) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).view(np.uint8))
    return digest.hexdigest()


def _check(base: Rotation, train: HeldOut, held_out: HeldOut, output: Sequence[np.ndarray]) -> None:
    heads, size = base.mu[0].shape
    for name, rows in (("train", train), ("held_out", held_out)):
        have = (len(rows.keys), *rows.keys[0].shape[2:])
        if have != (base.layers, heads, size):
            raise ValueError(
                f"{name}: rows have (layers, kv_heads, head_dim) = {have}, the base "
                f"{(base.layers, heads, size)}"
            )
        if rows.windows != train.windows:
            raise ValueError(f"held_out: windows {rows.windows} are not train's {train.windows}")
        for layer, arrays in enumerate(zip(rows.queries, rows.keys, rows.values, strict=True)):
            if not all(np.isfinite(array.astype(np.float32)).all() for array in arrays):
                raise ValueError(f"{name}: layer {layer} holds values that are not finite")
    want = (train.queries[0].shape[2], base.x_v[0].shape[-1], base.x_v[0].shape[-1])
    shapes = [np.shape(one) for one in output]
    if shapes != [want] * base.layers:
        raise ValueError(f"output has shapes {shapes}: must be {want} for {base.layers} layers")
