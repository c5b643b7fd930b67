"""`holdfast reshard`: a checkpoint written as a mesh of ranks would have saved it."""

from __future__ import annotations

import argparse
import math

from holdfast.cli import values
from holdfast.cli.options import given
from holdfast.cli.planned import add_places, carry_out
from holdfast.core.options import ReshardOptions

DESCRIPTION = """\
Split a checkpoint for a mesh of ranks. DST becomes a native directory, the sharded format of
Holdfast, with one data file for each rank.

Rules specify how to split tensors. '*.weight: tp=0' splits dimension 0 of the tensors whose names
match '*.weight' over the mesh axis tp. '*: replicate' replicates the matching tensors. The first
rule that matches a name applies. Tensors without a rule are replicated.

Without any rules, the axes dp and fsdp split dimension 0 of all tensors. The axis tp splits the
matrices of a transformer with Hugging Face tensor names."""

EXAMPLES = """\
examples:
  holdfast reshard step-1000 for-eight --mesh dp=8

  # Tensor parallelism with custom rules.
  holdfast reshard model.safetensors model-tp4 --mesh tp=4 \\
      --rule '*.q_proj.weight: tp=0' --rule '*.o_proj.weight: tp=1'

  # Read the rules from a file.
  holdfast reshard step-1000 on-eight --mesh dp=2,tp=4 --plan rules.txt

  # Show which file contains which part of each tensor.
  holdfast show --ranks model-tp4
"""


def add_arguments(verb: argparse.ArgumentParser) -> None:
    add_places(verb, ReshardOptions)
    cut = "split the tensors that match, such as '*.weight: tp=0'; repeatable"
    verb.add_argument("--rule", metavar="RULE", dest="rules", action="append", default=[], help=cut)
    verb.add_argument(
        "--plan",
        metavar="FILE",
        type=values.path,
        help="file with one rule per line; # starts a comment",
    )


def run(options: argparse.Namespace) -> int:
    from holdfast.core.text import pluralize
    from holdfast.stores.paths import describe_place
    from holdfast.verbs.reshard import parse_mesh, plan_reshard

    lines = options.plan.read_text("utf-8").splitlines() if options.plan else []
    rules = [
        text
        for text in (*options.rules, *(line.partition("#")[0].strip() for line in lines))
        if text
    ]
    planned = plan_reshard(options.src, options.dst, rules, given(options, ReshardOptions))
    ranks = math.prod(
        parse_mesh(options.mesh).values()
    )  # beside their files there may be a config and a tokenizer
    fields = {"source": describe_place(options.src), "mesh": options.mesh, "ranks": ranks}
    return carry_out(
        planned,
        "Resharding",
        options,
        fields=lambda done: fields,
        more=lambda done, seconds: f" for {pluralize(ranks, 'rank')}",
    )
