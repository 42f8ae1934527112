"""Imported for what it sets: XLA does not search for the fastest program of a product on a GPU.

The search times dozens of programs in every process that shares the GPU, for products that only the
specification makes, and does not get through compute-sanitizer.
"""

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_autotune_level=0"
