"""Every configuration of the Mosaic GPU decode kernel lowers for GPUs that are not here."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from pallas_kernels.decode import decode, mosaic_gpu, mosaic_tuning, xla
from pallas_kernels.decode.mosaic_gpu import Config
from pallas_kernels.decode.mosaic_tuning import Batch
from pallas_kernels.format import PAGE, Codec
from pallas_kernels.layout import LayerKV, Tables, Transform, Windows
from pallas_kernels.packing import words_per_row

DEVICES = {"H200": ("NVIDIA H200", 132), "B200": ("NVIDIA B200", 148), "A100": ("NVIDIA A100", 108)}
KERNEL = "mosaic_gpu_v2"  # the custom call's target


def on(name: str) -> AbstractMesh:
    kind, cores = DEVICES[name]
    device = AbstractDevice(device_kind=kind, num_cores=cores, platform="gpu")
    return AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)


def operands(
    head_dim: int,
    v_head_dim: int | None = None,
    *,
    batch: int = 2,
    kv_heads: int = 2,
    group: int = 3,
    queries: int = 1,
    table_pages: int = 40,
    windows: Windows = Windows(),  # noqa: B008 - frozen
    dtype: Any = jnp.bfloat16,
    bits: tuple[int, int] = (2, 2),
) -> tuple[Any, ...]:
    """(q, layer, transform, tables, lengths) as shapes."""
    dims = (head_dim, v_head_dim or head_dim)
    shape: Any = jax.ShapeDtypeStruct
    pages = batch * table_pages
    arrays: Any = (
        shape((pages, kv_heads, PAGE, words_per_row(dims[0], bits[0])), jnp.uint16),
        shape((pages, kv_heads, dims[1], words_per_row(PAGE, bits[1])), jnp.uint16),
        *(shape((pages, kv_heads, PAGE), jnp.uint32) for _ in "kv"),
        *(shape((batch, kv_heads, windows.sink, d), jnp.bfloat16) for d in dims),
        *(shape((batch, kv_heads, windows.ring, d), jnp.bfloat16) for d in dims),
    )
    layer = LayerKV(*arrays)
    sides = (dims[0], dims[0], dims[1], dims[1])
    arrays = (
        *(shape((kv_heads, d, d), jnp.float32) for d in sides),
        shape((kv_heads, dims[0]), jnp.float32),
    )
    transform = Transform(*arrays)
    row = shape((batch,), jnp.int32)
    q = shape((batch, queries, kv_heads * group, head_dim), dtype)
    return q, layer, transform, Tables(shape((batch, table_pages), jnp.int32), row, row), row


def lowered(arguments: tuple[Any, ...], platform: str = "cuda", **options: Any) -> str:
    """The program of ``decode`` with these options."""
    windows, codec = options.pop("windows", Windows()), options.pop("codec", Codec())
    call = options.pop("call", decode)

    def run(q: Any, layer: Any, transform: Any, tables: Any, lengths: Any) -> jax.Array:
        return call(
            q,
            layer,
            transform,
            tables,
            lengths=lengths,
            q_lens=lengths,
            windows=windows,
            codec=codec,
            scale=0.1,
            **options,
        )

    traced = jax.jit(run).trace(*arguments)
    assert traced.out_info.shape == (*arguments[0].shape[:3], arguments[1].v_head_dim)
    return traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("codec", ["uniform", "waterfill"])
@pytest.mark.parametrize(
    ("head_dim", "v_head_dim", "device"),
    [(64, 64, "H200"), (128, 128, "H200"), (256, 256, "H200"), (128, 64, "B200")],
)
def test_every_head_dim_and_codec_lowers(
    head_dim: int, v_head_dim: int, device: str, codec: Any
) -> None:
    with jax.sharding.use_abstract_mesh(on(device)):
        text = lowered(operands(head_dim, v_head_dim), codec=Codec(key=codec))
    assert text.count(f"@{KERNEL}(") == 3  # the query's packing, the kernel, the merge


@pytest.mark.parametrize(
    ("codec", "bits", "head_dim", "device"),
    [
        ("waterfill", (4, 4), 128, "H200"),
        ("uniform", (4, 2), 128, "H200"),
        ("uniform", (3, 2), 64, "H200"),
        ("waterfill", (3, 2), 128, "B200"),
        ("uniform", (3, 2), 256, "H200"),
    ],
)
def test_wide_pages_are_picked(
    codec: Any, bits: tuple[int, int], head_dim: int, device: str
) -> None:
    wide = Codec(codec).with_bits(key=bits[0], value=bits[1])
    with jax.sharding.use_abstract_mesh(on(device)):
        assert lowered(operands(head_dim, bits=bits), codec=wide).count(f"@{KERNEL}(") == 3


@pytest.mark.parametrize("device", ["H200", "B200"])
@pytest.mark.parametrize(
    "config",
    [Config(1, 1, 1, 1), Config(5, 2, 2, 1), Config(7, 4, 3, 2), Config(3, 1, 4, 4)],
    ids=str,
)
def test_every_way_to_cut_the_kernel_lowers(config: Config, device: str) -> None:
    call = functools.partial(mosaic_gpu.decode, config=config)
    with jax.sharding.use_abstract_mesh(on(device)):
        assert KERNEL in lowered(operands(128), call=call)


@pytest.mark.parametrize("group", [1, 5, 7, 8, 12, 16])
def test_every_group_lowers_and_pads_to_whole_blocks_of_heads(group: int) -> None:
    groups, size = mosaic_gpu.head_groups(group)
    assert (groups, groups * size - group < groups) == (1 + (group > 8), True)
    if group in (1, 12):
        with jax.sharding.use_abstract_mesh(on("H200")):
            assert KERNEL in lowered(operands(64, group=group, dtype=jnp.float32))


def test_none_is_the_kernel_on_new_gpus_and_xla_elsewhere() -> None:
    windows = Windows(sink=32)
    with jax.sharding.use_abstract_mesh(on("H200")):
        assert KERNEL in lowered(operands(128))
        assert KERNEL not in lowered(operands(128), platform="cpu")
        assert KERNEL not in lowered(operands(96))
        assert KERNEL not in lowered(operands(128, queries=2))
        assert KERNEL not in lowered(operands(64, group=17))
        assert KERNEL not in lowered(operands(64, windows=windows), windows=windows)
    with jax.sharding.use_abstract_mesh(on("A100")):
        assert KERNEL not in lowered(operands(128))
    assert KERNEL not in lowered(operands(128), platform="cpu")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (operands(96), "head_dim=96"),
        (operands(128, 192), "v_head_dim=192"),
        (operands(64, group=17), "17 query heads per KV head"),
        (operands(64, queries=2), "2 queries per row"),
    ],
)
def test_a_forced_kernel_that_cannot_serve_says_why_and_names_xla(
    arguments: tuple[Any, ...], named: str
) -> None:
    with (
        jax.sharding.use_abstract_mesh(on("H200")),
        pytest.raises(NotImplementedError, match=f"{named}.*'xla'"),
    ):
        lowered(arguments, implementation="mosaic_gpu")


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="the kernel serves on a GPU")
def test_a_forced_kernel_without_a_gpu_names_xla() -> None:
    with pytest.raises(NotImplementedError, match=r"compute capability 9.0.*'xla'"):
        lowered(operands(128), platform="cpu", implementation="mosaic_gpu")


def test_cpu_programs_are_those_of_the_specification() -> None:
    def without_names(text: str) -> str:
        return text.replace("jit_run", "").split("func.func", 1)[1]

    chosen = lowered(operands(64), platform="cpu")
    assert without_names(chosen) == without_names(lowered(operands(64), "cpu", call=xla.decode))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (dict(splits=0), "splits=0"),
        (dict(splits=4, stages=0), "stages=0"),
        (dict(splits=4, warps_per_page=3), "warps_per_page=3"),
        (dict(splits=4, stages=2, warps_per_page=4), "room for 4 pages"),
    ],
)
def test_an_impossible_configuration_says_why(values: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Config(**values)


@pytest.mark.parametrize("bits", [(2, 2), (3, 2), (4, 4)], ids=str)
@pytest.mark.parametrize("batch", [1, 8, 32, 256])
@pytest.mark.parametrize("pages", [1, 20, 1000, 8000])
@pytest.mark.parametrize("head_dim", mosaic_gpu.HEAD_DIMS)
def test_the_heuristic_fills_the_device_and_fits_its_shared_memory(
    batch: int, pages: int, head_dim: int, bits: tuple[int, int]
) -> None:
    size = Batch("uniform", head_dim, head_dim, batch * 8, pages, *bits)
    config = mosaic_gpu.heuristic(size, 132)
    assert isinstance(config, Config)
    held = config.stages * mosaic_gpu.stage_bytes(size, config.pages) + 2048
    assert held * mosaic_gpu.blocks_per_multiprocessor(size, config) <= mosaic_gpu.SHARED_BYTES
    assert (config.splits - 1) * config.pages < pages  # no split without a page
    blocks = batch * 8 * (config.splits + config.window_splits)
    assert blocks >= 128 or config.splits * config.pages >= pages


def test_a_measured_configuration_serves_batches_like_its_own_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mosaic_tuning, "FOLDER", tmp_path)
    mosaic_tuning.entries.cache_clear()
    measured, config = Batch("uniform", 128, 128, 8, 250), Config(77, 3, 2, 2)
    older = (measured, Config(5), 99.0)
    assert mosaic_gpu.choose(measured, "NVIDIA H200", 132).splits != 77
    path = mosaic_tuning.write("NVIDIA H200", [older, (measured, config, 17.2)])
    assert path == tmp_path / "nvidia-h200.json"
    near, far = (dataclasses.replace(measured, pages=n) for n in (300, 600))
    other = dataclasses.replace(measured, codec="waterfill")
    assert mosaic_gpu.choose(near, "NVIDIA H200", 132) == config
    assert mosaic_gpu.choose(far, "NVIDIA H200", 132) == mosaic_gpu.heuristic(far, 132)
    assert mosaic_gpu.choose(other, "NVIDIA H200", 132) == mosaic_gpu.heuristic(other, 132)
    assert mosaic_gpu.choose(measured, "NVIDIA B200", 148) == mosaic_gpu.heuristic(measured, 148)
    wide, own = dataclasses.replace(measured, key_bits=3), Config(66, 3, 2, 2)
    assert mosaic_gpu.choose(wide, "NVIDIA H200", 132) == mosaic_gpu.heuristic(wide, 132)
    mosaic_tuning.write("NVIDIA H200", [(wide, own, 20.0)])
    chosen = [mosaic_gpu.choose(x, "NVIDIA H200", 132) for x in (measured, wide)]
    assert chosen == [config, own]
    mosaic_tuning.entries.cache_clear()


@pytest.mark.parametrize("head_dim", mosaic_gpu.HEAD_DIMS)
def test_bf16_pages_lower(head_dim: int) -> None:
    q, layer, _, tables, row = operands(head_dim)
    pages = jax.ShapeDtypeStruct((80, 2, PAGE, head_dim), jnp.bfloat16)
    layer = dataclasses.replace(layer, k_pages=pages, v_pages=pages, k_meta=None, v_meta=None)
    with jax.sharding.use_abstract_mesh(on("H200")):
        text = lowered((q, layer, None, tables, row))
    assert text.count(f"@{KERNEL}(") == 2  # the kernel and the merge
