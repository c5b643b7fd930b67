"""The rules of `prune`, as text and as values.

    *.mlp.*.weight: 2:4              keep the two largest of every four along the last axis
    *.attn.*.weight: 0.5             the half of the smallest magnitudes of each tensor goes
    *.fc*.weight: block 4x4 0.9      blocks, by their mean square; a tensor is seen as its first axis by all others
    *.proj: random 0.3 seed=1        each tensor gets a pattern of its own from the seed and its name
    *.weight: global 0.8             one threshold over all tensors of all global rules
    lm_head.*: keep                  nothing

The pattern is a glob on dotted names. The first rule that matches a name decides.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

__all__ = ["Block", "Global", "Groups", "Keep", "Magnitude", "Method", "Random", "Rule", "parse_rule", "tensor_seed"]


@dataclass(frozen=True, slots=True)
class Keep:
    """Leave it as it is."""


@dataclass(frozen=True, slots=True)
class Magnitude:
    """The smallest of each tensor go."""

    level: float


@dataclass(frozen=True, slots=True)
class Groups:
    """`n` of every `m` along the last axis stay."""

    n: int
    m: int


@dataclass(frozen=True, slots=True)
class Block:
    """The blocks of the lowest mean square go."""

    height: int
    width: int
    level: float


@dataclass(frozen=True, slots=True)
class Random:
    """Any go."""

    level: float
    seed: int


@dataclass(frozen=True, slots=True)
class Global:
    """The smallest of all tensors together go."""

    level: float


Method = Keep | Magnitude | Groups | Block | Random | Global


@dataclass(frozen=True, slots=True)
class Rule:
    """Names, and what is done to the tensors of these names."""

    pattern: str
    method: Method
    text: str = ""
    """The method as it was written."""

    def __post_init__(self) -> None:
        problem = _problem(self.method)
        if problem:
            raise ValueError(f"rule {self.pattern!r}: {problem}")


NUMBER = r"[-+]?[\w.%]+"
FORM = re.compile(
    rf"(?P<pattern>.+?)\s*:\s*(?P<text>(?P<keep>keep)|(?P<n>\d+)\s*:\s*(?P<m>\d+)|global\s+(?P<all>{NUMBER})"
    rf"|block\s+(?P<height>\d+)\s*[x×]\s*(?P<width>\d+)\s+(?P<blocks>{NUMBER})"
    rf"|random\s+(?P<part>{NUMBER})(?:\s+seed\s*=\s*(?P<seed>-?\d+))?|(?P<level>[-+]?[\d.][\w.%]*|[-+]?(?:nan|inf)))",
    re.DOTALL,
)
"""The shortest pattern that leaves something with a meaning: `a: 2:4` is not the name `a: 2` at level 4."""


def parse_rule(text: str) -> Rule:
    """A rule from text. Raises `ValueError` with what is wrong.

    >>> parse_rule("*.weight: 2:4").method, parse_rule("a:b: block 4x4 0.9")
    (Groups(n=2, m=4), Rule(pattern='a:b', method=Block(height=4, width=4, level=0.9), text='block 4x4 0.9'))
    """
    found = FORM.fullmatch(text.strip())
    if found is None:
        forms = "'2:4', '0.5', 'block 4x4 0.9', 'random 0.3 seed=1', 'global 0.8' or 'keep'"
        raise ValueError(f"{text!r} is no rule: write PATTERN: and one of {forms}")
    method: Method
    if found["keep"]:
        method = Keep()
    elif found["n"]:
        method = Groups(int(found["n"]), int(found["m"]))
    elif found["all"]:
        method = Global(_number(found["all"], text))
    elif found["blocks"]:
        method = Block(int(found["height"]), int(found["width"]), _number(found["blocks"], text))
    elif found["part"]:
        method = Random(_number(found["part"], text), int(found["seed"] or 0))
    else:
        method = Magnitude(_number(found["level"], text))
    return Rule(found["pattern"], method, " ".join(found["text"].split()))


def _number(text: str, rule: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"rule {rule!r}: {text!r} is no number from 0 to 1") from None


def _problem(method: Method) -> str:
    match method:
        case Groups(n, m) if not (0 <= n <= m and m >= 1):
            return f"{n}:{m} keeps n of every m, with n at most m and m at least 1"
        case Block(height, width, _) if min(height, width) < 1:
            return f"a block of {height} x {width} has no elements"
        case Magnitude(level) | Block(_, _, level) | Random(level, _) | Global(level) if not 0 <= level <= 1:  # NaN as well
            hint = f"; for {level:g} percent write {level / 100:g}" if 1 < level <= 100 else ""
            return f"a level is the part that is pruned, from 0 to 1; found {level:g}{hint}"
    return ""


def tensor_seed(seed: int, name: str) -> int:
    """The seed of one tensor's random order: tensors of one shape do not get one pattern.

    >>> tensor_seed(1, "a") == tensor_seed(1, "a") != tensor_seed(1, "b")
    True
    """
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return (int.from_bytes(digest, "little") + seed * 0x9E37_79B9_7F4A_7C15) % (1 << 64)
