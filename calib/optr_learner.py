"""Adam on one side of a group of layers, all heads at once; see ``calib.optr``."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.linalg
from jax import lax
from jaxtyping import Array, Float, Int
from tqdm import tqdm

from calib.optr_loss import Loss, Rows, expm, select
from calib.optr_state import Store
from pallas_kernels.format import Codec

# Heads whose [G, Q, T] arrays exist at once inside a step. On a CPU one head's stay in the cache
# (a chain of products of [64, 64] runs at 35 GFLOP/s so, at 17 in one batch); a GPU wants many.
HEADS_AT_ONCE = {"cpu": None}  # one, and no batching around it
MANY_HEADS = 16
ADAM = optax.scale_by_adam()


@dataclasses.dataclass(frozen=True)
class OptrSettings:
    """How OptR learns; part of what a resume directory is keyed by.

    Args:
        steps: of the optimiser for the keys of every head; the values take half as many.
        learning_rate: of Adam, at its peak; a cosine takes it down to a tenth.
        output_weight: what the relative error after W_O counts beside the KL, for keys.
        batch: sequences per step.
        check_every: steps between two looks at the held-out loss, each of which may become what is
            kept; also how often a resumable run is saved.
        seed: of the order of the sequences.
        memory: bytes of rows on the device; as many layers as fit are learned together.
    """

    steps: int = 80
    learning_rate: float = 0.02
    output_weight: float = 1.0
    batch: int = 1
    check_every: int = 20
    seed: int = 0
    memory: int = 1 << 30

    @property
    def value_steps(self) -> int:
        return -(-self.steps // 2)

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "check_every", "memory"):
            if not getattr(self, name) >= 1:
                raise ValueError(f"OptrSettings.{name}={getattr(self, name)}: must be at least 1")
        if not 0 < self.learning_rate < float("inf"):
            raise ValueError(f"OptrSettings.learning_rate={self.learning_rate}: must be positive")
        if not 0 <= self.output_weight < float("inf"):
            raise ValueError(f"OptrSettings.output_weight={self.output_weight}: must be at least 0")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """Where one side of one group of layers stands; what a resume directory holds."""

    skew: Float[Array, "H D D"]
    adam: Any
    best: Float[Array, "H D D"]
    best_loss: Float[Array, " H"]

    @classmethod
    def fresh(cls, loss: Float[Array, " H"], size: int) -> State:
        """A = 0, which has this loss."""
        skew = jnp.zeros((len(loss), size, size))
        return cls(skew, ADAM.init(skew), skew, loss)


def _map(function: Callable[..., Any], *arrays: Any) -> Any:
    """The function of every head."""
    at_once = HEADS_AT_ONCE.get(jax.default_backend(), MANY_HEADS)
    return lax.map(lambda one: function(*one), arrays, batch_size=at_once)


@functools.partial(jax.jit, static_argnames=("loss", "codec"))
def _step(
    state: State,
    rows: Rows,
    batch: Int[Array, " b"],
    rate: Float[Array, ""],
    output_weight: Float[Array, ""],
    *,
    loss: Loss,
    codec: Codec,
) -> tuple[State, Float[Array, " H"]]:
    def one(skew: Array, own: Rows) -> tuple[Array, Array]:
        sample = select(own, batch)
        return jax.value_and_grad(lambda a: loss(expm(a), sample, codec, output_weight))(skew)

    with jax.default_matmul_precision("highest"):
        losses, gradient = _map(one, state.skew, rows)
        updates, adam = ADAM.update(gradient, state.adam)
    return dataclasses.replace(state, skew=state.skew - rate * updates, adam=adam), losses


@functools.partial(jax.jit, static_argnames=("loss", "codec"))
def _losses(
    rotation: Float[Array, "H D D"],
    rows: Rows,
    output_weight: Float[Array, ""],
    *,
    loss: Loss,
    codec: Codec,
) -> Float[Array, " H"]:
    """Every head's loss, mean over its sequences."""

    def one(rotation: Array, own: Rows) -> Array:
        sequences = jnp.arange(own.weights.shape[0])[:, None]
        single = lambda i: loss(rotation, select(own, i), codec, output_weight)  # noqa: E731
        return lax.map(single, sequences).mean()

    with jax.default_matmul_precision("highest"):
        return _map(one, rotation, rows)


@jax.jit
def _keep_best(state: State, losses: Float[Array, " H"]) -> State:
    better = losses < state.best_loss
    best = jnp.where(better[:, None, None], state.skew, state.best)
    return dataclasses.replace(
        state, best=best, best_loss=jnp.where(better, losses, state.best_loss)
    )


_expm = jax.jit(jax.vmap(expm))


def batch_of(step: int, sequences: int, settings: OptrSettings) -> Int[np.ndarray, " b"]:
    """The sequences of a step: each epoch in an order of its own, a function of seed and step.

    >>> settings = OptrSettings(batch=2)
    >>> sorted([*batch_of(0, 4, settings).tolist(), *batch_of(1, 4, settings).tolist()])
    [0, 1, 2, 3]
    """
    size = min(settings.batch, sequences)
    epoch, turn = divmod(step, sequences // size)
    order = np.random.default_rng([settings.seed, epoch]).permutation(sequences)
    return order[turn * size : (turn + 1) * size].astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Learner:
    """Learns the factors of one side of a group of layers.

    Args:
        name: of the part, in the store and beside the progress bar.
        loss, codec: what is minimised.
        steps: of the optimiser.
    """

    name: str
    loss: Loss
    codec: Codec
    steps: int
    settings: OptrSettings
    store: Store
    bar: tqdm | None

    def learn(self, train: Rows, held_out: Rows) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Every head's factor f64[H, D, D], I where it did not help, and losses f64[H] by name."""
        heads, sequences, _, size = train.rotated.shape
        identity = jnp.broadcast_to(jnp.eye(size), (heads, size, size))
        before = self._losses(identity, held_out)
        done, state = self.store.latest(self.name, State.fresh(before, size))
        self._advance(done)
        schedule = optax.cosine_decay_schedule(self.settings.learning_rate, self.steps, alpha=0.1)
        for step in range(done, self.steps):
            batch = batch_of(step, sequences, self.settings)
            rate, weight = jnp.float32(schedule(step)), jnp.float32(self.settings.output_weight)
            state, losses = _step(
                state, train, batch, rate, weight, loss=self.loss, codec=self.codec
            )
            if (step + 1) % self.settings.check_every == 0 or step + 1 == self.steps:
                state = _keep_best(state, self._losses(_expm(state.skew), held_out))
                self.store.save(self.name, step + 1, state)
            self._advance(1, float(losses.mean()))
        best = np.asarray(state.best, np.float64)
        factor = scipy.linalg.expm(best - best.swapaxes(1, 2))
        after = self._losses(jnp.asarray(factor, jnp.float32), held_out)
        kept = np.asarray(after < before)  # False where either is not a number
        factor = np.where(kept[:, None, None], factor, np.eye(size))
        found = {
            "train_before": self._losses(identity, train),
            "train_after": self._losses(jnp.asarray(factor, jnp.float32), train),
            "held_before": before,
            "held_after": jnp.where(kept, after, before),
        }
        return factor, {name: np.asarray(x, np.float64) for name, x in found.items()} | {
            "kept": kept
        }

    def _losses(self, rotation: Float[Array, "H D D"], rows: Rows) -> Float[Array, " H"]:
        weight = jnp.float32(self.settings.output_weight)
        return _losses(rotation, rows, weight, loss=self.loss, codec=self.codec)

    def _advance(self, steps: int, loss: float | None = None) -> None:
        if self.bar is not None:
            if loss is not None:
                self.bar.set_postfix(part=self.name, loss=f"{loss:.4g}", refresh=False)
            self.bar.update(steps)
