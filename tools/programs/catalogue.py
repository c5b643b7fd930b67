"""Which programs are run, and the reasons for differences that are meant.

A suite is a framework's own tests, from its sdist. An example is a script of a framework, from its sdist, run as a user would. A
script of ours uses the calls of torch, or of one framework, and nothing else. What needs a network or a GPU is skipped both ways.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TORCH = "torch==2.13.0"
"""The CPU build is small; whatever else pip would choose is not. It is installed first, and every other package beside it."""


@dataclass(frozen=True, slots=True)
class Suite:
    """Tests of one sdist: files, or folders of them."""

    package: str
    version: str
    tests: tuple[str, ...]
    needs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Example:
    """A script, each tuple of `runs` one call of it, in one folder. Files that they leave must be the same, but for `ignore`."""

    package: str
    version: str
    script: str
    runs: tuple[tuple[str, ...], ...]
    needs: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    standins: bool = False
    """Whether torchvision is replaced by noise (standins/)."""
    origin: Literal["sdist", "here"] = "sdist"


@dataclass(frozen=True, slots=True)
class Reason:
    """Why tests whose name contains `test` end otherwise than with torch, and are meant to."""

    test: str
    why: str


SUITES = (
    Suite(
        "accelerate",
        "1.15.0",
        (
            "tests/test_state_checkpointing.py",
            "tests/test_accelerator.py",
            "tests/test_modeling_utils.py",
            "tests/test_scheduler.py",
            "tests/test_optimizer.py",
        ),
        needs=("parameterized", "safetensors", "transformers"),
    ),
    Suite(
        "pytorch-ignite",
        "0.5.5",
        (
            "tests/ignite/handlers/test_checkpoint.py",
            "tests/ignite/handlers/test_ema_handler.py",
            "tests/ignite/engine/test_engine_state_dict.py",
            "tests/ignite/engine/test_deterministic.py",
        ),
        needs=("pytest-xdist",),
    ),
    Suite(
        "skorch",
        "1.4.0",
        (
            "skorch/tests/test_net.py",
            "skorch/tests/callbacks/test_training.py",
            "skorch/tests/test_utils.py",
        ),
        needs=("flaky", "pandas", "safetensors"),
    ),
    Suite(
        "stable-baselines3",
        "2.9.2",
        ("tests/test_save_load.py", "tests/test_callbacks.py", "tests/test_vec_normalize.py"),
    ),
    Suite("sb3-contrib", "2.9.2", ("tests/test_save_load.py",)),
    Suite(
        "poutyne",
        "1.19.0",
        ("tests/framework/experiment", "tests/framework/callbacks", "tests/framework/model"),
        needs=("pandas",),
    ),
    Suite("ema-pytorch", "0.8.3", ("tests",)),
)

EXAMPLES = (
    Example(
        "pytorch-ignite",
        "0.5.5",
        "examples/mnist/mnist_save_resume_engine.py",
        (
            ("--deterministic", "--epochs=3", "--log_dir=log", "--crash_iteration=20"),
            ("--deterministic", "--epochs=3", "--log_dir=log", "--resume_from=log/checkpoint_2.pt"),
        ),
        needs=("tensorboardX", "tqdm"),
        ignore=("log/events.*",),
        # Its checkpoints hold arrays, which torch.load has refused by default since 2.6.
        environment=(("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1"),),
        standins=True,
    ),
    Example(
        "schedulefree",
        "1.4.1",
        "examples/mnist/main.py",
        (("--epochs=1", "--save-model"),),
        standins=True,
    ),
    Example(
        "opacus",
        "1.6.0",
        "examples/mnist.py",
        (
            ("--device=cpu", "--epochs=1", "--save-model"),
            ("--device=cpu", "--epochs=1", "--disable-dp", "--save-model"),
        ),
        needs=("tqdm",),
        standins=True,
    ),
    *(
        # The second run goes on where the first one ended. Its logs have times in them.
        Example(
            "poutyne",
            "1.19.0",
            f"examples/basic_random_{kind}_with_model_bundle.py",
            ((), ()),
            ("pandas",),
            ("*log.tsv",),
        )
        for kind in ("classification", "regression")
    ),
)

OURS = (
    *(
        Example("torch", "2.13.0", f"scripts/{name}.py", ((),), ignore=ignore, origin="here")
        for name, ignore in (
            # What torch itself pickles there has an identity of its own at each save.
            ("dcp", ("*/.metadata",)),
            ("dcp_formats", ("*/.metadata",)),
            # A DTensor's mesh is named anew at each start.
            ("dcp_ranks", ("*/.metadata", "dtensor*.pt")),
            # The old container names storages by where they lay in memory.
            ("files", ("several.pt",)),
        )
    ),
    Example(
        "transformers",
        "5.22.2",
        "scripts/transformers_trainer.py",
        ((),),
        needs=("accelerate==1.15.0",),
        origin="here",
    ),
    Example("pytorch-lightning", "2.6.6", "scripts/lightning_trainer.py", ((),), origin="here"),
)

REASONS = (
    Reason(
        "test_disk_saver_atomic",
        "a save that fails leaves no half of a file, with `atomic=False` either",
    ),
)
