"""`holdfast package`: several models in one checkpoint, each storage once; or other weights in a program that is there."""

from __future__ import annotations

import argparse
import os
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.api.save import Saved

__all__ = ["DESCRIPTION", "EXAMPLES", "add_arguments", "print_saved", "run"]

DESCRIPTION = """\
Write the weights of several models into one package (.pt2) or native directory (no suffix); what they share is stored once.
With --replace, put other weights into the program of a .pt2: names, dtypes and shapes must be those that it has."""

EXAMPLES = """\
examples:
  holdfast package base=base.pt adapter=adapter.safetensors -o bundle.pt2
  holdfast package a=a.safetensors b=b.safetensors --content -o bundle.pt2       equal tensors once, though in two files
  holdfast package --replace model.pt2 tuned.safetensors -o tuned.pt2
  holdfast package --replace heads.pt2 classify=tuned.pt -o tuned.pt2            one of several models
"""


def add_arguments(verb: argparse.ArgumentParser) -> None:
    """What the verb takes."""
    verb.add_argument("models", metavar="NAME=PATH", nargs="+", help="a name and a checkpoint of any format")
    verb.add_argument("-o", "--output", metavar="OUT", help="where to write; without it, --replace replaces the archive")
    verb.add_argument("--replace", metavar="PT2", help="put the weights into this archive; NAME= is its model, if it has several")
    verb.add_argument("--format", choices=("pt2", "native"), help="the format, whatever the suffix")
    verb.add_argument("--content", action="store_true", help="store equal tensors once, wherever they are; reads what looks equal")
    verb.add_argument("--overwrite", action="store_true", help="replace what is there")
    verb.add_argument("--no-durable", action="store_true", help="do not wait until the disk has it")
    verb.add_argument("-q", "--quiet", action="store_true", help="no progress bar, no report")
    verb.add_argument("--threads", metavar="N", type=int, help="threads that read and write")
    verb.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """The command; returns its exit code."""
    from holdfast.cli.progress import bar
    from holdfast.errors import Unsupported

    begin = time.perf_counter()
    if options.replace is not None:
        if options.content or options.format:
            raise Unsupported("--replace keeps the format and the sharing of the new weights; leave out --content and --format")
        with bar("Replacing", os.path.getsize(options.replace), quiet=options.quiet) as progress:
            saved = _replace(options, progress)
    else:
        from holdfast.api.package import package

        if options.output is None:
            raise Unsupported("say where to write: -o bundle.pt2")
        models = dict(_pair(text) for text in options.models)
        if len(models) < len(options.models):
            raise Unsupported("two models have one name")
        native = options.format == "native" or (options.format is None and not os.path.splitext(options.output)[1])
        with bar("Packaging", sum(map(_nbytes, models.values())), quiet=options.quiet) as progress:
            saved = package(
                options.output, models, format="native" if native else "pt2",
                deduplicate="content" if options.content else "storage", overwrite=options.overwrite,
                durable=not options.no_durable, threads=options.threads, progress=progress,
            )  # fmt: skip
    if not options.quiet:
        print_saved(saved, time.perf_counter() - begin)
    return 0


def _replace(options: argparse.Namespace, progress: object) -> Saved:
    from holdfast.api.replace_weights import replace_weights
    from holdfast.errors import Unsupported

    if len(options.models) != 1:
        raise Unsupported("--replace takes one checkpoint of weights")
    name, equals, path = options.models[0].partition("=")
    # A path may have an equals sign, too; one that is there is a path.
    named = bool(equals) and not os.path.exists(options.models[0])
    return replace_weights(
        options.replace, path if named else options.models[0], output=options.output, model=name if named else None,
        overwrite=options.overwrite, durable=not options.no_durable, threads=options.threads,
        progress=progress if callable(progress) else None,
    )  # fmt: skip


def _pair(text: str) -> tuple[str, str]:
    from holdfast.errors import Unsupported

    name, equals, path = text.partition("=")
    if not equals or not name or not path:
        raise Unsupported(f"{text!r} is not of the form NAME=PATH", found=text)
    return name, path


def _nbytes(path: str) -> int:
    """For the bar; what cannot be looked at is refused when it is opened."""
    try:
        if os.path.isdir(path):
            return sum(entry.stat().st_size for entry in os.scandir(path) if entry.is_file())
        return os.path.getsize(path)
    except OSError:
        return 0


def print_saved(saved: Saved, seconds: float, more: str = "") -> None:
    """What was written, in a line, and what a person should know about it."""
    from holdfast.cli.lines import print_lines
    from holdfast.cli.text import clip, escape, nbytes, plural

    print_lines(
        [
            [
                ("wrote ", "clean"),
                (escape(clip(saved.path, 400)), "title"),
                (f"  {saved.format}", "dim"),
                (f"  {nbytes(saved.nbytes)}", "size"),
                (f" in {plural(saved.files, 'file')}  {seconds:.1f} s{more}", "dim"),
            ],
            *([("  note  ", "note"), (escape(clip(note, 600)), "")] for note in saved.notes),
        ]
    )
