"""What the command line takes: its verbs, their options, and help with examples.

argparse, because it starts in 10 ms: typer takes 60, and since 0.29 another 80 for pydantic as soon as a command runs,
which together are half of what `holdfast show` may take. Each verb imports what it needs when it runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from holdfast.cli import compact, package, places, prune, reshard, stats, tie
from holdfast.cli.planned import add_sparse

if TYPE_CHECKING:
    from holdfast.rewrite.transform import Edits

__all__ = ["parse"]

DESCRIPTION = "Open any PyTorch-family checkpoint without running the code inside it."

EXAMPLES = """\
examples:
  holdfast show model.pt                     what is in it
  holdfast read model.pt layers.0.weight     one tensor, and only its bytes
  holdfast scan downloads/                   what the pickles would have done
  holdfast verify model.pt                   whether every byte is as it was written
  holdfast diff old.pt new.safetensors       what is different
  holdfast convert model.pt model.safetensors
  holdfast edit model.pt --drop 'optimizer.*'
"""

SHOW = """\
Show what is in a checkpoint: names, dtypes, shapes, sizes, ties, plain values, foreign objects. No tensor data is read.
Layers of the same structure are shown once, as layers.[0-31].
"""

SHOW_EXAMPLES = """\
examples:
  holdfast show model.pt
  holdfast show model.pt --filter '*.attn.*'
  holdfast show model.pt --filter optimizer.param_groups
  holdfast show model.safetensors --depth 2
  holdfast show model.pt --json | jq '.tensors[].name'
"""

READ = """\
Read tensors: print them as numpy does, or write them to a file. Only the bytes that are asked for are read.
bfloat16 and the 8-, 6- and 4-bit floats are printed and written as float32, which holds them exactly.
"""

READ_EXAMPLES = """\
examples:
  holdfast read model.pt layers.0.weight
  holdfast read model.pt layers.0.weight --slice '0:2, ::2, -1'
  holdfast read model.pt layers.0.weight -o weight.npy
  holdfast read model.pt 'layers.0.*' -o layer0.npz
"""

SCAN = """\
Say what files would have done if a trusting loader had loaded them: each foreign global, how bad, and where.
Nothing is loaded, imported or called to find out. In directories, what no loader would do anything with is skipped, and named.
"""

SCAN_EXAMPLES = """\
exit codes:
  0  clean: all of it was read, and nothing was found
  1  something dangerous or suspicious (with --strict: or unknown), whatever else could not be read
  2  nothing was found, but something could not be read to its end, or was refused
  3  something unknown, and nothing worse was found
  4  nothing scanned: no file that any loader would do anything with

examples:
  holdfast scan model.pt
  holdfast scan ~/.cache/huggingface --strict
  holdfast scan *.ckpt --json
"""

VERIFY = """\
Check whole checkpoints against the checksums that they record, and name every damage: file, tensors, byte.
Where none are recorded, the structure is checked and every byte is read.
"""

VERIFY_EXAMPLES = """\
exit codes:
  0  nothing is wrong
  1  something is damaged
  2  a file could not be opened or read

examples:
  holdfast verify model.pt
  holdfast verify checkpoints/step-*
  holdfast verify model/ --json
"""

DIFF = """\
Compare two checkpoints of any formats: tensors added, removed, renamed and changed, and plain values.
Tensors for which both files record the same checksum are not read.
"""

DIFF_EXAMPLES = """\
exit codes, as those of diff(1):
  0  the same
  1  different
  2  trouble

examples:
  holdfast diff old.pt new.pt
  holdfast diff model.pt model.safetensors --exact
  holdfast diff old.pt new.pt --json | jq '.changed[].name'
"""


CONVERT = """\
Write a checkpoint in another format: torch (.pt, .pth, .bin, .ckpt), safetensors, or a native directory (no suffix).
It is streamed, never held in memory; checked against its own checksums, read back, and put in place in one step. If anything
goes wrong nothing is there. Ties, views and everything that is no tensor are kept, or the conversion is refused with a list.
"""

CONVERT_EXAMPLES = """\
examples:
  holdfast convert model.pt model.safetensors
  holdfast convert model.pt model/ --format safetensors --max-shard-size 5GB
  holdfast convert pytorch_model.bin model.safetensors --dtype bf16 --rename 'model.*=*'
  holdfast convert trainer.ckpt weights.safetensors --keep 'state_dict.*' --tensors-only
  holdfast convert model.pt model.safetensors --dry-run
  holdfast convert heads.pt2 classify.safetensors --model classify               its state dict, without the program
"""

EDIT = """\
Rename, drop, keep and cast tensors and values, and set metadata: a new checkpoint, in place of the old one unless -o says
where. A reader sees the old one or the new one, never a half; a failed edit leaves the old one.
"""

EDIT_EXAMPLES = """\
patterns:
  globs on dotted names; * matches dots, too. Each * of a new name stands for what that * of the old one matched.

examples:
  holdfast edit model.pt --rename 'model.*=*'
  holdfast edit model.pt --drop 'optimizer.*' -o small.pt
  holdfast edit model.safetensors --dtype bf16 --set licence=apache-2.0 --unset author
"""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, as all errors here are."""

    def error(self, message: str) -> NoReturn:
        from holdfast.cli.text import escape

        self.exit(2, f"holdfast: {escape(message)} (try: {self.prog} --help)\n")


class Version(argparse.Action):
    """`--version`; the version is looked up only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *rest: object) -> NoReturn:
        from holdfast import __version__

        sys.stdout.write(f"holdfast {__version__}\n")
        parser.exit()


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options; `run` is the function of the verb. Raises `SystemExit` as argparse does."""
    return _parser().parse_args(_with_slices_joined(arguments))


def _with_slices_joined(arguments: Sequence[str]) -> list[str]:
    """`--slice -2:` as `--slice=-2:`, because argparse takes `-2:` for an option."""
    joined: list[str] = []
    for argument in arguments:
        if joined and joined[-1] in ("-s", "--slice") and "--" not in joined:
            joined[-1] = f"--slice={argument}"
        else:
            joined.append(argument)
    return joined


def _parser() -> argparse.ArgumentParser:
    whole = Parser(
        prog="holdfast",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    whole.add_argument("--version", action=Version, nargs=0, help="print the version and exit")
    whole.add_argument("--traceback", action="store_true", help="show where in Holdfast an error came from")
    whole.set_defaults(run=lambda options: _help(whole))
    verbs = whole.add_subparsers(title="commands", metavar="COMMAND", parser_class=Parser)
    _add_show(_verb(verbs, "show", "show what is in a checkpoint", SHOW, SHOW_EXAMPLES))
    _add_read(_verb(verbs, "read", "print tensors, or write them as .npy or .npz", READ, READ_EXAMPLES))
    _add_scan(_verb(verbs, "scan", "say what pickles would have done", SCAN, SCAN_EXAMPLES))
    _add_verify(_verb(verbs, "verify", "check every byte against its checksum", VERIFY, VERIFY_EXAMPLES))
    _add_diff(_verb(verbs, "diff", "say how two checkpoints differ", DIFF, DIFF_EXAMPLES))
    _add_convert(_verb(verbs, "convert", "write a checkpoint in another format", CONVERT, CONVERT_EXAMPLES))
    _add_edit(_verb(verbs, "edit", "rename, drop, cast, set metadata", EDIT, EDIT_EXAMPLES))
    reshard.add_arguments(_verb(verbs, "reshard", "cut a checkpoint for a mesh of ranks", reshard.DESCRIPTION, reshard.EXAMPLES))
    prune.add_arguments(_verb(verbs, "prune", "set weights to zero by rules", prune.DESCRIPTION, prune.EXAMPLES))
    stats.add_arguments(_verb(verbs, "stats", "say what the numbers look like", stats.DESCRIPTION, stats.EXAMPLES))
    package.add_arguments(_verb(verbs, "package", "several models in one checkpoint", package.DESCRIPTION, package.EXAMPLES))
    tie.add_arguments(_verb(verbs, "tie", "find equal tensors, and store them once", tie.DESCRIPTION, tie.EXAMPLES))
    compact.add_arguments(_verb(verbs, "compact", "drop bytes that no tensor reaches", compact.DESCRIPTION, compact.EXAMPLES))
    return whole


def _help(whole: argparse.ArgumentParser) -> int:
    whole.print_help()
    return 0


def _verb(
    verbs: argparse._SubParsersAction[Parser], name: str, short: str, description: str, examples: str
) -> argparse.ArgumentParser:
    return verbs.add_parser(
        name,
        help=short,
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


PATH_HELP = "a checkpoint: .pt, .pth, .bin, .ckpt, .safetensors, or a directory"
JSON_HELP = "print one JSON document (its schema is in docs/cli.md)"
QUIET_HELP = "no progress bar"


def _add_show(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("path", metavar="PATH", type=places.path, help=PATH_HELP)
    verb.add_argument("-f", "--filter", metavar="GLOB", help="only names that match; a flat table")
    verb.add_argument("-d", "--depth", metavar="N", type=_positive, help="levels of the tree to show")
    verb.add_argument("-a", "--all", action="store_true", help="every line, with nothing folded or cut")
    verb.add_argument("--ranks", action="store_true", help="draw which file holds which part of each tensor")
    verb.add_argument("--sparsity", action="store_true", help="where the zeros of each tensor are; reads them all")
    verb.add_argument("--json", action="store_true", help=JSON_HELP)
    verb.set_defaults(run=_run_show)


def _add_read(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("path", metavar="PATH", type=places.path, help=PATH_HELP)
    verb.add_argument("names", metavar="NAME", nargs="+", help="names of tensors, or globs")
    verb.add_argument("-s", "--slice", metavar="INDEX", help="as in numpy: '0:2, ::2, -1', '...', 'None'")
    verb.add_argument("-o", "--output", metavar="FILE", type=places.path, help="write .npy or .npz instead of printing")
    verb.add_argument("--raw", action="store_true", help="with -o: keep the bits of types that numpy lacks, as unsigned integers")
    verb.set_defaults(run=_run_read)


def _add_scan(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("paths", metavar="PATH", type=places.path, nargs="+", help="files, and directories to search")
    verb.add_argument("--strict", action="store_true", help="count unknown globals as suspicious")
    verb.add_argument("-a", "--all", action="store_true", help="every finding of every file")
    verb.add_argument("--allow", metavar="FILE", type=places.path, help="patterns of module.name, one a line: shown, not counted")
    form = verb.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help=JSON_HELP)
    form.add_argument("--sarif", action="store_true", help="as SARIF 2.1.0")
    verb.set_defaults(run=_run_scan)


def _add_verify(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("paths", metavar="PATH", type=places.path, nargs="+", help="checkpoints, files or directories")
    verb.add_argument("-a", "--all", action="store_true", help="every damage")
    verb.add_argument("-q", "--quiet", action="store_true", help=QUIET_HELP)
    verb.add_argument("--json", action="store_true", help=JSON_HELP)
    verb.set_defaults(run=_run_verify)


def _add_diff(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("a", metavar="A", type=places.path, help=PATH_HELP)
    verb.add_argument("b", metavar="B", type=places.path, help="another one")
    verb.add_argument("-e", "--exact", action="store_true", help="compare bytes even where checksums agree")
    verb.add_argument("-a", "--all", action="store_true", help="every difference")
    verb.add_argument("-q", "--quiet", action="store_true", help=QUIET_HELP)
    verb.add_argument("--json", action="store_true", help=JSON_HELP)
    verb.set_defaults(run=_run_diff)


def _add_convert(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("src", metavar="SRC", type=places.path, help=PATH_HELP)
    verb.add_argument("dst", metavar="DST", type=places.target, help="where to write; the suffix says the format")
    verb.add_argument("--format", choices=("torch", "safetensors", "native"), help="the format, whatever the suffix")
    _add_edits(verb)
    verb.add_argument("--model", metavar="NAME", help="of a package: the state dict of this model")
    verb.add_argument("--constants", action="store_true", help="of a package: with the constants of its programs")
    verb.add_argument("--sample-inputs", action="store_true", help="of a package: with the inputs that they were exported with")
    verb.add_argument("--overwrite", action="store_true", help="replace what is there")
    verb.add_argument("--resume", action="store_true", help="to a directory: keep what an interrupted try finished")
    add_sparse(verb)
    verb.set_defaults(run=_run_convert)


def _add_edit(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("path", metavar="PATH", type=places.path, help=PATH_HELP)
    verb.add_argument("-o", "--output", metavar="OUT", type=places.target, help="write here and leave PATH as it is")
    _add_edits(verb)
    verb.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], type=_pair, help="set metadata")
    verb.add_argument("--unset", metavar="KEY", action="append", default=[], help="take metadata out")
    verb.add_argument("--overwrite", action="store_true", help="with -o: replace what is there")
    verb.set_defaults(run=_run_edit)


def _add_edits(verb: argparse.ArgumentParser) -> None:
    """What `convert` and `edit` have in common."""
    verb.add_argument("--dtype", metavar="DTYPE", help="cast floating-point tensors: bf16, f16, f32, float8_e4m3fn, …")
    verb.add_argument("--keep", metavar="GLOB", action="append", default=[], help="only names that match")
    verb.add_argument("--drop", metavar="GLOB", action="append", default=[], help="all but names that match")
    verb.add_argument("--rename", metavar="OLD=NEW", action="append", default=[], type=_pair, help="'model.*=*'")
    verb.add_argument("--tensors-only", action="store_true", help="leave out what is no tensor")
    verb.add_argument("--max-shard-size", metavar="SIZE", type=_size, help="split into files of at most 5GB, 500MiB, …")
    verb.add_argument("--max-memory", metavar="SIZE", type=_size, default=1 << 30, help="use no more than this (1GiB)")
    verb.add_argument("--threads", metavar="N", type=_positive, help="how many threads")
    verb.add_argument("--no-durable", action="store_true", help="do not wait for the disk (no fsync)")
    verb.add_argument("--no-verify", action="store_true", help="do not read back what was written")
    verb.add_argument("-n", "--dry-run", action="store_true", help="say what would be done, and do nothing")
    verb.add_argument("-q", "--quiet", action="store_true", help="no progress bar, no report")
    verb.add_argument("--json", action="store_true", help=JSON_HELP)


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form OLD=NEW")
    return key, value


def _size(text: str) -> int:
    from holdfast.errors import Unsupported
    from holdfast.rewrite.formats import byte_count

    try:
        return byte_count(text)
    except Unsupported as error:
        raise argparse.ArgumentTypeError(error.message) from None


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return int(text)


def _run_show(options: argparse.Namespace) -> int:
    if options.ranks:
        from holdfast.cli.ranks import run as draw

        return draw(options.path, pattern=options.filter)
    if options.sparsity:
        from holdfast.cli.sparsity import run as look

        return look(options.path, pattern=options.filter, everything=options.all, as_json=options.json)
    from holdfast.cli.show import run

    return run(options.path, pattern=options.filter, depth=options.depth, everything=options.all, as_json=options.json)


def _run_read(options: argparse.Namespace) -> int:
    from holdfast.cli.read import run

    return run(options.path, options.names, index=options.slice, output=options.output, raw=options.raw)


def _run_scan(options: argparse.Namespace) -> int:
    from holdfast.cli.scan import run

    return run(
        options.paths, strict=options.strict, everything=options.all, as_json=options.json, as_sarif=options.sarif,
        allow=options.allow,
    )  # fmt: skip


def _run_verify(options: argparse.Namespace) -> int:
    from holdfast.cli.verify import run

    return run(options.paths, everything=options.all, quiet=options.quiet, as_json=options.json)


def _run_diff(options: argparse.Namespace) -> int:
    from holdfast.cli.diff import run

    return run(options.a, options.b, exact=options.exact, everything=options.all, quiet=options.quiet, as_json=options.json)


def _run_convert(options: argparse.Namespace) -> int:
    from holdfast.cli.convert import run
    from holdfast.rewrite.formats import Options
    from holdfast.rewrite.models import Selection

    selection = Selection(options.model, options.constants, options.sample_inputs)
    return run(
        options.src, options.dst, format=options.format, selection=selection, edits=_edits(options),
        options=Options(options.max_shard_size, keep_tree=True, sparse=options.sparse), max_memory=options.max_memory,
        overwrite=options.overwrite, durable=not options.no_durable, verify=not options.no_verify, threads=options.threads,
        resume=options.resume, dry_run=options.dry_run, quiet=options.quiet, as_json=options.json,
    )  # fmt: skip


def _run_edit(options: argparse.Namespace) -> int:
    from holdfast.cli.edit import run
    from holdfast.rewrite.edit import metadata_changes

    return run(
        options.path, options.output, edits=_edits(options), metadata=metadata_changes(dict(options.set), options.unset),
        max_shard_size=options.max_shard_size, max_memory=options.max_memory, overwrite=options.overwrite,
        durable=not options.no_durable, verify=not options.no_verify, threads=options.threads, dry_run=options.dry_run,
        quiet=options.quiet, as_json=options.json,
    )  # fmt: skip


def _edits(options: argparse.Namespace) -> Edits:
    from holdfast.rewrite.transform import Edits, dtype_named

    dtype = dtype_named(options.dtype) if options.dtype else None
    return Edits(tuple(options.keep), tuple(options.drop), tuple(options.rename), dtype, options.tensors_only)
