"""The GPU that a program is traced for: the abstract mesh's, or the default backend's."""

from __future__ import annotations

import jax

SHARED_BYTES = 227 * 1024  # per multiprocessor and per block, sm_90 and sm_100
HOPPER = ("H100", "H200", "H20", "H800", "GH200")
NEWER = ("B200",)


def device_kind() -> str:
    """As ``jax.Device.device_kind`` has it."""
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    return str((device or jax.devices()[0]).device_kind)


def device_multiprocessors(*, wgmma: bool = False) -> int | None:
    """Its multiprocessors, if it is a GPU of compute capability 9.0 or newer; else None.

    Args:
        wgmma: the kernel needs wgmma, which Hopper (9.x) has and its successors have not.
    """
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if device is not None:
        kinds = HOPPER if wgmma else HOPPER + NEWER
        serves = device.platform == "gpu" and any(kind in device.device_kind for kind in kinds)
        return (device.num_cores or 132) if serves else None
    if jax.default_backend() != "gpu":
        return None
    local = jax.devices()[0]
    major = str(getattr(local, "compute_capability", "0")).partition(".")[0]
    if not major.isdigit() or int(major) < 9 or (wgmma and int(major) > 9):  # AMD says "gfx..."
        return None
    return int(getattr(local, "core_count", 132))
