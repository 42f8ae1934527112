"""Every configuration of the Mosaic GPU write kernel lowers for GPUs that are not here."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.format import PAGE, Codec, KeyCodec
from pallas_kernels.layout import LayerKV, PageJobs, Transform
from pallas_kernels.write import mosaic_gpu, write, xla
from pallas_kernels.write.mosaic_gpu import Config
from tests.lowering.test_mosaic_decode import KERNEL, on

POOLS = 4
WATERFILL = Codec(key="waterfill", gain=True)


def operands(
    head_dim: int,
    v_head_dim: int | None = None,
    *,
    jobs: int = 33,
    kv_heads: int = 2,
    length: int = 4480,
    int2: bool = True,
    bits: tuple[int, int] = (2, 2),
) -> tuple[Any, ...]:
    """(layer, source_k, source_v, transform, jobs) as shapes."""
    dims = (head_dim, v_head_dim or head_dim)
    shape: Any = jax.ShapeDtypeStruct
    bf16 = lambda n, rows, d: shape((n, kv_heads, rows, d), jnp.bfloat16)  # noqa: E731
    stored: Any = [bf16(40, PAGE, d) for d in dims] + [None, None]
    if int2:
        stored = [
            shape((40, kv_heads, PAGE, dims[0] * bits[0] // 16), jnp.uint16),
            shape((40, kv_heads, dims[1], PAGE * bits[1] // 16), jnp.uint16),
            *(shape((40, kv_heads, PAGE), jnp.uint32) for _ in dims),
        ]
    layer = LayerKV(*stored, *(bf16(3, 64, d) for d in dims), *(bf16(3, 400, d) for d in dims))
    sides = (dims[0], dims[0], dims[1], dims[1])
    arrays: Any = [
        *(shape((kv_heads, d, d), jnp.float32) for d in sides),
        shape((kv_heads, dims[0]), jnp.float32),
    ]
    transform = Transform(*arrays)
    row = shape((jobs,), jnp.int32)
    plan = PageJobs(row, row, row)
    sources = [bf16(2, length, d) for d in dims]
    return layer, *sources, transform if int2 else None, plan


def lowered(arguments: tuple[Any, ...], platform: str = "cuda", **options: Any) -> str:
    """The program of ``write`` with these options, its pools donated."""
    codec, call = options.pop("codec", Codec()), options.pop("call", write)

    def run(*arrays: Any) -> Any:
        return call(*arrays, codec=codec, **options)

    traced = jax.jit(run, donate_argnums=0).trace(*arguments)
    assert jax.tree.leaves(traced.out_info)[-1].shape == (2,)
    return traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("codec", [Codec(), WATERFILL], ids=str)
@pytest.mark.parametrize(
    ("head_dim", "v_head_dim"), [(64, 64), (128, 128), (64, 128), (128, 64), (256, 64), (256, 256)]
)
def test_every_head_dim_and_codec_lowers_to_one_launch_that_writes_the_pools_in_place(
    head_dim: int, v_head_dim: int, codec: Any
) -> None:
    with jax.sharding.use_abstract_mesh(on("H200")):
        text = lowered(operands(head_dim, v_head_dim), codec=codec, implementation="mosaic_gpu")
    assert text.count(f"@{KERNEL}(") == 1
    assert text.count("output_operand_alias<") == POOLS
    assert text.count("tf.aliasing_output") >= POOLS


@pytest.mark.parametrize(
    ("dims", "codec"),
    [
        ((64, 256), Codec(gain=True).with_bits(key=3)),
        ((128, 64), WATERFILL.with_bits(key=4, value=4)),
    ],
    ids=str,
)
def test_pages_of_3_and_4_bits_are_picked(dims: tuple[int, int], codec: Codec) -> None:
    with jax.sharding.use_abstract_mesh(on("H200")):
        assert KERNEL in lowered(operands(*dims, bits=codec.bits), codec=codec)


@pytest.mark.parametrize(
    "codec",
    [Codec(gain=True), Codec(clip_k=1.0, clip_v=1.0), Codec(clip_k=0.3), Codec(key="waterfill")],
    ids=str,
)
@pytest.mark.parametrize(
    "config",
    [Config(1, 1, 1), Config(3, 2, 3), Config(8, 9, 4)],
    ids=str,
)
def test_every_way_to_cut_the_kernel_lowers(config: Config, codec: Codec) -> None:
    call = functools.partial(mosaic_gpu.write, config=config)
    with jax.sharding.use_abstract_mesh(on("H200")):
        assert KERNEL in lowered(operands(128), call=call, codec=codec)


def test_none_is_the_kernel_on_hopper_and_xla_elsewhere() -> None:
    with jax.sharding.use_abstract_mesh(on("H200")):
        assert KERNEL in lowered(operands(128))
        assert KERNEL not in lowered(operands(128), platform="cpu")
        assert KERNEL not in lowered(operands(96))
        assert KERNEL in lowered(operands(256))
        assert KERNEL not in lowered(operands(128, int2=False))
    for other in ("A100", "B200"):  # no wgmma
        with jax.sharding.use_abstract_mesh(on(other)):
            assert KERNEL not in lowered(operands(128))
    assert KERNEL not in lowered(operands(128), platform="cpu")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (operands(96), "head_dim=96"),
        (operands(128, 192), "v_head_dim=192"),
        (operands(64, int2=False), "the pages are BF16"),
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


@pytest.mark.parametrize("other", ["A100", "B200"])
def test_a_forced_kernel_without_wgmma_names_xla(other: str) -> None:
    with (
        jax.sharding.use_abstract_mesh(on(other)),
        pytest.raises(NotImplementedError, match=r"compute capability 9\.x.*'xla'"),
    ):
        lowered(operands(128), implementation="mosaic_gpu")


def test_cpu_programs_are_those_of_the_specification() -> None:
    def without_names(text: str) -> str:
        return text.replace("jit_run", "").split("func.func", 1)[1]

    chosen = lowered(operands(64), platform="cpu")
    assert without_names(chosen) == without_names(lowered(operands(64), "cpu", call=xla.write))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (dict(key_splits=0, value_splits=1), "key_splits=0"),
        (dict(key_splits=1, value_splits=0), "value_splits=0"),
        (dict(key_splits=1, value_splits=1, warpgroups=5), "warpgroups=5"),
    ],
)
def test_an_impossible_configuration_says_why(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Config(**values)


@pytest.mark.parametrize("kv_heads", [1, 3, 8, 100])
@pytest.mark.parametrize("jobs", [1, 32, 257])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (64, 128), (256, 256), (256, 64)])
def test_the_heuristic_fits_the_device_and_gives_every_block_work(
    kv_heads: int, jobs: int, dims: tuple[int, int]
) -> None:
    keys: tuple[KeyCodec, ...] = ("uniform", "waterfill")
    for key in keys:
        sides = mosaic_gpu.sides_of(*dims, Codec(key=key))
        config = mosaic_gpu.heuristic(sides, jobs=jobs, kv_heads=kv_heads, sm_count=132)
        units = -(-jobs // 2)
        assert max(config.key_splits, config.value_splits) <= units
        assert kv_heads * (config.key_splits + config.value_splits) <= max(132, 2 * kv_heads)
        held = mosaic_gpu.shared_bytes(sides, config.warpgroups)
        assert held <= mosaic_gpu.SHARED_BYTES - 2048
