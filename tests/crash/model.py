"""A file system in memory that knows, after every call, each state a power cut may leave: the `Files` of the first proof.

What POSIX promises, and nothing more:

- fsync of a file makes its bytes and its length durable, not its name. fsync of a directory makes its entries durable, not what
  they lead to.
- Of the changes to a directory since its last fsync, any subset may be on disk, in any order. One change (a rename, an exchange)
  is there wholly or not at all.
- Of the bytes written to a file since its last fsync, any may be on disk; the length may be the new one without the bytes.

The states are bounded, and these are the bounds:

    directory   up to 4 unsynced changes: every subset in every order; up to 10: every subset, forwards and backwards; more: every
                prefix, each one alone, each one missing
    file        as synced; as written; as long as written but with zeros; and torn at 512 and 4096 bytes: the first one, half, all
                but the last one, the last one alone and every second block kept, the rest as it was or zero, the length as written
                or cut there
    files       several in a directory: all alike, and each one on its own with the others as written and with the others as synced

Only what a reader can reach is varied: the target, or the directory set aside where there is no target. The temporaries in a state
are as written, so that a following save has something to clean.
"""

from __future__ import annotations

import errno
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.stores.files import FileEntry, is_temporary

ROOT = "/w"
"""The one directory that exists at first."""

FIRST_DESCRIPTOR = 1_000_000
"""Smaller numbers are real descriptors, of files that a save copies from."""

Tree = dict[str, "bytes | Tree"]
Change = dict[str, int | None]

ELSEWHERE: dict[str, Tree] = {}
"""Directories of other saves, by their paths: what a save may link. Whoever wrote them did not wait for the disk."""


@dataclass
class File:
    """A file: what is on disk for certain, and what was written."""

    synced: bytes = b""
    data: bytearray = field(default_factory=bytearray)
    mode: int = 0o644

    def states(self) -> list[bytes]:
        """What a crash may leave of it, without repeats."""
        old, new = self.synced, bytes(self.data)
        if old == new:
            return [new]
        found = [old, new, old[: len(new)].ljust(len(new), b"\0"), b"\0" * len(new)]
        for block in (512, 4096):
            count = -(-len(new) // block)
            keeps = [
                {0},
                set(range(count // 2)),
                set(range(count - 1)),
                {count - 1},
                set(range(0, count, 2)),
            ]
            for keep, under in itertools.product(keeps, (old, b"")):
                torn = bytearray(under[: len(new)].ljust(len(new), b"\0"))
                for i in keep:
                    torn[i * block : (i + 1) * block] = new[i * block : (i + 1) * block]
                found += [bytes(torn), bytes(torn[: (max(keep, default=-1) + 1) * block])]
        return list(dict.fromkeys(found))


@dataclass
class Directory:
    """A directory: its durable entries, its entries, and the changes that lead from one to the other."""

    synced: dict[str, int] = field(default_factory=dict)
    entries: dict[str, int] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)
    mode: int = 0o755

    def change(self, change: Change) -> None:
        self.changes.append(change)
        apply(self.entries, change)

    def states(self) -> list[dict[str, int]]:
        """What a crash may leave of it, without repeats."""
        found = {}
        for chosen in arrangements(len(self.changes)):
            entries = dict(self.synced)
            for i in chosen:
                apply(entries, self.changes[i])
            found[tuple(sorted(entries.items()))] = entries
        return list(found.values())


def apply(entries: dict[str, int], change: Change) -> None:
    for name, node in change.items():
        if node is None:
            entries.pop(name, None)
        else:
            entries[name] = node


def arrangements(count: int) -> Iterator[tuple[int, ...]]:
    """Which changes reached the disk, in which order; bounded as the module's docstring says.

    >>> sorted(arrangements(2))
    [(), (0,), (0, 1), (1,), (1, 0)]
    """
    every = range(count)
    if count <= 4:
        for size in range(count + 1):
            yield from itertools.permutations(every, size)
    elif count <= 10:
        for size in range(count + 1):
            for chosen in itertools.combinations(every, size):
                yield chosen
                yield chosen[::-1]
    else:
        for i in range(count + 1):
            yield tuple(every[:i])
            yield tuple(j for j in every if j != i)
            yield (min(i, count - 1),)


class Model:
    """`Files` in memory."""

    def __init__(
        self, *, exchange: bool = True, noreplace: bool = True, tree: Tree | None = None
    ) -> None:
        self.nodes: dict[int, File | Directory] = {}
        self.open_descriptors: dict[int, int] = {}
        self.locks: dict[int, int] = {}
        self.calls: list[str] = []
        self.watch: Callable[[str], None] | None = None
        """Called after every call that changes something or opens something, with the call in words."""
        self._exchange = exchange
        self._noreplace = noreplace
        self._descriptors = itertools.count(FIRST_DESCRIPTOR)
        self._turn = threading.RLock()
        self._others: dict[str, int] = {}
        self.root = self._plant(tree or {})

    def _plant(self, tree: Tree, *, durable: bool = True) -> int:
        """A directory with this content, its files durable or not."""
        made = Directory()
        for name, what in tree.items():
            if isinstance(what, bytes):
                made.entries[name] = self._add(File(what if durable else b"", bytearray(what)))
            else:
                made.entries[name] = self._plant(what)
        made.synced = dict(made.entries)
        return self._add(made)

    def _elsewhere(self, path: str) -> int:
        if path not in self._others:
            self._others[path] = self._plant(ELSEWHERE[path], durable=False)
        return self._others[path]

    def of_others(self) -> set[int]:
        """The files of the directories that other saves wrote."""
        folders = [self.nodes[node] for node in self._others.values()]
        return {
            node
            for folder in folders
            if isinstance(folder, Directory)
            for node in folder.entries.values()
        }

    def _add(self, node: File | Directory) -> int:
        number = len(self.nodes) + 1
        self.nodes[number] = node
        return number

    def revive(self) -> None:
        """The process died: descriptors and locks are gone, what was written is there, what was not synced still is not."""
        self.open_descriptors.clear()
        self.locks.clear()
        self.watch = None

    # What the proofs ask.

    def live(self, node: int | None = None) -> Tree:
        """What a process sees now, and what the death of a process leaves."""
        found = self.nodes[node or self.root]
        assert isinstance(found, Directory)
        return {name: self._live(inner) for name, inner in found.entries.items()}

    def _live(self, node: int) -> bytes | Tree:
        found = self.nodes[node]
        return bytes(found.data) if isinstance(found, File) else self.live(node)

    def crashes(self, target: str) -> Iterator[Tree]:
        """Every state that a power cut may leave now, within the bounds."""
        root = self.nodes[self.root]
        assert isinstance(root, Directory)
        for entries in root.states():
            reached = (
                [target]
                if target in entries
                else [name for name in entries if name.endswith(".old")]
            )
            rest: Tree = {
                name: self._live(node) for name, node in entries.items() if name not in reached
            }
            for choice in itertools.product(*(self._states(entries[name]) for name in reached)):
                yield rest | dict(zip(reached, choice, strict=True))

    def _states(self, node: int) -> list[bytes | Tree]:
        found = self.nodes[node]
        if isinstance(found, File):
            return list(found.states())
        return [tree for entries in found.states() for tree in self._combined(entries)]

    def _combined(self, entries: dict[str, int]) -> list[Tree]:
        options = {name: self._states(node) for name, node in entries.items()}
        most = max(map(len, options.values()), default=1)
        alike: list[Tree] = [
            {name: states[min(i, len(states) - 1)] for name, states in options.items()}
            for i in range(most)
        ]
        single: list[Tree] = [
            {name: states[min(others, len(states) - 1)] for name, states in options.items()}
            | {one: state}
            for one, states in options.items()
            if len(states) > 1
            for state in states
            for others in (0, 1)
        ]
        return alike + single

    # The calls.

    def _called(self, call: str) -> None:
        self.calls.append(call)
        if self.watch is not None:
            self.watch(call)

    def _at(self, descriptor: int) -> Directory:
        found = self.nodes[self.open_descriptors[descriptor]]
        if not isinstance(found, Directory):
            raise OSError(errno.ENOTDIR, "Not a directory")
        return found

    def _file(self, descriptor: int) -> File:
        found = self.nodes[self.open_descriptors[descriptor]]
        if not isinstance(found, File):
            raise OSError(errno.EISDIR, "Is a directory")
        return found

    def _entry(self, name: str, dir_fd: int) -> int:
        node = self._at(dir_fd).entries.get(name)
        if node is None:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", name)
        return node

    def _led_to(self, path: str) -> int:
        """What an absolute path leads to."""
        if path in ELSEWHERE:
            return self._elsewhere(path)
        node = self.root
        for name in path.removeprefix(ROOT).strip("/").split("/") if path != ROOT else ():
            inner = self.nodes[node]
            if (
                not path.startswith(f"{ROOT}/")
                or not isinstance(inner, Directory)
                or name not in inner.entries
            ):
                raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
            node = inner.entries[name]
        return node

    def _opened(self, node: int) -> int:
        descriptor = next(self._descriptors)
        self.open_descriptors[descriptor] = node
        return descriptor

    def resolve(self, path: str) -> str:
        return path.rstrip("/")

    def open_directory(self, path: str, *, dir_fd: int | None = None) -> int:
        with self._turn:
            node = self._led_to(path) if dir_fd is None else self._entry(path, dir_fd)
            if not isinstance(self.nodes[node], Directory):
                raise NotADirectoryError(errno.ENOTDIR, "Not a directory", path)
            descriptor = self._opened(node)
            self._called(f"open_directory {path}")
            return descriptor

    def open(self, name: str, *, dir_fd: int) -> int:
        with self._turn:
            descriptor = self._opened(self._entry(name, dir_fd))
            self._called(f"open {name}")
            return descriptor

    def hold(self, name: str, *, dir_fd: int) -> int | None:
        """Nothing follows from it: what has no name is gone with the process."""
        with self._turn:
            return self._opened(self._entry(name, dir_fd))

    def create(self, name: str, *, dir_fd: int, private: bool = False) -> int:
        with self._turn:
            directory = self._at(dir_fd)
            if name in directory.entries:
                raise FileExistsError(errno.EEXIST, "File exists", name)
            node = self._add(File(mode=0o600 if private else 0o644))
            directory.change({name: node})
            descriptor = self._opened(node)
            self._called(f"create {name}")
            return descriptor

    def allocate(self, descriptor: int, nbytes: int) -> None:
        with self._turn:
            file = self._file(descriptor)
            del file.data[nbytes:]
            file.data.extend(bytes(nbytes - len(file.data)))
            self._called(f"allocate {nbytes}")

    def pwrite(self, descriptor: int, data: memoryview, offset: int) -> int:
        with self._turn:
            file = self._file(descriptor)
            file.data.extend(bytes(max(0, offset - len(file.data))))
            file.data[offset : offset + len(data)] = data
            self._called(f"pwrite {offset}+{len(data)}")
            return len(data)

    def pread(self, descriptor: int, nbytes: int, offset: int) -> bytes:
        with self._turn:
            return bytes(self._file(descriptor).data[offset : offset + nbytes])

    def copy_range(
        self, source: int, target: int, nbytes: int, *, source_offset: int, offset: int
    ) -> int:
        with self._turn:
            if source < FIRST_DESCRIPTOR:
                data = os.pread(source, nbytes, source_offset)
            else:
                data = bytes(self._file(source).data[source_offset : source_offset + nbytes])
            return self.pwrite(target, memoryview(data), offset)

    def begin_sync(self, descriptor: int, offset: int, nbytes: int) -> None:
        """Nothing follows from it: any bytes that are not synced may be on disk."""

    def sync(self, descriptor: int) -> None:
        with self._turn:
            found = self.nodes[self.open_descriptors[descriptor]]
            if isinstance(found, File):
                found.synced = bytes(found.data)
            else:
                found.synced = dict(found.entries)
                found.changes.clear()
            self._called(f"sync {'file' if isinstance(found, File) else 'directory'}")

    def chmod(self, descriptor: int, mode: int) -> None:
        with self._turn:
            self.nodes[self.open_descriptors[descriptor]].mode = mode
            self._called(f"chmod {mode:o}")

    def chown(self, descriptor: int, user: int, group: int) -> None:
        with self._turn:
            self._called(f"chown {user} {group}")

    def rename(self, source: str, target: str, *, dir_fd: int) -> None:
        with self._turn:
            directory, node = self._at(dir_fd), self._entry(source, dir_fd)
            replaced = self.nodes.get(directory.entries.get(target, 0))
            if isinstance(replaced, Directory) and (
                replaced.entries or isinstance(self.nodes[node], File)
            ):
                raise OSError(errno.ENOTEMPTY, "Directory not empty", target)
            if isinstance(replaced, File) and isinstance(self.nodes[node], Directory):
                raise NotADirectoryError(errno.ENOTDIR, "Not a directory", target)
            directory.change({source: None, target: node})
            self._called(f"rename {source} {target}")

    def rename_new(self, source: str, target: str, *, dir_fd: int) -> bool:
        with self._turn:
            if not self._noreplace:
                return False
            directory, node = self._at(dir_fd), self._entry(source, dir_fd)
            if target in directory.entries:
                raise FileExistsError(errno.EEXIST, "File exists", target)
            directory.change({source: None, target: node})
            self._called(f"rename_new {source} {target}")
            return True

    def exchange(self, first: str, second: str, *, dir_fd: int) -> bool:
        with self._turn:
            if not self._exchange:
                return False
            one, two = self._entry(first, dir_fd), self._entry(second, dir_fd)
            self._at(dir_fd).change({first: two, second: one})
            self._called(f"exchange {first} {second}")
            return True

    def link(
        self, source: str, target: str, *, dir_fd: int, source_dir_fd: int | None = None
    ) -> None:
        with self._turn:
            directory, node = (
                self._at(dir_fd),
                self._entry(source, dir_fd if source_dir_fd is None else source_dir_fd),
            )
            if target in directory.entries:
                raise FileExistsError(errno.EEXIST, "File exists", target)
            directory.change({target: node})
            self._called(f"link {source} {target}")

    def mkdir(self, name: str, *, dir_fd: int, private: bool = False) -> None:
        with self._turn:
            directory = self._at(dir_fd)
            if name in directory.entries:
                raise FileExistsError(errno.EEXIST, "File exists", name)
            directory.change({name: self._add(Directory(mode=0o700 if private else 0o755))})
            self._called(f"mkdir {name}")

    def unlink(self, name: str, *, dir_fd: int) -> None:
        with self._turn:
            if isinstance(self.nodes[self._entry(name, dir_fd)], Directory):
                raise IsADirectoryError(errno.EISDIR, "Is a directory", name)
            self._at(dir_fd).change({name: None})
            self._called(f"unlink {name}")

    def rmdir(self, name: str, *, dir_fd: int) -> None:
        with self._turn:
            found = self.nodes[self._entry(name, dir_fd)]
            if not isinstance(found, Directory):
                raise NotADirectoryError(errno.ENOTDIR, "Not a directory", name)
            if found.entries:
                raise OSError(errno.ENOTEMPTY, "Directory not empty", name)
            self._at(dir_fd).change({name: None})
            self._called(f"rmdir {name}")

    def list(self, descriptor: int) -> list[str]:
        with self._turn:
            return sorted(self._at(descriptor).entries)

    def lock(self, descriptor: int) -> bool:
        with self._turn:
            return (
                self.locks.setdefault(self.open_descriptors[descriptor], descriptor) == descriptor
            )

    def stat(self, name: str, *, dir_fd: int) -> FileEntry | None:
        with self._turn:
            node = self._at(dir_fd).entries.get(name)
            return None if node is None else self._found(node)

    def inspect(self, descriptor: int) -> FileEntry:
        with self._turn:
            return self._found(self.open_descriptors[descriptor])

    def _found(self, node: int) -> FileEntry:
        what = self.nodes[node]
        if isinstance(what, File):
            return FileEntry("file", (1, node), what.mode, len(what.data))
        return FileEntry("directory", (1, node), what.mode, 0)

    def is_shared(self, descriptor: int) -> bool:
        return False

    def longest_name(self, descriptor: int) -> int:
        return 255

    def close(self, descriptor: int) -> None:
        with self._turn:
            node = self.open_descriptors.pop(descriptor)
            if self.locks.get(node) == descriptor:
                del self.locks[node]


def freeze(tree: Tree) -> tuple[object, ...]:
    """A tree as a key."""
    return tuple(
        (name, what if isinstance(what, bytes) else freeze(what))
        for name, what in sorted(tree.items())
    )


def temporaries(tree: Tree) -> list[str]:
    """The names in the folder that are no checkpoints."""
    return sorted(filter(is_temporary, tree))


def materialise(tree: Tree, folder: Path) -> None:
    """Write a state as real files."""
    folder.mkdir()
    for name, what in tree.items():
        if isinstance(what, bytes):
            (folder / name).write_bytes(what)
        else:
            materialise(what, folder / name)
