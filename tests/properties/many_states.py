"""States of many small arrays, with what is not ordinary among them now and then."""

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

__all__ = ["many_states"]


@st.composite
def many_states(
    draw: st.DrawFn,
    dtypes: Sequence[npt.DTypeLike],
    odd: Sequence[str],
    *,
    large: int,
    below: int = 256,
) -> dict[str, object]:
    """Few kinds of arrays, whose bytes are `below` something; and up to two of what is `odd`, of which one array is `large`."""
    rng = np.random.default_rng(draw(st.integers(0, 9)))
    shapes = draw(
        st.lists(st.lists(st.integers(1, 4), max_size=3).map(tuple), min_size=1, max_size=3)
    )
    drawn = [
        np.dtype(dtype) for dtype in draw(st.lists(st.sampled_from(dtypes), min_size=1, max_size=3))
    ]
    state: dict[str, object] = {}
    for i in range(draw(st.sampled_from([3, 70, 90]))):
        shape, dtype = shapes[i % len(shapes)], drawn[i % len(drawn)]
        content = rng.integers(
            0, 2 if dtype == np.bool_ else below, (int(np.prod(shape)) * dtype.itemsize,), np.uint8
        )
        state[f"layers.{i * 7 % 90}.w"] = content.view(dtype).reshape(shape)
    for one in draw(st.lists(st.sampled_from(odd), max_size=2)):
        match one:
            case "empty":
                state["empty"] = np.zeros((0, 3), np.float32)
            case "tied":
                state["tied"] = state["layers.0.w"]
            case "large":
                state["large"] = np.arange(large, dtype=np.float32)
            case "nested":
                state["nested"] = {"inner": np.arange(3), "more": [np.arange(2)]}
            case "value":
                state["value"] = 3
            case "view":
                state["view"] = np.arange(40, dtype=np.int32)[4:9]
            case "name":
                state["ein Name ü"] = np.arange(3)
            case "ordered":
                state = OrderedDict(state)
                state._metadata = {"": {"version": 1}}  # type: ignore[attr-defined]  # as modules have it
            case "bare":
                state = {
                    name: value for name, value in state.items() if isinstance(value, np.ndarray)
                }
            case _:
                raise ValueError(one)
    return state
