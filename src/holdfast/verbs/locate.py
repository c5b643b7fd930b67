"""Find the checkpoint that a path stands for, where it is not at the path itself.

    model.safetensors.index.json           the folder that the index lies in, by this index
    pytorch_model.bin.index.json           the same, for files of `torch.save`
    models--org--name/                     a model in the cache of the Hugging Face hub: `snapshots/<revision>` of its ref

Only opening looks here. A scan, a copy of one file and the target of a save mean the path itself.
"""

from __future__ import annotations

import os
import re
from pathlib import PurePath

from holdfast.core.limits import Limits
from holdfast.errors import HeaderError, NoSuchPath, StoreError, UnsafePath, Unsupported
from holdfast.formats.index_file import INDEX, USUAL, some
from holdfast.stores.local import LocalStore
from holdfast.stores.place import place_at

INDEX_ENDS = tuple(suffix + INDEX for suffix in USUAL)
"""The ends of the names of indexes."""

CACHED_MODEL = "models--"
"""How the hub cache begins the name of a model's folder."""

REFS, SNAPSHOTS = "refs", "snapshots"
USUAL_REF = "main"

REVISION = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{0,127}")
"""The name of a snapshot. The hub names it by the hash of a commit; a test or a mirror may use another plain name."""

REF_NBYTES = 256
"""More than any ref takes: it holds the 40 digits of a commit."""


def locate_checkpoint(path: str, limits: Limits) -> tuple[str, str]:
    """Find the place of the checkpoint that a path or URL stands for: usually the path itself.

    Returns:
        The place, and the index that the user named. That index counts although another one may
        have the usual name. It is empty if the user named no index.

    Raises:
        NoSuchPath: The index, or the snapshot that a ref names, is not there.
        Unsupported: A hub cache folder has several refs or snapshots, and none is the usual one.
        HeaderError, UnsafePath: A ref does not name a snapshot inside of its folder.
    """
    place = place_at(path)
    if path.endswith(INDEX_ENDS) and not place.is_folder:
        # Opening the index says why it cannot be read, for example because it is not there.
        place.open_store(limits, _recover_nothing).close()
        return place.parent, place.name
    name = PurePath(path).name or _name_working_folder()
    if place.on_disk and name.startswith(CACHED_MODEL):
        return _find_snapshot(path, limits), ""
    return path, ""


def _name_working_folder() -> str:
    """Return the name of the folder that "." means."""
    try:
        return os.path.basename(os.getcwd())
    except OSError:
        return ""  # The working directory is gone, and opening the path says so.


def _recover_nothing(path: str) -> None:
    """A save sets whole folders aside, and never an index alone."""


def _find_snapshot(folder: str, limits: Limits) -> str:
    """Return the snapshot of a hub cache folder; the folder itself if it has no snapshots."""
    snapshots = os.path.join(folder, SNAPSHOTS)
    if not os.path.isdir(snapshots):
        return folder
    revision = _read_revision(folder, limits) or _find_only_revision(folder, snapshots)
    path = os.path.join(snapshots, revision)
    if not os.path.isdir(path):
        raise NoSuchPath(
            f"the ref of this hub cache folder names the snapshot {revision!r}, which is not there: "
            "download the model again",
            file=path,
        )
    # The ref is a file of the folder, so it must not be able to lead out of it by a link.
    if os.path.realpath(path) != os.path.join(os.path.realpath(folder), SNAPSHOTS, revision):
        raise UnsafePath("a link leads out of the hub cache folder", file=path)
    return path


def _read_revision(folder: str, limits: Limits) -> str:
    """Return the revision of the ref `main`, or of the only ref; empty if there are no refs."""
    store = LocalStore(folder, max_files=limits.files)
    try:
        refs = [key for key in store.list() if key.startswith(f"{REFS}/")]
        if not refs:
            return ""
        usual = f"{REFS}/{USUAL_REF}"
        ref = usual if usual in refs else refs[0]
        if ref != usual and len(refs) > 1:
            raise Unsupported(
                f"this hub cache folder has several refs ({some(refs)}) and none is {USUAL_REF!r}: "
                f"open one of the folders in {SNAPSHOTS!r}",
                file=folder,
                found=tuple(refs),
            )
        content = bytearray(min(store.size(ref), REF_NBYTES))
        store.read(ref, 0, memoryview(content))
    finally:
        store.close()
    revision = bytes(content).decode("ascii", "backslashreplace").strip()
    if not REVISION.fullmatch(revision):
        raise HeaderError(
            f"the ref {ref!r} must hold the name of a snapshot, got {revision[:80]!r}",
            file=os.path.join(folder, ref),
            found=revision,
        )
    return revision


def _find_only_revision(folder: str, snapshots: str) -> str:
    """Return the one snapshot of a model that was downloaded by its commit, which writes no ref."""
    try:
        revisions = [entry.name for entry in os.scandir(snapshots) if entry.is_dir()]
    except OSError as error:
        raise StoreError(f"cannot list this folder: {error.strerror}", file=snapshots) from None
    if len(revisions) != 1:
        raise Unsupported(
            f"this hub cache folder has no ref and {len(revisions):,} snapshots: "
            f"open one of the folders in {SNAPSHOTS!r}",
            file=folder,
            found=tuple(revisions),
        )
    return revisions[0]
