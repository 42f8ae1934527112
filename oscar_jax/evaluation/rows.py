"""What the rows of a table are called, and the rotation of each, fitted when its turn comes.

bf16                  BF16 pages: what everything is compared with
RECIPE                any recipe of ``python -m calib``, fitted on every domain of text
RECIPE@DOMAIN         the same, fitted on the calibration text of one domain only
DIRECTORY             a checkpoint
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from oscar_jax import checkpoint
from oscar_jax.accounting import CacheShape
from oscar_jax.config import KVConfig
from oscar_jax.models import Loaded
from oscar_jax.rotation import Rotation

if TYPE_CHECKING:
    from calib.covariance import Moments
    from calib.optr import Learned

BF16 = "bf16"
ALL = "all"  # domains
# Every ingredient on top of the one before; gain and water-filling also alone.
INGREDIENTS = (
    BF16,
    "identity",
    "hadamard",
    "oscar-shared",
    "oscar",
    "oscar+centre",
    "stretch+centre",
    "stretch+centre+gain",
    "stretch+centre+waterfill",
    "stretch+centre+waterfill+gain",
)
# And wider keys, and the two ends of the table fitted on text of one kind.
ABLATION = (
    *INGREDIENTS,
    "oscar+centre+k3",
    "oscar+centre+k4",
    "oscar+centre@prose",
    "oscar+centre@code",
    "stretch+centre+waterfill+gain@prose",
    "stretch+centre+waterfill+gain@code",
)
# Learned on top of a closed form: minutes each to fit, where all others take seconds.
LEARNED = (
    "hadamard+optr",
    "hadamard+centre+optr",
    "oscar+centre+optr",
    "stretch+centre+gain+optr",
    "stretch+centre+waterfill+gain+optr",
)
LISTS = {"ablation": ABLATION, "learned": LEARNED}  # names that stand for several


@dataclasses.dataclass(frozen=True)
class Row:
    """One row's name and what it is made of.

    Args:
        recipe: None for BF16 pages and for a checkpoint. domain: of its calibration text.
        checkpoint: None unless it is one.
    """

    name: str
    recipe: str | None = None
    domain: str = ALL
    checkpoint: Path | None = None

    @classmethod
    def of(cls, name: str, domain: str = ALL) -> Row:
        """The row of a name as on the command line; ``domain`` where the name says none.

        >>> Row.of("oscar+centre@prose")
        Row(name='oscar+centre@prose', recipe='oscar+centre', domain='prose', checkpoint=None)
        >>> Row.of("oscar", "code").name
        'oscar@code'

        Raises:
            ValueError: an unknown recipe.
        """
        from calib.recipes import recipe  # calib is built on this package

        if name == BF16:
            return cls(BF16)
        base, _, own = name.partition("@")
        recipe(base)
        domain = own or domain
        return cls(base if domain == ALL else f"{base}@{domain}", base, domain)


class Fits:
    """Rotations of rows, from moments that are collected once per domain.

    No head falls back to another recipe here, so that each row is what its name says; a head that
    +optr does not improve on one further sequence of every domain keeps its closed form.

    Args:
        tokens: about how many tokens all domains together have; one domain has its share of them,
            so that a row of one domain differs from the row of all in what it has seen of the
            others, and not in what it has seen of its own.
        length: of a calibration sequence.
    """

    def __init__(self, loaded: Loaded, windows: KVConfig, tokens: int, length: int):
        from calib.data import calibration_texts, sequences

        texts = calibration_texts()
        domains = list(dict.fromkeys(text.domain for text in texts))
        count = max(1, round(tokens / length / len(domains)))
        self.loaded, self.windows = loaded, windows
        found = sequences(loaded.tokenizer.encode, texts, length=length, count=count + 1)
        self._rows = {name: rows[:count] for name, rows in found.items()}
        self._held_out = {name: rows[count:] for name, rows in found.items()}
        self._moments: dict[str, Moments] = {}

    @property
    def domains(self) -> list[str]:
        """Of the calibration text."""
        return list(self._rows)

    def check(self, row: Row) -> None:
        """Raise ValueError if there is no calibration text of the row's domain."""
        if row.domain not in (ALL, *self.domains):
            raise ValueError(
                f"{row.name}: calibration domain {row.domain!r} must be one of "
                f"{', '.join((ALL, *self.domains))}"
            )

    def rotation(self, row: Row) -> tuple[Rotation | None, dict[str, Any]]:
        """A row's rotation, and what is to be said of its calibration."""
        if row.checkpoint is not None:
            loaded = self.loaded
            rotation, metadata = checkpoint.load(
                row.checkpoint, model_config=loaded.config, weights_hash=loaded.weights_hash
            )
            said = {"recipe": metadata.recipe, "tokens": metadata.tokens}
            return rotation, said | {"data_hash": metadata.data_hash}
        if row.recipe is None:
            return None, {}
        from calib.fit import fit
        from calib.recipes import recipe

        self.check(row)
        chosen, said = recipe(row.recipe), self.calibration(row.domain)
        rotation, _ = fit(self._collected(row.domain), chosen.closed_form)
        if not chosen.learned:
            return rotation, said
        learned = self._refined(row, rotation)
        return learned.rotation, said | {"learned": learned.summary()}

    def calibration(self, domain: str) -> dict[str, Any]:
        """Domain, tokens that a fit on it counts, and the hash of its text."""
        from calib.data import data_hash

        rows = self._sequences(domain)
        counted = sum(len(tokens) - self.windows.sink for tokens in rows)
        return {"domain": domain, "tokens": counted, "data_hash": data_hash(rows)}

    def _sequences(self, domain: str, *, held_out: bool = False) -> list[np.ndarray]:
        names = self.domains if domain == ALL else [domain]
        rows = self._held_out if held_out else self._rows
        return [tokens for name in names for tokens in rows[name]]

    def _refined(self, row: Row, base: Rotation) -> Learned:
        from calib.collect import collect_rows
        from calib.optr import refine

        held = self._sequences(row.domain, held_out=True)
        if not held:
            raise ValueError(f"{row.name}: +optr decides on held-out text, and none is left")
        held_out = collect_rows(self.loaded.decoder, held, self.windows)
        used = self._sequences(row.domain)
        return refine(self.loaded.decoder, {row.name: base}, used, held_out)[row.name]

    def _collected(self, domain: str) -> Moments:
        from calib.collect import collect_moments

        if domain not in self._moments:
            rows = self._sequences(domain)
            total = sum(map(len, rows))
            with tqdm(total=total, desc=f"calibrating on {domain}", unit=" tokens") as bar:
                self._moments[domain] = collect_moments(
                    self.loaded.decoder, rows, sink=self.windows.sink, progress=bar
                )
        return self._moments[domain]


def page_bits(loaded: Loaded, windows: KVConfig, rotation: Rotation | None) -> float:
    """Stored bits of a key or value number in a page, metadata counted, averaged over layers."""
    config = loaded.config
    shape = CacheShape.of(
        dataclasses.replace(windows, dtype="bf16" if rotation is None else "int2"),
        layers=config.num_layers,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        codecs=None if rotation is None else rotation.codecs,
        sliding_windows=config.sliding_windows,
    )
    return shape.bits_per_element
