"""What happens to the new heads of a row: norm and rotation, and their way into the cache."""

from pallas_kernels.heads.api import append, rotate

__all__ = ["append", "rotate"]
