"""`holdfast convert`: a conversion with a progress bar, and what it did in a line or as JSON. `edit` reports in the same way."""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from typing import TYPE_CHECKING

from holdfast.cli.options import given
from holdfast.cli.planned import add_places, carry_out
from holdfast.cli.text import fields_of
from holdfast.core.options import ConvertOptions
from holdfast.formats import written_in_words

if TYPE_CHECKING:
    from holdfast.verbs.convert import Conversion
    from holdfast.verbs.shared.planned import Saved

DESCRIPTION = f"""\
Write a checkpoint in another format: {written_in_words()}.
It is streamed, never held in memory; checked against its own checksums, read back, and put in place in one step. If anything
goes wrong nothing is there. Ties, views and everything that is no tensor are kept, or the conversion is refused with a list.
"""

EXAMPLES = """\
examples:
  holdfast convert model.pt model.safetensors
  holdfast convert model.pt model/ --format safetensors --max-shard-size 5GB
  holdfast convert pytorch_model.bin model.safetensors --dtype bf16 --rename 'model.*=*'
  holdfast convert llama/ small/ --format safetensors --dtype bf16 --dtype '*norm*=f32'    config and tokenizer come along
  holdfast convert actor/ hf/ --format safetensors --dtype bf16 --copy-config base/
  holdfast convert trainer.ckpt weights.safetensors --keep 'state_dict.*' --tensors-only
  holdfast convert model.pt model.safetensors --dry-run
  holdfast convert model.gguf model.safetensors --dequantize --dtype bf16
  holdfast convert heads.pt2 classify.safetensors --model classify               its state dict, without the program
"""


def add_arguments(verb: argparse.ArgumentParser) -> None:
    add_places(verb, ConvertOptions)
    cut = "of Megatron's ranks: how names were cut, as for reshard"
    verb.add_argument("--rule", metavar="RULE", dest="rules", action="append", default=[], help=cut)


def run(options: argparse.Namespace) -> int:
    from holdfast.verbs.convert import plan_conversion
    from holdfast.verbs.open import open as open_checkpoint

    with (
        open_checkpoint(options.src, rules=options.rules, threads=1)
        if options.rules
        else nullcontext(options.src) as source
    ):
        planned = plan_conversion(source, options.dst, given(options, ConvertOptions))
        return carry_out(planned, "Converting", options, fields=conversion_fields, more=rate)


def rate(done: Saved, seconds: float) -> str:
    from holdfast.core.text import nbytes

    return f", {nbytes(int(done.nbytes / max(seconds, 1e-3)))}/s"


def conversion_fields(done: Conversion) -> dict[str, object]:
    return fields_of(done, "source tensors read_nbytes over_read_nbytes peak_nbytes")
