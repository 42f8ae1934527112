"""Centre, transform, quantise and pack whole pages into the pool."""

from pallas_kernels.write.api import write

__all__ = ["write"]
