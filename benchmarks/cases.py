"""The cases, in the order of the table. Peers are imported inside of functions: a probe of ours must not load torch."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks import files
from benchmarks.board import Bound, Case, Count, Race, Start
from benchmarks.bulk import BULK
from benchmarks.pruning import PRUNING
from benchmarks.saving import SAVING
from benchmarks.torch_io import TORCH_IO

__all__ = ["CASES"]

MIB = 1 << 20
SLICES = 10_000
SLICE = 64
"""Elements of a small slice: 256 bytes."""


def ours_names(path: Path) -> object:
    import holdfast

    checkpoint = holdfast.open(path)
    return checkpoint, list(checkpoint)


def torch_names(path: Path) -> object:
    import torch

    state = torch.load(path, mmap=True, weights_only=True)
    return state, list(state)


def safe_open_names(path: Path) -> object:
    from safetensors import safe_open

    file = safe_open(path, "np")
    return file, list(file.keys())


def ours_whole(path: Path) -> object:
    import holdfast

    with holdfast.open(path) as checkpoint:
        return checkpoint.read()


def ours_unverified(path: Path) -> object:
    """Without comparing the checksums that torch wrote, as torch does not either."""
    import holdfast

    with holdfast.open(path, verify=False) as checkpoint:
        return checkpoint.read()


def torch_whole(path: Path) -> object:
    import torch

    return torch.load(path, weights_only=True)


def load_file_copied(path: Path) -> object:
    """`load_file` only maps; memory of one's own takes a copy. Each tensor is dropped when it is copied."""
    from safetensors.torch import load_file

    mapped = load_file(path)
    return {name: mapped.pop(name).clone() for name in list(mapped)}


def ours_mapped(path: Path) -> object:
    import holdfast

    with holdfast.open(path, mmap=True) as checkpoint:
        arrays = [tensor.numpy() for tensor in checkpoint.values()]
    return arrays, sum(
        float(array.reshape(-1)[:: 4096 // array.itemsize].sum()) for array in arrays
    )


def load_file_touched(path: Path) -> object:
    """The same touch by the same code, so that only the loading differs."""
    from safetensors.torch import load_file

    arrays = [tensor.numpy() for tensor in load_file(path).values()]
    return arrays, sum(
        float(array.reshape(-1)[:: 4096 // array.itemsize].sum()) for array in arrays
    )


def ours_slice(index):
    def job(path: Path) -> object:
        import holdfast

        with holdfast.open(path) as checkpoint:
            array = checkpoint["w"][index].numpy()
        assert array.nbytes == MIB, array.shape
        return array

    return job


def places(rows: int, columns: int, scattered: bool) -> list[tuple[int, slice]]:
    """Where the small slices are: every other 256 bytes of neighbouring rows, or spread over the whole file."""
    a_row = columns // SLICE // 2
    if not scattered:
        return [
            (i // a_row, slice(i % a_row * 2 * SLICE, (i % a_row * 2 + 1) * SLICE))
            for i in range(SLICES)
        ]
    # A stride that is coprime to the rows visits them in an order that no read-ahead guesses.
    step = 100_003
    return [
        (i * step % rows, slice(i % a_row * 2 * SLICE, (i % a_row * 2 + 1) * SLICE))
        for i in range(SLICES)
    ]


def ours_slices(scattered: bool):
    def job(path: Path) -> object:
        import holdfast

        with holdfast.open(path) as checkpoint:
            tensor = checkpoint["w"]
            return holdfast.read([tensor[place] for place in places(*tensor.shape, scattered)])

    return job


def ours_slices_alone(path: Path) -> object:
    """Each by itself, as one who does not know of `read` would."""
    import holdfast

    with holdfast.open(path) as checkpoint:
        tensor = checkpoint["w"]
        return [tensor[place].numpy() for place in places(*tensor.shape, True)]


def memmap_slices(scattered: bool):
    def job(path: Path) -> object:
        import json

        import numpy as np

        with path.open("rb") as file:
            nbytes = int.from_bytes(file.read(8), "little")
            shape = tuple(json.loads(file.read(nbytes))["w"]["shape"])
        array = np.memmap(path, np.float32, "r", 8 + nbytes, shape)
        return [np.array(array[place]) for place in places(*shape, scattered)]

    return job


def get_slices(scattered: bool):
    def job(path: Path) -> object:
        from safetensors import safe_open

        with safe_open(path, "np") as file:
            tensor = file.get_slice("w")
            return [tensor[place] for place in places(*tensor.get_shape(), scattered)]

    return job


def count_slices(scattered: bool):
    """The plan of the same job: how many reads, of how many bytes, for how many wanted."""

    def job(path: Path) -> dict[str, int]:
        import holdfast
        from holdfast.core.protocols import Request
        from holdfast.engine.boxes import estimate_read_cost

        with holdfast.open(path) as checkpoint:
            tensor = checkpoint["w"]
            wanted = [tensor[place] for place in places(*tensor.shape, scattered)]
            cost = estimate_read_cost([Request(t, t.empty()) for t in wanted])
        return {
            "reads": cost.read_count,
            "read_nbytes": cost.read_nbytes,
            "wanted_nbytes": cost.wanted_nbytes,
        }

    return job


PYTHON = ("{python}", "-c")
HOLDFAST = str(Path(sys.executable).parent / "holdfast")

LIMITS = {"read_nbytes": int(1.1 * MIB), "peak_nbytes": 10 * MIB}

INDEXES = {
    "rows": (slice(1000, 1016), slice(None)),
    "columns": (slice(None), slice(500, 504)),
    "block": (slice(3000, 3512), slice(256, 768)),
}
"""1 MiB each, of a tensor of 65536 × 16384 float32."""

QUICK_INDEXES = {**INDEXES, "rows": (slice(1000, 1256), slice(None))}


def slice_index(name: str, path: Path) -> object:
    return (QUICK_INDEXES if path.stat().st_size < 1 << 30 else INDEXES)[name]


def sliced(name: str):
    return lambda path: ours_slice(slice_index(name, path))(path)


SLICED: tuple[Case, ...] = tuple(
    Bound(
        f"slice-{kind}-{name}", f"1 MiB of a 4 GiB {suffix}: {title}", recipe, sliced(name), LIMITS
    )
    for kind, suffix, recipe in (
        ("pt", ".pt", files.giant_pt),
        ("safetensors", "safetensors", files.giant_safetensors),
    )
    for name, title in (
        ("rows", "16 rows"),
        ("columns", "4 columns"),
        ("block", "a block of 512 × 512"),
    )
)

ALONE = Race(
    "slices-alone-memmap",
    "10,000 slices of 256 B, scattered, one by one",
    "numpy.memmap, one by one",
    files.wide_safetensors,
    ours_slices_alone,
    memmap_slices(True),
    0.3,
    ("numpy",),
)

SMALL: tuple[Case, ...] = tuple(
    case
    for where, scattered in (("near", False), ("scattered", True))
    for case in (
        Race(
            f"slices-{where}-memmap",
            f"10,000 slices of 256 B, {where}, in one call",
            "numpy.memmap, one by one",
            files.wide_safetensors,
            ours_slices(scattered),
            memmap_slices(scattered),
            0.5 if scattered else None,
            ("numpy",),
        ),
        Race(
            f"slices-{where}-get-slice",
            f"10,000 slices of 256 B, {where}, in one call",
            "safe_open.get_slice, one by one",
            files.wide_safetensors,
            ours_slices(scattered),
            get_slices(scattered),
            None,
            ("numpy", "safetensors"),
        ),
        Count(
            f"slices-{where}-reads",
            f"10,000 slices of 256 B, {where}: the plan",
            files.wide_safetensors,
            count_slices(scattered),
        ),
    )
)

BACKED_NBYTES = 1300 * MIB
"""More than either side needs for a file of 1 GiB."""

WHOLE_PT: tuple[Case, ...] = tuple(
    Race(
        f"read-pt{check}{memory}",
        f"read a .pt of 1 GiB whole, {checked}{backed}",
        "torch.load",
        files.large_pt,
        ours,
        torch_whole,
        3.0,
        memory=not nbytes,
        backed_nbytes=nbytes,
    )
    for memory, backed, nbytes in (("", "", 0), ("-backed", ", backed memory", BACKED_NBYTES))
    for check, checked, ours in (
        ("", "checksums compared", ours_whole),
        ("-unverified", "verify=False", ours_unverified),
    )
)

CASES: tuple[Case, ...] = (
    Race(
        "open-pt",
        "open and list a .pt of 100,000 tensors",
        "torch.load(mmap=True)",
        files.many_pt,
        ours_names,
        torch_names,
        6.0,
    ),
    Race(
        "open-safetensors",
        "open and list a safetensors of 100,000 tensors",
        "safe_open + keys",
        files.many_safetensors,
        ours_names,
        safe_open_names,
        0.5,
        ("numpy", "safetensors"),
    ),
    *WHOLE_PT,
    Race(
        "read-safetensors",
        "read a safetensors of 1 GiB whole, into memory of one's own",
        "load_file + clone",
        files.large_safetensors,
        ours_whole,
        load_file_copied,
        None,
    ),
    # The same once more, in memory that the machine really has: see Race.backed_nbytes.
    Race(
        "read-safetensors-backed",
        "read a safetensors of 1 GiB whole, backed memory",
        "load_file + clone",
        files.large_safetensors,
        ours_whole,
        load_file_copied,
        None,
        memory=False,
        backed_nbytes=BACKED_NBYTES,
    ),
    Race(
        "map-safetensors",
        "map a safetensors of 1 GiB and touch every page",
        "load_file + the same touch",
        files.large_safetensors,
        ours_mapped,
        load_file_touched,
        None,
    ),
    Race(
        "read-many-pt",
        "read all of a .pt of 100,000 tensors of 64 B",
        "torch.load",
        files.many_pt,
        ours_whole,
        torch_whole,
        3.0,
    ),
    Race(
        "read-many-safetensors",
        "read all of a safetensors of 100,000 tensors of 64 B",
        "load_file + clone",
        files.many_safetensors,
        ours_whole,
        load_file_copied,
        5.0,
    ),
    *SLICED,
    *SMALL,
    ALONE,
    Start(
        "import",
        "start Python and `import holdfast`",
        {
            "ours": (*PYTHON, "import holdfast"),
            "import numpy": (*PYTHON, "import numpy"),
            "nothing": (*PYTHON, ""),
        },
        0.5,
    ),
    Start("cli-version", "`holdfast --version`", {"ours": (HOLDFAST, "--version")}, 0.1),
    Start(
        "cli-show",
        "`holdfast show small.pt`",
        {"ours": (HOLDFAST, "show", "{file}")},
        0.2,
        files.small_pt,
    ),
    *SAVING,
    *TORCH_IO,
    *PRUNING,
    *BULK,
)
