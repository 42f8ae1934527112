"""The checker that the tests put on every jaxtyping signature of the packages."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from beartype import beartype
from beartype.roar import BeartypeDecorHintPep3119Exception


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """beartype, with two exceptions.

    JAX rebuilds a dataclass pytree with shapes, names or placeholders for leaves, as in
    ``jax.tree.map(lambda x: x.shape, cache)``: a constructor is checked when it is given arrays.
    A protocol that is not ``runtime_checkable`` says nothing about a value: mypy alone sees it.
    """
    try:
        strict: Callable[..., Any] = beartype(function)
    except BeartypeDecorHintPep3119Exception:
        return function
    if function.__name__ != "__init__":
        return strict

    @functools.wraps(function)
    def constructor(*args: Any, **kwargs: Any) -> Any:
        holds_arrays = any(
            isinstance(leaf, jax.Array | np.ndarray) for leaf in jax.tree.leaves((args[1:], kwargs))
        )
        return (strict if holds_arrays else function)(*args, **kwargs)

    return constructor
