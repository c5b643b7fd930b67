"""The public names, as the source says them: griffe reads it and imports nothing, so the site needs neither torch nor JAX.

Every name of `__all__` of a public module stands on one page of the reference. It has a docstring, and so have the public methods
of a class. Names that are not in `__all__` may stand on a page as well, and need a docstring there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import griffe

MODULES = (
    *(
        "holdfast",
        "holdfast.torch",
        "holdfast.torch.serialization",
        "holdfast.torch.sparsity",
        "holdfast.errors",
        "holdfast.metadata",
        "holdfast.jax",
        "holdfast.testing",
    ),
    *(
        f"holdfast.integrations.{name}"
        for name in (
            "dcp",
            "accelerate",
            "lightning",
            "sglang",
            "torchtitan",
            "transformers",
            "vllm",
        )
    ),
)
SUBMODULES = {"holdfast": {"errors", "metadata"}, "holdfast.torch": {"sparsity"}}
"""Names that are modules with pages of their own."""


class Names:
    """What is public, and what of it was put on a page."""

    def __init__(self, source: Path) -> None:
        # Bodies of methods are of no interest, and aliases are followed when they are asked for.
        self.package = griffe.load("holdfast", search_paths=[source])
        self.placed: Counter[str] = Counter()
        self.targets: set[str] = set()
        """What stands on a page under any of its names."""
        self.unknown: list[str] = []

    def listed(self, what: str, page: str) -> str:
        """The directives for `module name name…`; for `module` alone everything in it."""
        module, *wanted = what.split()
        if module not in MODULES:
            self.unknown.append(f"{page} asks for the names of {module}, which is no public module")
            return ""
        public = self.public(module)
        for name in wanted or public:
            if name not in self._module(module).members:
                self.unknown.append(f"{page} asks for {module}.{name}, which is not there")
                continue
            self.placed[f"{module}.{name}"] += 1
            thing = self._thing(f"{module}.{name}")
            self.targets.add(thing.path if thing else f"{module}.{name}")
        members = self._module(module).members
        return "\n\n".join(
            self._entry(module, name) for name in wanted or public if name in members
        )

    def _entry(self, module: str, name: str) -> str:
        if self._thing(f"{module}.{name}") is None:
            return f"### {name}\n\ntorch's own, here for programs that look for it here."
        return f"::: {module}.{name}"

    def public(self, module: str) -> list[str]:
        return [
            str(name)
            for name in self._module(module).exports or []
            if str(name) not in SUBMODULES.get(module, ())
        ]

    def problems(self) -> list[str]:
        found = list(self.unknown)
        for module in MODULES:
            for name in self.public(module):
                path = f"{module}.{name}"
                thing = self._thing(path)
                elsewhere = (
                    not self.placed[path] and thing is not None and thing.path in self.targets
                )
                if self.placed[path] != 1 and not elsewhere:
                    found.append(
                        f"{path} stands on {self.placed[path] or 'no'} pages of the reference; it is to stand on one"
                    )
        public_paths = [f"{module}.{name}" for module in MODULES for name in self.public(module)]
        for path in dict.fromkeys([*public_paths, *self.placed]):
            found += [f"{where} has no docstring" for where in self._silent(path)]
        return found

    def _module(self, module: str) -> griffe.Module:
        inside = module.removeprefix("holdfast").removeprefix(".")
        return self.package[inside] if inside else self.package

    def _thing(self, path: str) -> griffe.Object | None:
        """What a name is; None where it comes out of somebody else's package."""
        module, _, name = path.rpartition(".")
        thing = self._module(module)[name]
        try:
            return thing.final_target if thing.is_alias else thing
        except griffe.AliasResolutionError:
            return None

    def _silent(self, path: str) -> Iterator[str]:
        """What of a name has no words. A parameter, a constant and a method that overrides another one may go without."""
        thing = self._thing(path)
        if thing is None:
            return
        if (thing.is_function or thing.is_class) and not thing.docstring:
            yield path
        if thing.is_class:
            for member in thing.members.values():
                public = not member.name.startswith("_") and member.is_function
                if public and not member.docstring and not _inherited(thing, member.name):
                    yield f"{path}.{member.name}"


def _inherited(thing: griffe.Class, name: str) -> bool:
    """Whether a method says what a class above already said of it."""
    return any(name in above.members for above in thing.mro())
