"""Nothing is imported, compiled, opened or run because a stream asks for it: Python's own audit events say so."""

from __future__ import annotations

import subprocess
import sys
import textwrap

SCRIPT = """
import collections, pathlib, pickle, random, sys, types
import numpy as np
from holdfast.formats.pickle.machine import interpret_whole
from holdfast.formats.pickle.plain import PlainTable
from holdfast.core.limits import Limits

class Payload:
    def __reduce__(self):
        return (exec, ("import antigravity; open('/tmp/holdfast-was-here', 'w')",))

payload = Payload()
value = {"call": payload, "array": np.arange(3), "when": np.datetime64("2024-01-01", "ns"), "od": collections.OrderedDict(a=1),
         "path": pathlib.PurePosixPath("/a"), "rng": random.Random(1), "s": {1}, "f": np.float32(1), "text": np.array(["ab"])}
streams = [pickle.dumps(value, p) for p in range(6)]
streams += [b"(S'id'\\nios\\nsystem\\n."]
streams += [b"(cos\\nsystem\\nS'id'\\no.", b"cnot_there\\nthing\\n)\\x81}b.", b"\\x80\\x04\\x8c\\x06shutil\\x8c\\x06rmtree\\x93)R."]
seen, on = [], False

def hook(event, args):
    if on:
        seen.append((event, str(args)[:200]))

sys.addaudithook(hook)
before = set(sys.modules)
table, limits = PlainTable(), Limits()
on = True
results = [interpret_whole(s, table, limits=limits) for s in streams]
on = False
allowed = {"builtins.id"}
bad = [e for e in seen if e[0] not in allowed]
assert not bad, bad
assert set(sys.modules) == before, set(sys.modules) - before
assert all(r.foreign for r in results)
print("inert")
"""


def test_no_audit_event():
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT)], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "inert", done.stderr


def test_the_interpreter_imports_no_pickle_of_pythons():
    code = """
        import ast, pathlib, holdfast.formats.pickle as package
        for path in pathlib.Path(package.__file__).parent.glob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
                names += [node.module] if isinstance(node, ast.ImportFrom) else []
                assert not {"pickle", "pickletools", "_pickle", "importlib"} & set(names), path
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                    assert node.func.id not in {"eval", "exec", "__import__", "compile", "setattr"}, path
        print("clean")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "clean", done.stderr
