"""Code that comes with a model: `trust_remote_code=True` would run it, so a folder with it is not clean."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast.cli.main import main

AUTO_MAP = {"auto_map": {"AutoConfig": "configuration_x.XConfig", "AutoModel": "modeling_x.XModel"}}


def model(path: Path, **files: object) -> Path:
    """Clean weights, and these files beside them; `__` in a name is a dot."""
    path.mkdir(parents=True)
    holdfast.save({"w": np.ones(3)}, path / "model.safetensors")
    for name, content in files.items():
        (path / name.replace("__", ".")).write_text(
            content if isinstance(content, str) else json.dumps(content)
        )
    return path


def found(path: Path) -> dict[str, list[tuple[str, str]]]:
    """What is said of each file, by its name."""
    report = holdfast.scan(path)
    return {
        file.path.rpartition("/")[2]: [(f.what, f.reason) for f in file.findings]
        for file in report.reports
        if any(f.severity == "suspicious" for f in file.findings)
    }


def test_a_clean_model_stays_clean(tmp_path: Path):
    path = model(
        tmp_path / "m",
        config__json={"model_type": "llama"},
        tokenizer_config__json={},
        chat_template__jinja="{{ x }}",
    )
    assert holdfast.scan(path).verdict() == "clean"


def test_what_auto_map_names_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = model(tmp_path / "m", config__json=AUTO_MAP, modeling_x__py="import os", helper__py="")
    said = found(path)
    assert sorted(said) == ["config.json", "helper.py", "modeling_x.py"]
    assert [what for what, _ in said["config.json"]] == [
        "configuration_x.XConfig",
        "modeling_x.XModel",
    ]
    assert all("trust_remote_code=True" in reason for lines in said.values() for _, reason in lines)
    assert "a config beside it names it" in said["modeling_x.py"][0][1]
    assert "may import it" in said["helper.py"][0][1]
    assert holdfast.scan(path).verdict() == "suspicious"
    assert main(["scan", str(path)]) == 1
    printed = capsys.readouterr().out
    assert "modeling_x.XModel" in printed
    assert "trust_remote_code=True" in printed
    assert "skipped" not in printed


@pytest.mark.parametrize(
    ("name", "document", "what"),
    [
        (
            "config.json",
            {"auto_map": {"AutoModel": "someone/code--modeling_y.YModel"}},
            "someone/code--modeling_y.YModel",
        ),
        (
            "tokenizer_config.json",
            {"auto_map": ["tokenization_x.XTokenizer", None]},
            "tokenization_x.XTokenizer",
        ),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["t.X", "t.XFast"]}}, "t.XFast"),
        ("preprocessor_config.json", {"auto_map": {"AutoImageProcessor": {"pil": "i.P"}}}, "i.P"),
        (
            "processor_config.json",
            {"image_processor": {"auto_map": {"AutoImageProcessor": "i.P"}}},
            "i.P",
        ),
        (
            "config.json",
            {"custom_pipelines": {"task": {"impl": "pipe.Pipe", "pt": ["AutoModel"]}}},
            "pipe.Pipe",
        ),
        ("model_index.json", {"_class_name": ["pipeline_x", "XPipeline"]}, "pipeline_x.XPipeline"),
        ("modules.json", [{"idx": 0, "type": "custom_st.Transformer"}], "custom_st.Transformer"),
    ],
)
def test_every_place_that_names_code(name: str, document: object, what: str, tmp_path: Path):
    path = model(tmp_path / "m")
    (path / name).write_text(json.dumps(document))
    assert what in [one for one, _ in found(path)[name]]
    assert [f.what for f in holdfast.scan(path / name).reports[0].findings][-1:] == [what]


def test_code_of_another_repository_is_fetched(tmp_path: Path):
    path = model(tmp_path / "m", config__json={"auto_map": {"AutoModel": "a/b--c.D"}})
    assert "fetch" in found(path)["config.json"][0][1]


def test_ordinary_names_are_no_code(tmp_path: Path):
    path = model(
        tmp_path / "m",
        model_index__json={
            "_class_name": "StableDiffusionPipeline",
            "unet": ["diffusers", "UNet2DConditionModel"],
        },
        modules__json=[{"type": "sentence_transformers.models.Transformer"}],
        adapter_config__json={"auto_mapping": None},
    )
    assert holdfast.scan(path).verdict() == "clean"


def test_a_key_that_comes_twice_counts_both_times(tmp_path: Path):
    twice = '{"auto_map": {"AutoModel": "evil.Evil"}, "auto_map": {}}'
    escaped = '{"auto\\u005fmap": {"AutoModel": "evil.Evil"}}'
    for name, text in (("m", twice), ("n", escaped)):
        assert [
            what for what, _ in found(model(tmp_path / name, config__json=text))["config.json"]
        ] == ["evil.Evil"]


def test_code_without_a_word_in_a_config(tmp_path: Path):
    path = model(tmp_path / "m", config__json={}, pipeline__py="")
    assert "no config here names it" in found(path)["pipeline.py"][0][1]


def test_code_that_is_a_pickle_as_well_stays_code(tmp_path: Path):
    path = model(tmp_path / "m", config__json=AUTO_MAP, modeling_x__py="N.")
    (report,) = [file for file in holdfast.scan(path).reports if file.path.endswith(".py")]
    assert report.format == "pickle"
    assert [finding.what for finding in report.findings] == ["Python code beside weights"]


def test_generate_in_its_folder(tmp_path: Path):
    path = model(tmp_path / "m", config__json={})
    (path / "custom_generate").mkdir()
    (path / "custom_generate" / "generate.py").write_text("")
    assert "generate.py" in found(path)["generate.py"][0][1]


def test_a_pipeline_whose_weights_lie_below(tmp_path: Path):
    model(tmp_path / "m" / "unet", config__json={})
    (tmp_path / "m" / "model_index.json").write_text('{"_class_name": "X"}')
    (tmp_path / "m" / "pipeline.py").write_text("")
    assert list(found(tmp_path / "m")) == ["pipeline.py"]


def test_code_without_weights_is_none_of_ours(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "train.py").write_text("")
    report = holdfast.scan(tmp_path)
    assert (report.verdict(), report.skipped) == ("nothing scanned", 2)


@pytest.mark.parametrize("format", ["native", "dcp"])
def test_in_a_folder_that_is_one_checkpoint(format: str, tmp_path: Path):
    if format == "dcp":
        dcp = pytest.importorskip("torch.distributed.checkpoint")
        torch = pytest.importorskip("torch")
        from tests.support import ALONE

        dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "m", **ALONE)
    else:
        holdfast.save({"w": np.ones(3)}, tmp_path / "m")
    (tmp_path / "m" / "modeling_x.py").write_text("")
    assert list(found(tmp_path / "m")) == ["modeling_x.py"]
    (tmp_path / "m" / "config.json").write_text(json.dumps(AUTO_MAP))
    named = [what for lines in found(tmp_path / "m").values() for what, _ in lines]
    assert {"configuration_x.XConfig", "modeling_x.XModel", "Python code beside weights"} == set(
        named
    )


@pytest.mark.parametrize(
    "content",
    ["", "{", "[" * 100_000, '{"auto_map": 5, "custom_pipelines": [null]}', "\x00" * 9, "NaN"],
)
def test_an_odd_config_breaks_nothing(content: str, tmp_path: Path):
    assert holdfast.scan(model(tmp_path / "m", config__json=content)).verdict() in (
        "clean",
        "error",
    )


def test_a_config_that_is_too_long_is_not_clean(tmp_path: Path):
    path = model(tmp_path / "m", config__json=" " * (17 << 20))
    assert holdfast.scan(path).verdict() == "error"
