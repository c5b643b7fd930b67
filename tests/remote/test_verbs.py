"""Every verb on URLs: what it does to files it does to objects, from Python and at the shell."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import numpy as np
import obstore
import pytest
from obstore.store import MemoryStore

import holdfast
from holdfast.cli.main import main
from holdfast.errors import Corrupted, HoldfastError, NotCommitted
from holdfast.stores.remote.client import get_bucket
from holdfast.stores.remote.url import parse_url
from tests.remote.servers import Proxy
from tests.verbs.test_missing import VERBS, check_missing

STATE = {
    "a.weight": np.arange(1 << 14, dtype=np.float32).reshape(128, 128),
    "b.weight": np.arange(1 << 14, dtype=np.float32).reshape(128, 128),
    "norm": np.ones(64, np.float32),
}


def same(url: str, state: dict[str, np.ndarray]) -> None:
    with holdfast.open(url) as checkpoint:
        assert sorted(checkpoint) == sorted(state)
        for name, array in state.items():
            np.testing.assert_array_equal(checkpoint[name].numpy(), array)


def names(url: str) -> list[str]:
    where = parse_url(url)
    prefix = f"{where.key}/"
    return [one.key.removeprefix(prefix) for one in get_bucket(where).list_objects(prefix, 10_000)]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A Hugging Face folder of two shards."""
    holdfast.save(STATE, tmp_path / "model", format="safetensors", max_shard_size="70KB")
    (tmp_path / "model" / "config.json").write_text('{"torch_dtype": "float32"}')
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    return tmp_path / "model"


@pytest.mark.parametrize("suffix", ["", ".pt", ".safetensors"])
def test_every_command(
    suffix: str, proxy: Proxy, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    local, place = str(tmp_path / "local.pt"), f"{url}/x{suffix}"
    holdfast.save(STATE, local)

    def run(*arguments: str, code: int = 0) -> str:
        found = main(list(arguments))
        told = capsys.readouterr()
        assert found == code, told.err
        return told.out + told.err

    run("convert", local, place)
    assert "a.weight" in run("show", place)
    assert "16129" in run("read", place, "a.weight", "--slice", "126, 1")
    run("read", place, "norm", "-o", str(tmp_path / "norm.npy"))
    assert "ok" in run("verify", place)
    assert "3 tensors the same" in run("diff", place, local)
    assert "clean" in run("scan", place)
    assert json.loads(run("scan", place, "--json"))["files"][0]["path"] == place
    assert place in run("scan", place, "--sarif")
    assert "norm" in run("stats", place)
    assert "norm" in run("show", place, "--sparsity")
    assert "3 tensors" in run("report", place, "-o", str(tmp_path / "page.html"), "--stats")
    assert "norm" in run("show", place, "--ranks")
    assert "write" in run("convert", place, f"{url}/never/", "--dry-run")
    run("edit", place, "--in-place", "--drop", "norm")
    run("tie", place, "--in-place")
    run("compact", place, "--in-place")
    without = {name: array for name, array in STATE.items() if name != "norm"}
    same(place, without)
    run("prune", place, f"{url}/pruned{suffix}", "--rule", "*: 0.5")
    run("reshard", place, f"{url}/ranks", "--mesh", "dp=2", "--rule", "*: dp=0")
    same(f"{url}/ranks", without)
    run("package", f"one={place}", f"two={local}", f"{url}/both")
    same(
        f"{url}/both",
        {f"one.{n}": a for n, a in without.items()} | {f"two.{n}": a for n, a in STATE.items()},
    )
    run("package", f"one={place}", f"{url}/both.pt2")
    run("convert", place, str(tmp_path / f"back{suffix}"))
    same(str(tmp_path / f"back{suffix}"), without)
    run("convert", place, f"{url}/again.safetensors")
    same(f"{url}/again.safetensors", without)
    assert "exists" in run("convert", local, place, code=2)
    assert "a file on this machine" in run("read", place, "a.weight", "-o", f"{url}/x.npy", code=2)
    assert "no such object" in run("show", f"{url}/none", code=2)
    assert holdfast.alias_graph(place) is not None


def test_a_folder_of_hugging_face_goes_to_a_bucket_and_back(
    model: Path, proxy: Proxy, url: str, tmp_path: Path
):
    """Data has names of its own, the index says which counts; config and tokenizer come along, and stay in place."""
    holdfast.convert(model, url, max_shard_size="70KB")
    found = names(url)
    assert {"config.json", "tokenizer.json", "model.safetensors.index.json"} < set(found)
    assert len(found) == 5
    same(url, STATE)
    holdfast.edit(url, in_place=True, dtype="bf16")
    assert set(names(url)) & set(found) == {
        "config.json",
        "tokenizer.json",
        "model.safetensors.index.json",
    }
    with holdfast.open(url) as checkpoint:
        assert checkpoint["norm"].dtype.name == "bfloat16"
    config = json.loads(
        get_bucket(parse_url(url))
        .get_object(parse_url(url).key + "/config.json", 1000)
        .data.tobytes()
    )
    assert config == {"torch_dtype": "bfloat16"}
    holdfast.convert(url, tmp_path / "back")
    assert {"config.json", "tokenizer.json"} < set(os.listdir(tmp_path / "back"))
    holdfast.save(STATE, tmp_path / "plain.pt")
    holdfast.convert(tmp_path / "plain.pt", f"{url}-with/", copy_config=url)
    assert "tokenizer.json" in names(f"{url}-with")
    with pytest.raises(HoldfastError, match="there is none"):
        holdfast.convert(tmp_path / "plain.pt", f"{url}-without/", copy_config=f"{url}/nowhere")


def test_another_format_takes_the_place_of_one(model: Path, proxy: Proxy, url: str):
    """What is there is seen whatever its format, and after an overwrite nothing is left of it."""
    holdfast.save(STATE, url)
    with pytest.raises(NotCommitted, match="overwrite=True"):
        holdfast.convert(model, url, format="safetensors")
    holdfast.convert(model, url, format="safetensors", overwrite=True)
    assert not [name for name in names(url) if name.startswith(("holdfast", "data"))]
    same(url, STATE)
    with pytest.raises(NotCommitted, match="overwrite=True"):
        holdfast.save(STATE, url)
    holdfast.save({"w": np.ones(3)}, url, overwrite=True)
    same(url, {"w": np.ones(3)})
    assert not [name for name in names(url) if name.startswith("model")]


def test_weights_of_others_are_replaced_and_what_is_none_of_ours_stays(
    model: Path, proxy: Proxy, url: str
):
    bucket, where = get_bucket(parse_url(url)), parse_url(url)
    for path in model.iterdir():
        bucket.put(f"{where.key}/{path.name}", path.read_bytes())
    bucket.put(f"{where.key}/notes.txt", b"mine")
    with pytest.raises(NotCommitted, match="overwrite=True"):
        holdfast.save(STATE, url)
    holdfast.edit(url, in_place=True, drop="norm")
    assert {"notes.txt", "config.json"} < set(names(url))
    assert len([name for name in names(url) if name.endswith(".safetensors")]) == 1


def test_a_save_that_fails_takes_nothing_of_others(
    model: Path, proxy: Proxy, url: str, monkeypatch: pytest.MonkeyPatch
):
    """A folder with a config is replaced, and that fails at the end: config, index and weights are as they were."""
    holdfast.convert(model, url)
    before = names(url)
    monkeypatch.setattr("holdfast.stores.remote.client.MAX_RETRIES", 0)
    proxy.fault = lambda asked: (
        "drop" if asked.method == "PUT" and asked.path.endswith("index.json") else None
    )
    with pytest.raises(HoldfastError):
        holdfast.convert(model, url, overwrite=True, format="safetensors", dtype="bf16")
    proxy.fault = lambda asked: None
    assert set(before) <= set(names(url))
    same(url, STATE)


def test_scan_searches_a_prefix(proxy: Proxy, url: str, tmp_path: Path):
    import pickle

    where = parse_url(url)
    bucket = get_bucket(where)
    bucket.put(f"{where.key}/deep/er/evil.pkl", b"cos\nsystem\n(S'echo hi'\ntR.")
    bucket.put(f"{where.key}/readme.txt", b"nothing to see")
    bucket.put(f"{where.key}/plain.pkl", pickle.dumps({"a": 1}))
    holdfast.save(STATE, f"{url}/native")
    report = holdfast.scan(url)
    verdicts = {file.path.removeprefix(f"{url}/"): file.verdict() for file in report.reports}
    assert verdicts == {"deep/er/evil.pkl": "dangerous", "plain.pkl": "clean", "native": "clean"}
    assert report.skipped_paths == (f"{url}/readme.txt",)
    assert holdfast.scan(f"{url}/deep/er/evil.pkl").verdict() == "dangerous"
    assert holdfast.scan(f"{url}/none").reports[0].error is not None


def test_scan_tells_of_code_beside_weights(proxy: Proxy, url: str):
    where = parse_url(url)
    bucket = get_bucket(where)
    holdfast.save(STATE, f"{url}/m/model.safetensors")
    bucket.put(f"{where.key}/m/config.json", b'{"auto_map": {"AutoModel": "modeling_x.X"}}')
    bucket.put(f"{where.key}/m/modeling_x.py", b"")
    bucket.put(f"{where.key}/m/custom_generate/generate.py", b"")
    report = holdfast.scan(url)
    assert {
        file.path.removeprefix(f"{url}/m/")
        for file in report.reports
        if file.verdict() == "suspicious"
    } == {
        "config.json",
        "modeling_x.py",
        "custom_generate/generate.py",
    }


def test_verify_finds_damage_in_a_folder_of_several(proxy: Proxy, url: str):
    where = parse_url(url)
    bucket = get_bucket(where)
    holdfast.save(STATE, url)
    holdfast.save(STATE, f"{url}/beside.pt")
    report = holdfast.verify(url)
    assert report.ok
    assert len(report.files) >= 2
    (data,) = (name for name in names(url) if name.startswith("data"))
    content = bytearray(bucket.get_object(f"{where.key}/{data}", 1 << 20).data)
    content[-5] ^= 1
    bucket.put(f"{where.key}/{data}", content)
    report = holdfast.verify(url)
    assert not report.ok
    assert report.damaged[0].file == f"{url}/{data}"


@pytest.mark.parametrize(
    "key", ["with space", "per%20cent%", "plus+and&", "ünïcode-模型", "a=b;c,d", "#hash?query"]
)
def test_odd_characters_in_keys(key: str, proxy: Proxy, url: str):
    for suffix in ("", ".pt"):
        place = f"{url}/{key}{suffix}"
        holdfast.save(STATE, place)
        same(place, STATE)
        assert holdfast.verify(place).ok


def test_a_thousand_files_below_a_prefix(proxy: Proxy, url: str):
    store = MemoryStore()
    for number in range(1200):
        obstore.put(store, f"many/{number:05}.bin", b"x")
    holdfast.save(STATE, "many", store=store)
    with holdfast.open("many", store=store) as checkpoint:
        np.testing.assert_array_equal(checkpoint["norm"].numpy(), STATE["norm"])
        assert holdfast.verify(checkpoint).ok


def test_a_program_with_a_store_of_its_own():
    """Readers take an open checkpoint; what writes takes `store=`, as `save` does, by way of it."""
    store = MemoryStore()
    holdfast.save(STATE, "here.pt", store=store)
    with holdfast.open("here.pt", store=store) as source:
        holdfast.save(source, "there", store=store)
        assert holdfast.diff(source, source).same
        with pytest.raises(HoldfastError):
            holdfast.save(source, "there", store=store)
    with holdfast.open("there", store=store) as checkpoint:
        assert holdfast.verify(checkpoint).ok


@pytest.mark.parametrize("verb", VERBS)
def test_a_missing_object(verb: str, proxy: Proxy, url: str, tmp_path: Path):
    check_missing(VERBS[verb], f"{url}/missing.pt2", tmp_path)


def test_torch_reads_from_a_url(proxy: Proxy, url: str):
    torch = pytest.importorskip("torch")
    import holdfast.torch

    holdfast.save(STATE, url)
    module = torch.nn.Module()
    module.norm = torch.nn.Parameter(torch.zeros(64))
    holdfast.torch.load_into(module, url, strict=False)
    assert module.norm.eq(1).all()
    with holdfast.torch.open(url) as checkpoint:
        assert checkpoint["a.weight"][3, 5].item() == 3 * 128 + 5


@pytest.mark.parametrize("source", ["", ".pt", ".safetensors"])
def test_what_records_its_sums_is_fetched_once(source: str, proxy: Proxy, url: str):
    """Also by a format with its sums before its data."""
    state = {"w": np.random.default_rng(0).random((1024, 1024)), "v": np.ones(1000)}
    nbytes = sum(array.nbytes for array in state.values())
    holdfast.save(state, url + source)
    proxy.clear()
    holdfast.convert(url + source, f"{url}-new.safetensors", read_back=False)
    assert nbytes <= proxy.sent_nbytes < 1.1 * nbytes
    same(f"{url}-new.safetensors", state)
    proxy.clear()
    holdfast.convert(url + source, f"{url}-cast.safetensors", dtype="f32", read_back=False)
    assert proxy.sent_nbytes > 1.9 * nbytes, "nothing is recorded of what is computed"
    same(
        f"{url}-cast.safetensors", {name: array.astype(np.float32) for name, array in state.items()}
    )


def test_sums_that_are_believed_are_compared():
    """A source that is damaged is refused, and what was there is there still."""
    store = MemoryStore()
    holdfast.save({"w": np.ones(3 << 20)}, "a.safetensors", store=store)
    holdfast.save({"x": np.ones(3)}, "b.safetensors", store=store)
    raw = bytearray(obstore.get(store, "a.safetensors").bytes())
    raw[-1] ^= 1
    obstore.put(store, "a.safetensors", bytes(raw))
    with holdfast.open("a.safetensors", store=store) as source:
        with pytest.raises(Corrupted, match="checksum that it records"):
            holdfast.convert(source, "b.safetensors", store=store, overwrite=True)
        for format in ("safetensors", "torch"):
            with pytest.raises(Corrupted, match="checksum that it records"):
                holdfast.save(source, io.BytesIO(), format=format)
    with holdfast.open("b.safetensors", store=store) as kept:
        assert list(kept) == ["x"]


@pytest.mark.parametrize("verb", ["edit", "tie", "compact"])
def test_a_step_that_is_rewritten_in_place_is_that_step(verb: str):
    place = f"memory://in-place-{verb}/run"
    with holdfast.Run(place) as run:
        before = run.save(1, STATE, metrics={"loss": 0.5})
    getattr(holdfast, verb)(
        before.path, in_place=True, **({"drop": "norm"} if verb == "edit" else {})
    )
    (now,) = holdfast.Run(place)
    assert (now.step, now.saved, now.metrics) == (1, before.saved, {"loss": 0.5})


@pytest.mark.parametrize("damaged", [False, True])
def test_what_takes_the_place_of_a_distributed_checkpoint_leaves_no_data_of_it(
    damaged: bool, tmp_path: Path
):
    """Of one whose index cannot be read the index goes, and what it names is not known."""
    torch = pytest.importorskip("torch")
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    dcp.save({"w": torch.ones(4)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    store = MemoryStore()
    for file in (tmp_path / "dcp").iterdir():
        content = file.read_bytes()
        obstore.put(
            store,
            f"ckpt/{file.name}",
            content[:9] if damaged and file.name == ".metadata" else content,
        )
    obstore.put(store, "ckpt/notes.txt", b"mine")
    with pytest.raises(NotCommitted):
        holdfast.save(STATE, "ckpt", format="native", store=store)
    holdfast.save(STATE, "ckpt", format="native", overwrite=True, store=store)
    left = {one["path"] for page in obstore.list(store) for one in page}
    assert "ckpt/notes.txt" in left
    assert "ckpt/.metadata" not in left
    assert any(name.endswith(".distcp") for name in left) is damaged
    with holdfast.open("ckpt", store=store) as checkpoint:
        assert sorted(checkpoint) == sorted(STATE)
