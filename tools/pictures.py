"""The pictures of the report in docs/images: a small model with faults in it, its page in a browser, in both themes.

    python tools/pictures.py

needs chromium and playwright (`make browser`). The model is made here: layer 3 has a NaN, a head of layer 6 is dead, an output
projection of layer 9 is a hundred times too small.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np
from playwright.sync_api import sync_playwright

import holdfast

OUT = Path(__file__).resolve().parent.parent / "docs" / "images"
LAYERS, WIDTH, HEADS = 12, 192, 16
SCREEN = {"width": 1040, "height": 1590}
LARGEST = 200_000
"""Bytes of a picture."""


def model() -> dict[str, np.ndarray]:
    """Weights as after initialisation, with the faults."""
    random = np.random.default_rng(5)

    def normal(*shape: int) -> np.ndarray:
        return (random.standard_normal(shape, np.float32) * 0.02).astype(ml_dtypes.bfloat16)

    shapes = {
        "self_attn.q_proj": (WIDTH, WIDTH), "self_attn.k_proj": (WIDTH // 4, WIDTH), "self_attn.v_proj": (WIDTH, WIDTH),
        "self_attn.o_proj": (WIDTH, WIDTH), "mlp.gate_proj": (4 * WIDTH, WIDTH), "mlp.up_proj": (4 * WIDTH, WIDTH),
        "mlp.down_proj": (WIDTH, 4 * WIDTH),
    }  # fmt: skip
    state = {"model.embed_tokens.weight": normal(6_000, WIDTH)}
    for layer in range(LAYERS):
        norms = ("input_layernorm", "post_attention_layernorm")
        state |= {
            f"model.layers.{layer}.{name}.weight": 1
            + 0.1 * random.standard_normal(WIDTH, np.float32)
            for name in norms
        }
        state |= {
            f"model.layers.{layer}.{name}.weight": normal(*shape) for name, shape in shapes.items()
        }
    state["model.norm.weight"] = 1 + 0.1 * random.standard_normal(WIDTH, np.float32)
    state["model.layers.3.mlp.up_proj.weight"][7, 11] = np.nan
    state["model.layers.6.self_attn.v_proj.weight"][: WIDTH // HEADS] = 0
    state["model.layers.9.self_attn.o_proj.weight"] *= ml_dtypes.bfloat16(0.01)
    return state


def main() -> int:
    browser = os.environ.get("HOLDFAST_CHROMIUM") or shutil.which("chromium")
    if browser is None:
        print("there is no chromium: make browser", file=sys.stderr)
        return 1
    OUT.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        os.chdir(folder)
        holdfast.save(model(), "model.safetensors")
        holdfast.report("model.safetensors", stats=True).save("page.html")
        launched = driver.chromium.launch(
            executable_path=browser, args=["--no-sandbox", "--disable-gpu"]
        )
        for theme in ("light", "dark"):
            page = launched.new_page(viewport=SCREEN, color_scheme=theme)
            page.goto(Path(folder, "page.html").as_uri())
            page.locator("html[data-ready]").wait_for()
            picture = OUT / f"report-{theme}.png"
            page.screenshot(path=picture)
            print(f"{picture.name}: {picture.stat().st_size:,} bytes")
            if picture.stat().st_size > LARGEST:
                print(f"that is more than {LARGEST:,}", file=sys.stderr)
                return 1
        launched.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
