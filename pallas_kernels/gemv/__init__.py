"""Products of weights with a few rows, with the norms, gates and residuals around them."""

from pallas_kernels.gemv.api import between, linear

__all__ = ["between", "linear"]
