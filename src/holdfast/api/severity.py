"""How bad a global in a pickle is. A denylist, and so never complete: it is for a report and no decision rests on it.

What keeps a reader safe is that nothing foreign is ever imported or called, whatever this table says. The table only
ranks what the report shows to a person who wonders what some other, trusting loader would have done:

    dangerous    runs commands or code, touches files or the network, loads another pickle, or reaches any attribute
                 of anything
    suspicious   a function that nothing here knows is called; or a name that is made to mislead
    unknown      a class that nothing here knows, or a function that is mentioned and not called: its module would be
                 imported
    known        part of ordinary checkpoints, and does nothing but hold data
"""

from __future__ import annotations

from typing import Literal

from holdfast.core.opaque import Global

__all__ = ["ORDER", "Severity", "judge"]

Severity = Literal["dangerous", "suspicious", "unknown", "known"]

ORDER: tuple[Severity, ...] = ("dangerous", "suspicious", "unknown", "known")
"""From the worst to the most harmless."""

MODULES = {
    "runs commands": """
        os posix nt subprocess _posixsubprocess pty popen2 commands pexpect paramiko fabric sh plumbum distutils
        setuptools pip ensurepip venv multiprocessing concurrent asyncio _aix_support _osx_support _winapi
        docker git torch.utils.cpp_extension torch.utils.collect_env torch.utils.bottleneck
        torch.distributed torch.multiprocessing""",
    "runs or builds Python code": """
        runpy code codeop pdb bdb timeit cProfile profile trace doctest importlib imp zipimport pkgutil zipapp site
        sys gc inspect unittest pytest _pytest IPython idlelib lib2to3 pydoc py_compile compileall sched threading
        _thread atexit signal numpy.testing numpy.f2py numpy.distutils torch._dynamo torch._inductor torch.testing
        torch.fx torch.package jinja2 sympy types _xxsubinterpreters""",
    "calls into native code": "ctypes _ctypes cffi _cffi_backend torch.ops torch._ops torch.classes torch._classes",
    "opens the network": """
        socket _socket socketserver ssl http urllib urllib2 urllib3 requests httpx aiohttp ftplib smtplib telnetlib
        poplib imaplib nntplib xmlrpc wsgiref twisted tornado torch.hub boto3 fsspec webbrowser antigravity""",
    "reads or writes files": """
        shutil tempfile glob fileinput linecache io _io zipfile tarfile mmap sqlite3 dbm logging.config msvcrt winreg
        fcntl torch.utils.tensorboard""",
    "loads another pickle or module": """
        pickle _pickle cPickle marshal dill cloudpickle joblib shelve jsonpickle yaml torch.serialization torch.jit
        pandas.io.pickle keras tensorflow""",
    "reaches any attribute": "operator _operator",
}
"""Whole modules, with all below them."""

NAMES = {
    "runs or builds Python code": "builtins.eval builtins.exec builtins.compile builtins.execfile builtins.breakpoint "
    "builtins.input builtins.__import__ builtins.apply builtins.map builtins.filter builtins.reduce functools.reduce "
    "pandas.eval torch.utils._config_module.load_config torch.utils.data.datapipes.utils.decoder.basichandlers",
    "reads or writes files": "builtins.open builtins.file codecs.open numpy.fromfile numpy.memmap numpy.save",
    "reaches any attribute": "builtins.getattr builtins.setattr builtins.delattr builtins.globals builtins.locals "
    "builtins.vars builtins.type builtins.super builtins.classmethod functools.partialmethod",
    "loads another pickle or module": "torch.load numpy.load pandas.read_pickle torch.storage._load_from_bytes",
}

KNOWN = """
    collections.deque datetime.date datetime.time datetime.datetime datetime.timedelta datetime.timezone
    torch._dynamo.decorators._DimRange argparse.Namespace types.SimpleNamespace _codecs.encode codecs.encode copyreg._reconstructor
    copy_reg._reconstructor copyreg.__newobj__ copyreg.__newobj_ex__ decimal.Decimal fractions.Fraction uuid.UUID
    zoneinfo.ZoneInfo._unpickle builtins.object builtins.set builtins.frozenset builtins.list builtins.dict
    builtins.tuple builtins.int builtins.float builtins.complex builtins.bool builtins.str builtins.bytes
    builtins.bytearray builtins.slice builtins.range torch.Size torch.device torch.dtype torch.Generator torch.Tensor
    torch.Storage torch._tensor.Tensor torch.nn.parameter.Parameter torch._tensor._rebuild_from_type_v2
    torch.storage.TypedStorage torch.storage.UntypedStorage torch.torch_version.TorchVersion numpy.dtype numpy.ndarray
    numpy.core.multiarray._reconstruct numpy._core.multiarray._reconstruct numpy.core.multiarray.scalar
    numpy._core.multiarray.scalar numpy._core.numeric._frombuffer numpy.core.numeric._frombuffer
    omegaconf.base.ContainerMetadata omegaconf.base.Metadata typing.Any enum.Enum torch.jit._pickle.build_intlist
    torch.jit._pickle.build_tensorlist torch.jit._pickle.build_doublelist torch.jit._pickle.build_boollist
    torch.jit._pickle.build_tensor_from_id torch.jit._pickle.restore_type_tag
"""

KNOWN_UNDER = (
    "collections", "datetime", "pathlib", "numpy.random", "torch.nn", "torch.nested", "torch.optim", "torch._utils", "torch.amp",
    "torch.cuda.amp", "torch.ao.nn", "torch.distributed.checkpoint.metadata", "torch.distributed.fsdp", "omegaconf",
)  # fmt: skip
"""Modules whose classes hold data.

Functions in them count as known only where the name says that they rebuild something.
"""

REBUILDERS = ("_rebuild_", "__randomstate_ctor", "__generator_ctor", "__bit_generator_ctor", "_pickle_")


def _expanded(table: dict[str, str]) -> dict[str, str]:
    return {entry: reason for reason, entries in table.items() for entry in entries.split()}


_MODULES = _expanded(MODULES)
_NAMES = _expanded(NAMES)
_KNOWN = frozenset(KNOWN.split())


def judge(what: Global, uses: tuple[str, ...]) -> tuple[Severity, str]:
    """The severity of a global that was used in these ways, and the reason in a few words.

    >>> judge(Global("os", "system"), ("call",))
    ('dangerous', 'runs commands')
    >>> judge(Global("mymodel", "Net"), ("build", "new"))
    ('unknown', 'a class that nothing here knows; its module would be imported')
    """
    # Python 2 wrote __builtin__; to Python 3 it is the same module.
    module = "builtins" if what.module == "__builtin__" else what.module
    full = f"{module}.{what.name}"
    if full in _KNOWN:
        return "known", "holds data"
    if module.split(".")[0] == "__torch__":
        return "known", "a type of TorchScript, which has no Python module"
    if not full.isascii():
        return "suspicious", "letters that look like others: a name made to mislead"
    if full in _NAMES:
        return "dangerous", _NAMES[full]
    path = f"{full}.".split(".")
    if _under(full, KNOWN_UNDER) and (path[-2][:1].isupper() or path[-2].startswith(REBUILDERS)) and "." not in what.name:
        return "known", "part of ordinary checkpoints"
    for end in range(len(path) - 1, 0, -1):
        reason = _MODULES.get(".".join(path[:end]))
        if reason is not None:
            return "dangerous", reason
    return _judge_name(what.name, uses)


def _judge_name(name: str, uses: tuple[str, ...]) -> tuple[Severity, str]:
    parts = name.split(".")
    # Since protocol 4 a name may have dots, and each one is an attribute: `linear.os.system` of any module that
    # imports os.
    for part in parts[:-1]:
        if part in _MODULES:
            return "dangerous", f"{_MODULES[part]}, reached through another module"
    if any(part.startswith("__") for part in parts):
        return "dangerous", "reaches into the interpreter"
    if parts[-1].lstrip("_")[:1].isupper():
        return "unknown", "a class that nothing here knows; its module would be imported"
    if uses and set(uses) <= {"mention"}:
        return "unknown", "mentioned and not called; its module would be imported"
    return "suspicious", "a function that nothing here knows would be called"


def _under(full: str, modules: tuple[str, ...]) -> bool:
    return any(full.startswith(f"{module}.") for module in modules)
