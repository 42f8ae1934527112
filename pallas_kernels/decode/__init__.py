"""Attention of a few queries per sequence against sink, pages and tail."""

from pallas_kernels.decode.api import decode

__all__ = ["decode"]
