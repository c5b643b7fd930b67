"""What `show` says about checkpoints made by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest
from msgspec.structs import force_setattr

from holdfast.cli.outline import ranges
from holdfast.cli.show import LINES, document, show_table, show_tree
from holdfast.cli.text import plain
from holdfast.core.opaque import Global, Opaque
from holdfast.core.patterns import make_matcher
from holdfast.core.protocols import Foreign
from holdfast.core.tensor import Composite, Traits


def tree_of(checkpoint, **options):
    return [plain(line) for line in show_tree(checkpoint, **options)]


def test_layers_are_folded_and_joined(made):
    state = {f"layers.{i}.attn.{n}": made.zeros(4, 4) for i in range(32) for n in "qk"}
    state["embed.weight"] = made.zeros(10, 4)
    lines = tree_of(made.checkpoint(state))
    assert lines[0] == "made.pt  torch-zip · 65 tensors · 1,064 parameters · 4.2 KiB · f32 100%"
    assert lines[1].split() == ["├─", "layers.[0-31].attn", "32", "×", "2", "tensors", "4.0", "KiB"]
    assert lines[2].split() == ["│", "├─", "q", "f32", "[4,", "4]", "64", "B"]
    assert lines[4].split() == ["└─", "embed.weight", "f32", "[10,", "4]", "160", "B"]
    assert len(lines) == 5


def test_layers_of_another_structure_stay_apart(made):
    state = {f"l.{i}.w": made.zeros(2 if i % 2 else 3) for i in range(6)}
    lines = tree_of(made.checkpoint(state))
    assert [line.split()[1] for line in lines[2:]] == ["├─", "└─"] or "[0,2,4].w" in lines[2]
    assert any("[0,2,4].w" in line and "3 × [3]" in line for line in lines)
    assert any("[1,3,5].w" in line and "3 × [2]" in line for line in lines)


def test_two_names_with_a_number_are_names(made):
    lines = tree_of(made.checkpoint({"ln_1": made.zeros(2), "ln_2": made.zeros(2)}))
    assert [line.split()[1] for line in lines[1:]] == ["ln_1", "ln_2"]


def test_folded_values_that_differ_say_so(made):
    groups = [
        {"lr": 0.1 * i, "eps": 1e-8, "long": "x" * 200 + str(i), "w": made.zeros(1)}
        for i in range(3)
    ]
    text = "\n".join(tree_of(made.checkpoint({"groups": groups})))
    assert "lr = (differs)" in text
    assert "long = (differs)" in text
    assert "eps = 1e-08" in text


def test_all_folds_nothing(made):
    state = {f"layers.{i}.w": made.zeros(2) for i in range(300)}
    lines = tree_of(made.checkpoint(state), everything=True)
    assert len(lines) == 1 + 1 + 300 + 300
    assert not any("×" in line for line in lines)


def test_ties_views_and_shared_containers(made):
    weight = made.tensor(np.arange(12, dtype=np.float32).reshape(3, 4))
    model = {"a": weight, "b": weight, "c": weight[1:]}
    text = tree_of(made.checkpoint({"model": model, "ema": model}))
    assert text[3].endswith("= model.a")
    assert text[4].endswith("in model.a")
    assert text[5] == "└─ ema = model (the same object)"
    assert "20 elements" in text[0]  # a and c; b is a, and ema is model


def test_cycles_and_sharing_cost_nothing(made):
    loop: dict[str, object] = {"w": made.zeros(2)}
    loop["self"] = loop
    bomb: list[object] = []
    for _ in range(60):
        bomb = [bomb, bomb]
    text = "\n".join(tree_of(made.checkpoint({"loop": loop, "n": {"x": 1}})))
    assert "self = loop (the same object)" in text
    checkpoint = made.checkpoint({})
    force_setattr(checkpoint._description, "tree", {"bomb": bomb})
    assert len(tree_of(checkpoint)) < LINES


def test_a_name_of_a_million_dots_is_one_name(made):
    names = {
        "a." * 1_000_000 + "b": made.zeros(1),
        ".": made.zeros(1),
        "a..b": made.zeros(1),
        "": made.zeros(1),
    }
    lines = tree_of(made.checkpoint(names))
    assert len(lines) == 5
    assert max(map(len, lines)) < 300


def test_values_objects_modules_and_composites(made):
    module = Opaque(
        Global("net", "Linear"),
        state={
            "_parameters": {"weight": made.zeros(2, 2)},
            "_buffers": {"mean": made.zeros(2), "gone": made.zeros(2)},
            "_modules": {},
            "_non_persistent_buffers_set": {"gone"},
            "in_features": 2,
            "training": True,
        },
    )
    sparse = Composite(
        "sparse_coo", (9, 9), {"indices": made.zeros(2, 3), "values": made.zeros(3)}, {}, Traits()
    )
    tree = {
        "epoch": 12,
        "args": Opaque(Global("argparse", "Namespace"), state={"lr": 0.1}),
        "hook": Opaque(Global("os", "system"), ("echo hi",)),
        "net": module,
        "sparse": sparse,
        "history": list(range(1000)),
        "none": None,
        "param": made.tensor(np.zeros(2, np.float32), traits=Traits(parameter=True)),
    }
    lines = tree_of(made.checkpoint(tree))
    text = "\n".join(lines)
    assert "├─ epoch = 12" in lines
    assert "├─ hook = os.system('echo hi')" in lines
    assert "├─ history = [0, 1, 2, 3, 4, 5, … 1,000 items]" in lines
    assert "args  argparse.Namespace" in text
    assert "net  net.Linear(in_features=2)" in text
    assert any("weight" in line and line.endswith("parameter") for line in lines)
    assert any("mean" in line and line.endswith("buffer") for line in lines)
    assert "gone" not in text
    assert any(line.split()[1:5] == ["sparse", "sparse_coo", "[9,", "9]"] for line in lines)
    assert lines[-1].endswith("parameter")


def test_header_says_elements_where_there_is_more_than_tensors(made):
    assert "elements" in tree_of(made.checkpoint({"w": made.zeros(2), "epoch": 1}))[0]


def test_a_tensor_alone(made):
    assert tree_of(made.checkpoint(made.zeros(3)))[1].split() == [
        "└─",
        "tensor",
        "f32",
        "[3]",
        "12",
        "B",
    ]


def test_footer(made):
    foreign = (Foreign(Global("evil\x1b[1m", "Thing"), ("call",), 3, "data.pkl"),)
    lines = tree_of(
        made.checkpoint({}, foreign=foreign, notes=("odd\nnote",), metadata={"k\n": "v"})
    )
    assert lines[-3:] == [
        r"metadata  k\n=v",
        r"foreign   evil\x1b[1m.Thing  (1 global not imported, shown as data; see holdfast scan)",
        r"note      odd\nnote",
    ]


def test_hostile_names_never_reach_the_output(made):
    name = "a\x1b[2J\u202e[bold red]x[/]\nfake"
    checkpoint = made.checkpoint({name: made.zeros(1), "v": {name: name}}, name="p\x1b.pt")
    for lines in (show_tree(checkpoint), show_table(checkpoint, "*")):
        for line in lines:
            assert plain(line).isprintable()
    assert r"a\x1b[2J\u202e[bold red]x[/]\nfake" in "\n".join(tree_of(checkpoint))
    assert json.dumps(document(checkpoint), allow_nan=False).isascii()


def test_a_hundred_thousand_tensors_stay_readable(made):
    state = {f"enc.{i // 100}.block{i % 100}.w": made.zeros(4) for i in range(50_000)}
    state |= {
        f"odd{chr(97 + i % 26)}{i}x{i * 7919 % 1013}": made.zeros(i % 97 + 1) for i in range(50_000)
    }
    checkpoint = made.checkpoint(state)
    lines = tree_of(checkpoint)
    assert len(lines) <= LINES + 2
    assert "more lines: use --depth, --filter or --all" in lines[-1]
    assert any("enc.[0-499].block[0-99].w" in line and "50,000 × [4]" in line for line in lines)


def test_depth(made):
    checkpoint = made.checkpoint({"a": {"b": {"c": {"d": made.zeros(1)}}, "x": 1}, "y": 2})
    assert len(tree_of(checkpoint, depth=1)) == 3
    assert len(tree_of(checkpoint, depth=2)) == 5
    assert len(tree_of(checkpoint)) == 7


def test_filter(made):
    tree = {"model": {"a.w": made.zeros(2), "b.w": made.zeros(2)}, "opt": {"lr": 0.5}}
    checkpoint = made.checkpoint(tree)
    lines = [plain(line) for line in show_table(checkpoint, "*.w")]
    assert lines[0] == "made.pt  2 tensors of 2 match *.w · 16 B"
    assert [line.split()[0] for line in lines[1:]] == ["model.a.w", "model.b.w"]
    assert [plain(line) for line in show_table(checkpoint, "opt")][1:] == ["opt.lr = 0.5"]
    assert make_matcher("model.a")("model.a.w")
    assert not make_matcher("model.a")("model.ab")


def test_json_has_everything(made):
    weight = made.tensor(np.arange(4, dtype=np.float32))
    tree = {
        "a": weight,
        "b": weight,
        "nan": float("nan"),
        "l": [1, 2],
        "s": "\ud800\x1b",
        "o": Opaque(Global("m", "C"), (1,)),
    }
    checkpoint = made.checkpoint(
        tree, foreign=(Foreign(Global("m", "C"), ("call",), 7, "data.pkl", ("o",)),)
    )
    parsed = json.loads(json.dumps(document(checkpoint), allow_nan=False))
    assert parsed["schema"] == 1
    assert [t["name"] for t in parsed["tensors"]] == ["a", "b"]
    assert parsed["tensors"][1]["same_as"] == "a"
    assert parsed["tensors"][0]["chunks"][0]["storage_nbytes"] == 16
    assert parsed["aliases"][0]["names"] == ["a", "b"]
    values = {v["name"]: v for v in parsed["values"]}
    assert values["nan"] == {"name": "nan", "type": "float", "text": "nan"}
    assert values["l"]["value"] == [1, 2]
    assert values["s"]["value"] == "\ud800\x1b"
    assert values["o"] == {"name": "o", "type": "object", "text": "m.C(1)"}
    assert parsed["foreign"] == [
        {
            "module": "m",
            "name": "C",
            "uses": ["call"],
            "stream": "data.pkl",
            "offset": 7,
            "paths": ["o"],
        }
    ]


@pytest.mark.parametrize(
    ("digits", "text"),
    [
        (["3", "1"], "3,1"),
        (["9", "10", "11"], "9-11"),
        (["09", "10"], "09-10"),
        (["0", "1", "3"], "0-1,3"),
    ],
)
def test_ranges(digits, text):
    assert ranges(digits) == text
