"""Products of weights with a few rows, with the norms, gates and residuals around them."""

from pallas_kernels.gemv.api import between, counters, linear

__all__ = ["between", "counters", "linear"]
