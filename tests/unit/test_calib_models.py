"""Calibrating the models of configs: every command parses, stated memory is the formula."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import jax
import numpy as np
import pytest
import tyro

from calib.__main__ import Arguments
from calib.collect import empty_moments
from oscar_jax.config import ModelConfig, model_entry, model_names

DOCUMENT = (Path(__file__).parents[2] / "docs/calibration.md").read_text()
QWEN3 = [name for name in model_names() if name.startswith("qwen3-")]


def commands() -> dict[str, list[str]]:
    """The arguments of the first documented ``python -m calib`` command of every model."""
    found: dict[str, list[str]] = {}
    for line in re.findall(r"^python -m calib (--model .*)$", DOCUMENT.replace("\\\n", " "), re.M):
        words = shlex.split(line)
        found.setdefault(words[1], words)
    return found


def moment_bytes(config: ModelConfig) -> int:
    """What the sums of one set take, without allocating them."""
    shapes = jax.tree.leaves(jax.eval_shape(lambda: empty_moments(config)))
    return sum(int(np.prod(one.shape)) * one.dtype.itemsize for one in shapes)


@pytest.mark.parametrize("name", model_names())
def test_a_models_file_says_all_that_a_calibration_needs(name: str) -> None:
    config = model_entry(name).architecture
    arguments = tyro.cli(
        Arguments, args=commands().get(name, ["--model", name, "--out", f"rotations/{name}"])
    )
    assert (arguments.model, arguments.recipe, arguments.check) == (name, "auto", True)
    sums = 56 * len(config.paged_layers) * config.num_kv_heads * config.head_dim**2
    assert sums < moment_bytes(config) < 1.02 * sums  # and the means, pivots and frequencies


def test_qwen3_has_a_documented_command_each_with_its_memory() -> None:
    assert len(QWEN3) == 6 and set(QWEN3) <= set(commands())
    for name in QWEN3:
        config = model_entry(name).architecture
        one = 56 * config.num_layers * config.num_kv_heads * config.head_dim**2
        row = next(line for line in DOCUMENT.splitlines() if line.startswith(f"| {name} |"))
        _, weights, moments, together, rows, *_ = (cell.strip() for cell in row.split("|")[1:-1])
        assert moments == f"{one / 1e6:.0f} MB" and together == f"{7 * one / 1e9:.1f} GB"
        kept = 2048 * 2 * config.num_kv_heads + 64 * config.num_heads  # rows of head_dim numbers
        assert rows == f"{6 * 2 * config.num_layers * config.head_dim * kept / 1e9:.1f} GB"
        size = config.hidden_size
        heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        layer = size * (heads + config.num_heads * config.head_dim + 3 * config.intermediate_size)
        tables = config.vocab_size * size * (1 if config.tie_word_embeddings else 2)
        assert weights == f"{2 * (config.num_layers * layer + tables) / 1e9:.1f} GB"
