"""What a new user sees: the names that are there, where they are found, and `python -m holdfast`."""

from __future__ import annotations

import builtins
import re
import subprocess
import sys

import pytest

import holdfast
from tests.pages import ROOT

SERIALIZATION = """
    save load add_safe_globals safe_globals get_safe_globals clear_safe_globals get_unsafe_globals_in_checkpoint skip_data
    register_package location_tag default_restore_location validate_cuda_device validate_hpu_device
    normalize_storage_type storage_to_tensor_type StorageType check_module_version_greater_or_equal
    LoadEndianness get_default_load_endianness set_default_load_endianness get_crc32_options set_crc32_options
    get_default_mmap_options set_default_mmap_options
    SourceChangeWarning mkdtemp DEFAULT_PROTOCOL MAGIC_NUMBER PROTOCOL_VERSION STORAGE_KEY_SEPARATOR
"""
ADAPTER = """
    Run async_save_sharded group install load load_full load_into load_sharded open package_program save save_sharded slices
    sparsity uninstall
"""
LESS_USED = """
    LocalShardsWrapper TensorProperties Weights group_weights get_complete metadata_from_torch metadata_to_torch
    Loaded LoadedShards SaveHandle SavedShards TorchCheckpoint free_host_memory Slices tensor_from_composite tensor_from_lazy
    torch_dtype
"""
"""Names of `holdfast.torch` that are not in its `__all__`."""
METADATA = """
    ChunkStorageMetadata TensorProperties TensorStorageMetadata BytesStorageMetadata StorageMeta Metadata MetadataIndex
"""
SPARSITY = """
    module_to_fqn fqn_to_module get_arg_info_from_tensor_fqn module_contains_param swap_module FakeSparsity
    BaseSparsifier WeightNormSparsifier NearlyDiagonalSparsifier BaseScheduler LambdaSL CubicSL BaseStructuredSparsifier
    to_semi_structured
"""
VERBS = """
    compact convert copy diff edit errors open package prune read replace_weights report reshard save scan seal sparsity stats
    tie to_bytes verify
"""


def run_code(code: str) -> str:
    """Run code in a new interpreter and return what it prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def star_import(module: str) -> set[str]:
    """Return the names that a star import of a module defines."""
    names: dict[str, object] = {}
    exec(f"from {module} import *", names)
    return set(names) - {"__builtins__"}


def test_star_import_has_exactly_the_public_names():
    assert set(dir(holdfast)) == {*holdfast.__all__, "jax", "metadata", "testing", "torch"}
    assert set(VERBS.split()) <= set(holdfast.__all__)
    assert {name for name in holdfast.__all__ if name[0].islower()} == set(VERBS.split())
    assert star_import("holdfast") == set(holdfast.__all__)
    assert set(METADATA.split()) <= set(holdfast.metadata.__all__)
    for module in (holdfast.errors, holdfast.metadata):
        assert dir(module) == sorted(module.__all__)


GUIDES = [ROOT / "README.md", ROOT / "PYPI.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.name)
def test_every_class_that_a_guide_types_is_in_all(guide):
    blocks = re.findall(r"```python\n(.*?)```", guide.read_text(encoding="utf-8"), re.DOTALL)
    code = "\n".join(blocks)
    imported = ",".join(re.findall(r"from holdfast import (.+)", code))
    typed_names = {*re.findall(r"holdfast\.(\w+)", code), *re.findall(r"\w+", imported)}
    assert {name for name in typed_names if name[0].isupper()} <= set(holdfast.__all__)


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.name)
def test_the_errors_that_a_guide_names_are_names_of_holdfast(guide):
    code = re.findall(r"`[^`\n]+`", guide.read_text(encoding="utf-8"))
    words = {word for text in code for word in re.findall(r"\w+", text)}
    named_errors = words & set(holdfast.errors.__all__)
    for name in named_errors:
        assert getattr(holdfast, name) is getattr(holdfast.errors, name)


def test_the_names_of_the_adapter():
    pytest.importorskip("torch")
    assert dir(holdfast.torch) == sorted(holdfast.torch.__all__)
    assert set(holdfast.torch.__all__) == set(ADAPTER.split())
    assert [name for name in LESS_USED.split() if not hasattr(holdfast.torch, name)] == []
    assert star_import("holdfast.torch") == set(holdfast.torch.__all__)
    assert dir(holdfast.torch.sparsity) == sorted(holdfast.torch.sparsity.__all__)
    assert set(SPARSITY.split()) <= set(dir(holdfast.torch.sparsity))


def test_every_name_of_torch_serialization_is_there():
    torch = pytest.importorskip("torch")
    ours = holdfast.torch.serialization
    assert set(ours.__all__) == set(SERIALIZATION.split())
    assert set(torch.serialization.__all__) <= set(ours.__all__)
    assert star_import("holdfast.torch.serialization") == set(ours.__all__)


def test_the_adapter_is_found_as_an_attribute():
    pytest.importorskip("torch")
    loaded = (
        "import sys, holdfast; dir(holdfast); print('torch' in sys.modules); "
        "holdfast.torch.load; print('torch' in sys.modules)"
    )
    assert run_code(loaded).split() == ["False", "True"]


HIDDEN = "import sys; sys.modules['torch'] = None\n"
"""As if torch were not installed."""


@pytest.mark.parametrize(
    "statement",
    ["import holdfast.torch", "from holdfast import torch", "from holdfast.torch import load"],
)
def test_an_import_without_torch_names_what_is_missing(statement: str):
    output = run_code(
        f"{HIDDEN}try:\n    {statement}\nexcept ModuleNotFoundError as error:\n    print(error.name, error)"
    )
    assert output.startswith(
        "torch holdfast.torch needs torch, which is not installed here: pip install torch."
    )


def test_an_attribute_without_torch_names_what_is_missing():
    access = "try:\n    holdfast.torch\nexcept AttributeError as error:\n    print(error)"
    output = run_code(f"{HIDDEN}import holdfast\nprint(hasattr(holdfast, 'torch'))\n{access}")
    assert output.startswith("False\nholdfast.torch needs torch, which is not installed here")
    run_code(
        f"{HIDDEN}import inspect, holdfast\nassert 'torch' not in dict(inspect.getmembers(holdfast))\nfrom holdfast import *"
    )


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        holdfast.nothing  # noqa: B018


def test_open_is_the_only_builtin_that_a_star_import_replaces():
    assert {name for name in holdfast.__all__ if hasattr(builtins, name)} == {"open"}


def test_the_package_runs_as_a_program():
    done = subprocess.run(
        [sys.executable, "-m", "holdfast", "--version"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split()[:2] == ["holdfast", holdfast.__version__]
    wrong = subprocess.run(
        [sys.executable, "-m", "holdfast", "show", "nowhere.pt"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith("holdfast: ")
