"""`holdfast package`: several models in one checkpoint, each storage once; or other weights in a program that is there."""

from __future__ import annotations

import argparse
import os
from contextlib import ExitStack

from holdfast.cli import places
from holdfast.cli.planned import add_writing, carry_out, writing

__all__ = ["DESCRIPTION", "EXAMPLES", "add_arguments", "run"]

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
    where = "where to write; without it, --replace replaces the archive"
    verb.add_argument("-o", "--output", metavar="OUT", type=places.target, help=where)
    archive = "put the weights into this archive; NAME= is its model, if it has several"
    verb.add_argument("--replace", metavar="PT2", type=places.target, help=archive)
    verb.add_argument("--format", choices=("pt2", "native"), help="the format, whatever the suffix")
    verb.add_argument("--content", action="store_true", help="store equal tensors once, wherever they are; reads what looks equal")
    add_writing(verb, "replace what is there")
    verb.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """The command; returns its exit code."""
    return _replace(options) if options.replace is not None else _package(options)


def _package(options: argparse.Namespace) -> int:
    from holdfast.cli.progress import bar
    from holdfast.errors import Unsupported
    from holdfast.rewrite.package import planned_package

    if options.output is None:
        raise Unsupported("say where to write: -o bundle.pt2")
    models = dict(_pair(text) for text in options.models)
    if len(models) < len(options.models):
        raise Unsupported("two models have one name")
    native = options.format == "native" or (options.format is None and not os.path.splitext(options.output)[1])
    with ExitStack() as stack:
        with bar("Comparing", quiet=options.quiet or options.json or not options.content) as progress:
            planned = stack.enter_context(
                planned_package(
                    options.output, models, format="native" if native else "pt2",
                    deduplicate="content" if options.content else "storage", writing=writing(options), progress=progress,
                )
            )  # fmt: skip
        return carry_out(planned, "Packaging", options, fields={"models": models})


def _replace(options: argparse.Namespace) -> int:
    from holdfast.errors import Unsupported
    from holdfast.rewrite.replace_weights import planned_replacement

    if options.content or options.format:
        raise Unsupported("--replace keeps the format and the sharing of the new weights; leave out --content and --format")
    if len(options.models) != 1:
        raise Unsupported("--replace takes one checkpoint of weights")
    name, equals, path = options.models[0].partition("=")
    # A path may have an equals sign, too; one that is there is a path.
    model, weights = (name, path) if equals and not os.path.exists(options.models[0]) else (None, options.models[0])
    with planned_replacement(options.replace, weights, output=options.output, model=model, writing=writing(options)) as planned:
        fields = {"source": options.replace, "weights": weights, "model": model}
        return carry_out(planned, "Replacing", options, fields=fields)


def _pair(text: str) -> tuple[str, str]:
    from holdfast.errors import Unsupported

    name, equals, path = text.partition("=")
    if not equals or not name or not path:
        raise Unsupported(f"{text!r} is not of the form NAME=PATH", found=text)
    return name, path
