"""The `holdfast` command: its verbs, their options, and the one place where an error becomes a line on stderr.

Exit codes: 0 done (for `scan`: clean), 1 `scan` found something suspicious, 2 an error or wrong usage, 130
interrupted. There is no traceback unless `--traceback` asks for one. Everything that a verb needs is imported when it
runs, so that `--help` starts fast; typer's own rich help is off for the same reason (0.1 s).
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.text import clip, escape

__all__ = ["app", "main"]

app = typer.Typer(
    name="holdfast",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)

CheckpointPath = Annotated[
    Path, typer.Argument(metavar="PATH", help="A checkpoint: .pt, .pth, .bin, .ckpt, .safetensors, or a directory.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document (schema: docs/cli.md).")]


@app.callback(invoke_without_command=True)
def holdfast(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show where in Holdfast an error came from.")] = False,
) -> None:
    """Open any PyTorch-family checkpoint without running the code inside it.

    \b
    Examples:
      holdfast show model.pt                     what is in it
      holdfast read model.pt layers.0.weight     one tensor, and only its bytes
      holdfast scan downloads/                   what the pickles would have done
    """
    if version:
        from holdfast import __version__

        sys.stdout.write(f"holdfast {__version__}\n")
        raise typer.Exit
    if context.invoked_subcommand is None:
        sys.stdout.write(context.get_help() + "\n")
        raise typer.Exit


@app.command()
def show(
    path: CheckpointPath,
    pattern: Annotated[
        str | None, typer.Option("--filter", "-f", metavar="GLOB", help="Only names that match; a flat table.")
    ] = None,
    depth: Annotated[int | None, typer.Option("--depth", "-d", min=1, help="Levels of the tree to show.")] = None,
    everything: Annotated[bool, typer.Option("--all", "-a", help="Every line, with nothing folded or cut.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what is in a checkpoint: names, dtypes, shapes, sizes, ties, foreign objects. No tensor data is read.

    Layers of the same structure are shown once, as layers.[0-31].

    \b
    Examples:
      holdfast show model.pt
      holdfast show model.pt --filter '*.attn.*'
      holdfast show model.pt --filter optimizer.param_groups
      holdfast show model.safetensors --depth 2
      holdfast show model.pt --json | jq '.tensors[].name'
    """
    from holdfast.api.open import open as open_checkpoint
    from holdfast.cli import lines
    from holdfast.cli import show as view

    with open_checkpoint(path) as checkpoint:
        if as_json:
            from holdfast.cli.document import document, dumps

            wanted = view.matcher(pattern) if pattern is not None else lambda name: True
            sys.stdout.write(dumps(document(checkpoint, wanted=wanted)) + "\n")
        elif pattern is not None:
            lines.print_lines(view.show_table(checkpoint, pattern, everything=everything))
        else:
            lines.print_lines(view.show_tree(checkpoint, depth=depth, everything=everything, pieces=lines.guides()))


@app.command()
def read(
    path: CheckpointPath,
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Names of tensors, or globs.")],
    index: Annotated[
        str | None, typer.Option("--slice", "-s", metavar="INDEX", help="As in numpy: '0:2, ::2, -1', '...', 'None'.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write .npy or .npz instead of printing.")
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="With -o: keep the bits of types that numpy lacks, as unsigned integers.")
    ] = False,
) -> None:
    """Read tensors: print them as numpy does, or write them to a file. Only the bytes that are asked for are read.

    bfloat16 and the 8-, 6- and 4-bit floats are printed and written as float32, which holds them exactly.

    \b
    Examples:
      holdfast read model.pt layers.0.weight
      holdfast read model.pt layers.0.weight --slice '0:2, ::2, -1'
      holdfast read model.pt layers.0.weight -o weight.npy
      holdfast read model.pt 'layers.0.*' -o layer0.npz
    """
    from holdfast.api.open import open as open_checkpoint
    from holdfast.cli import lines
    from holdfast.cli import read as reading

    with open_checkpoint(path) as checkpoint:
        tensors = reading.choose(checkpoint, names, index)
        if output is None:
            lines.print_lines(reading.print_tensors(tensors))
        else:
            lines.print_lines(reading.write_tensors(checkpoint, tensors, output, raw=raw), file=sys.stderr)


@app.command()
def scan(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="Files, and directories to search.")],
    strict: Annotated[bool, typer.Option("--strict", help="Count unknown globals as suspicious.")] = False,
    everything: Annotated[bool, typer.Option("--all", "-a", help="Every finding of every file.")] = False,
    as_json: AsJson = False,
) -> None:
    """Say what a file would have done if it had been loaded with pickle: each foreign global, how bad, and where.

    Nothing is loaded, imported or called to find out. In directories, files that are no checkpoints and no pickles
    are skipped.

    \b
    Exit codes:
      0  clean: nothing dangerous or suspicious (with --strict: nothing unknown either)
      1  something dangerous or suspicious
      2  a file could not be read, was refused, or ends too early

    \b
    Examples:
      holdfast scan model.pt
      holdfast scan ~/.cache/huggingface --strict
      holdfast scan *.ckpt --json
    """
    from holdfast.api.scan import scan as scan_files
    from holdfast.cli import lines
    from holdfast.cli import scan as view

    report = scan_files(*paths)
    if as_json:
        from holdfast.cli.document import dumps

        sys.stdout.write(dumps(view.scan_document(report, strict=strict)) + "\n")
    else:
        lines.print_lines(view.scan_lines(report, everything=everything, strict=strict))
    raise typer.Exit({"clean": 0, "suspicious": 1, "error": 2}[report.verdict(strict=strict)])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code. Nothing but the exit code comes out."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # A terminal that cannot show a character shows its code.
            stream.reconfigure(errors="backslashreplace")
    # Looking for cycles among the million objects of a large checkpoint, again and again, would take half of the time.
    gc.set_threshold(200_000)
    try:
        code = app(args=argv, prog_name="holdfast", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except BrokenPipeError:
        return _pipe_closed()
    except (KeyboardInterrupt, typer.Abort):
        sys.stderr.write("holdfast: interrupted\n")
        return 130
    except Exception as error:
        if "--traceback" in argv:
            raise
        sys.stderr.write(f"holdfast: {escape(clip(_sentence(error), 2000))}\n")
        return 2


def _pipe_closed() -> int:
    """The reader of our output went away, as `head` does.

    Python would complain when it flushes at exit: give it nothing to flush.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 141  # 128 + SIGPIPE, as the shell reports it for other tools


def _sentence(error: Exception) -> str:
    """What to say about an error: its message where it is one of ours, of typer's or of the system's; else that this
    is a bug.
    """
    from holdfast.errors import HoldfastError

    if isinstance(error, HoldfastError):
        return str(error)
    # typer has its own copy of click's exceptions in some versions and click's in others; both have this method.
    message = getattr(error, "format_message", None)
    if callable(message):
        context = getattr(error, "ctx", None)
        verb = f" (try: {context.command_path} --help)" if context is not None else ""
        return f"{message()}{verb}"
    if isinstance(error, OSError):
        places: Iterable[object] = (error.filename, error.filename2)
        where = ", ".join(repr(os.fspath(p)) for p in places if isinstance(p, str | bytes | os.PathLike))
        return f"{error.strerror or type(error).__name__}{f': {where}' if where else ''}"
    if isinstance(error, MemoryError):
        return "out of memory"
    return f"internal error, please report it: {type(error).__name__}: {error} (holdfast --traceback … shows where)"
