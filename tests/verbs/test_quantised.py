"""Numbers of quantised GGUF files: shapes and parameters of the header, values of the decoded blocks."""

from __future__ import annotations

import json

import numpy as np
import pytest

import holdfast
from holdfast.cli.main import main
from tests.conftest import GOLDEN
from tests.extras.reports.pages import names_of
from tests.formats.gguf.craft_gguf import gguf, info, q8_0, q8_0_file

TINY = GOLDEN / "files" / "tiny.gguf"


@pytest.fixture
def arrays():
    numbers = np.random.default_rng(0)
    model = {f"blk.{n}.w": numbers.standard_normal((48, 64)).astype("f4") for n in range(3)}
    return {**model, "norm": np.arange(5, dtype="f4")}


@pytest.fixture
def quantised(tmp_path, arrays):
    return q8_0_file(tmp_path / "model.gguf", arrays)


@pytest.fixture
def decoded(tmp_path, quantised):
    """The same numbers as a file of 32-bit floats."""
    path = tmp_path / "decoded.safetensors"
    holdfast.convert(quantised, path, dequantize=True, durable=False)
    return path


def test_stats_are_those_of_the_decoded_numbers(quantised, decoded):
    rows = {row.name: row for row in holdfast.stats(quantised, bins=8)}
    for expected in holdfast.stats(decoded, bins=8):
        row = rows[expected.name]
        assert row.shape == expected.shape
        assert (row.minimum, row.maximum, row.zeros) == (
            expected.minimum,
            expected.maximum,
            expected.zeros,
        )
        assert (row.mean, row.norm, row.histogram) == (
            expected.mean,
            expected.norm,
            expected.histogram,
        )
    assert (rows["blk.0.w"].dtype, rows["norm"].dtype) == ("Q8_0", "float32")
    assert rows["blk.0.w"].shape == (48, 64)


def test_sparsity_is_that_of_the_decoded_numbers(tmp_path):
    sparse = np.ones((64, 64), "f4")
    sparse[3:5] = 0
    path = q8_0_file(tmp_path / "model.gguf", {"w": sparse})
    (row,) = holdfast.sparsity(path)
    assert (row.dtype, row.shape, row.zeros, row.dead_rows) == ("Q8_0", (64, 64), 128, 2)


@pytest.mark.parametrize("scale", [np.nan, np.inf])
def test_a_broken_scale_is_found_at_the_element_of_its_block(scale, tmp_path, capsys):
    blocks = bytearray(q8_0(np.ones((4, 64), "f4")))
    # The second block of the third row.
    blocks[5 * 34 : 5 * 34 + 2] = np.array(scale, "<f2").tobytes()
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf([info("w", [64, 4], 8)], bytes(blocks) + bytes(-len(blocks) % 32)))

    (row,) = holdfast.stats(path)
    assert (row.nans + row.infinities, row.first_nan or row.first_infinity) == (32, (2, 32))
    assert main(["stats", str(path), "--fail-on", "nan", "--fail-on", "inf"]) == 1
    assert "in 1 tensor, first `w` at [2, 32]" in capsys.readouterr().out


def test_blocks_that_cannot_be_decoded_have_no_numbers_and_a_note(capsys):
    report = holdfast.stats(TINY)
    assert "blk.1.IQ2_XXS" not in [row.name for row in report]
    assert any("IQ2_XXS blocks cannot be decoded" in note for note in report.notes)
    assert not any("dequantize" in note for note in report.notes)
    assert main(["stats", str(TINY), "--bins", "0"]) == 0
    assert "IQ2_XXS blocks cannot be decoded" in capsys.readouterr().out
    assert main(["stats", str(TINY), "--json"]) == 0
    assert "IQ2_XXS" in json.loads(capsys.readouterr().out)["notes"][0]


def test_show_counts_the_parameters_of_the_header(quantised, arrays, capsys):
    size = sum(array.size for array in arrays.values())
    assert main(["show", str(quantised)]) == 0
    out = capsys.readouterr().out
    assert f"{size:,} parameters" in out
    assert "Q8_0" in out
    assert "[48, 64]" in out
    assert "[48, 68]" not in out


@pytest.mark.parametrize("stats", [False, True])
def test_the_page_has_the_parameters_and_shapes_of_the_header(stats, quantised, decoded, arrays):
    document = holdfast.report(quantised, stats=stats).document
    size = sum(array.size for array in arrays.values())
    assert ["parameters", f"{size:,}"] in document["facts"]
    assert [48, 64] in document["tensors"]["shape"]["labels"]
    assert "Q8_0" in document["tensors"]["dtype"]["labels"]
    if stats:
        expected = holdfast.report(decoded, stats=True).document
        order = [names_of(expected).index(name) for name in names_of(document)]
        for own, other in zip(document["measures"], expected["measures"], strict=True):
            assert own["values"] == [other["values"][row] for row in order], own["key"]
        quantiles = document["details"]["quantiles"]
        assert quantiles == [expected["details"]["quantiles"][row] for row in order]


def test_singular_values_are_those_of_the_decoded_numbers(quantised, decoded):
    documents = [holdfast.report(path, svd=True).document for path in (quantised, decoded)]
    found = [
        dict(zip(names_of(document), document["details"]["singular"], strict=True))
        for document in documents
    ]
    assert found[0] == found[1]
    assert found[0]["blk.0.w"] is not None


def test_diff_compares_blocks_with_numbers(quantised, decoded):
    found = holdfast.diff(quantised, decoded)
    assert [change.name for change in found.changed] == ["blk.0.w", "blk.1.w", "blk.2.w"]
    for change in found.changed:
        assert change.dtypes == ("Q8_0", "float32")
        assert change.shapes == ((48, 64), (48, 64))
        assert change.content.changed == 0
    assert found.same == 1


def test_diff_of_two_quantised_files_counts_numbers(quantised, arrays, tmp_path, capsys):
    arrays["blk.1.w"][5] *= 3
    other = q8_0_file(tmp_path / "other.gguf", arrays)
    seen: list[int] = []
    found = holdfast.diff(quantised, other, progress=seen.append)

    (change,) = found.changed
    assert (change.name, change.dtypes, change.shapes[0]) == ("blk.1.w", ("Q8_0", "Q8_0"), (48, 64))
    assert change.content.changed <= 64
    assert change.content.total == 48 * 64
    before, after = holdfast.open(quantised)["blk.1.w"], holdfast.open(other)["blk.1.w"]
    a, b = holdfast.dequantize(before).numpy(), holdfast.dequantize(after).numpy()
    assert change.content.relative == pytest.approx(np.linalg.norm(a - b) / np.linalg.norm(a))
    assert sum(seen) == pytest.approx(quantised.stat().st_size * 2, rel=0.1)

    assert main(["diff", str(quantised), str(other)]) == 1
    assert "[48, 64]" in capsys.readouterr().out


def test_diff_does_not_take_blocks_of_another_type_for_the_same(tmp_path):
    # Blocks of Q4_0 and of IQ4_NL are 18 bytes each, and the same bytes are other numbers.
    content = np.random.default_rng(0).integers(0, 255, (8, 18), np.uint8)
    content[:, :2] = np.array([1], "<f2").view(np.uint8)
    data = content.tobytes() + bytes(-content.size % 32)
    paths = []
    for name, kind in (("q4_0", 2), ("iq4_nl", 20)):
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(gguf([info("w", [32, 8], kind)], data))
        paths.append(path)
    (change,) = holdfast.diff(*paths).changed
    assert change.dtypes == ("Q4_0", "IQ4_NL")
    assert change.content.changed > 0


def test_diff_of_blocks_that_cannot_be_decoded_has_no_numbers(tmp_path, capsys):
    paths = []
    for name, byte in (("a", 1), ("b", 2)):
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(gguf([info("w", [32, 8], 9)], bytes([byte]) * 320))
        paths.append(path)
    (change,) = holdfast.diff(*paths).changed
    assert (change.dtypes, change.shapes[0], change.content) == (("Q8_1", "Q8_1"), (8, 32), None)
    assert holdfast.diff(paths[0], paths[0]).equal
    assert main(["diff", *map(str, paths)]) == 1
    assert "blocks that cannot be decoded" in capsys.readouterr().out


def test_a_native_directory_of_blocks_is_measured_as_its_gguf_file(quantised, tmp_path):
    holdfast.convert(quantised, tmp_path / "native", format="native", durable=False)
    rows = {row.name: (row.dtype, row.shape, row.norm) for row in holdfast.stats(quantised)}
    assert rows["blk.0.w"][:2] == ("Q8_0", (48, 64))
    found = {
        row.name: (row.dtype, row.shape, row.norm) for row in holdfast.stats(tmp_path / "native")
    }
    assert found == rows
    assert holdfast.diff(quantised, tmp_path / "native").equal


def test_the_advice_to_dequantize_goes_when_it_was_taken(quantised, tmp_path, capsys):
    words = ["convert", str(quantised)]
    assert main([*words, str(tmp_path / "a.safetensors")]) == 0
    assert "convert with --dequantize" in capsys.readouterr().out
    assert main([*words, str(tmp_path / "b.safetensors"), "--dequantize"]) == 0
    assert "quantised blocks" not in capsys.readouterr().out
    done = holdfast.convert(
        quantised, tmp_path / "c.safetensors", dequantize=True, dry_run=True, durable=False
    )
    assert not any("dequantize" in note for note in done.notes)
