"""Meta's files of Llama: a model cut by hand, as its model-parallel ranks have it, and put together by names."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import holdfast
from holdfast.cli.main import main
from holdfast.errors import (
    FormatError,
    HoldfastError,
    MetadataError,
    ReplicasDiffer,
    UnknownFormat,
    Unsupported,
)
from tests.extras.maps.test_oracles import FOLDER, digest, numbered
from tests.extras.rank_files.megatron_folders import count_up

Model = dict[str, torch.Tensor]

HEADS, WIDTH, VOCABULARY, FFN, LAYERS = 8, 4, 20, 12, 2
HIDDEN = HEADS * WIDTH
PARAMS: dict[str, object] = {
    "dim": HIDDEN,
    "n_layers": LAYERS,
    "n_heads": HEADS,
    "vocab_size": -1,
    "multiple_of": 4,
}
COLUMNS = ("attention.wo.weight", "feed_forward.w2.weight")


def whole_model(groups: int = HEADS) -> Model:
    """A model every element of which is another."""
    shapes: dict[str, tuple[int, ...]] = {
        "tok_embeddings.weight": (VOCABULARY, HIDDEN),
        "norm.weight": (HIDDEN,),
    }
    shapes |= {"output.weight": (VOCABULARY, HIDDEN), "rope.freqs": (WIDTH // 2,)}
    for n in range(LAYERS):
        rows = {"wq": HIDDEN, "wk": groups * WIDTH, "wv": groups * WIDTH, "wo": HIDDEN}
        shapes |= {
            f"layers.{n}.attention.{name}.weight": (count, HIDDEN) for name, count in rows.items()
        }
        shapes |= {f"layers.{n}.feed_forward.{name}.weight": (FFN, HIDDEN) for name in ("w1", "w3")}
        shapes |= {f"layers.{n}.feed_forward.w2.weight": (HIDDEN, FFN)}
        shapes |= {
            f"layers.{n}.{name}.weight": (HIDDEN,) for name in ("attention_norm", "ffn_norm")
        }
    return count_up(shapes)


def local(name: str, tensor: torch.Tensor, rank: int, *, count: int, columns: bool) -> torch.Tensor:
    """What a rank has."""
    if tensor.ndim == 1:
        return tensor.clone()
    if name.endswith(COLUMNS) or (columns and name == "tok_embeddings.weight"):
        width = tensor.shape[1] // count
        return tensor[:, rank * width : (rank + 1) * width].clone()
    height = len(tensor) // count
    return tensor[rank * height : (rank + 1) * height].clone()


def write(
    folder: Path, count: int, *, groups: int = HEADS, columns: bool = False, zipped: bool = True,
    change: Callable[[int, Model], object] = lambda rank, own: None,
) -> Model:  # fmt: skip
    """Write a model in several files; `change` is done to each before. Gives the whole tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    model = whole_model(groups)
    for rank in range(count):
        own = {
            name: local(name, tensor, rank, count=count, columns=columns)
            for name, tensor in model.items()
        }
        change(rank, own)
        torch.save(
            own, folder / f"consolidated.{rank:02d}.pth", _use_new_zipfile_serialization=zipped
        )
    more = {} if groups == HEADS else {"n_kv_heads": groups}
    (folder / "params.json").write_text(json.dumps(PARAMS | more))
    return model


def check(folder: Path, expected: Model) -> None:
    with holdfast.open(folder) as found:
        assert found.format == "meta-llama"
        assert list(found) == list(expected)
        for name, tensor in expected.items():
            assert torch.equal(found[name].torch(), tensor), name


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("columns", [True, False], ids=["llama 2", "llama 3"])
@pytest.mark.parametrize("groups", [HEADS, 4])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_every_tensor_is_put_together(
    tmp_path: Path, count: int, groups: int, columns: bool, zipped: bool
) -> None:
    expected = write(tmp_path, count, groups=groups, columns=columns, zipped=zipped)
    check(tmp_path, expected)
    with holdfast.open(tmp_path) as found:
        assert {len(found[name].chunks) for name in found if found[name].ndim == 2} == {count}
        assert torch.equal(
            found["tok_embeddings.weight"][3:13, 5:27].torch(),
            expected["tok_embeddings.weight"][3:13, 5:27],
        )
    assert holdfast.verify(tmp_path).ok


@pytest.mark.parametrize("columns", [True, False], ids=["llama 2", "llama 3"])
@pytest.mark.parametrize("groups", [HEADS, 4])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_through_the_map_and_back(tmp_path: Path, count: int, groups: int, columns: bool) -> None:
    """Sizes are those of params.json: nothing is given behind the map."""
    expected = write(tmp_path / "meta", count, groups=groups, columns=columns)
    assert (
        main(
            [
                "convert",
                str(tmp_path / "meta"),
                str(tmp_path / "hf"),
                "--map",
                "llama:meta->hf",
                "--quiet",
            ]
        )
        == 0
    )
    with holdfast.open(tmp_path / "hf") as hf, holdfast.open(tmp_path / "meta", map="auto") as auto:
        assert hf.format == "safetensors-dir"
        assert set(hf) == set(auto)
        key = hf["model.layers.1.self_attn.k_proj.weight"].torch()
        own = expected["layers.1.attention.wk.weight"].view(groups, WIDTH // 2, 2, HIDDEN)
        assert torch.equal(key, own.transpose(1, 2).reshape(groups * WIDTH, HIDDEN))
    with holdfast.open(tmp_path / "hf", map="llama:hf->meta") as back:
        assert set(back) == set(expected) - {"rope.freqs"}
        for name in back:
            assert torch.equal(back[name].torch(), expected[name]), name


@pytest.mark.parametrize("variant", ["gqa", "mha"])
def test_as_the_converter_of_transformers_did_it(tmp_path: Path, variant: str) -> None:
    recorded = json.loads((FOLDER / f"llama-{variant}-2files.meta-hf.json").read_text())
    shapes = json.loads(recorded["note"].partition("each file: ")[2].partition("}")[0] + "}")
    whole = numbered([row[:2] for row in recorded["source"]])
    for rank in range(2):
        own = {}
        for name, values in whole.items():
            layer = name.split(".")
            shape = shapes[".".join(["layers", "0", *layer[2:]]) if layer[0] == "layers" else name]
            cut = tuple(
                slice(rank * n, rank * n + n) if n < size else slice(None)
                for n, size in zip(shape, values.shape, strict=True)
            )
            own[name] = torch.from_numpy(values[cut].astype(np.int64).copy())
        torch.save(own, tmp_path / f"consolidated.{rank:02d}.pth")
    config = recorded["config"]
    params = {
        "dim": config["hidden_size"],
        "n_heads": config["num_attention_heads"],
        "n_kv_heads": config["num_key_value_heads"],
    }
    (tmp_path / "params.json").write_text(
        json.dumps(params | {"n_layers": config["num_hidden_layers"]})
    )
    with holdfast.open(tmp_path, map="llama:meta->hf") as found:
        assert {name: (list(found[name].shape), digest(found[name].numpy())) for name in found} == {
            row[0]: (row[1], row[2]) for row in recorded["target"]
        }


def test_more_files_than_heads_of_keys(tmp_path: Path) -> None:
    """405B in 16 files: two ranks whose queries share a head of keys both have it."""
    model = whole_model(2)

    def repeat(rank: int, own: Model) -> None:
        for name in [name for name in own if name.endswith(("wk.weight", "wv.weight"))]:
            own[name] = model[name][rank // 2 * WIDTH :][:WIDTH].clone()

    check(tmp_path, write(tmp_path, 4, groups=2, change=repeat))


def test_half_a_head_of_keys_in_each_file(tmp_path: Path) -> None:
    check(tmp_path, write(tmp_path, 4, groups=2))


def test_one_file_alone_is_the_file(tmp_path: Path) -> None:
    expected = write(tmp_path, 1)
    (tmp_path / "params.json").unlink()
    with holdfast.open(tmp_path) as found:
        assert found.format == "torch-zip"
        assert list(found) == list(expected)
    with holdfast.open(tmp_path, map="llama:meta->hf?heads=8") as found:
        assert torch.equal(found["lm_head.weight"].torch(), expected["output.weight"])


def test_what_somebody_made_of_it_counts(tmp_path: Path) -> None:
    write(tmp_path, 2)
    holdfast.save({"a": np.ones(3, np.float32)}, tmp_path / "consolidated.safetensors")
    with holdfast.open(tmp_path) as found:
        assert found.format == "safetensors-dir"


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_replicas_must_be_equal(tmp_path: Path, zipped: bool) -> None:
    expected = write(
        tmp_path, 2, zipped=zipped, change=lambda rank, own: own["norm.weight"].add_(rank)
    )
    with holdfast.open(tmp_path) as found:
        assert torch.equal(found["output.weight"].torch(), expected["output.weight"])
        with pytest.raises(ReplicasDiffer, match=r"norm\.weight"):
            found["norm.weight"].numpy()


def test_a_number_where_a_matrix_belongs(tmp_path: Path) -> None:
    write(tmp_path, 2, change=without_dimensions)
    with holdfast.open(tmp_path) as found, pytest.raises(ReplicasDiffer):
        found["layers.0.attention.wo.weight"].numpy()


def test_a_missing_file(tmp_path: Path) -> None:
    write(tmp_path, 4, columns=True)
    (tmp_path / "consolidated.03.pth").unlink()
    with pytest.raises(
        MetadataError,
        match=r"3 files have 24 columns of it.* 32: files are missing at the end.*tok_embeddings\.weight",
    ):
        holdfast.open(tmp_path)
    (tmp_path / "consolidated.01.pth").unlink()
    with pytest.raises(FormatError, match=r"2 of 3 consolidated files are here, and with rank 1 "):
        holdfast.open(tmp_path)
    (tmp_path / "consolidated.02.pth").unlink()
    with pytest.raises(MetadataError, match="files are missing at the end"):
        holdfast.open(tmp_path)


def other_shape(rank: int, own: Model) -> None:
    if rank:
        own["output.weight"] = own["output.weight"][1:].clone()


def other_dtype(rank: int, own: Model) -> None:
    if rank:
        own["output.weight"] = own["output.weight"].half()


def missing(rank: int, own: Model) -> None:
    if rank:
        del own["layers.1.feed_forward.w2.weight"]


def surplus(rank: int, own: Model) -> None:
    if rank:
        own["layers.9.feed_forward.w2.weight"] = torch.ones(2, 2)


def unknown(rank: int, own: Model) -> None:
    own["layers.0.feed_forward.experts.0.w1.weight"] = torch.ones(2, 2)


def three_dimensions(rank: int, own: Model) -> None:
    own["output.weight"] = torch.ones(2, 2, 2)


def without_dimensions(rank: int, own: Model) -> None:
    own["layers.0.attention.wo.weight"] = torch.tensor(float(rank))


def without_norm(rank: int, own: Model) -> None:
    del own["norm.weight"]


def nested(rank: int, own: Model) -> None:
    own["model"] = {"a": torch.ones(1)}  # type: ignore[assignment]  # on purpose


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            other_shape,
            MetadataError,
            r"rank 1 has a part of \[9, 32\] where the placement says \[10, 32\].*'output\.weight'",
        ),
        (other_dtype, MetadataError, r"rank 1 has a part of (?:f16|float16).*'output\.weight'"),
        (
            missing,
            MetadataError,
            r"they are of two models.*consolidated\.01\.pth.*layers\.1\.feed_forward\.w2\.weight",
        ),
        (
            surplus,
            MetadataError,
            r"they are of two models.*consolidated\.01\.pth.*layers\.9\.feed_forward\.w2\.weight",
        ),
        (unknown, Unsupported, r"nothing says how its 2 parts go together.*experts\.0\.w1\.weight"),
        (three_dimensions, Unsupported, r"no 3-dimensional.*'output\.weight'"),
        (
            without_norm,
            Unsupported,
            r"nothing says how its 2 parts go together.*tok_embeddings\.weight",
        ),
        (nested, FormatError, r"no plain dict of tensors.*consolidated\.00\.pth"),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, change: Callable[[int, Model], object], error: type[HoldfastError], message: str
) -> None:
    write(tmp_path, 2, change=change)
    with pytest.raises(error, match=message):
        holdfast.open(tmp_path)


def test_one_file_may_have_other_names(tmp_path: Path) -> None:
    write(tmp_path, 1, change=unknown)
    with holdfast.open(tmp_path) as found:
        assert found["layers.0.feed_forward.experts.0.w1.weight"].shape == (2, 2)


def test_a_file_of_something_else(tmp_path: Path) -> None:
    write(tmp_path, 2)
    (tmp_path / "consolidated.01.pth").write_bytes(b"<html>")
    with pytest.raises(UnknownFormat, match=r"web page.*consolidated\.01\.pth"):
        holdfast.open(tmp_path)


@pytest.mark.parametrize(
    "text", ["[]", "{", '{"dim": "x", "n_heads": 0}', '{"dim": 32, "n_heads": 8, "n_kv_heads": 3}']
)
def test_parameters_that_say_nothing(tmp_path: Path, text: str) -> None:
    expected = write(tmp_path, 2)
    (tmp_path / "params.json").write_text(text)
    check(tmp_path, expected)
