"""Code that comes with a model: `trust_remote_code=True` would run it, so a folder with it is not clean."""

from __future__ import annotations

import hashlib
import json
import zlib
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast.cli.main import main
from holdfast.errors import BadArgument
from tests.hostile.scan_attacks import packed_zip

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


def found(path: Path, *, code: bool = False) -> dict[str, list[tuple[str, str]]]:
    """What is said of each file, by its name."""
    report = holdfast.scan(path, code=code)
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


def test_code_that_no_config_names_is_a_finding_only_if_all_code_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = model(tmp_path / "m", config__json={}, train__py="")
    report = holdfast.scan(path)
    assert (report.verdict(), str(path / "train.py") in report.skipped_paths) == ("clean", True)
    assert main(["scan", str(path)]) == 0
    assert "no config here names it" in found(path, code=True)["train.py"][0][1]
    assert main(["scan", str(path), "--code"]) == 1
    assert "train.py" in capsys.readouterr().out


def sha256_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_code_is_allowed_by_path_and_sha256(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = model(tmp_path / "m", config__json=AUTO_MAP, modeling_x__py="a = 1", helper__py="b = 2")
    (path / "configuration_x.py").write_text("c = 3")
    entries = [
        f"m/{name}  sha256:{sha256_of(path / name).upper()}  # read on Monday"
        for name in ("modeling_x.py", "helper.py", "configuration_x.py")
    ]
    report = holdfast.scan(path, allow=entries)
    assert report.verdict() == "clean"
    # Both names in the config, and the three files.
    assert report.count("suspicious", allowed=True) == 5
    (tmp_path / "allow.txt").write_text("\n".join(entries))
    assert main(["scan", str(path), "--allow", str(tmp_path / "allow.txt")]) == 0
    assert "suspicious allowed" in capsys.readouterr().out

    (path / "helper.py").write_text("b = 3")
    report = holdfast.scan(path, allow=entries)
    counted = [f.stream for file in report.reports for f in file.findings if not f.allowed]
    assert (report.verdict(), counted) == ("suspicious", ["helper.py"])


def test_a_config_is_not_allowed_by_the_code_of_another_file(tmp_path: Path):
    path = model(tmp_path / "m", config__json=AUTO_MAP, modeling_x__py="a = 1")
    other = model(tmp_path / "other", modeling_x__py="a = 1")
    digest = sha256_of(other / "modeling_x.py")
    for entry in (f"other/modeling_x.py sha256:{digest}", f"x.py sha256:{digest}"):
        assert holdfast.scan(path, allow=[entry]).count("suspicious", allowed=True) == 0
    # Nobody has read configuration_x.py, which is not there.
    report = holdfast.scan(path, allow=[f"modeling_x.py sha256:{digest}"])
    counted = [f.what for file in report.reports for f in file.findings if not f.allowed]
    assert counted == ["configuration_x.XConfig"]


def test_any_file_is_allowed_by_path_and_sha256(tmp_path: Path):
    path = model(tmp_path / "m", config__json={"auto_map": {"AutoModel": "a/b--c.D"}})
    entry = f"config.json sha256:{sha256_of(path / 'config.json')}"
    assert holdfast.scan(path, allow=[entry]).verdict() == "clean"
    (path / "config.json").write_text((path / "config.json").read_text() + " ")
    assert holdfast.scan(path, allow=[entry]).verdict() == "suspicious"


@pytest.mark.parametrize("entry", ["x.py sha256:", "x.py sha256:abc", f"sha256:{'0' * 64}"])
def test_an_entry_without_a_whole_path_and_sha256_is_refused(entry: str, tmp_path: Path):
    with pytest.raises(BadArgument, match="64 hexadecimal digits"):
        holdfast.scan(tmp_path, allow=[entry])


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
    assert found(tmp_path / "m") == {}
    assert list(found(tmp_path / "m", code=True)) == ["pipeline.py"]
    (tmp_path / "m" / "model_index.json").write_text('{"_class_name": ["pipeline", "X"]}')
    assert list(found(tmp_path / "m")) == ["model_index.json", "pipeline.py"]


def test_code_without_weights_is_none_of_ours(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "train.py").write_text("")
    report = holdfast.scan(tmp_path, code=True)
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
    assert found(tmp_path / "m") == {}
    assert list(found(tmp_path / "m", code=True)) == ["modeling_x.py"]
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


def test_a_project_with_a_training_script_and_a_checkpoint_is_clean(tmp_path: Path):
    model(tmp_path / "project", train__py="import os", config__json={"model_type": "x"})
    blob = b"blob 10\0" + packed_zip("m/data.pkl", b"\x80\x02}.")
    objects = tmp_path / "project" / ".git" / "objects"
    objects.mkdir(parents=True)
    (objects / "14d1").write_bytes(zlib.compress(blob))
    report = holdfast.scan(tmp_path / "project")
    assert report.verdict() == "clean"
    assert str(tmp_path / "project" / ".git") in report.skipped_paths
    # Who names the folder wants to know.
    assert holdfast.scan(objects).verdict() == "suspicious"
