"""Stands for a package that a victim has installed: classes whose methods do something when a pickle calls them."""

from __future__ import annotations

import os
from pathlib import Path


def drop(*_: object, **__: object) -> None:
    """What must not happen."""
    Path(os.environ["CANARY"]).touch()


class Appends(list):  # type: ignore[type-arg]
    def append(self, value: object) -> None:
        drop()


class Extends:
    def extend(self, values: object) -> None:
        drop()


class AppendsAlone:
    def append(self, value: object) -> None:
        drop()


class Sets(dict):  # type: ignore[type-arg]
    def __setitem__(self, key: object, value: object) -> None:
        drop()


class Adds:
    def add(self, value: object) -> None:
        drop()


class Builds:
    dump_patches = False  # torch asks modules for it

    def __setstate__(self, state: object) -> None:
        drop()


class Descends:
    @property
    def weight(self) -> int:
        return 1

    @weight.setter
    def weight(self, value: object) -> None:
        drop()


class Makes:
    def __new__(cls, *args: object, **kwargs: object) -> Makes:
        drop()
        return super().__new__(cls)


class Inits:
    def __init__(self, *args: object) -> None:
        drop()


class Hashes:
    def __hash__(self) -> int:
        drop()
        return 0


class Outer:
    class Inner:
        def __init__(self, *args: object) -> None:
            drop()

    @staticmethod
    def build(*args: object) -> None:
        drop()


def factory(*args: object) -> object:
    return drop
