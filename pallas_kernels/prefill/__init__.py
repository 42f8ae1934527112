"""Attention of a chunk's queries against sink, pages and the chunk's own band."""

from pallas_kernels.prefill.api import prefill

__all__ = ["prefill"]
