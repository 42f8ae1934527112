"""``python -m oscar_jax.evaluation.pictures``: what 2 bits do to a model's own keys, as pictures.

Everything drawn comes from the model's calibration moments and from keys of held-out text that went
through the real codec. Three PNG files:

    spectra.png   energy of keys and queries per direction, and what stretch makes of both
    bits.png      where water-filling puts its bits, beside what each direction is worth
    gain.png      logits of real queries on 2-bit keys against exact ones, without and with gain
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import tyro

from oscar_jax.config import KVConfig
from oscar_jax.fetch import FetchError, resolve
from oscar_jax.models import load
from oscar_jax.rotation import Rotation
from pallas_kernels.format import PAGE, decode_key_pages, encode_key_pages

PROGRAM = "python -m oscar_jax.evaluation.pictures"
PLAIN, GAIN = "stretch+centre+waterfill", "stretch+centre+waterfill+gain"
LENGTH = 2048


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Draw a model's spectra, its water-filled bits and what gain repairs (about a minute)."""

    model: str
    """A name in configs/, a Hugging Face directory or a GGUF file."""
    layer: int = 12
    """The layer that is drawn."""
    head: int = 0
    """The KV head that is drawn."""
    sequences: int = 2
    """Calibration sequences of 2,048 tokens of every domain."""
    out: Path = Path("docs/pictures")
    """Directory of the PNG files."""


def run(arguments: Arguments) -> list[Path]:
    """The command; returns the files.

    Raises:
        ValueError: a layer or head that the model does not have, or matplotlib is missing.
    """
    from calib.collect import collect_moments, collect_rows
    from calib.data import calibration_texts, sequences
    from calib.fit import DAMPING, fit
    from calib.recipes import damped

    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ValueError("pictures need matplotlib: pip install '.[report]'") from None
    loaded = load(resolve(arguments.model))
    config = loaded.config
    for name, value, known in (
        ("layer", arguments.layer, config.paged_layers),
        ("head", arguments.head, range(config.num_kv_heads)),
    ):
        if value not in known:
            raise ValueError(f"--{name} {value}: the model has pages in {name}s {list(known)}")
    found = sequences(
        loaded.tokenizer.encode,
        calibration_texts(),
        length=LENGTH,
        count=arguments.sequences + 1,
    )
    windows = KVConfig()
    used = [row for rows in found.values() for row in rows[:-1]]
    moments = collect_moments(loaded.decoder, used, sink=windows.sink)
    held = collect_rows(loaded.decoder, [rows[-1] for rows in found.values()], windows)
    layer, head = config.paged_layers.index(arguments.layer), arguments.head
    statistics = moments.statistics(layer)
    key, query = (damped(x[head], DAMPING) for x in (statistics.key, statistics.query))
    shares = np.array([_mean_share(moments.statistics(i)) for i in range(len(moments.layers))])
    keys = held.keys[layer][:, windows.sink :, head].astype(np.float64)
    keys = keys[:, : keys.shape[1] // PAGE * PAGE]
    group = config.num_heads // config.num_kv_heads
    queries = held.queries[layer][:, :, head * group].astype(np.float64)
    logits = {
        name: logits_on_pages(fit(moments, name)[0], layer, head, keys, queries)
        for name in (PLAIN, GAIN)
    }
    title = f"{Path(arguments.model).stem}, layer {arguments.layer}, KV head {head}"
    arguments.out.mkdir(parents=True, exist_ok=True)
    figures = {
        "spectra.png": _spectra(key, query, shares, title),
        "bits.png": _bits(key, query, title),
        "gain.png": _gain(logits, title),
    }
    paths = []
    for name, figure in figures.items():
        paths.append(arguments.out / name)
        figure.savefig(paths[-1], dpi=75)
    return paths


def balanced(key: np.ndarray, query: np.ndarray) -> np.ndarray:
    """z f64[D], descending: per direction of the stretched space, key energy = query importance.

    The singular values of S^1/2 C^1/2, which A^1/2 S A^1/2 has as its eigenvalues.

    >>> balanced(np.diag([4.0, 1.0]), np.diag([1.0, 9.0])).round(6).tolist()
    [3.0, 2.0]
    """
    from calib.recipes import power

    return np.linalg.svd(power(key, 0.5) @ power(query, 0.5), compute_uv=False)


def ideal_bits(z: np.ndarray, mean: float = 2.0) -> np.ndarray:
    """Bits per direction that spend ``mean`` on average and leave all with the same noise.

    Noise of a direction falls as z^2 4^-b, so b_i = mean + log2(z_i) - mean of log2(z).

    >>> ideal_bits(np.array([4.0, 2.0, 1.0])).tolist()
    [3.0, 2.0, 1.0]
    """
    logs = np.log2(z)
    return mean + logs - logs.mean()


def _mean_share(statistics: Any) -> float:
    """|mu|^2 / tr S, over the layer's heads."""
    return float((statistics.mean**2).sum() / np.trace(statistics.key, axis1=1, axis2=2).sum())


def logits_on_pages(
    rotation: Rotation, layer: int, head: int, keys: np.ndarray, queries: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(exact, quantised) q.(k - mu) / sqrt(D), less each query's mean, all pairs flattened."""
    transform, codec = rotation.layer(layer), rotation.codecs[layer]
    if codec is None:
        raise ValueError(f"layer {layer} keeps BF16 pages: nothing is quantised")
    x_k, x_q, mu = (
        np.asarray(x[head], np.float64) for x in (transform.x_k, transform.x_q, transform.mu)
    )
    rows = (keys - mu) @ x_k  # [B, T, D]
    pages = jnp.asarray(rows.reshape(*rows.shape[:1], 1, -1, PAGE, rows.shape[-1]), jnp.float32)
    coded = encode_key_pages(pages, codec)
    back = np.asarray(decode_key_pages(coded.words, coded.meta, codec), np.float64)
    scale = keys.shape[-1] ** -0.5
    exact = scale * np.einsum("bqd,btd->bqt", queries, keys - mu)
    quantised = scale * np.einsum("bqd,btd->bqt", queries @ x_q, back.reshape(rows.shape))
    centred = [x - exact.mean(-1, keepdims=True) for x in (exact, quantised)]
    return centred[0].ravel(), centred[1].ravel()


def _figure(title: str, count: int) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6 * count, 3.4), layout="constrained")
    figure.suptitle(title, fontsize="medium")
    return figure, figure.subplots(1, count, squeeze=False)[0]


def _spectra(key: np.ndarray, query: np.ndarray, shares: np.ndarray, title: str) -> Any:
    figure, (left, right) = _figure(title, 2)
    energy = lambda x: np.sort(np.linalg.eigvalsh(x))[::-1] / np.trace(x)  # noqa: E731
    z = balanced(key, query)
    left.semilogy(energy(key), label="keys (S, centred)")
    left.semilogy(energy(query), label="queries (C)")
    left.semilogy(z / z.sum(), label="both, after stretch (z)", linewidth=2)
    left.set(xlabel="direction, by size", ylabel="share of the energy")
    left.legend(fontsize="small")
    right.bar(np.arange(len(shares)), shares, color="tab:gray")
    right.axhline(1, color="black", linewidth=0.7)
    right.set(xlabel="layer", ylabel="|mean key|² / spread of the keys")
    right.set_title("what centring takes away", fontsize="small")
    return figure


def _bits(key: np.ndarray, query: np.ndarray, title: str) -> Any:
    figure, (axes,) = _figure(title, 1)
    z = balanced(key, query)
    size = len(z)
    widths = np.repeat([4, 2, 1], [size // 8, 5 * size // 8, size // 4])
    axes.plot(ideal_bits(z), label="equal noise everywhere")
    axes.step(np.arange(size), widths, where="mid", label="water-filled: 4, 2, 1")
    axes.axhline(2, color="black", linewidth=0.7, linestyle="--", label="uniform")
    axes.set(xlabel="direction, by worth z", ylabel="bits", ylim=(-0.5, 6))
    axes.legend(fontsize="small")
    return figure


def _gain(logits: dict[str, tuple[np.ndarray, np.ndarray]], title: str) -> Any:
    figure, (left, right) = _figure(title, 2)
    for name, (exact, quantised) in logits.items():
        centres, means = binned(exact, quantised)
        label = "with gain" if name == GAIN else "without"
        left.plot(centres, means, label=label)
        right.plot(centres, means / centres, label=label)
    ends = [float(centres.min()), float(centres.max())]
    left.plot(ends, ends, color="black", linewidth=0.7, linestyle="--", label="exact")
    left.set(xlabel="exact logit, over the query's mean", ylabel="mean logit on 2-bit keys")
    right.axhline(1, color="black", linewidth=0.7, linestyle="--")
    right.set(xlabel="exact logit, over the query's mean", ylabel="2-bit / exact", ylim=(0.7, 1.2))
    left.legend(fontsize="small")
    return figure


def binned(
    exact: np.ndarray, quantised: np.ndarray, count: int = 24
) -> tuple[np.ndarray, np.ndarray]:
    """Means of both over bins of ``exact`` from 1 upwards that hold at least 20 pairs.

    >>> x = np.repeat(np.arange(1.0, 4.0), 50)
    >>> [values.tolist() for values in binned(x, 0.5 * x, count=3)]
    [[1.0, 2.0, 3.0], [0.5, 1.0, 1.5]]
    """
    edges = np.linspace(1.0, exact.max(), count + 1)
    place = np.clip(np.digitize(exact, edges) - 1, -1, count - 1)
    kept = [place == i for i in range(count) if (place == i).sum() >= 20]
    return tuple(np.array([x[own].mean() for own in kept]) for x in (exact, quantised))  # type: ignore[return-value]


def main() -> None:
    """Parse the command line and run; wrong input ends in one line and exit code 2."""
    arguments = tyro.cli(Arguments, prog=PROGRAM)
    try:
        paths = run(arguments)
    except (ValueError, NotImplementedError, FileNotFoundError, FetchError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print("written to", *paths)


if __name__ == "__main__":
    main()
