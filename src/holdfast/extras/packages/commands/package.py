"""`holdfast package`: several models in one checkpoint, each storage once; or other weights in a program that is there."""

from __future__ import annotations

import argparse
import os
import time

from holdfast.cli import values
from holdfast.cli.options import add_options, given
from holdfast.cli.planned import carry_out
from holdfast.core.options import PackageOptions, ReplaceOptions

DESCRIPTION = """\
Combine the weights of several models in one package, and store data that the models share only
once. A package is a .pt2 file, the format of torch.export. If DST has no suffix, it is a native
directory, the format of Holdfast.

  holdfast package NAME=PATH [NAME=PATH ...] DST

With --replace, put new weights into PT2, an exported program, without running it. The new weights
must have the same names, dtypes and shapes as the old weights.

  holdfast package --replace PT2 WEIGHTS DST
  holdfast package --replace PT2 WEIGHTS --in-place"""

EXAMPLES = """\
examples:
  holdfast package base=base.pt adapter=adapter.safetensors bundle.pt2

  # Store equal tensors once, even if they come from two files.
  holdfast package a=a.safetensors b=b.safetensors bundle.pt2 --content

  # Put tuned weights into an exported program.
  holdfast package --replace model.pt2 tuned.safetensors tuned.pt2
  holdfast package --replace model.pt2 tuned.safetensors --in-place

  # Replace one of several models.
  holdfast package --replace heads.pt2 classify=tuned.pt tuned.pt2
"""


def add_arguments(verb: argparse.ArgumentParser) -> None:
    models = (
        "a model to add, as NAME=PATH; with --replace, the new weights (as NAME=PATH if the package "
        "has several models). The last argument is DST, the path or URL to write"
    )
    verb.add_argument("models", metavar="MODEL", nargs="+", help=models)
    in_place = "with --replace: change the package PT2 itself, atomically; there is no DST"
    verb.add_argument("--in-place", action="store_true", help=in_place)
    archive = "put new weights into this package"
    verb.add_argument("--replace", metavar="PT2", type=values.target, help=archive)
    add_options(verb, PackageOptions)
    verb.set_defaults(several=True, dst=None)


def run(options: argparse.Namespace) -> int:
    from holdfast.stores.paths import place_of
    from holdfast.stores.place import place_from_text

    if not options.in_place and len(options.models) > 1:
        # As for cp, the last one is where it goes; a model that stands there was not meant to be overwritten.
        _, equals, path = options.models[-1].partition("=")
        if not equals or not place_from_text(options.models[-1]).on_disk or not _is_path(path):
            options.dst = place_of(options.models.pop())
    return _replace(options) if options.replace is not None else _package(options)


def _package(options: argparse.Namespace) -> int:
    from holdfast.cli.progress import bar
    from holdfast.errors import Unsupported
    from holdfast.extras.packages.package import plan_package

    if options.dst is None or options.in_place:
        raise Unsupported(
            "no target; pass it as the last argument: holdfast package base=base.pt bundle.pt2"
        )
    models = dict(_pair(text) for text in options.models)
    if len(models) < len(options.models):
        raise Unsupported("two models have the same name")
    begin = time.perf_counter()
    content = "deduplicate" in options
    with bar("Comparing", quiet=options.quiet or options.json or not content) as progress:
        planned = plan_package(
            models, options.dst, given(options, PackageOptions, progress=progress)
        )
    return carry_out(
        planned, "Packaging", options, fields=lambda done: {"models": models}, begin=begin
    )


def _replace(options: argparse.Namespace) -> int:
    from holdfast.errors import Unsupported
    from holdfast.extras.packages.package import plan_replacement

    if "deduplicate" in options or "format" in options:
        raise Unsupported(
            "--replace keeps the format and the sharing of the new weights; leave out --content and --format"
        )
    if len(options.models) != 1:
        raise Unsupported("--replace needs exactly one checkpoint with weights")
    name, equals, path = options.models[0].partition("=")
    # A path may have an equals sign, too; one that is there is a path.
    model, weights = (
        (name, path) if equals and not _is_path(options.models[0]) else (None, options.models[0])
    )
    planned = plan_replacement(
        options.replace, options.dst, given(options, ReplaceOptions, weights=weights, model=model)
    )
    fields = {"source": options.replace, "weights": weights, "model": model}
    return carry_out(planned, "Replacing", options, fields=lambda done: fields)


def _is_path(text: str) -> bool:
    from holdfast.stores.place import place_from_text

    return not place_from_text(text).on_disk or os.path.exists(text)


def _pair(text: str) -> tuple[str, str]:
    from holdfast.errors import Unsupported

    name, equals, path = text.partition("=")
    if not equals or not name or not path:
        raise Unsupported(f"write each model as NAME=PATH, such as base={text}", found=text)
    return name, path
