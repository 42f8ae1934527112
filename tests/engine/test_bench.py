"""The benchmark runs both caches on the same content and reports what it measured."""

from __future__ import annotations

from oscar_jax import bench
from oscar_jax.accounting import CacheShape
from oscar_jax.models.loading import Loaded


def test_every_cell_has_both_caches_and_their_ratio(tiny: Loaded) -> None:
    options = bench.Engine(model="tiny", batches=(1,), tokens=(900,), steps=2, repeats=3)
    rows = bench.engine(options, tiny)
    assert [(r["dtype"], r["batch"], r["tokens"]) for r in rows] == [
        ("int2", 1, 900),
        ("bf16", 1, 900),
    ]
    for row in rows:
        assert row["step_ms"] >= row["fastest_step_ms"] > 0
        assert abs(row["model_ms"] + row["attention_ms"] - row["step_ms"]) < 1e-9
        assert abs(row["tokens_per_s"] * row["step_ms"] - 1e3) < 1e-6
    shape = CacheShape(layers=2, kv_heads=2, head_dim=64)
    assert rows[0]["cache_bytes"] == shape.live_bytes(900)
    assert rows[1]["cache_bytes"] == 900 * shape.bf16_bytes_per_token
    assert rows[0]["model_ms"] == rows[1]["model_ms"]
    (ratio,) = bench.ratios(rows)
    assert ratio["int2_over_bf16"] == rows[0]["tokens_per_s"] / rows[1]["tokens_per_s"]
