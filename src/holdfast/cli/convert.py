"""`holdfast convert`: a conversion with a progress bar, and what it did in a line or as JSON. `edit` reports in the same way."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

from holdfast.cli import values
from holdfast.cli.planned import FORMATS, add_folder, add_sparse, add_writing, carry_out, copy_config, writing
from holdfast.cli.values import pair

if TYPE_CHECKING:
    from holdfast.rewrite.convert import Conversion
    from holdfast.rewrite.planned import Saved
    from holdfast.rewrite.transform import Edits

DESCRIPTION = """\
Write a checkpoint in another format: torch (.pt, .pth, .bin, .ckpt), safetensors, or a native directory (no suffix).
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
    """What the verb takes."""
    verb.add_argument("src", metavar="SRC", type=values.path, help="a checkpoint of any format")
    verb.add_argument("dst", metavar="DST", type=values.target, help="where to write; the suffix says the format")
    add_edits(verb)
    verb.add_argument("--model", metavar="NAME", help="of a package: the state dict of this model")
    verb.add_argument("--constants", action="store_true", help="of a package: with the constants of its programs")
    verb.add_argument("--sample-inputs", action="store_true", help="of a package: with the inputs that they were exported with")
    verb.add_argument("--dequantize", action="store_true", help="of GGUF: the numbers that its quantised blocks stand for")
    verb.add_argument(
        "--rule", metavar="RULE", action="append", default=[], help="of Megatron's ranks: how names were cut, as for reshard"
    )
    verb.add_argument("--resume", action="store_true", help="to a directory: keep what an interrupted try finished")
    add_sparse(verb)
    add_writing(verb)
    verb.set_defaults(run=run)


def add_edits(verb: argparse.ArgumentParser) -> None:
    """What `convert` and `edit` have in common."""
    verb.add_argument("--format", choices=FORMATS, help="the format, whatever the suffix")
    cast = "cast floating-point tensors: bf16, f16, f32, …; or those of a name: '*norm*=f32' ('=keep': not at all)"
    verb.add_argument("--dtype", metavar="[GLOB=]DTYPE", action="append", default=[], help=cast)
    verb.add_argument("--keep", metavar="GLOB", action="append", default=[], help="only names that match")
    verb.add_argument("--drop", metavar="GLOB", action="append", default=[], help="all but names that match")
    verb.add_argument("--rename", metavar="OLD=NEW", action="append", default=[], type=pair, help="'model.*=*'")
    verb.add_argument("--tensors-only", action="store_true", help="leave out what is no tensor")
    add_folder(verb)


def edits_of(options: argparse.Namespace) -> Edits:
    """Those options, for the library."""
    from holdfast.rewrite.transform import Edits, casts_of

    casts = casts_of(_dtypes(options.dtype))
    dequantize = getattr(options, "dequantize", False)  # `edit` has no such option: it writes what it reads
    return Edits(tuple(options.keep), tuple(options.drop), tuple(options.rename), casts, options.tensors_only, dequantize)


def _dtypes(words: Sequence[str]) -> dict[str, str]:
    """Each `GLOB=DTYPE` in its order, and last of all the dtype without a pattern, wherever that stands."""
    from holdfast.errors import Unsupported

    dtypes: dict[str, str] = {}
    rest: list[str] = []
    for word in words:
        pattern, equals, dtype = word.rpartition("=")
        if not equals:
            rest.append(dtype)
        elif not pattern or pattern in dtypes:
            raise Unsupported(f"--dtype {word}: write GLOB=DTYPE, each GLOB once", found=word)
        else:
            dtypes[pattern] = dtype
    if len(rest) > 1 or (rest and "*" in dtypes):
        raise Unsupported("--dtype is given twice for all tensors; write GLOB=DTYPE for some of them", found=tuple(words))
    return dtypes | dict.fromkeys(("*",) * len(rest), *rest)


def run(options: argparse.Namespace) -> int:
    """The command; returns its exit code."""
    from holdfast.inspect.open import open as open_checkpoint
    from holdfast.rewrite.convert import plan_conversion
    from holdfast.rewrite.formats import Options
    from holdfast.rewrite.models import Selection

    with open_checkpoint(options.src, rules=options.rule, threads=1) if options.rule else nullcontext(options.src) as source:
        planned = plan_conversion(
            source, options.dst, format=options.format, edits=edits_of(options),
            selection=Selection(options.model, options.constants, options.sample_inputs),
            options=Options(options.max_shard_size, keep_tree=True, sparse=options.sparse),
            copy_config=copy_config(options), writing=writing(options, resume=options.resume),
        )  # fmt: skip
        return carry_out(planned, "Converting", options, fields=conversion_fields, more=rate)


def rate(done: Saved, seconds: float) -> str:
    """How fast it was."""
    from holdfast.core.text import nbytes

    return f", {nbytes(int(done.nbytes / max(seconds, 1e-3)))}/s"


def conversion_fields(done: Conversion) -> dict[str, object]:
    """What only a conversion says, as values that JSON has."""
    return {
        "source": done.source,
        "tensors": done.tensors,
        "read_nbytes": done.read_nbytes,
        "over_read_nbytes": done.over_read_nbytes,
        "peak_nbytes": done.peak_nbytes,
    }
