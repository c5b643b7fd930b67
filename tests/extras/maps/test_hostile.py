"""Files of families that mean harm, and checkpoints with names that do: `BadMap`, soon, and nothing is run."""

from __future__ import annotations

import ast
import sys
import time
import tomllib
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast
from holdfast.cli.main import main
from holdfast.errors import BadMap, DoesNotFit, HoldfastError
from holdfast.extras.maps.family import MOST_NBYTES, read_family
from holdfast.extras.maps.find import Map
from holdfast.extras.maps.parts import LARGEST, LONGEST, LayoutPart, NamePattern, evaluate
from tests.sampling import examples

GOOD = """
about = "for tests"
model_types = ["x"]
[sizes]
layer = ["config.layers", "2"]
half = ["2"]
[layouts.a]
drop = ["junk.{layer}"]
states = "opt.{state}.{name}"
format = "safetensors"
[layouts.b]
states = "{name}|{state}"
[layouts.c]
from = "b"
replace = {"all." = "each.{layer}."}
[[array]]
id = "w"
range = {layer = "0:"}
a = ["w.{layer}.x : (half[0] pair) hidden", "w.{layer}.y : (half[1] pair) hidden"]
b = "all.w : layer (pair half) hidden"
[[array]]
id = "v"
optional = true
a = "v : hidden"
b = "all.v : hidden"
[[array]]
id = "twin"
tied = "v"
copies = ["b"]
a = "twin : hidden"
b = "all.twin : hidden"
"""

PLAIN = """
[layouts.a]
[layouts.b]
[[array]]
id = "w"
"""


def read(text: str | bytes) -> object:
    return read_family("test", text.encode() if isinstance(text, str) else text)


def checkpoint(*names: str, shape: tuple[int, ...] = (2,)) -> holdfast.Checkpoint:
    return holdfast.open(
        holdfast.to_bytes({name: np.zeros(shape, "<i4") for name in names}, format="safetensors")
    )


def test_the_good_one_is_good():
    family = read(GOOD)
    state = {"w.0.x": 1, "w.0.y": 2, "w.1.x": 3, "w.1.y": 4, "junk.7": 5}
    tensors = {name: np.full((3, 4), value, "<i4") for name, value in state.items()}
    tensors |= {
        f"opt.exp_avg.{name}": values + 10 for name, values in tensors.items() if name != "junk.7"
    }
    source = holdfast.open(holdfast.to_bytes(tensors, format="safetensors"))
    seen = Map(family, "a", "b").through(source)
    assert {name: tensor.shape for name, tensor in seen.items()} == {
        "all.w": (2, 6, 4),
        "all.w|exp_avg": (2, 6, 4),
    }
    assert seen["all.w"].numpy()[:, :, 0].tolist() == [[1, 2] * 3, [3, 4] * 3]
    assert seen["all.w|exp_avg"].numpy()[:, :, 0].tolist() == [[11, 12] * 3, [13, 14] * 3]
    back = Map(family, "a", "c").compose(Map(family, "c", "a")).through(source)
    assert {name: tensor.numpy().tolist() for name, tensor in back.items()} == {
        name: values.tolist() for name, values in tensors.items() if name != "junk.7"
    }


BAD = {
    "empty": "",
    "no layouts": '[[array]]\nid = "w"',
    "no arrays": "[layouts.a]",
    "binary": bytes(range(256)),
    "not utf-8": b'about = "\xff"',
    "deep lists": "about = " + "[" * 100_000,
    "deep tables": "about = " + "{a=" * 50_000,
    "dots": "a." * 50_000 + "b = 1",
    "dotted header": "[" + "a." * 50_000 + "b]",
    "large": "#" * (MOST_NBYTES + 1),
    "a long number": "about = " + "9" * 5000,
    "a date": "about = 2020-01-01",
    "another key": GOOD + 'exec = "x"\n',
    "another key at the top": "import = 'os'\n" + GOOD,
    "another key of a layout": GOOD.replace('format = "safetensors"', 'code = "x"'),
    "arrays": PLAIN + "".join(f'[[array]]\nid = "x{i}"\n' for i in range(401)),
    "parts": PLAIN + "a = [" + ",".join(f'"x.p{i} : n"' for i in range(65)) + "]",
    "layouts": "".join(f"[layouts.l{i}]\n" for i in range(17)) + '[[array]]\nid = "w"',
    "sizes": PLAIN + "[sizes]\n" + "".join(f's{i} = "1"\n' for i in range(401)),
    "a long part": PLAIN + f'a = "{"x" * LONGEST} : n"',
    "a long size": PLAIN + f'[sizes]\nn = "{"1 + " * 100}1"',
    "from itself": GOOD.replace('from = "b"', 'from = "c"'),
    "from nowhere": GOOD.replace('from = "b"', 'from = "d"'),
    "from each other": GOOD.replace('states = "{name}|{state}"', 'from = "c"'),
    "name of a layout": GOOD.replace("[layouts.c]", '[layouts."../c"]'),
    "states without a name": GOOD.replace("opt.{state}.{name}", "opt.{state}"),
    "states with two": GOOD.replace("opt.{state}.{name}", "{state}.{name}.{name}"),
    "states side by side": GOOD.replace("opt.{state}.{name}", "{state}{name}"),
    "states with letters between": GOOD.replace("opt.{state}.{name}", "{state}_{name}"),
    "one id twice": GOOD.replace('id = "v"', 'id = "w"'),
    "tied to nothing": GOOD.replace('tied = "v"', 'tied = "x"'),
    "tied to another kind": GOOD.replace('tied = "v"', 'tied = "w"'),
    "an axis twice": PLAIN + 'a = "x : n n"',
    "an axis twice in a name": PLAIN + 'a = "x.{n}.y.{n} : m"',
    "an axis in name and dimension": PLAIN + 'a = "x.{n} : n"',
    "an axis twice by replacing": GOOD.replace("each.{layer}.", "{layer}.{layer}."),
    "an axis left in brackets": GOOD.replace("layer (pair half) hidden", "(layer pair half) hidden"),
    "many axes": PLAIN + 'a = "x : ' + " ".join(f"n{i}" for i in range(13)) + '"',
    "two parts of one name": PLAIN + 'a = ["x.{n} : m", "x.{k} : m"]',
    "open bracket": PLAIN + 'a = "x : (n m"',
    "closed bracket": PLAIN + 'a = "x : n) m"',
    "brackets in brackets": PLAIN + 'a = "x : ((n m))"',
    "open range": PLAIN + 'a = "x : n[1"',
    "empty range": PLAIN + 'a = "x : n[]"',
    "blank range": PLAIN + 'a = "x : (n[ : ])"',
    "three ends": PLAIN + 'a = "x : n[1:2:3]"',
    "a range of words": PLAIN + 'a = "x : (n[__import__(1):])"',
    "no colon": PLAIN + 'a = "x n"',
    "no name": PLAIN + 'a = " : n"',
    "an empty part": PLAIN + 'a = ""',
    "numbers side by side": PLAIN + 'a = "x{n}{m} : k"',
    "a number beside digits": PLAIN + 'a = "x{n}1 : k"',
    "a number that is none": PLAIN + 'a = "x{N} : k"',
    "an empty number": PLAIN + 'a = "x{} : k"',
    "a format in a number": PLAIN + 'a = "x{n.__class__} : k"',
    "a sharp": PLAIN + 'a = "x# : k"',
    "unicode axes": PLAIN + 'a = "x : ñ"',
    "capital axes": PLAIN + 'a = "x : N"',
    "a size that is none": PLAIN + '[sizes]\nn = "m +"',
    "a size with brackets": PLAIN + '[sizes]\nn = "(1 + 2) * 3"',
    "a power": PLAIN + '[sizes]\nn = "9 ** 9"',
    "a call": PLAIN + '[sizes]\nn = "exit()"',
    "an empty size": PLAIN + '[sizes]\nn = ""',
    "a size of 13 digits": PLAIN + '[sizes]\nn = "1000000000000"',
    "a number as a size": PLAIN + "[sizes]\nn = 3",
    "a range that is none": GOOD.replace('"0:"', '"0"'),
    "a range of a number": GOOD.replace('"0:"', "7"),
    "a range of words again": GOOD.replace('"0:"', '"a b:"'),
    "replacing grows": GOOD.replace(
        'replace = {"all." = "each.{layer}."}', f"replace = {{a = '{'b' * 300}', b = '{'c' * 300}', c = '{'d' * 300}'}}"
    ),
    "replacing nothing": GOOD.replace('"all." = ', '"" = '),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_family(name: str):
    with pytest.raises(BadMap) as caught:
        read(BAD[name])
    assert caught.value.file == "test"
    assert len(str(caught.value)) < 2000


def test_refusing_costs_little():
    """Of every bad file above: less memory than a few times the largest file of a family."""
    tracemalloc.start()
    for content in BAD.values():
        with pytest.raises(BadMap):
            read(content)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200 * MOST_NBYTES


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 10**20) | st.floats() | st.text(max_size=12) | st.dates()
    | st.sampled_from(["w.{layer}", "x : n", "n[", "{", "a", "b", "1 / 0", "layer", "half - 3"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "b", "id", "from", "x"]), inner, max_size=3),
    max_leaves=4,
)  # fmt: skip


@settings(max_examples=examples(300))
@given(st.data())
def test_any_value_anywhere_is_taken_or_refused(data: st.DataObject):
    """One value of a good file, or one key of it, is another one."""
    import msgspec

    document = tomllib.loads(GOOD)
    places: list[tuple[dict[str, object] | list[object], object]] = []

    def walk(node: object) -> None:
        for key, inner in (
            node.items()
            if isinstance(node, dict)
            else enumerate(node)
            if isinstance(node, list)
            else ()
        ):
            places.append((node, key))
            walk(inner)

    walk(document)
    holder, key = data.draw(st.sampled_from(places))
    if isinstance(holder, dict) and data.draw(st.integers(0, 4)) == 0:
        holder[
            data.draw(st.text(max_size=5) | st.sampled_from(["a", "b", "c", "from", "replace"]))
        ] = holder.pop(key)
    else:
        holder[key] = data.draw(VALUES)
    try:
        content = msgspec.toml.encode(document)
    except (TypeError, ValueError, ImportError, ModuleNotFoundError):
        return
    tensors = {name: np.zeros((3, 4), "<i4") for name in ("w.0.x", "w.0.y", "w.1.x", "w.1.y")}
    source = holdfast.open(holdfast.to_bytes(tensors, format="safetensors"))
    for target in ("b", "c"):
        try:
            seen = Map(read(content), "a", target).through(source)
            {name: tensor.numpy() for name, tensor in seen.items()}
        except (BadMap, DoesNotFit):
            pass


@pytest.mark.parametrize("text", [
    "[sizes]\nn = 'q'\nq = 'n'", "[sizes]\nn = 'n + 1'", "[sizes]\nn = '4 / zero'\nzero = '0'", "[sizes]\nn = '3 - 5'",
    "[sizes]\nn = '999999999999 * 999999999999'", "[sizes]\nn = '999999999999'", "[sizes]\nn = '3 / 2'",
])  # fmt: skip
def test_sizes_that_lead_nowhere(text: str):
    family = read(PLAIN + "a = 'x.{k} : m'\nb = 'y.{n} : m k'\n" + text)
    with pytest.raises((BadMap, DoesNotFit)):
        Map(family, "a", "b", {"m": 2}).through(checkpoint("x.0", "x.1"))


def test_products_of_products_end():
    """Each size is the product of 75 of the one before: the ninth would have more digits than there are atoms."""
    lines = ["s0 = '999999999999'"] + [
        f"s{i} = '{' * '.join([f's{i - 1}'] * 60)}'" for i in range(1, 10)
    ]
    family = read(PLAIN + "a = 'x : s9'\nb = 'y : s9'\n[sizes]\n" + "\n".join(lines))
    with pytest.raises(BadMap, match="more than any size"):
        Map(family, "a", "b").through(checkpoint("x"))


@pytest.mark.parametrize("way", [("a", "b"), ("b", "a")])
def test_names_by_the_billion(way: tuple[str, str]):
    family = read(
        PLAIN + "a = 'x.{n}.y.{m} : k'\nb = 'z : k'\n[sizes]\nn = '999999999'\nm = '999999999'"
    )
    with pytest.raises(DoesNotFit, match="tensors, which no checkpoint has"):
        Map(family, *way).through(checkpoint("x.0.y.0" if way[0] == "a" else "z"))


def test_parts_by_the_thousand_end():
    """As many arrays and parts as there may be, each with as many tensors as there may be: not one of them is there."""
    arrays = ""
    for i in range(300):
        parts = ", ".join(f"'x.{{n}}.p{i}q{k} : (k[{k}] j)'" for k in range(16))
        arrays += f"[[array]]\nid = 'w{i}'\na = [{parts}]\nb = 'y{i} : j'\n"
    family = read("[sizes]\nn = '4000'\nk = '16'\n[layouts.a]\n[layouts.b]\n" + arrays)
    with pytest.raises(DoesNotFit) as caught:
        Map(family, "a", "b", {"j": 1}).through(checkpoint("x.0.p0q0", shape=(1,)))
    assert len(caught.value.missing) < 400_000


def growth(run: Callable[[int], object], n: int) -> float:
    """How many times longer four times as much takes, at best of a few rounds."""

    def once(size: int) -> float:
        start = time.process_time()
        run(size)
        return time.process_time() - start

    return min(once(4 * n) for _ in range(4)) / min(once(n) for _ in range(4))


@pytest.mark.parametrize(
    "states",
    [
        "opt.{state}.{name}",
        "{name}a.{state}",
        "{name}.a{state}",
        "a{state}aa.aa{name}",
        "{name}.{state}a",
    ],
)
def test_long_names_and_states(states: str):
    family = read(
        "[layouts.a]\nstates = '"
        + states
        + "'\n[layouts.b]\n[[array]]\nid = 'w'\na = 'x : n'\nb = 'y : n'"
    )
    layout = family.layout("a")
    for text in ("a", "a.", ".a", "aa.aa", "1"):
        names = lambda n, text=text: [text * (n // len(text)) + "!" for _ in range(3)]  # noqa: E731
        assert (
            growth(lambda n, names=names: [layout.state_of(name) for name in names(n)], 50_000) < 12
        ), text
    assert layout.state_of(layout.name_of("exp_avg", "x.y")) == ("exp_avg", "x.y")


def test_long_names_in_a_checkpoint():
    family = read(PLAIN + "a = 'x.{n} : k'\nb = 'y : n k'")
    for bad in (
        "x." + "9" * 100_000,
        "x." + "1." * 50_000,
        "x.\n1",
        "x.\x1b[31m1",
        "x.١",
        "x.²",
        "x.-1",
        "x.1 ",
        "",
    ):
        with pytest.raises(DoesNotFit) as caught:
            Map(family, "a", "b").through(checkpoint("x.0", "x.1", bad))
        assert bad in (*caught.value.unexpected, *caught.value.mismatched)


def test_drops_with_long_numbers_are_no_drops():
    family = read(
        PLAIN.replace("[layouts.a]", "[layouts.a]\ndrop = ['junk.{n}.x']")
        + "a = 'x : k'\nb = 'y : k'"
    )
    assert [*Map(family, "a", "b").through(checkpoint("x", "junk.123.x"))] == ["y"]
    with pytest.raises(DoesNotFit) as caught:
        Map(family, "a", "b").through(checkpoint("x", f"junk.{'7' * 5000}.x"))
    assert len(caught.value.unexpected) == 1


@pytest.mark.parametrize(
    "text", ["{" * 300, "[" * 299, "x : " + "a[" * 100, "x : " + "(" * 200, "x : " + "(a" * 99]
)
def test_patterns_that_may_go_back_and_forth(text: str):
    start = time.process_time()
    with pytest.raises(BadMap):
        LayoutPart.read(text)
    assert time.process_time() - start < 1000 * loops()


def loops() -> float:
    start = time.process_time()
    for _ in range(1000):
        NamePattern.read("a")
    return (time.process_time() - start) / 1000


def test_no_control_character_reaches_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    family = tmp_path / "my\x1b[31m.toml"
    family.write_text(
        '[layouts.a]\n[layouts.b]\n[[array]]\nid = "w"\na = "x : n"\nb = "y\\u001b[31m : n"\n'
    )
    holdfast.save({"x": np.zeros(2)}, tmp_path / "m.safetensors")
    holdfast.save({"x": np.zeros(2), "z\x1b[31m\n": np.zeros(2)}, tmp_path / "n.safetensors")
    name = f"{family}:a->b"
    runs = [
        ["maps", "check", name, str(tmp_path / "m.safetensors")],
        ["maps", "check", name, str(tmp_path / "n.safetensors")],
    ]
    runs += [
        [*runs[0], more]
        for more in ("--all", "--json", "--explain=y\x1b[31m", "--explain=x\x1b[31m")
    ]
    runs += [["maps", "check", f"{family}:a->b\x1b", str(tmp_path / "m.safetensors")]]
    for run in runs:
        assert main(run) in (0, 2)
        captured = capsys.readouterr()
        assert captured.out or captured.err
        assert "\x1b" not in captured.out + captured.err, run


NAMES = {"a": 6, "b": 4, "config.x": 12, "zero": 0, "w.0": 3}


@st.composite
def expressions(draw: st.DrawFn) -> str:
    words = [draw(st.sampled_from([*NAMES]) | st.integers(0, 99).map(str))]
    for _ in range(draw(st.integers(0, 6))):
        words += [
            draw(st.sampled_from("+-*/")),
            draw(st.sampled_from([*NAMES]) | st.integers(0, 99).map(str)),
        ]
    return draw(st.sampled_from([" ", "", "  "])).join(words)


@settings(max_examples=examples(400))
@given(expressions())
def test_expressions_are_what_python_makes_of_them(text: str):
    """Python's own syntax tree, evaluated by hand: division must come out even."""
    tree = ast.parse(text.replace("config.x", "config_x").replace("w.0", "w_0"), mode="eval")
    names = {name.replace(".", "_"): value for name, value in NAMES.items()}

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.Constant):
            return int(node.value)
        if isinstance(node, ast.Name):
            return names[node.id]
        assert isinstance(node, ast.BinOp)
        left, right = value(node.left), value(node.right)
        if isinstance(node.op, ast.Div):
            quotient, rest = divmod(left, right)
            if rest:
                raise ZeroDivisionError
            return quotient
        return (
            left + right
            if isinstance(node.op, ast.Add)
            else left - right
            if isinstance(node.op, ast.Sub)
            else left * right
        )

    try:
        expected = value(tree.body)
    except ZeroDivisionError:
        with pytest.raises(BadMap):
            evaluate(text, NAMES.get)
        return
    if abs(expected) < LARGEST // 10**6:
        assert evaluate(text, NAMES.get) == expected
    assert evaluate(f"{text} + unknown", NAMES.get) is None


def test_nothing_is_imported_or_opened():
    seen: list[str] = []
    on = [True]

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if on[0] and event in (
            "exec",
            "compile",
            "import",
            "open",
            "subprocess.Popen",
            "os.system",
        ):
            seen.append(event)

    evil = GOOD.replace('"config.layers"', '"config.__class__"').replace(
        "opt.{state}", "{state}.__import__"
    )
    read(GOOD)
    sys.addaudithook(hook)
    try:
        read(GOOD)
        read(evil)
        for content in (
            "a call",
            "a power",
            "a range of words",
            "a format in a number",
            "another key",
        ):
            with pytest.raises(HoldfastError):
                read(BAD[content])
    finally:
        on[0] = False
    assert seen == []
