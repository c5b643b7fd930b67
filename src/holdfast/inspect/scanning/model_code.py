"""Code that comes with a model: what its configs name, and Python files beside its weights.

    config.json            "auto_map": {"AutoModel": "modeling_x.XModel"}, "custom_pipelines": {"task": {"impl": "pipe.Pipe"}}
    tokenizer_config.json  "auto_map": {"AutoTokenizer": ["tokenization_x.XTokenizer", null]}; so do those of processors
    model_index.json       "_class_name": ["pipeline_x", "XPipeline"]                      diffusers
    modules.json           [{"type": "custom_st.Transformer", …}]                          sentence-transformers
    modeling_x.py          imported, and so run, by a loader that was told to trust it; without a word in any config, too:
    custom_generate/…      transformers looks for `custom_generate/generate.py` by itself

`trust_remote_code=True` makes all of these run. "user/repo--modeling_x.XModel" names code in another repository, which is fetched.
A chat template is no code here: it is rendered in a sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence

from holdfast.inspect.scanning.archives import Span
from holdfast.inspect.scanning.findings import Finding, Findings

CONFIG_NBYTES = 16 << 20

INDEX = "model_index.json"
MODULES = "modules.json"
GENERATE = "custom_generate"
OWN = "sentence_transformers."
"""What the modules of a model begin with that sentence-transformers has itself."""

LOCAL = "a loader with trust_remote_code=True would import that file of this folder, and run it"
ELSEWHERE = "a loader with trust_remote_code=True would fetch this from the repository that is named before the --, and run it"

WHAT = "Python code beside weights"
NAMED = "a loader with trust_remote_code=True would run it, for a config beside it names it"
IMPORTED = "a loader with trust_remote_code=True runs what a config here names, and that may import it"
ALONE = (
    "no config here names it: it would run where a loader is told to take code from this folder (trust_remote_code=True with "
    "another config, a custom pipeline of diffusers, torch.hub with a local source)"
)
GENERATES = "from_pretrained of the folder above with trust_remote_code=True would run generate.py, whatever the configs say"


class Pairs(list[tuple[str, object]]):
    """An object of JSON with every key that it has, also those that come again: which one counts is up to the reader."""


def is_config(name: str) -> bool:
    """Whether a name is that of a file in which loaders look for code to run."""
    return name in (INDEX, MODULES) or (name.endswith(".json") and "config" in name)


def look_at_config(span: Span, name: str, found: Findings) -> bool:
    """Report all code that a config names; True where there is any. Loaders read nothing that is no JSON."""
    if span.nbytes > CONFIG_NBYTES:
        if name.endswith("config.json"):
            found.error(f"a config of {span.nbytes:,} bytes, of which {CONFIG_NBYTES:,} may be read; not read")
        return False
    try:
        document = json.loads(span.read(0, span.nbytes), object_pairs_hook=Pairs)
    except ValueError:
        return False
    named = list(_named(document, name))
    for where, what in named:
        found.add_other("suspicious", what, ELSEWHERE if "--" in what else LOCAL, stream=where)
    return bool(named)


def _named(document: object, name: str) -> Iterator[tuple[str, str]]:
    """Classes that a config wants imported, each with the key that names it."""
    waiting: list[object] = [document]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Pairs):
            for key, inner in value:
                if key in ("auto_map", "custom_pipelines"):
                    yield from ((key, text) for text in _texts(inner) if "." in text)
                elif key == "_class_name" and type(inner) is list and inner and isinstance(inner[0], str):
                    yield key, ".".join(one for one in inner if isinstance(one, str))
                elif key == "type" and name == MODULES and isinstance(inner, str) and not inner.startswith(OWN):
                    yield key, inner
                waiting.append(inner)
        elif isinstance(value, list):
            waiting += value


def _texts(value: object) -> Iterator[str]:
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, Pairs):
            waiting += [inner for _, inner in reversed(one)]
        elif isinstance(one, list):
            waiting += reversed(one)


def model_code_findings(
    folder: str, names: Sequence[str], findings: Iterable[Finding], *, weights: bool, above: bool
) -> dict[str, Finding]:
    """The findings of the Python files of a folder, by their names.

    `findings` are those of its other files, configs among them. `weights` says whether a loader reads any file here, and `above`
    whether it reads one of the folder above.
    """
    code = [name for name in names if name.endswith(".py")]
    generates = above and folder == GENERATE
    if not code or not (weights or generates or INDEX in names):
        return {}
    named = {one.what.partition(".")[0] for one in findings if one.reason == LOCAL}
    other = GENERATES if generates else IMPORTED if named else ALONE
    reasons = {name: NAMED if name.removesuffix(".py") in named else other for name in code}
    return {name: Finding("suspicious", WHAT, reason, (), (), name, 0) for name, reason in reasons.items()}
