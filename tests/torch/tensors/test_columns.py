"""Which tensors are rows, and what their columns say: compared with what each tensor says by itself."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.torch.tensors.storages import tabulate_tensors
from tests.sampling import examples


def hooked() -> torch.Tensor:
    tensor = torch.ones(3, requires_grad=True)
    tensor.register_hook(lambda grad: grad)
    return tensor


def with_attribute() -> torch.Tensor:
    tensor = torch.ones(3)
    tensor.note = "kept by nobody"  # type: ignore[attr-defined]
    return tensor


def nested() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def quantized() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(3), 1.0, 0, torch.qint8)


KEPT: dict[str, Callable[[], torch.Tensor]] = {
    "plain": lambda: torch.ones(2, 3),
    "strided": lambda: torch.arange(12.0).reshape(3, 4).t()[1:],
    "half": lambda: torch.ones(5, dtype=torch.float16),
    "parameter": lambda: torch.nn.Parameter(torch.ones(2)),
    "gradient": lambda: torch.ones(2, requires_grad=True),
    "empty": lambda: torch.ones(0, 3),
    "conjugated": lambda: torch.ones(2, dtype=torch.complex64).conj(),
    "negated": lambda: torch.ones(2, dtype=torch.complex64).conj().imag,
}
LEFT: dict[str, Callable[[], torch.Tensor]] = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "nested": nested,
    "quantized": quantized,
    "meta": lambda: torch.ones(2, device="meta"),
    "hooked": hooked,
    "with an attribute": with_attribute,
}


@settings(max_examples=examples(60), deadline=None)
@given(names=st.lists(st.sampled_from([*KEPT, *LEFT]), max_size=8))
def test_rows_are_what_each_tensor_says(names: list[str]):
    tensors = [{**KEPT, **LEFT}[name]() for name in names]
    found = tabulate_tensors([*tensors])
    assert [*found.rows] == [at for at, name in enumerate(names) if name in KEPT]
    assert {*found.kind_indices} == {*range(len(found.kinds))}
    for at, (row, kind, number) in enumerate(
        zip(found.rows, found.kind_indices, found.storage_indices, strict=True)
    ):
        tensor, said = tensors[row], found.kinds[kind]
        bits = 8 * tensor.element_size()
        assert said.dtype.name == str(tensor.dtype).removeprefix("torch.")
        assert said.shape == tuple(tensor.shape)
        assert said.strides == tuple(stride * bits for stride in tensor.stride())
        assert found.offsets.get(at, 0) == tensor.storage_offset() * bits
        assert (
            said.storage_nbytes
            == tensor.untyped_storage().nbytes()
            == found.storages.nbytes[number]
        )
        traits = said.traits
        assert (traits.conj, traits.neg) == (tensor.is_conj(), tensor.is_neg())
        assert (traits.requires_grad, traits.parameter) == (
            tensor.requires_grad,
            isinstance(tensor, torch.nn.Parameter),
        )
        assert said.location == "cpu"
    assert len({*found.storage_indices}) == len(found.rows)


def test_none_are_rows_where_somebody_watches():
    class Watching(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            return function(*args, **(kwargs or {}))

    with Watching():
        assert not [*tabulate_tensors([torch.ones(3)]).rows]


def test_what_vmap_wraps_is_left_out():
    found: list[list[int]] = []

    def look(wrapped: torch.Tensor) -> torch.Tensor:
        found.append([*tabulate_tensors([torch.ones(2), wrapped, torch.eye(2).to_sparse()]).rows])
        return wrapped

    torch.vmap(look)(torch.ones(3, 2))
    assert found == [[0]]
