"""The search of the site: questions as people type them, and the page that must come first.

The site is made as `make docs` makes it, and strictly: a broken link fails here, too. The questions go to the theme's own script,
the one that runs in the browser, so that the order is the one that a reader sees. If a page does not come first, the page lacks
the words that people use: add them there, in its headings above all.
"""

from __future__ import annotations

import json
import os
import string
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pages import ROOT

quickjs = pytest.importorskip("quickjs")
material = pytest.importorskip("material")
pytest.importorskip("mkdocstrings")

QUESTIONS = {
    "how do I resume on fewer GPUs": "training.html",
    "Is this .pt safe?": "scan.html",
    "open a .pt file without torch": "scan.html",
    "convert pytorch_model.bin to safetensors": "hugging-face.html",
    "why is my checkpoint twice as large": "packages.html",
    "weights_only error": "coming-from.html",
    "async checkpoint memory": "training.html",
    "spot instance preemption": "training.html",
    "keep only the best checkpoints": "runs.html",
    "compare two checkpoints": "compare.html",
    "merge LoRA": "compare.html",
    "load a slice from S3": "object-storage.html",
    "prune a model 2:4": "pruning.html",
    "read GGUF": "formats/gguf.html",
    "DeepSpeed ZeRO checkpoint": "formats/deepspeed-megatron.html",
    "install": "start.html",
    "FSDP checkpoint resume different number of gpus": "training.html",
    "save LoRA adapter": "training.html",
    "wandb": "training.html",
    "resume corrupted checkpoint": "runs.html",
    "disk full": "runs.html",
    "average checkpoints": "compare.html",
    "quantize": "who-this-is-for.html",
    "dcp.save": "coming-from.html",
    "Lightning ckpt load without lightning": "coming-from.html",
    "Kubernetes": "beyond-one-machine.html",
    "convert to GGUF": "formats/gguf.html",
    "find NaN in checkpoint": "report.html",
    "convert pt to safetensors": "saving.html",
    "merge models": "compare.html",
    "torch.save alternative": "coming-from.html",
    "resume training": "training.html",
    "corrupted checkpoint": "runs.html",
    "weights_only": "coming-from.html",
    "LoRA": "training.html",
    "FSDP": "sharded.html",
    "DeepSpeed": "formats/deepspeed-megatron.html",
    "pickle exploit": "scan.html",
}
"""What people type, and the page that answers it."""

WORKER = """
    var warnings = [], console = {warn(text) { warnings.push(String(text)); }};
    var self = globalThis, listener, answer;
    function addEventListener(name, called) { listener = called; }
    function postMessage(message) { answer = JSON.stringify(message); }
"""
"""What the script needs of a browser."""


class Search:
    """The search of the browser, outside of one."""

    def __init__(self, index: object) -> None:
        (script,) = (Path(material.__file__).parent / "templates/assets/javascripts/workers").glob(
            "search.*.js"
        )
        self.context = quickjs.Context()
        self.context.eval(WORKER)
        self.context.eval(script.read_text(encoding="utf-8"))
        self._send({"type": 0, "data": {**index, "options": {"suggest": True}}})

    def pages(self, question: str) -> list[str]:
        """The pages in the order in which the browser lists them."""
        groups = self._send({"type": 2, "data": question})["data"]["items"]
        warnings = json.loads(self.context.eval("JSON.stringify(warnings)"))
        assert warnings == [], "the script failed, and shows a reader no page at all"
        return [group[0]["location"].partition("#")[0] for group in groups]

    def _send(self, message: object) -> dict:
        self.context.eval(f"listener({{data: {json.dumps(message)}}})")
        while self.context.execute_pending_job():
            pass
        return json.loads(self.context.get("answer"))


def make_site(folder: Path) -> Path:
    """The site in a folder, as `make docs` makes it in build/."""
    build = (
        "import sys; from mkdocs.commands.build import build; from mkdocs.config import load_config\n"
        "build(load_config('mkdocs.yml', docs_dir=sys.argv[1], site_dir=sys.argv[2]))"
    )
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    for command in (
        ["tools/site", folder / "pages"],
        ["-c", build, folder / "pages", folder / "site"],
    ):
        done = subprocess.run(
            [sys.executable, *command],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    return folder / "site"


@pytest.mark.slow("builds the whole site")
def test_a_question_finds_its_page(tmp_path: Path):
    search = Search(json.loads((make_site(tmp_path) / "search/search_index.json").read_bytes()))
    assert {question: search.pages(question)[:1] for question in QUESTIONS} == {
        question: [page] for question, page in QUESTIONS.items()
    }
    assert search.pages(" ".join(string.ascii_lowercase)), "whatever is typed first finds something"
    assert search.pages("how is this") == [], "small words are no question"
    assert search.pages("zyzzyva") == []
