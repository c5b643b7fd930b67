"""Every parameter of every public function accepts a value, or refuses it with a Holdfast error."""

from __future__ import annotations

import inspect
import itertools
import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from tests.support import public_names

import holdfast
import holdfast.torch
from holdfast.core.options import PARAMETER_CHECKS
from holdfast.core.quantities import describe_value, parse_nbytes, parse_seconds
from holdfast.errors import BadArgument, BadArgumentType, HoldfastError

VALUES: list[object] = [
    None, 0, 1, -1, 7, 0.5, 1e9, float("nan"), True, False, "", "x", "2GB", "*", b"x", Path("nowhere"),
    [], ["x"], [1], [["x"]], (), ("a", "b"),
    {}, {"x": "y"}, {"x": 1}, {1: "x"}, np.float32, np.dtype("float16"), np.int64(3), np.bool_(True), np.arange(3), np.float32(2.5),
    torch.bfloat16, torch.arange(3), torch.tensor(2), torch.device("cpu"), print, object(), int, range(2), timedelta(seconds=1),
]  # fmt: skip

NOT_VERBS = {
    "get_complete",
    "group_weights",
    "metadata_from_torch",
    "metadata_to_torch",
    "tensor_from_composite",
    "tensor_from_lazy",
    "torch_dtype",
}
"""Functions that convert one value to another. Their arguments are not checked."""


def list_verbs(module: ModuleType) -> set[str]:
    """Return the names of the public functions whose arguments are checked."""
    names = public_names() if module is holdfast else module.__all__
    verbs = set()
    for name in names:
        function = getattr(module, name)
        if not inspect.isfunction(function) or name in NOT_VERBS:
            continue
        # These have the arguments and the errors of torch.
        is_of_torch = module is holdfast.torch and hasattr(torch.serialization, name)
        if not is_of_torch and inspect.signature(function).parameters:
            verbs.add(name)
    return verbs


VERBS = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module in (holdfast, holdfast.torch)
    for name in sorted(list_verbs(module))
}
"""The public functions whose arguments are checked, by their full names."""


@pytest.fixture(scope="module")
def calls(tmp_path_factory) -> dict[str, Callable[..., object]]:
    """Each verb with valid arguments, to which a test adds others. Each call has a new target."""
    folder = tmp_path_factory.mktemp("arguments")
    state = {"w": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2), "step": 3}
    torch.save(state, folder / "a.pt")
    source = str(folder / "a.pt")
    holdfast.torch.save_sharded(folder / "ranks", {"w": torch.ones(2)})
    holdfast.package({"m": {"w": np.ones(2, np.float32)}}, folder / "a.pt2")
    target_number = itertools.count()

    def target() -> str:
        return str(folder / f"out-{next(target_number)}")

    def with_arguments(
        verb: Callable[..., object], **factories: Callable[[], object]
    ) -> Callable[..., object]:
        """Return a function that calls a verb with new arguments, and deletes what it wrote."""

        def call(**tested: object) -> object:
            arguments = {name: make_argument() for name, make_argument in factories.items()}
            try:
                return verb(**{**arguments, **tested})
            finally:
                written = arguments.get("dst", arguments.get("path"))
                if isinstance(written, str) and "out-" in written:
                    shutil.rmtree(written, ignore_errors=True)

        return call

    src = {"src": lambda: source}
    saved = {**src, "dst": lambda: target(), "durable": lambda: False}
    exported = torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),))
    ranks = {"path": target, "state": lambda: {"w": torch.ones(2)}, "durable": lambda: False}
    return {
        "holdfast.alias_graph": with_arguments(holdfast.alias_graph, **src),
        "holdfast.compact": with_arguments(holdfast.compact, **saved),
        "holdfast.convert": with_arguments(holdfast.convert, **saved),
        "holdfast.copy": with_arguments(holdfast.copy, **saved),
        "holdfast.dequantize": with_arguments(
            holdfast.dequantize, tensor=lambda: holdfast.open(source)["w"]
        ),
        "holdfast.diff": with_arguments(holdfast.diff, a=lambda: source, b=lambda: source),
        "holdfast.edit": with_arguments(holdfast.edit, **saved, drop=lambda: ["b"]),
        "holdfast.open": with_arguments(
            lambda **arguments: holdfast.open(**arguments).close(), path=lambda: source
        ),
        "holdfast.package": with_arguments(
            holdfast.package, models=lambda: {"m": source}, dst=target, durable=lambda: False
        ),
        "holdfast.prune": with_arguments(holdfast.prune, **saved, rules=lambda: ["w: 0.5"]),
        "holdfast.read": with_arguments(
            lambda **arguments: holdfast.read(**arguments), tensors=list
        ),
        "holdfast.replace_weights": with_arguments(
            holdfast.replace_weights,
            src=lambda: str(folder / "a.pt2"),
            dst=lambda: target() + ".pt2",
            weights=lambda: {"w": np.zeros(2, np.float32)},
            dry_run=lambda: True,
        ),
        "holdfast.reshard": with_arguments(holdfast.reshard, **saved, mesh=lambda: {"tp": 2}),
        "holdfast.save": with_arguments(
            holdfast.save, state=lambda: {"w": np.ones(2)}, dst=target, durable=lambda: False
        ),
        "holdfast.scan": with_arguments(holdfast.scan),
        "holdfast.seal": with_arguments(
            holdfast.seal, **src, overwrite=lambda: True, durable=lambda: False
        ),
        "holdfast.sparsity": with_arguments(holdfast.sparsity, **src),
        "holdfast.report": with_arguments(holdfast.report, **src),
        "holdfast.stats": with_arguments(holdfast.stats, **src),
        "holdfast.tie": with_arguments(holdfast.tie, **saved),
        "holdfast.to_bytes": with_arguments(
            holdfast.to_bytes, state=lambda: {"w": np.ones(2)}, format=lambda: "safetensors"
        ),
        "holdfast.verify": with_arguments(holdfast.verify, **src),
        "holdfast.torch.async_save_sharded": with_arguments(
            lambda **arguments: holdfast.torch.async_save_sharded(**arguments).wait(), **ranks
        ),
        "holdfast.torch.group": with_arguments(holdfast.torch.group),
        "holdfast.torch.load_full": with_arguments(
            holdfast.torch.load_full, path=lambda: str(folder / "ranks")
        ),
        "holdfast.torch.load_into": with_arguments(
            holdfast.torch.load_into,
            module_or_state=lambda: {"w": torch.ones(2, 3), "b": torch.ones(2)},
            path=lambda: source,
        ),
        "holdfast.torch.load_sharded": with_arguments(
            holdfast.torch.load_sharded,
            path=lambda: str(folder / "ranks"),
            state=lambda: {"w": torch.ones(2)},
        ),
        "holdfast.torch.open": with_arguments(
            lambda **arguments: holdfast.torch.open(**arguments).close(), path=lambda: source
        ),
        "holdfast.torch.package_program": with_arguments(
            holdfast.torch.package_program,
            exported_programs=lambda: exported,
            dst=lambda: target() + ".pt2",
            dry_run=lambda: True,
        ),
        "holdfast.torch.slices": with_arguments(
            lambda **arguments: holdfast.torch.slices(**arguments), path=lambda: source
        ),
        "holdfast.torch.save_sharded": with_arguments(holdfast.torch.save_sharded, **ranks),
    }


@pytest.mark.parametrize("name", VERBS)
def test_a_parameter_accepts_a_value_or_refuses_it_with_a_holdfast_error(
    calls, name, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    other_errors = []
    for parameter in inspect.signature(VERBS[name]).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            continue
        for value in VALUES:
            try:
                calls[name](**{parameter.name: value})
            except HoldfastError:
                pass
            except Exception as error:
                argument = f"{parameter.name}={describe_value(value)}"
                other_errors.append(f"{argument}: {type(error).__name__}: {str(error)[:150]}")
    assert not other_errors, "\n".join(other_errors)


def test_every_verb_checks_its_arguments():
    for name, verb in VERBS.items():
        # `read` takes any number of tensors, and has a check of its own.
        if name != "holdfast.read":
            assert hasattr(verb, "__wrapped__"), f"{name} is not @validate_arguments"


def test_every_check_belongs_to_a_parameter():
    parameter_names = set()
    for verb in VERBS.values():
        parameter_names.update(inspect.signature(verb).parameters)
    assert set(PARAMETER_CHECKS) <= parameter_names


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    torch.save(
        {"model": {"w": torch.ones(4), "n": torch.ones(2)}, "opt": {"m": torch.ones(1)}, "step": 3},
        tmp_path / "a.pt",
    )
    return tmp_path / "a.pt"


@pytest.mark.parametrize(
    "rename",
    [
        {"model.*": "*"},
        [("model.*", "*")],
        [["model.*", "*"]],
        ("model.*", "*"),
        "model.*=*",
        ["model.*=*"],
    ],
)
def test_renames_may_be_a_dict_pairs_or_text(checkpoint, tmp_path, rename):
    holdfast.convert(checkpoint, tmp_path / "b.pt", rename=rename)
    assert set(holdfast.open(tmp_path / "b.pt")) == {"w", "n", "opt.m"}


@pytest.mark.parametrize(
    "keep", ["model.*", ["model.*"], ("model.*",), {"model.*"}, iter(["model.*"])]
)
def test_patterns_may_be_one_text_or_a_collection(checkpoint, tmp_path, keep):
    holdfast.convert(checkpoint, tmp_path / "b.pt", keep=keep)
    assert set(holdfast.open(tmp_path / "b.pt")) == {"model.w", "model.n"}


@pytest.mark.parametrize(
    "dtype",
    ["bf16", "bfloat16", "torch.bfloat16", torch.bfloat16, holdfast.DTYPES.name("bfloat16")],
)
def test_a_dtype_may_be_one_of_torch_or_a_name(checkpoint, tmp_path, dtype):
    holdfast.convert(checkpoint, tmp_path / "b.safetensors", dtype=dtype)
    assert holdfast.open(tmp_path / "b.safetensors")["model.w"].dtype == torch.bfloat16
    target = {"model": {"w": torch.zeros(4, device="meta")}}
    holdfast.torch.load_into(target, checkpoint, dtype=dtype, strict=False)
    assert target["model"]["w"].dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [np.float16, np.dtype("float16"), np.dtype("<f2")])
def test_a_dtype_may_be_one_of_numpy(checkpoint, tmp_path, dtype):
    holdfast.convert(checkpoint, tmp_path / "b.safetensors", dtype=dtype)
    assert holdfast.open(tmp_path / "b.safetensors")["model.w"].dtype == dtype


@pytest.mark.parametrize(
    "size", [1e9, 2_000_000_000, "2GB", "500MiB", "1.5 GiB", "2 gb", np.int64(10**9), None]
)
def test_a_size_may_be_a_number_or_text_with_a_unit(checkpoint, tmp_path, size):
    holdfast.convert(checkpoint, tmp_path / "b.pt", max_memory=size)
    assert parse_nbytes("500MiB") == 500 << 20
    assert parse_nbytes("1_000") == 1000


def test_a_duration_may_be_a_number_text_or_a_timedelta():
    assert [
        parse_seconds(each) for each in (2, 2.5, "2s", "1 min", "1h", timedelta(minutes=1))
    ] == [
        2,
        2.5,
        2,
        60,
        3600,
        60,
    ]


def test_limits_must_be_a_limits_object(checkpoint):
    with pytest.raises(holdfast.errors.LimitExceeded, match="pickle_nbytes"):
        holdfast.open(checkpoint, limits=holdfast.Limits(pickle_nbytes=10))
    with pytest.raises(BadArgumentType, match=r"takes a holdfast.Limits, such as Limits\(files="):
        holdfast.open(checkpoint, limits={"pickle_nbytes": 10})
    assert holdfast.Limits(pickle_nbytes="1MiB").pickle_nbytes == 1 << 20


def test_rules_may_be_one_text_a_list_or_a_dict(checkpoint, tmp_path):
    for index, rules in enumerate(("model.*: 0.5", ["model.*: 0.5"], {"model.*": "0.5"})):
        assert holdfast.prune(checkpoint, tmp_path / f"{index}.pt", rules).sparsity == 0.5


def test_none_stands_for_the_default(checkpoint, tmp_path):
    done = holdfast.convert(
        checkpoint,
        tmp_path / "b.pt",
        keep=None,
        rename=None,
        durable=None,
        progress=False,
        threads=None,
    )
    assert done.tensors == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"metadata": {"a": 1}},
            r"metadata= takes a dict of text, and 'a': 1 is not text; convert it with str\(…\)",
        ),
        ({"progress": True}, r"progress= takes a function .*, not True; with tqdm"),
        ({"overwrite": "no"}, r"overwrite= takes True or False, not 'no'"),
        ({"threads": True}, r"threads= takes a whole number, not True"),
        ({"threads": 0}, r"threads= takes a number from 1 on, not 0"),
        ({"max_memory": [1]}, r"max_memory= takes a number of bytes \(.*\), not \[1\] \(a list\)"),
        ({"limits": 3}, r"limits= takes a holdfast.Limits, such as Limits\(files=200_000\), not 3"),
        ({"format": 3}, r"format= takes text, not 3"),
    ],
)
def test_a_wrong_argument_is_refused_before_anything_is_written(tmp_path, arguments, message):
    with pytest.raises(BadArgument, match=message):
        holdfast.save({"w": np.ones(2)}, tmp_path / "a.safetensors", **arguments)
    assert not list(tmp_path.iterdir())


def test_scan_accepts_lists_and_reports_what_is_not_a_path(checkpoint):
    assert [one.path for one in holdfast.scan([checkpoint], checkpoint).reports] == [
        str(checkpoint)
    ] * 2
    assert [one.error is not None for one in holdfast.scan(5, b"x", None, [3]).reports] == [
        True
    ] * 4


def test_an_unknown_keyword_is_a_type_error_that_suggests_a_similar_name(checkpoint, tmp_path):
    with pytest.raises(
        TypeError,
        match=r"open\(\) got an unexpected keyword argument 'limit'; did you mean 'limits'\?",
    ):
        holdfast.open(checkpoint, limit=3)
    with pytest.raises(
        TypeError,
        match=r"convert\(\) got an unexpected keyword argument 'dtpye'; did you mean 'dtype'\?",
    ):
        holdfast.convert(checkpoint, tmp_path / "b.pt", dtpye="bf16")
    with pytest.raises(TypeError, match=r"it takes src, dst, rules, .*, progress$"):
        holdfast.prune(checkpoint, tmp_path / "b.pt", ["*: 2:4"], qqqqq=1)
    with pytest.raises(TypeError, match=r"reshard\(\) needs mesh="):
        holdfast.reshard(checkpoint, tmp_path / "b")
    assert not list(tmp_path.glob("b*"))
