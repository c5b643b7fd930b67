"""Documents to draw: made by rule, with faults put in that a reader must see.

Pages of real checkpoints are drawn, too (`test_kinds.py`). These have what no small file has: 30,000 tensors, a NaN layer, a dead
head, names made to break a page.
"""

from __future__ import annotations

import math
import random
from functools import cache
from typing import Any

Document = dict[str, Any]

ITEM = {"bf16": 2, "f32": 4, "f8_e4m3": 1, "i64": 8}

MEASURES = [
    ("rms", "rms", "root of the mean square", "log"),
    ("absmax", "largest", "the largest magnitude", "log"),
    ("zeros", "zeros", "share of elements that are zero", "share"),
    ("nonfinite", "NaN or Inf", "share of elements that are NaN or Inf", "share"),
    ("kurtosis", "kurtosis", "how heavy the tails are", "log"),
]


CHANGES = [
    ("change", "‖Δ‖/‖w‖", "the change beside the weight", "log"),
    ("cosine", "cosine", "between before and after", "linear"),
    ("changed", "changed", "share of elements that changed", "share"),
]


def significant(value: float) -> float:
    """A number in four digits, as the document has them."""
    return float(f"{value:.4g}")


class Sheet:
    """Columns of tensors, filled row by row."""

    def __init__(self, seed: int = 1) -> None:
        self.random = random.Random(seed)
        self.names: list[str] = []
        self.rows: list[dict[str, Any]] = []

    def add(
        self,
        name: str,
        shape: list[int],
        *,
        dtype: str = "bf16",
        layer: int = -1,
        role: str | None = None,
        **more: Any,
    ) -> int:
        """A tensor; `more` may have expert, tie, state, file, and values of measures."""
        self.names.append(name)
        scale = 1.0 if len(shape) < 2 else 0.02
        rms = scale * math.exp(self.random.gauss(0, 0.08))
        row = {
            "shape": shape, "dtype": dtype, "layer": layer, "role": role or name, "nbytes": math.prod(shape) * ITEM[dtype],
            "expert": -1, "tie": -1, "state": 1, "file": 0, "zeros": 0.0, "nonfinite": 0.0,
            "rms": rms, "absmax": rms * self.random.uniform(4, 9),
            "kurtosis": 3 + self.random.expovariate(2),
            "change": 0.01 * math.exp(self.random.gauss(0, 0.3)),
            "cosine": 1 - self.random.uniform(0, 1e-3),
            "changed": self.random.uniform(0.9, 1),
        }  # fmt: skip
        row.update(more)
        self.rows.append(row)
        return len(self.rows) - 1

    def labels(self, key: str) -> dict[str, Any]:
        found: dict[Any, int] = {}
        frozen = [tuple(row[key]) if isinstance(row[key], list) else row[key] for row in self.rows]
        at = [found.setdefault(value, len(found)) for value in frozen]
        return {
            "labels": [list(value) if isinstance(value, tuple) else value for value in found],
            "at": at,
        }

    def column(self, key: str) -> list[Any]:
        return [None if row[key] is None or row[key] != row[key] else row[key] for row in self.rows]

    def document(
        self,
        *,
        stats: bool = True,
        files: list[str] | None = None,
        title: str = "model.safetensors",
        **more: Any,
    ) -> Document:
        """The document of these tensors, by schema 1."""
        total = sum(row["nbytes"] for row in self.rows)
        ends: dict[int, int] = {}
        start, end = [], []
        for row in self.rows:
            start.append(ends.get(row["file"], 4096))
            ends[row["file"]] = start[-1] + row["nbytes"]
            end.append(ends[row["file"]])
        names = files or [title]
        parameters = sum(math.prod(row["shape"]) for row in self.rows)
        document: Document = {
            "schema": 1, "kind": "checkpoint", "title": title, "path": f"models/{title}", "other": None,
            "made": "2026-01-02T03:04:05", "version": "0.1.0",
            "sentence": f"{len(self.rows):,} tensors with {parameters / 1e6:,.0f} million parameters in {total / 2**20:,.0f} MiB.",
            "facts": [["format", "safetensors"], ["tensors", f"{len(self.rows):,}"], ["parameters", f"{parameters:,}"],
                      ["bytes", f"{total / 2**20:,.1f} MiB"], ["dtypes", "bf16 98% · f32 2%"],
                      ["ties", "1 group"], ["dead bytes", "none"], ["foreign objects", "none"]],
            "scan": {"verdict": "clean", "findings": []}, "notes": [], "stats": stats, "sampled": None,
            "tensors": {
                "count": len(self.rows), "names": front_coded(self.names), "dtype": self.labels("dtype"),
                "shape": self.labels("shape"), "nbytes": self.column("nbytes"),
                "file": {"labels": names, "at": self.column("file")}, "start": start, "end": end,
                "tie": self.column("tie"), "layer": self.column("layer"),
                "role": self.labels("role"), "expert": self.column("expert"), "strides": {"at": [], "values": []},
            },
            "measures": [{"key": "nbytes", "label": "bytes", "help": "size", "scale": "log", "values": self.column("nbytes")}],
            "details": None, "shards": None, "run": None, "live": None,
        }  # fmt: skip
        if stats:
            for key, label, text, scale in MEASURES:
                values = [
                    None if value is None else significant(value) for value in self.column(key)
                ]
                document["measures"].append(
                    {"key": key, "label": label, "help": text, "scale": scale, "values": values}
                )
            document["details"] = self.details()
        document.update(more)
        return document

    def details(self) -> dict[str, Any]:
        """Drawer data: normal weights around their rms, a dead group of rows where zeros are. Alike tensors have the same."""
        made = [
            drawn(
                float(f"{row['rms'] or 1e-30:.1g}"),
                flat=len(row["shape"]) < 2,
                dead=row["zeros"] > 0.05,
            )
            for row in self.rows
        ]
        columns = {
            key: [one[key] for one in made]
            for key in ("exponents", "quantiles", "rows", "columns", "singular")
        }
        return {**columns, "negative": [0.4993] * len(made)}


@cache
def drawn(rms: float, *, flat: bool, dead: bool) -> dict[str, Any]:
    """What a drawer shows of one tensor."""
    peak = [
        max(1, round(255 * math.exp(-(((step - 11.4) / (3.2 if step < 11 else 1.1)) ** 2))))
        for step in range(15)
    ]
    wave = [
        0 if dead and 20 <= step < 24 else significant(rms * 40 * (1 + 0.1 * math.sin(step)))
        for step in range(64)
    ]
    return {
        "exponents": [math.floor(math.log2(rms)) - 12, peak],
        "quantiles": [
            significant(rms * at) for at in (-5.1, -3.1, -2.3, -0.67, 0.001, 0.67, 2.3, 3.1, 5.2)
        ],
        "rows": None if flat else wave,
        "columns": None
        if flat
        else [significant(rms * 40 * (1 + 0.05 * math.cos(step * 0.7))) for step in range(64)],
        "singular": None
        if flat
        else [significant(rms * 90 / (1 + step) ** 0.6) for step in range(32)],
    }


def front_coded(names: list[str]) -> dict[str, list[Any]]:
    """Names without what they share with the one before, counted in UTF-16 units as JavaScript does."""
    shared, rest, before = [], [], b""
    for name in names:
        units = name.encode("utf-16-le", "surrogatepass")
        same = 0
        while (
            same + 2 <= min(len(units), len(before))
            and units[same : same + 2] == before[same : same + 2]
        ):
            same += 2
        shared.append(same // 2)
        rest.append(units[same:].decode("utf-16-le", "surrogatepass"))
        before = units
    return {"shared": shared, "rest": rest}


BLOCK = [
    ("input_layernorm.weight", "norm"), ("self_attn.q_proj.weight", "square"), ("self_attn.k_proj.weight", "narrow"),
    ("self_attn.v_proj.weight", "narrow"), ("self_attn.o_proj.weight", "square"), ("post_attention_layernorm.weight", "norm"),
    ("mlp.gate_proj.weight", "up"), ("mlp.up_proj.weight", "up"), ("mlp.down_proj.weight", "down"),
]  # fmt: skip


def llama(layers: int = 24, width: int = 2048, sheet: Sheet | None = None) -> Sheet:
    """A dense model, healthy."""
    sheet = sheet or Sheet()
    shapes = {
        "norm": [width],
        "square": [width, width],
        "narrow": [width // 4, width],
        "up": [4 * width, width],
        "down": [width, 4 * width],
    }
    sheet.add("model.embed_tokens.weight", [32000, width], tie=0, rms=0.018)
    for layer in range(layers):
        for rest, kind in BLOCK:
            sheet.add(
                f"model.layers.{layer}.{rest}",
                shapes[kind],
                layer=layer,
                role=f"model.layers.*.{rest}",
            )
    sheet.add("model.norm.weight", [width])
    sheet.add("lm_head.weight", [32000, width], tie=0, rms=0.018)
    return sheet


def small(**more: Any) -> Document:
    """A model of 24 layers in which layer 7 has NaN, a head of layer 15 is dead and layer 19 is a hundred times too small."""
    sheet = llama()
    at = {name: place for place, name in enumerate(sheet.names)}
    for role in ("self_attn.q_proj", "mlp.up_proj", "mlp.gate_proj"):
        sheet.rows[at[f"model.layers.7.{role}.weight"]].update(
            nonfinite=0.0003, rms=None, absmax=None, kurtosis=None
        )
    sheet.rows[at["model.layers.15.self_attn.v_proj.weight"]].update(zeros=0.0625)
    sheet.rows[at["model.layers.3.mlp.down_proj.weight"]].update(
        zeros=1.0, rms=0.0, absmax=0.0, kurtosis=None
    )
    sheet.rows[at["model.layers.19.self_attn.o_proj.weight"]].update(rms=0.0002, absmax=0.0011)
    return sheet.document(**more)


def experts(layers: int = 40, count: int = 248, *, stats: bool = True) -> Document:
    """A Mixture of Experts: 40 layers of 248 experts with three weights each, 30,000 tensors; one expert is dead, one has NaN."""
    sheet = Sheet(7)
    sheet.add("model.embed_tokens.weight", [100352, 2048])
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        for rest, kind in BLOCK[:6]:
            shape = {"norm": [2048], "square": [2048, 2048], "narrow": [512, 2048]}[kind]
            sheet.add(f"{prefix}.{rest}", shape, layer=layer, role=f"model.layers.*.{rest}")
        sheet.add(
            f"{prefix}.mlp.gate.weight",
            [count, 2048],
            layer=layer,
            role="model.layers.*.mlp.gate.weight",
        )
        for expert in range(count):
            for part, shape in (
                ("gate_proj", [768, 2048]),
                ("up_proj", [768, 2048]),
                ("down_proj", [2048, 768]),
            ):
                name = f"{prefix}.mlp.experts.{expert}.{part}.weight"
                sheet.add(
                    name,
                    shape,
                    layer=layer,
                    expert=expert,
                    role=f"model.layers.*.mlp.experts.*.{part}.weight",
                    dtype="f8_e4m3" if layer % 9 == 0 else "bf16",
                )
    at = {name: place for place, name in enumerate(sheet.names)}
    sheet.rows[
        at[f"model.layers.{min(17, layers - 1)}.mlp.experts.{min(101, count - 1)}.up_proj.weight"]
    ].update(rms=0.0001, absmax=0.0004)
    sheet.rows[at[f"model.layers.{min(30, layers - 1)}.mlp.experts.5.down_proj.weight"]].update(
        nonfinite=0.001, rms=None, absmax=None, kurtosis=None
    )
    sheet.add("model.norm.weight", [2048])
    sheet.add("lm_head.weight", [100352, 2048])
    return sheet.document(title="moe-30k", stats=stats)


def difference() -> Document:
    """A fine-tune and its base: layers 0 to 3 did not train, one projection moved far; some tensors added, removed, renamed."""
    sheet = llama()
    for row in sheet.rows:
        if 0 <= row["layer"] < 4:
            row.update(state=0, change=0.0, cosine=1.0, changed=0.0)
    at = {name: place for place, name in enumerate(sheet.names)}
    sheet.rows[at["model.layers.21.self_attn.o_proj.weight"]].update(change=0.4, cosine=0.91)
    alone = {"change": None, "cosine": None, "changed": None}
    for name in ("score.weight", "score.bias", "adapter.scale"):
        sheet.add(name, [2, 2048] if name == "score.weight" else [2], state=2, **alone)
    sheet.rows[at["lm_head.weight"]].update(state=3, tie=-1, **alone)
    sheet.rows[at["model.norm.weight"]].update(state=4)
    document = sheet.document(
        stats=False,
        kind="diff",
        title="base → chat",
        path="models/base.safetensors",
        other="models/chat.safetensors",
    )
    document["sentence"] = (
        "181 of 222 tensors changed between base.safetensors and chat.safetensors; 3 were added, 1 removed, 1 renamed."
    )
    document["tensors"]["state"] = sheet.column("state")
    document["tensors"]["was"] = {
        "at": [at["model.norm.weight"]],
        "names": ["transformer.norm.weight"],
    }
    for key, label, text, scale in CHANGES:
        values = [None if value is None else significant(value) for value in sheet.column(key)]
        document["measures"].append(
            {"key": key, "label": label, "help": text, "scale": scale, "values": values}
        )
    return document


def sharded(ranks: int = 8) -> Document:
    """A step that eight ranks saved: each tensor in eight boxes along its first axis, one file a rank, and a gap."""
    sheet = llama(layers=12, width=1024)
    files = [f"shard-{rank:05d}-of-{ranks:05d}.safetensors" for rank in range(ranks)]
    document = sheet.document(files=files, title="step-12000", stats=False)
    count = len(sheet.rows)
    document["tensors"]["start"] = document["tensors"]["end"] = [None] * count
    boxes: dict[str, list[Any]] = {"tensor": [], "file": [], "offset": [], "size": []}
    strips: list[list[list[int]]] = [[[0, 65536, 1, -1]] for _ in files]
    for tensor, row in enumerate(sheet.rows):
        shape = row["shape"]
        for rank in range(ranks):
            rows = shape[0] // ranks
            boxes["tensor"].append(tensor)
            boxes["file"].append(rank)
            boxes["offset"].append([rank * rows] + [0] * (len(shape) - 1))
            boxes["size"].append([rows, *shape[1:]])
            start = strips[rank][-1][1]
            strips[rank].append([start, start + row["nbytes"] // ranks, 0, tensor])
    strips[5].append([strips[5][-1][1], strips[5][-1][1] + 2_000_000, 2, -1])
    document["shards"] = {
        "files": [{"name": name, "nbytes": strips[rank][-1][1], "strips": strips[rank]} for rank, name in enumerate(files)],
        "boxes": boxes, "replicas": 2, "gaps": 1,
        "mesh": {"text": "3 ranks along axis 0", "ranks": [
            {"rank": 0, "files": [0, 1, 2], "nbytes": 60_000_000}, {"rank": 1, "files": [2, 3, 4, 5], "nbytes": 61_000_000},
            {"rank": 2, "files": [5, 6, 7], "nbytes": 60_000_000},
        ]},
    }  # fmt: skip
    document["sentence"] = (
        "A native step of 111 tensors in 8 files, cut into 888 boxes along the first axis; one file has a gap of 2 MB."
    )
    return document


def run() -> Document:
    """A run of 40 steps: a spike of the norm, a torn step, one pinned, the newest and every tenth kept."""
    chance = random.Random(3)
    steps = []
    for number in range(1, 41):
        torn = number == 23
        kept = number % 10 == 0 or number > 37
        norm = 812 + 3 * number + (90 if number == 31 else 0) + chance.gauss(0, 2)
        steps.append({
            "step": number * 500, "name": f"step-{number * 500:08d}",
            "time": f"2026-01-{1 + number // 3:02d}T{number % 24:02d}:00:00",
            "nbytes": 2_400_000_000, "shared": 0 if number % 10 == 1 else 700_000_000, "kept": kept, "pinned": number == 20,
            "why": "newest" if number > 37 else "every 5000" if kept else "", "norm": None if torn else round(norm, 2),
            "loss": None if torn else round(2.1 + 6 / number + chance.gauss(0, 0.03), 3),
            "state": "torn" if torn else "whole" if kept or number > 30 else "deleted",
        })  # fmt: skip
    sheet = llama(layers=12, width=1024)
    document = sheet.document(kind="run", title="runs/llama", stats=False)
    document["sentence"] = (
        "A run of 40 steps from 500 to 20,000; 7 are kept, 1 is torn, the newest whole one is step 20,000."
    )
    document["run"] = {
        "steps": steps,
        "summary": "40 steps, 7 kept, 1 torn, 1 pinned; 16.1 GB on disk, of which 4.2 GB are shared",
    }
    return document


SCRIPT = "document.title='pwned';window.pwned=1;alert(1)"

HOSTILE = [
    "<script>" + SCRIPT + "</script>",
    "</script><script>" + SCRIPT + "</script>",
    "</style><script>" + SCRIPT + "</script>",
    "<img src=x onerror=" + SCRIPT + ">",
    "\"><svg onload='" + SCRIPT + "'>",
    "' onmouseover='" + SCRIPT,
    "javascript:" + SCRIPT,
    "{{constructor.constructor('" + SCRIPT + "')()}}",
    "${" + SCRIPT + "}",
    "<!--<script>",
    "-->", "]]>", "{{data}}", "{{script}}", "{{style}}", "&lt;script&gt;",
    "__proto__", "constructor.prototype", "__proto__.polluted", "toString", "hasOwnProperty.x",
    "\x1b[2J\x1b[31m", "\u202eexe.tp\u2066", "a\0b", "line\nbreak\r\ttab", "\u2028\u2029\x85", "\ud800",
    "x\udfff.y\ud83d", "\U000e0041\u200b\ufeff", "e" + "\u0301" * 200, "\u3164",
    "", ".", "..", "...", ".a.", "/etc/passwd", "..\\..\\x", "a\\b\"c'd", "%s%n", "\U0001f4a9.weight", "𝒽.0.𝓁",
    "x" * 10_000, "d." * 3_000 + "end", "layers." + "9" * 400 + ".w", "נוסע.0.وزن",
]  # fmt: skip
"""Names that would do something on a page that did not treat them as text."""


def hostile() -> Document:
    """A checkpoint that is called, and says, the worst that it can everywhere."""
    sheet = Sheet()
    for place, name in enumerate(HOSTILE):
        sheet.add(
            name,
            [64, 64 + place],
            layer=place % 5 if place % 3 else -1,
            role=f"{HOSTILE[place % 12]}.*.{name[:300]}",
            file=place % len(HOSTILE),
        )
    document = sheet.document(files=HOSTILE, title=HOSTILE[0])
    nasty = HOSTILE[3]
    document.update(
        path=HOSTILE[1],
        other=HOSTILE[4],
        sentence=" ".join(HOSTILE[:12]),
        facts=[[name[:300], name] for name in HOSTILE],
        notes=HOSTILE,
    )
    document["scan"] = {
        "verdict": nasty,
        "findings": [{"severity": nasty, "text": name} for name in HOSTILE[:40]],
    }
    for measure in document["measures"]:
        measure["label"] += nasty
        measure["help"] = nasty
    document["tensors"]["dtype"]["labels"] = [nasty]
    document["sampled"] = {"share": 0.01, "text": nasty}
    document["shards"] = {
        "files": [
            {"name": name, "nbytes": 9000, "strips": [[0, 100, 1, -1], [100, 8000, 0, place], [8000, 9000, 2, -1]]}
            for place, name in enumerate(HOSTILE)
        ],
        "boxes": {"tensor": [0, 0], "file": [0, 1], "offset": [[0, 0], [32, 0]], "size": [[32, 64], [32, 64]]},
        "replicas": 0, "gaps": 1,
        "mesh": {"text": nasty, "ranks": [{"rank": 0, "files": [0], "nbytes": 1}]},
    }  # fmt: skip
    document["run"] = {
        "summary": nasty,
        "steps": [
            {
                "step": 1,
                "name": nasty,
                "time": nasty,
                "nbytes": 1,
                "shared": 0,
                "kept": True,
                "pinned": True,
                "why": nasty,
                "norm": 1.0,
                "loss": 2.0,
                "state": nasty,
            }
        ],
    }
    document["tensors"]["state"] = [place % 6 for place in range(len(HOSTILE))]
    document["tensors"]["was"] = {"at": [4], "names": [nasty]}
    return document
