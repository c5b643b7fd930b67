"""The JAX adapter: `holdfast.jax.load(path, shardings)`. It is `holdfast.integrations.jax`, under a name that is easy to find.

Imported when it is first asked for. Arrays of JAX are saved by `holdfast.save`, as those of numpy are.
"""

from __future__ import annotations

import importlib.util

if importlib.util.find_spec("jax") is None:
    raise ModuleNotFoundError(
        "holdfast.jax needs JAX, which is not installed here: pip install jax. The rest of holdfast works without it.",
        name="jax",
    )

from holdfast.integrations.jax import load

__all__ = ["load"]


def __dir__() -> list[str]:
    return sorted(__all__)
