"""Every configuration of the Mosaic GPU prefill kernels lowers for a GPU that is not here."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.format import Codec
from pallas_kernels.layout import Windows
from pallas_kernels.prefill import mosaic_gpu, mosaic_pages, prefill, xla
from pallas_kernels.prefill.mosaic_pages import Config
from tests.lowering.test_mosaic_decode import KERNEL, on, operands


def lowered(
    arguments: tuple[Any, ...], platform: str = "cuda", call: Any = prefill, **options: Any
) -> str:
    """The program of ``prefill`` with these options."""
    q, layer, *rest, lengths = arguments
    windows, codec = options.pop("windows", Windows()), options.pop("codec", Codec())
    rows = (q.shape[0], layer.sink_k.shape[1], windows.band + q.shape[1])
    band = [
        jax.ShapeDtypeStruct((*rows, size), jnp.bfloat16) for size in (q.shape[3], layer.v_head_dim)
    ]

    def run(q: Any, bands: Any, layer: Any, transform: Any, tables: Any, n: Any) -> jax.Array:
        return call(
            q,
            *bands,
            layer,
            transform,
            tables,
            lengths=n,
            q_lens=n,
            windows=windows,
            codec=codec,
            scale=0.1,
            **options,
        )

    traced = jax.jit(run).trace(q, band, layer, *rest, lengths)
    assert traced.out_info.shape == (*q.shape[:3], layer.v_head_dim)
    return traced.lower(lowering_platforms=(platform,)).as_text()


def bf16_pages(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same with BF16 pages and no transform."""
    q, layer, _, tables, lengths = arguments
    pages, kv_heads, tokens = layer.k_meta.shape
    shape: Any = jax.ShapeDtypeStruct
    pools = [
        shape((pages, kv_heads, tokens, d), jnp.bfloat16) for d in (q.shape[3], layer.v_head_dim)
    ]
    kept = (layer.sink_k, layer.sink_v, layer.tail_k, layer.tail_v)
    return q, type(layer)(*pools, None, None, *kept), None, tables, lengths


FORCED: dict[str, Any] = dict(implementation="mosaic_gpu")


@pytest.mark.parametrize("codec", ["uniform", "waterfill"])
@pytest.mark.parametrize(
    ("head_dim", "v_head_dim"), [(64, 64), (128, 128), (256, 256), (128, 64), (64, 256)]
)
def test_every_head_dim_and_codec_lowers(head_dim: int, v_head_dim: int, codec: Any) -> None:
    arguments = operands(head_dim, v_head_dim, queries=100)
    with jax.sharding.use_abstract_mesh(on("H200")):
        text = lowered(arguments, codec=Codec(key=codec), **FORCED)
    assert text.count(f"@{KERNEL}") == 2


@pytest.mark.parametrize(
    ("codec", "bits", "head_dim"),
    [("uniform", (3, 2), 128), ("waterfill", (3, 4), 256)],
)
def test_wide_pages_are_picked(codec: Any, bits: tuple[int, int], head_dim: int) -> None:
    wide = Codec(codec).with_bits(key=bits[0], value=bits[1])
    arguments = operands(head_dim, queries=64, bits=bits)
    with jax.sharding.use_abstract_mesh(on("H200")):
        assert lowered(arguments, codec=wide).count(f"@{KERNEL}") == 2


@pytest.mark.parametrize("config", [Config(1, 1, 1), Config(5, 2, 2), Config(2, 4, 3)], ids=str)
def test_every_way_to_cut_the_kernel_lowers(config: Config) -> None:
    call = functools.partial(mosaic_gpu.prefill, config=config)
    with jax.sharding.use_abstract_mesh(on("H200")):
        assert KERNEL in lowered(operands(64, queries=64), call=call)


@pytest.mark.parametrize("group", [1, 7, 16, 17])
def test_every_group_lowers(group: int) -> None:
    with jax.sharding.use_abstract_mesh(on("H200")):
        assert KERNEL in lowered(operands(128, group=group, queries=70, dtype=jnp.float32))


@pytest.mark.parametrize("head_dim", [64, 256])
def test_bf16_pages_take_one_kernel(head_dim: int) -> None:
    with jax.sharding.use_abstract_mesh(on("H200")):
        text = lowered(bf16_pages(operands(head_dim, queries=64)), **FORCED)
    assert text.count(f"@{KERNEL}") == 1


def test_none_is_the_kernel_on_hopper_and_xla_elsewhere() -> None:
    windows = Windows(sink=32)
    with jax.sharding.use_abstract_mesh(on("H200")):
        assert KERNEL in lowered(operands(128, queries=64))
        assert KERNEL not in lowered(operands(128, queries=64), platform="cpu")
        arguments = operands(128, queries=64, windows=windows)
        assert KERNEL not in lowered(arguments, windows=windows)
        assert KERNEL not in lowered(operands(96, queries=64))
        assert KERNEL in lowered(bf16_pages(operands(64, queries=64)))
    for device in ("A100", "B200"):  # wgmma is Hopper's
        with jax.sharding.use_abstract_mesh(on(device)):
            assert KERNEL not in lowered(operands(128, queries=64))
    assert KERNEL not in lowered(operands(128, queries=64), platform="cpu")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(operands(96, queries=8), "head_dim=96"), (operands(128, 192, queries=8), "v_head_dim=192")],
)
def test_a_forced_kernel_that_cannot_serve_says_why_and_names_xla(
    arguments: tuple[Any, ...], named: str
) -> None:
    with (
        jax.sharding.use_abstract_mesh(on("H200")),
        pytest.raises(NotImplementedError, match=f"{named}.*'xla'"),
    ):
        lowered(arguments, implementation="mosaic_gpu")


def test_a_forced_kernel_without_a_hopper_gpu_names_xla() -> None:
    with (
        jax.sharding.use_abstract_mesh(on("B200")),
        pytest.raises(NotImplementedError, match=r"compute capability 9.x.*'xla'"),
    ):
        lowered(operands(128, queries=64), implementation="mosaic_gpu")


def test_cpu_programs_are_those_of_the_specification() -> None:
    def without_names(text: str) -> str:
        return text.replace("jit_run", "").split("func.func", 1)[1]

    arguments = operands(64, queries=40)
    chosen = lowered(arguments, platform="cpu")
    assert without_names(chosen) == without_names(lowered(arguments, "cpu", call=xla.prefill))


@pytest.mark.parametrize("name", ["splits", "pages", "stages"])
def test_an_impossible_configuration_says_why(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=0"):
        Config(**{name: 0})


@pytest.mark.parametrize("blocks", [1, 16, 128, 512, 4000])
@pytest.mark.parametrize("pages", [1, 20, 240, 8000])
@pytest.mark.parametrize("head_dim", mosaic_gpu.HEAD_DIMS)
@pytest.mark.parametrize("bits", [(2, 2), (3, 2), (4, 4)], ids=str)
def test_the_heuristic_fills_the_device_and_fits_its_shared_memory(
    blocks: int, pages: int, head_dim: int, bits: tuple[int, int]
) -> None:
    codec = Codec().with_bits(key=bits[0], value=bits[1])
    tiles = mosaic_gpu.tiles_of(head_dim, head_dim, codec)
    config = mosaic_gpu.heuristic(blocks=blocks, table_pages=pages, sm_count=132, tiles=tiles)
    assert mosaic_pages.shared_bytes(tiles, config) <= 227 * 1024 - 1024
    assert config.splits <= max(1, pages // 4)
    assert blocks * config.splits >= 100 or config.splits == max(1, min(16, pages // 4))
