"""Every parameter of every verb, given what people give: it is taken, or refused in a sentence of ours."""

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

OF_VALUES = {"get_complete", "group_weights", "metadata_from_torch", "metadata_to_torch", "tensor_from_composite",
             "tensor_from_lazy", "torch_dtype"}  # fmt: skip
"""Functions from one value to another, which are no verbs."""


def functions(module: ModuleType) -> set[str]:
    names = public_names() if module is holdfast else module.__all__
    found = {name for name in names if inspect.isfunction(getattr(module, name))}
    # What torch has as well takes what torch takes, and says what torch says.
    of_torch = {
        name for name in found if module is holdfast.torch and hasattr(torch.serialization, name)
    }
    return {
        name
        for name in found - of_torch - OF_VALUES
        if inspect.signature(getattr(module, name)).parameters
    }


FACE = {module: functions(module) for module in (holdfast, holdfast.torch)}
"""The verbs."""


@pytest.fixture(scope="module")
def calls(tmp_path_factory) -> dict[str, Callable[..., object]]:
    """Each verb with arguments that it takes, to which others are added; a fresh target each time."""
    folder = tmp_path_factory.mktemp("arguments")
    state = {"w": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2), "step": 3}
    torch.save(state, folder / "a.pt")
    source = str(folder / "a.pt")
    holdfast.torch.save_sharded(folder / "ranks", {"w": torch.ones(2)})
    holdfast.package({"m": {"w": np.ones(2, np.float32)}}, folder / "a.pt2")
    number = itertools.count()

    def target() -> str:
        return str(folder / f"out-{next(number)}")

    def writes(verb: Callable[..., object], **base: Callable[[], object]) -> Callable[..., object]:
        def call(**given: object) -> object:
            here = {name: make() for name, make in base.items()}
            try:
                return verb(**{**here, **given})
            finally:
                made = here.get("dst", here.get("path"))
                if isinstance(made, str) and "out-" in made:
                    shutil.rmtree(made, ignore_errors=True)

        return call

    src = {"src": lambda: source}
    saved = {**src, "dst": lambda: target(), "durable": lambda: False}
    exported = torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),))
    ranks = {"path": target, "state": lambda: {"w": torch.ones(2)}, "durable": lambda: False}
    return {
        "holdfast.alias_graph": writes(holdfast.alias_graph, **src),
        "holdfast.compact": writes(holdfast.compact, **saved),
        "holdfast.convert": writes(holdfast.convert, **saved),
        "holdfast.copy": writes(holdfast.copy, **saved),
        "holdfast.dequantize": writes(holdfast.dequantize, tensor=lambda: holdfast.open(source)["w"]),
        "holdfast.diff": writes(holdfast.diff, a=lambda: source, b=lambda: source),
        "holdfast.edit": writes(holdfast.edit, **saved, drop=lambda: ["b"]),
        "holdfast.open": writes(lambda **given: holdfast.open(**given).close(), path=lambda: source),
        "holdfast.package": writes(holdfast.package, models=lambda: {"m": source}, dst=target, durable=lambda: False),
        "holdfast.prune": writes(holdfast.prune, **saved, rules=lambda: ["w: 0.5"]),
        "holdfast.read": writes(lambda **given: holdfast.read(**given), tensors=list),
        "holdfast.replace_weights": writes(
            holdfast.replace_weights, src=lambda: str(folder / "a.pt2"), dst=lambda: target() + ".pt2",
            weights=lambda: {"w": np.zeros(2, np.float32)}, dry_run=lambda: True,
        ),
        "holdfast.reshard": writes(holdfast.reshard, **saved, mesh=lambda: {"tp": 2}),
        "holdfast.save": writes(holdfast.save, state=lambda: {"w": np.ones(2)}, dst=target, durable=lambda: False),
        "holdfast.scan": writes(holdfast.scan),
        "holdfast.seal": writes(holdfast.seal, **src, overwrite=lambda: True, durable=lambda: False),
        "holdfast.sparsity": writes(holdfast.sparsity, **src),
        "holdfast.report": writes(holdfast.report, **src),
        "holdfast.stats": writes(holdfast.stats, **src),
        "holdfast.tie": writes(holdfast.tie, **saved),
        "holdfast.to_bytes": writes(holdfast.to_bytes, state=lambda: {"w": np.ones(2)}, format=lambda: "safetensors"),
        "holdfast.verify": writes(holdfast.verify, **src),
        "holdfast.torch.async_save_sharded": writes(lambda **given: holdfast.torch.async_save_sharded(**given).wait(), **ranks),
        "holdfast.torch.group": writes(holdfast.torch.group),
        "holdfast.torch.load_full": writes(holdfast.torch.load_full, path=lambda: str(folder / "ranks")),
        "holdfast.torch.load_into": writes(
            holdfast.torch.load_into, module_or_state=lambda: {"w": torch.ones(2, 3), "b": torch.ones(2)}, path=lambda: source
        ),
        "holdfast.torch.load_sharded": writes(
            holdfast.torch.load_sharded, path=lambda: str(folder / "ranks"), state=lambda: {"w": torch.ones(2)}
        ),
        "holdfast.torch.open": writes(lambda **given: holdfast.torch.open(**given).close(), path=lambda: source),
        "holdfast.torch.package_program": writes(
            holdfast.torch.package_program, exported_programs=lambda: exported, dst=lambda: target() + ".pt2", dry_run=lambda: True
        ),
        "holdfast.torch.slices": writes(lambda **given: holdfast.torch.slices(**given), path=lambda: source),
        "holdfast.torch.save_sharded": writes(holdfast.torch.save_sharded, **ranks),
    }  # fmt: skip


def verbs() -> list[tuple[str, object]]:
    return [
        (f"{module.__name__}.{name}", getattr(module, name))
        for module, names in FACE.items()
        for name in sorted(names)
    ]


@pytest.mark.parametrize(("name", "verb"), verbs(), ids=[name for name, _ in verbs()])
def test_whatever_a_parameter_is_given_is_taken_or_refused_in_a_sentence(
    calls, name, verb, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    raw = []
    for parameter in inspect.signature(verb).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            continue
        for value in VALUES:
            try:
                calls[name](**{parameter.name: value})
            except HoldfastError:
                pass
            except Exception as error:
                raw.append(
                    f"{parameter.name}={describe_value(value)}: {type(error).__name__}: {str(error)[:150]}"
                )
    assert not raw, "\n".join([f"{len(raw)} raw errors", *raw])


def test_every_verb_is_in_the_table_and_every_parameter_of_a_name_means_one_thing():
    """A new verb that is not `@validate_arguments` fails above; one that is not tried there fails here."""
    for name, verb in verbs():
        if name != "holdfast.read":
            assert hasattr(verb, "__wrapped__"), f"{name} is not @validate_arguments"
    named = {name for _, verb in verbs() for name in inspect.signature(verb).parameters}
    assert set(PARAMETER_CHECKS) <= named, f"nobody has {set(PARAMETER_CHECKS) - named}"


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
def test_renames_are_a_dict_or_pairs(checkpoint, tmp_path, rename):
    holdfast.convert(checkpoint, tmp_path / "b.pt", rename=rename)
    assert set(holdfast.open(tmp_path / "b.pt")) == {"w", "n", "opt.m"}


@pytest.mark.parametrize(
    "keep", ["model.*", ["model.*"], ("model.*",), {"model.*"}, iter(["model.*"])]
)
def test_one_pattern_is_not_read_letter_by_letter(checkpoint, tmp_path, keep):
    holdfast.convert(checkpoint, tmp_path / "b.pt", keep=keep)
    assert set(holdfast.open(tmp_path / "b.pt")) == {"model.w", "model.n"}


@pytest.mark.parametrize(
    "dtype",
    ["bf16", "bfloat16", "torch.bfloat16", torch.bfloat16, holdfast.DTYPES.name("bfloat16")],
)
def test_dtypes_of_any_kind(checkpoint, tmp_path, dtype):
    holdfast.convert(checkpoint, tmp_path / "b.safetensors", dtype=dtype)
    assert holdfast.open(tmp_path / "b.safetensors")["model.w"].dtype == torch.bfloat16
    target = {"model": {"w": torch.zeros(4, device="meta")}}
    holdfast.torch.load_into(target, checkpoint, dtype=dtype, strict=False)
    assert target["model"]["w"].dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [np.float16, np.dtype("float16"), np.dtype("<f2")])
def test_dtypes_of_numpy(checkpoint, tmp_path, dtype):
    holdfast.convert(checkpoint, tmp_path / "b.safetensors", dtype=dtype)
    assert holdfast.open(tmp_path / "b.safetensors")["model.w"].dtype == dtype


@pytest.mark.parametrize(
    "size", [1e9, 2_000_000_000, "2GB", "500MiB", "1.5 GiB", "2 gb", np.int64(10**9), None]
)
def test_sizes_as_people_write_them(checkpoint, tmp_path, size):
    holdfast.convert(checkpoint, tmp_path / "b.pt", max_memory=size)
    assert parse_nbytes("500MiB") == 500 << 20
    assert parse_nbytes("1_000") == 1000


def test_durations():
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


def test_limits_takes_what_its_type_says(checkpoint):
    """A dict, which the type does not allow, is refused as well."""
    with pytest.raises(holdfast.errors.LimitExceeded, match="pickle_nbytes"):
        holdfast.open(checkpoint, limits=holdfast.Limits(pickle_nbytes=10))
    with pytest.raises(BadArgumentType, match=r"takes a holdfast.Limits, such as Limits\(files="):
        holdfast.open(checkpoint, limits={"pickle_nbytes": 10})
    assert holdfast.Limits(pickle_nbytes="1MiB").pickle_nbytes == 1 << 20


def test_one_rule_is_not_read_letter_by_letter(checkpoint, tmp_path):
    for at, rules in enumerate(("model.*: 0.5", ["model.*: 0.5"], {"model.*": "0.5"})):
        assert holdfast.prune(checkpoint, tmp_path / f"{at}.pt", rules).sparsity == 0.5


def test_none_stands_for_the_default_and_false_for_no_progress(checkpoint, tmp_path):
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
    ("given", "said"),
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
def test_what_is_refused_is_refused_in_a_sentence(tmp_path, given, said):
    with pytest.raises(BadArgument, match=said):
        holdfast.save({"w": np.ones(2)}, tmp_path / "a.safetensors", **given)
    assert not list(tmp_path.iterdir())


def test_scan_takes_lists_and_says_what_is_no_path(checkpoint):
    assert [one.path for one in holdfast.scan([checkpoint], checkpoint).reports] == [
        str(checkpoint)
    ] * 2
    assert [one.error is not None for one in holdfast.scan(5, b"x", None, [3]).reports] == [
        True
    ] * 4


def test_an_unknown_keyword_is_a_type_error_that_says_the_nearest_name(checkpoint, tmp_path):
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
