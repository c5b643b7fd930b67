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
Convert a checkpoint to another format: {written_in_words()}.
With --format dcp, DST becomes a directory for torch.distributed.checkpoint (DCP).
Tensors are streamed within a memory limit, and the new checkpoint appears under its name only when
it is complete and has been read back. Tied tensors and values that are not tensors, such as the
step number, are preserved. If the format cannot store a value, the conversion fails and lists all
such values.
"""

EXAMPLES = """\
examples:
  holdfast convert model.pt model.safetensors

  # Split the output into files of 5 GB. Also copies config and tokenizer files.
  holdfast convert llama/ out/ --format safetensors --max-shard-size 5GB

  # Cast to bfloat16, except for the norms.
  holdfast convert llama/ small/ --format safetensors \\
      --dtype bf16 --dtype '*norm*=f32'

  # Keep only the model of a training checkpoint.
  holdfast convert trainer.ckpt weights.safetensors \\
      --keep 'state_dict.*' --rename 'state_dict.*=*' --tensors-only

  # Decode the quantized blocks of GGUF.
  holdfast convert model.gguf model.safetensors --dequantize --dtype bf16

  # Convert Hugging Face weights to Megatron's layout.
  holdfast convert Qwen3-8B/ step-0/ --map qwen3:hf:megatron

  # See what would be written.
  holdfast convert model.pt model.safetensors --dry-run
"""


def add_arguments(verb: argparse.ArgumentParser) -> None:
    add_places(verb, ConvertOptions)
    cut = (
        "for Megatron rank files: how a tensor was split across ranks, such as '*.weight: tp=0' "
        "(syntax: holdfast reshard --help); repeatable"
    )
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
    # A shorter conversion spends its time on opening files and flushing them to the disk.
    if seconds < 1:
        return ""

    from holdfast.core.text import format_nbytes

    return f", {format_nbytes(int(done.nbytes / seconds))}/s"


def conversion_fields(done: Conversion) -> dict[str, object]:
    return fields_of(done, "source tensors read_nbytes over_read_nbytes peak_nbytes")
