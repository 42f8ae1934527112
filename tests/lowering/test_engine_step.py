"""What the engine's decode step becomes for a GPU that is not here: kernels, and no branch."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from oscar_jax.cache import init_cache
from oscar_jax.config import KVConfig, ModelConfig, model_entry
from oscar_jax.engine.steps import Pools, Steps, empty_state
from oscar_jax.models.transformer import Decoder
from oscar_jax.rotation import Rotation
from pallas_kernels.format import PAGE
from pallas_kernels.layout import Windows
from tests.lowering.test_mosaic_decode import KERNEL, on

LAYERS = 2


QWEN3 = dataclasses.replace(model_entry("qwen3-8b").architecture, num_layers=LAYERS)
GEMMA3 = dataclasses.replace(
    model_entry("gemma3-270m").architecture, num_layers=LAYERS, global_every=2
)


def step_text(rows: int, *, greedy: bool, config: ModelConfig = QWEN3) -> str:
    """The program of one decode step of two layers."""
    split: dict[str, Any] = {}

    def build() -> Any:
        decoder = Decoder(config, lambda _, shape: jnp.zeros(shape, jnp.bfloat16))
        split["graphdef"], weights = nnx.split(decoder)
        return weights

    weights = jax.eval_shape(build)
    cache = jax.eval_shape(
        lambda: init_cache(
            layers=LAYERS,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            batch=rows,
            max_tokens=64 * PAGE + KVConfig.sink,
            sliding_windows=config.sliding_windows,
        )
    )
    pools = Pools.of(cache)
    rotation = Rotation.hadamard(
        layers=len(config.paged_layers), kv_heads=config.num_kv_heads, head_dim=config.head_dim
    )
    state = jax.eval_shape(lambda: empty_state(rows))
    steps = Steps(split["graphdef"], Windows(), 4)

    def run(*arguments: Any) -> Any:
        return steps.decode(*arguments, greedy=greedy)

    table, slots = np.zeros((rows, 64), np.int32), np.zeros(rows, np.int32)
    with jax.sharding.use_abstract_mesh(on("H200")):
        traced = jax.jit(run).trace(weights, rotation, pools, state, table, slots)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


def calls(text: str, kernel: str) -> int:
    """Calls of a kernel by its name, wherever its one definition is called from."""
    return len(re.findall(rf"call @{kernel}\w*\(", text))


def branches(text: str) -> list[str]:
    """What branches depend on, but for the platform: that is a constant, and XLA removes them."""
    found = []
    for function in text.split("func.func")[1:]:
        constant: set[str] = set()
        for result, name in re.findall(
            r'(%\w+)(?::\d+)? = "stablehlo\.(?:case|if)"\((%\w+)', function
        ):
            if name.startswith("%c") or name in constant:
                constant.add(result)
            else:
                found.append(name)
    return found


def test_a_greedy_step_has_every_kernel_and_stops_the_host_nowhere() -> None:
    text = step_text(1, greedy=True)
    assert KERNEL in text
    assert branches(text) == []
    # the first projection and the head; what lies between two attentions, and after the last
    assert calls(text, "linear") == 2
    for kernel in ("between", "rotate", "append", "decode"):
        assert calls(text, kernel) == LAYERS, kernel


def test_a_step_that_samples_branches_on_what_its_rows_ask_for() -> None:
    assert len(branches(step_text(1, greedy=False))) == 2


def test_large_batches_multiply_in_xla_and_attend_in_the_kernel() -> None:
    text = step_text(16, greedy=True)
    assert KERNEL in text
    assert (calls(text, "between"), calls(text, "append")) == (0, LAYERS)
    assert text.count("stablehlo.dot_general") == 4 * LAYERS + 1


def test_a_window_layer_and_one_with_pages_of_gemma_3_stop_the_host_nowhere_either() -> None:
    """Products of 1024 and 2048 columns are kernels, one of the 640 is none; so is attention."""
    text = step_text(1, greedy=True, config=GEMMA3)
    assert branches(text) == []
    assert KERNEL in text
    assert calls(text, "decode_window") == 1
    assert calls(text, "linear") == 2 * LAYERS
