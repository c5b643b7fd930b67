"""The adapter for JAX: `holdfast.jax.load(path, shardings)`.

This is `holdfast.integrations.jax` under a shorter name. `holdfast.save` saves arrays of JAX as it
does those of numpy.
"""

from __future__ import annotations

import importlib.util

if importlib.util.find_spec("jax") is None:
    raise ModuleNotFoundError(
        "holdfast.jax needs JAX, which is not installed: pip install jax. The rest of holdfast "
        "works without it.",
        name="jax",
    )

from holdfast.integrations.jax import load

__all__ = ["load"]


def __dir__() -> list[str]:
    return sorted(__all__)
