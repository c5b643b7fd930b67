"""Checkpoints that are not what a map is for: all of it is said, before a byte of a tensor is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast.cli.main import main
from holdfast.core.value import replace
from holdfast.errors import BadMap, DoesNotFit
from holdfast.extras.maps.find import Map, families
from tests.extras.maps.small import DEEPSEEK, LLAMA, MOE, QWEN, counted, model, write

Tensors = dict[str, np.ndarray]


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No byte of a tensor is read within the test."""
    with counted(monkeypatch) as found:
        yield
    assert sum(found) == 0


def refused(folder: Path, name: str = "qwen3:hf->megatron") -> DoesNotFit:
    with pytest.raises(DoesNotFit) as caught:
        holdfast.open(folder, map=name)
    return caught.value


@pytest.mark.parametrize("name", [QWEN, MOE, LLAMA, DEEPSEEK])
def test_what_fits_is_seen(tmp_path: Path, unread: None, name: str):
    tensors, config = model(name)
    family = name.partition("-")[0]
    assert len(holdfast.open(write(tmp_path, tensors, config), map=f"{family}:hf->titan"))


def test_bytes_of_tensors_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = write(tmp_path, *model())
    with counted(monkeypatch) as found:
        holdfast.open(folder, map="qwen3:hf->megatron")[
            "decoder.layers.mlp.linear_fc1.weight"
        ].numpy()
    assert sum(found) == 3 * 44 * 24 * 4


def test_missing_tensors_are_all_named(tmp_path: Path, unread: None):
    tensors, config = model(MOE)
    gone = [
        name
        for name in tensors
        if ".1.mlp.experts.4." in name or ".2.self_attn." in name or name == "model.norm.weight"
    ]
    assert len(gone) == 3 + 6 + 1
    error = refused(
        write(tmp_path, {k: v for k, v in tensors.items() if k not in gone}, config),
        "qwen3_moe:hf->megatron",
    )
    assert sorted(error.missing) == sorted(gone)
    assert not error.unexpected
    assert not error.mismatched
    assert all(name in str(error) for name in gone)


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("known", [True, False])
def test_a_missing_layer(tmp_path: Path, unread: None, layer: int, known: bool):
    tensors, config = model()
    gone = [name for name in tensors if f"layers.{layer}." in name]
    if not known:
        del config["num_hidden_layers"]
    folder = write(tmp_path, {k: v for k, v in tensors.items() if k not in gone}, config)
    if layer == 2 and not known:  # nobody can know of it
        assert (
            holdfast.open(folder, map="qwen3:hf->megatron")[
                "decoder.layers.mlp.linear_fc2.weight"
            ].shape[0]
            == 2
        )
        return
    assert sorted(refused(folder).missing) == sorted(gone)


def test_a_layer_too_many(tmp_path: Path, unread: None):
    tensors, config = model()
    more = {
        name.replace("layers.2.", "layers.3."): values
        for name, values in tensors.items()
        if "layers.2." in name
    }
    error = refused(write(tmp_path, tensors | more, config))
    assert sorted(error.unexpected) == sorted(more)
    assert not error.missing


def test_one_tensor_under_two_names(tmp_path: Path, unread: None):
    tensors, config = model()
    name = "model.layers.01.mlp.up_proj.weight"
    error = refused(
        write(tmp_path, tensors | {name: tensors["model.layers.1.mlp.up_proj.weight"]}, config)
    )
    assert [*error.mismatched] in ([name], ["model.layers.1.mlp.up_proj.weight"])
    assert name in str(error)
    assert "twice" in str(error)


def test_fused_and_unfused_together(tmp_path: Path, unread: None):
    tensors, config = model()
    seen = holdfast.open(write(tmp_path / "a", tensors, config), map="qwen3:hf->megatron")
    both = tensors | {
        "decoder.layers.mlp.linear_fc1.weight": np.zeros(
            seen["decoder.layers.mlp.linear_fc1.weight"].shape, "<i4"
        )
    }
    error = refused(write(tmp_path / "b", both, config))
    assert error.unexpected == ("decoder.layers.mlp.linear_fc1.weight",)


def test_left_over(tmp_path: Path, unread: None):
    tensors, config = model()
    odd = {
        "model.layers.0.self_attn.q_proj.bias": np.zeros(60, "<i4"),
        "x": np.zeros(3, "<i4"),
        "model.norm.weight2": np.zeros(1),
    }
    error = refused(write(tmp_path, tensors | odd, config))
    assert sorted(error.unexpected) == sorted(odd)
    assert all(name in str(error) for name in odd)


WRONG: dict[str, Callable[[Tensors, dict[str, object]], object]] = {
    "heads": lambda tensors, config: config.update(num_attention_heads=4),
    "groups": lambda tensors, config: config.update(num_key_value_heads=3),
    "vocabulary": lambda tensors, config: config.update(vocab_size=64),
    "layers": lambda tensors, config: config.update(num_hidden_layers=2),
    "shape": lambda tensors, config: tensors.update(
        {"model.layers.1.mlp.down_proj.weight": np.zeros((24, 21), "<i4")}
    ),
    "dims": lambda tensors, config: tensors.update({"model.norm.weight": np.zeros((24, 1), "<i4")}),
    "scalar": lambda tensors, config: tensors.update({"model.norm.weight": np.zeros((), "<i4")}),
    "padding": lambda tensors, config: tensors.update(
        {"lm_head.weight": np.zeros((40, 24), "<i4")}
    ),
    "other model": lambda tensors, config: config.update(model(LLAMA)[1]),
    "experts": lambda tensors, config: config.update(model(MOE)[1]),
}


@pytest.mark.parametrize("fault", WRONG)
def test_sizes_that_are_wrong(tmp_path: Path, unread: None, fault: str):
    tensors, config = model()
    WRONG[fault](tensors, config)
    folder = write(tmp_path, tensors, config)
    with pytest.raises((DoesNotFit, BadMap)) as caught:
        holdfast.open(folder, map="qwen3:hf->megatron")
    if isinstance(caught.value, DoesNotFit):
        assert caught.value.mismatched or caught.value.unexpected


def test_every_tensor_of_a_wrong_size_is_named(tmp_path: Path, unread: None):
    tensors, config = model()
    error = refused(write(tmp_path, tensors, config | {"intermediate_size": 23}))
    wrong = [name for name in tensors if "_proj.weight" in name and ".mlp." in name]
    assert sorted(error.mismatched) == sorted(wrong)
    assert "23 (config" in str(error)


def test_another_vocabulary_padding_names_both(tmp_path: Path, unread: None):
    tensors, config = model()
    error = refused(write(tmp_path, tensors, config | {"vocab_size": 64}))
    assert sorted(error.mismatched) == ["lm_head.weight", "model.embed_tokens.weight"]


def test_dtypes_inside_a_fused_tensor(tmp_path: Path, unread: None):
    tensors, config = model()
    for name in ("model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.k_proj.weight"):
        tensors[name] = tensors[name].astype("<f2")
    error = refused(write(tmp_path, tensors, config))
    assert sorted(error.mismatched) == [
        "decoder.layers.mlp.linear_fc1.weight",
        "decoder.layers.self_attention.linear_qkv.weight",
    ]
    assert "float16" in str(error)
    assert "int32" in str(error)
    assert (
        holdfast.open(tmp_path, map="qwen3:hf->titan")["layers.1.feed_forward.w3.weight"].dtype.name
        == "float16"
    )


def test_without_a_configuration_sizes_are_asked_for_by_name(tmp_path: Path, unread: None):
    tensors, _ = model()
    folder = write(tmp_path, tensors)
    error = refused(folder)
    assert all(name.startswith("size ") for name in error.mismatched)
    assert "size group" in error.mismatched
    assert "?group=" in str(error)
    seen = holdfast.open(folder, map="qwen3:hf->megatron?group=2&query=3")
    with_config = holdfast.open(write(tmp_path / "b", *model()), map="qwen3:hf->megatron")
    assert {n: t.shape for n, t in seen.items()} == {n: t.shape for n, t in with_config.items()}


CONFIGS: dict[str, object] = {
    "no JSON": b"{",
    "binary": bytes(range(256)),
    "empty": b"",
    "list": b"[1, 2]",
    "number": b"7",
    "nested": b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
    "lists": b"[" * 100_000,
    "twice": b'{"head_dim": 1, "head_dim": 10}',
    "long number": b'{"head_dim": ' + b"9" * 10_000 + b"}",
    "long": b'{"a": "' + b"x" * 5_000_000 + b'"}',
    "nan": b'{"head_dim": NaN}',
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_configurations_that_are_none(tmp_path: Path, unread: None, kind: str):
    with pytest.raises((DoesNotFit, BadMap)):
        holdfast.open(write(tmp_path, model()[0], CONFIGS[kind]), map="qwen3:hf->megatron")


@pytest.mark.parametrize(
    "value",
    ["2", -2, 0, 1, True, 2.0, None, [], {}, 10**9, 10**18, 1 << 39, 1 << 70, {"a": 1}],
    ids=repr,
)
@pytest.mark.parametrize(
    "key",
    ["num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"],
)
def test_values_that_are_no_sizes(tmp_path: Path, unread: None, key: str, value: object):
    """They are refused, or not used: where shapes say the size, the map is as it should be."""
    tensors, config = model()
    folder = write(tmp_path, tensors, config | {key: value})
    try:
        seen = holdfast.open(folder, map="qwen3:hf->megatron")
    except (DoesNotFit, BadMap):
        return
    right = holdfast.open(write(tmp_path / "b", tensors, config), map="qwen3:hf->megatron")
    assert {n: (t.shape, [c.storage for c in t.chunks][:0]) for n, t in seen.items()} == {
        n: (t.shape, []) for n, t in right.items()
    }


def test_numbers_in_names_cost_nothing(tmp_path: Path, unread: None):
    tensors, config = model()
    del config["num_hidden_layers"]
    for number in ("999999999", "9999999999", "9" * 5000):
        more = {f"model.layers.{number}.input_layernorm.weight": np.zeros(24, "<i4")}
        error = refused(write(tmp_path / number[:12], tensors | more, config))
        assert len(error.missing) < 100_000
        assert error.unexpected == tuple(more) or error.mismatched


def test_a_size_of_zero_divides_nothing(tmp_path: Path, unread: None):
    folder = write(tmp_path, *model())
    for sizes in ("group=0", "group=7", "layer=999999999", "vocab=0"):
        with pytest.raises((BadMap, DoesNotFit)):
            holdfast.open(folder, map=f"qwen3:hf->megatron?{sizes}")


@pytest.mark.parametrize("name", [QWEN, MOE, LLAMA, DEEPSEEK])
def test_auto_finds_family_and_direction(tmp_path: Path, name: str):
    tensors, config = model(name)
    family = name.partition("-")[0]
    source = write(tmp_path / "hf", tensors, config)
    for layout in (one for one in families()[family].layouts if one != "hf"):
        seen = holdfast.open(source, map=f"auto->{layout}")
        assert any(f"{family}:hf:{layout}" in note for note in seen.notes)
        if sorted(seen) == sorted(tensors):
            continue  # the same names: it is known as the first layout that has them
        there = write(
            tmp_path / layout, {name: tensor.numpy() for name, tensor in seen.items()}, config
        )
        back = holdfast.open(there, map="auto")
        assert any(f"{family}:{layout}:hf" in note for note in back.notes)
        assert sorted(back) == sorted(tensors)


def test_auto_says_why_not_in_one_line(
    tmp_path: Path, unread: None, capsys: pytest.CaptureFixture[str]
):
    tensors, config = model()
    write(tmp_path / "hf", tensors, config)
    write(tmp_path / "odd", {"x": np.zeros(3)}, config)
    for folder, said in (("hf", "in the layout 'hf'"), ("odd", "fits none of the families")):
        with pytest.raises(BadMap, match=said):
            holdfast.open(tmp_path / folder, map="auto")
    assert main(["maps", "check", "auto", str(tmp_path / "odd")]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_a_check_with_auto_accepts_the_hugging_face_layout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """A check needs no target: it finds the family and proves that all tensors fit."""
    tensors, config = model()
    folder = write(tmp_path / "hf", tensors, config)
    assert main(["maps", "check", "auto", str(folder)]) == 0
    title = capsys.readouterr().out.splitlines()[0]
    assert title.startswith(
        f"qwen3 in the layout hf  fits: {len(tensors)} tensors of {len(tensors)}"
    )
    assert holdfast.verify(folder, map="auto").ok


def test_a_check_with_auto_refuses_a_checkpoint_that_lacks_a_tensor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    tensors, config = model()
    del tensors["model.layers.0.mlp.down_proj.weight"]
    folder = write(tmp_path / "hf", tensors, config)
    assert main(["maps", "check", "auto", str(folder)]) == 2
    assert "model.layers.0.mlp.down_proj.weight: missing" in capsys.readouterr().err
    with pytest.raises(DoesNotFit, match="missing"):
        holdfast.verify(folder, map="auto")


def test_auto_refuses_where_two_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unread: None):
    known = families()
    both = {**known, "same": replace(known["qwen3"], name="same", model_types=())}
    monkeypatch.setattr("holdfast.extras.maps.find.families", lambda: both)
    tensors, config = model()
    with pytest.raises(BadMap, match="fits several: qwen3:hf:megatron, same:hf:megatron"):
        holdfast.open(write(tmp_path / "a", tensors), map="auto->megatron")
    # The configuration says which.
    assert len(holdfast.open(write(tmp_path / "b", tensors, config), map="auto->megatron"))


@pytest.mark.parametrize(
    "name",
    ["", "qwen3", "qwen3:hf", "qwen3:hf->", "qwen3:hf->nowhere", "none:hf->titan", "qwen3:hf->titan?x", "->", ":",
     "qwen3:hf->titan?group=-1", "qwen3:hf->titan?group=" + "9" * 99, "missing.toml:a->b", ".toml:a->b", "\0.toml:a->b",
     "qwen3:HF->titan", "qwen3:hf:", "qwen3::titan", "qwen3:hf...titan", "qwen3:hf:titan,x", "qwen3:hf:titan,group=-1",
     "auto:nowhere", "auto->nowhere", "auto->", "qwen3:hf->titan\n", "x" * 100_000 + ".toml:a->b", ":" * 10_000],
    ids=lambda name: name[:20].replace("\0", "0"),
)  # fmt: skip
def test_names_that_are_no_maps(tmp_path: Path, unread: None, name: str):
    with pytest.raises(BadMap):
        holdfast.open(write(tmp_path, *model()), map=name)


@pytest.mark.parametrize(
    "name",
    [
        "qwen3:hf:megatron",
        "qwen3:hf..megatron",
        "auto:megatron",
        "auto..megatron",
        "auto->megatron",
    ],
)
def test_a_map_is_written_without_a_sign_that_a_shell_takes(tmp_path: Path, name: str):
    folder = write(tmp_path / "hf", *model())
    with (
        holdfast.open(folder, map="qwen3:hf->megatron") as wanted,
        holdfast.open(folder, map=name) as seen,
    ):
        assert [(one.name, one.shape) for one in seen.values()] == [
            (one.name, one.shape) for one in wanted.values()
        ]


def test_sizes_and_a_prefix_follow_a_map_without_a_sign_that_a_shell_takes():
    plain, quoted = (
        Map.named("qwen3:megatron:hf,group=4,query=2,prefix=model."),
        Map.named("qwen3:megatron->hf?group=4&query=2&prefix=model."),
    )
    assert plain.sizes == quoted.sizes == {"group": 4, "query": 2}
    assert plain.prefix == quoted.prefix == "model."
    assert str(plain) == "qwen3:megatron:hf"


@pytest.mark.parametrize("name", ["qwen3:hf-", "auto-", "my.toml:mine-"])
def test_the_message_recognises_a_map_whose_end_a_shell_took(tmp_path: Path, capsys, name: str):
    folder = write(tmp_path / "hf", *model())
    with pytest.raises(BadMap, match="sends the output of a command to a file"):
        holdfast.open(folder, map=name)
    assert main(["maps", "check", name, str(folder)]) == 2
    assert f"write {name[:-1]}:LAYOUT, which needs no quotes" in capsys.readouterr().err


def test_the_family_of_a_map_may_be_a_file_with_colons_in_its_path(tmp_path: Path):
    path = tmp_path / "a:b" / "mine.toml"
    path.parent.mkdir()
    path.write_text('[layouts.a]\n[layouts.b]\n[[array]]\nid = "w"\na = "w : n"\nb = "v : n"\n')
    for separator in (":", "..", "->"):
        found = Map.named(f"{path}:a{separator}b")
        assert (found.family.name, found.source, found.target) == ("mine", "a", "b")


def test_a_map_of_a_tie_is_proved(tmp_path: Path, unread: None):
    text = """
    [layouts.a]
    [layouts.b]
    [[array]]
    id = "embed"
    a = "embed : vocab hidden"
    b = "e : vocab hidden"
    [[array]]
    id = "head"
    tied = "embed"
    copies = ["b"]
    a = "head : vocab hidden"
    b = "h : vocab hidden[:2]"
    """
    (tmp_path / "my.toml").write_text(text)
    folder = write(tmp_path / "m", {"embed": np.zeros((3, 4), "<i4")})
    error = refused(folder, f"{tmp_path}/my.toml:a->b")
    assert "array head" in error.mismatched
    (tmp_path / "my.toml").write_text(
        text.replace(
            'b = "e : vocab hidden"', 'b = "e : vocab hidden"\nrange = {hidden = ":other"}'
        )
    )
    assert "size hidden" in refused(folder, f"{tmp_path}/my.toml:a->b").mismatched


def test_the_proof_of_a_composed_map_is_of_both(tmp_path: Path, unread: None):
    folder = write(tmp_path, *model())
    wrong = Map.named("qwen3:hf->titan").compose(Map.named("qwen3:megatron->hf"))
    with pytest.raises(DoesNotFit):
        holdfast.open(folder, map=wrong)
