"""How bad a global in a pickle is, by what the stream does with it. For a report: no decision of ours rests on it.

What keeps a reader safe is that nothing foreign is ever imported or called, whatever this table says. It only ranks what the
report shows to a person who wonders what some other, trusting loader would have done:

    dangerous    runs commands or code, touches files or the network, loads another pickle, or reaches any attribute of anything
    suspicious   something that nothing here knows is called with what the file gives it: a function, a constructor, a method
    unknown      a class that nothing here knows gets its state, or a name is mentioned: its module would be imported
    known        part of ordinary checkpoints, and does nothing but hold data
    safe         what Holdfast builds itself, and `torch.load(weights_only=True)` allows; not worth a line

The rule is the other way round from a denylist: what is not known to be harmless is at least `unknown`, and is `suspicious` as
soon as it is called. A name that nobody thought of is never "clean". The lists of bad names only make it say `dangerous`.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from typing import Literal

from holdfast.core.opaque import Global

Severity = Literal["dangerous", "suspicious", "unknown", "known", "safe"]

ORDER: tuple[Severity, ...] = ("dangerous", "suspicious", "unknown", "known", "safe")
"""From the worst to the most harmless."""

MODULES = {
    "runs commands": """
        os posix nt subprocess _posixsubprocess pty popen2 commands pexpect paramiko fabric sh plumbum distutils
        setuptools pip ensurepip venv multiprocessing concurrent asyncio _aix_support _osx_support _winapi
        docker git torch.utils.cpp_extension torch.utils.collect_env torch.utils.bottleneck torch.utils.hipify
        torch.distributed torch.multiprocessing _pyrepl pyrepl cgi cgitb shlex tkinter turtle curses""",
    "runs or builds Python code": """
        runpy code codeop pdb bdb timeit cProfile profile trace doctest importlib imp zipimport pkgutil zipapp site
        sys gc inspect unittest pytest _pytest IPython idlelib lib2to3 pydoc py_compile compileall sched threading
        _thread atexit signal numpy.testing numpy.f2py numpy.distutils torch._dynamo torch._inductor torch.testing
        torch.fx torch.package jinja2 types _xxsubinterpreters _interpreters torch.utils.benchmark torch.utils.model_dump
        torch.utils.data.datapipes torch._export torch.export torch.onnx sympy.parsing
        sympy.utilities.lambdify pickletools tracemalloc faulthandler
        numexpr modulefinder symtable""",
    "calls into native code": "ctypes _ctypes cffi _cffi_backend torch.ops torch._ops torch.classes torch._classes torch._C._jit",
    "opens the network": """
        socket _socket socketserver ssl http urllib urllib2 urllib3 requests httpx aiohttp ftplib smtplib telnetlib
        poplib imaplib nntplib xmlrpc wsgiref twisted tornado torch.hub boto3 fsspec webbrowser antigravity select selectors
        huggingface_hub websockets""",
    "reads or writes files": """
        shutil tempfile glob fileinput linecache io _io _pyio zipfile tarfile mmap sqlite3 dbm logging.config logging.handlers
        msvcrt winreg fcntl gzip bz2 _bz2 lzma _lzma torch.utils.tensorboard mailbox""",
    "loads another pickle or module": """
        pickle _pickle cPickle marshal dill cloudpickle joblib shelve jsonpickle yaml torch.serialization torch.jit
        pandas.io keras.saving keras.src.saving keras.models tensorflow.io tensorflow.saved_model copy""",
    "reaches any attribute": "operator _operator",
}
"""Whole modules, with all below them."""

NAMES = {
    "runs or builds Python code": "builtins.eval builtins.exec builtins.compile builtins.execfile builtins.breakpoint "
    "builtins.input builtins.__import__ builtins.apply builtins.map builtins.filter builtins.reduce functools.reduce "
    "pandas.eval torch.utils._config_module.load_config torch.compile torch.utils.checkpoint.checkpoint site._Printer "
    "dataclasses.make_dataclass collections.namedtuple sympy.sympify sympy.parse_expr sympy.lambdify "
    "sympy.core.sympify.sympify <computed>.<computed>",
    "reads or writes files": "builtins.open builtins.file codecs.open numpy.fromfile numpy.memmap numpy.save numpy.savez "
    "numpy.savetxt numpy.loadtxt numpy.genfromtxt numpy.lib.npyio.save logging.FileHandler logging.basicConfig torch.save "
    "torch.from_file torch._C.PyTorchFileWriter torch._C.PyTorchFileReader torch.PyTorchFileWriter torch.PyTorchFileReader "
    "torch.UntypedStorage.from_file torch.FloatStorage.from_file numpy.core.memmap numpy._core.memmap",
    "calls into native code": "numpy.ctypeslib numpy.ctypeslib.load_library torch._C._load_library",
    "reaches any attribute": "builtins.getattr builtins.setattr builtins.delattr builtins.globals builtins.locals builtins.hasattr "
    "builtins.vars builtins.super builtins.classmethod builtins.staticmethod builtins.property functools.partialmethod "
    "functools.singledispatch functools.update_wrapper copyreg.pickle copyreg.add_extension copyreg.constructor",
    "loads another pickle or module": "torch.load numpy.load pandas.read_pickle torch.storage._load_from_bytes",
}

MEMBERS = """
    tofile dump dumps from_file fromfile memmap save load open write write_bytes write_text unlink rmdir rename replace touch mkdir
    chmod symlink_to hardlink_to link_to lchmod read_bytes read_text apply_ map_ map2_ _apply _write_file _set_from_file
    _share_filename_cpu_ _new_shared_filename_cpu share_memory_ register_hook register_forward_hook format format_map
"""
"""Members of classes, known ones as well, that touch files, call what they are given, or reach attributes."""

KNOWN = """
    collections.deque collections.defaultdict collections.Counter collections.OrderedDict collections.ChainMap collections.UserDict
    datetime.date datetime.time datetime.datetime datetime.timedelta datetime.timezone operator.itemgetter _operator.itemgetter
    torch._dynamo.decorators._DimRange argparse.Namespace types.SimpleNamespace _codecs.encode codecs.encode copyreg._reconstructor
    copy_reg._reconstructor copyreg.__newobj__ copyreg.__newobj_ex__ decimal.Decimal fractions.Fraction uuid.UUID uuid.SafeUUID
    zoneinfo.ZoneInfo._unpickle builtins.object builtins.set builtins.frozenset builtins.list builtins.dict
    builtins.tuple builtins.int builtins.float builtins.complex builtins.bool builtins.str builtins.bytes builtins.type
    builtins.bytearray builtins.slice builtins.range builtins.len builtins.sum builtins.abs
    builtins.NotImplemented builtins.Ellipsis
    builtins.memoryview torch.Size torch.device torch.dtype torch.Generator torch.Tensor torch.strided torch.layout
    torch.memory_format torch.Storage torch._tensor.Tensor torch.nn.parameter.Parameter torch._tensor._rebuild_from_type_v2
    torch.storage.TypedStorage torch.storage.UntypedStorage torch.storage._TypedStorage torch.torch_version.TorchVersion
    torch.serialization._get_layout numpy.dtype numpy.ndarray numpy.bool numpy.bool_
    numpy.core.multiarray._reconstruct numpy._core.multiarray._reconstruct numpy.core.multiarray.scalar
    numpy.matrix numpy.ma.core.MaskedArray numpy.ma.MaskedArray torch._C._VariableFunctionsClass
    numpy.ma.core._mareconstruct numpy._core.multiarray.scalar numpy._core.numeric._frombuffer numpy.core.numeric._frombuffer
    numpy.recarray numpy.rec.recarray numpy.record numpy.poly1d functools.partial logging.getLogger re._compile
    omegaconf.base.ContainerMetadata omegaconf.base.Metadata typing.Any enum.Enum torch.jit._pickle.build_intlist
    torch.jit._pickle.build_tensorlist torch.jit._pickle.build_doublelist torch.jit._pickle.build_boollist
    torch.jit._pickle.build_tensor_from_id torch.jit._pickle.restore_type_tag
    pandas._libs.internals._unpickle_block pandas.core.indexes.base._new_Index pandas.core.indexes.datetimes._new_DatetimeIndex
    pandas.core.internals.managers.BlockManager pandas.StringDtype pandas.core.arrays.string_.StringDtype
    pandas._libs.tslibs.timestamps._unpickle_timestamp pandas._libs.tslibs.timedeltas._timedelta_unpickle
    sklearn.tree._tree.Tree sklearn.neighbors._kd_tree.newObj sklearn.neighbors._ball_tree.newObj
    sklearn.metrics._dist_metrics.newObj sklearn._loss._loss.CyHalfBinomialLoss sklearn._loss._loss.CyHalfSquaredError
    sklearn._loss._loss.CyHalfMultinomialLoss
    joblib.numpy_pickle.NumpyArrayWrapper sklearn.externals.joblib.numpy_pickle.NumpyArrayWrapper
    torch.distributed.checkpoint.filesystem._StorageInfo torch.distributed.checkpoint.filesystem._StoragePrefix
    transformers.training_args.OptimizerNames transformers.trainer_utils.IntervalStrategy transformers.trainer_utils.SaveStrategy
    transformers.trainer_utils.SchedulerType transformers.trainer_utils.HubStrategy transformers.trainer_utils.EvaluationStrategy
    transformers.debug_utils.DebugOption transformers.trainer_utils.FSDPOption transformers.training_args.ParallelMode
    accelerate.utils.dataclasses.DistributedType accelerate.state.PartialState accelerate.utils.dataclasses.DynamoBackend
    accelerate.utils.dataclasses.PrecisionType
"""

KNOWN_UNDER = """
    collections datetime numpy.random torch.nn torch.nested torch.optim torch._utils torch.amp torch.cuda.amp torch.ao.nn
    torch.distributed.checkpoint.metadata torch.distributed.fsdp omegaconf torch.distributed.tensor torch.distributed._tensor
    torch.distributed.device_mesh torch.distributed._shard torch.distributed._mesh_layout torch.distributed.checkpoint.storage
    torch.utils._pytree torch.torch_version
"""
"""Modules whose classes hold data. Known when they get their state; their constructors are another matter.

Functions in them count as known only where the name says that they rebuild something.
"""

PURE = """
    torch._C._VariableFunctionsClass. torch._C._VariableFunctions. torch._C._nn. torch._C._special. torch._C._linalg.
    torch._C._fft. torch.nn.functional. torch.nn.init. torch._VF.
"""
"""Functions of tensors, which an activation or an initialisation names; `from_file` and its like are `MEMBERS`."""

REBUILDERS = (
    "_rebuild_",
    "__randomstate_ctor",
    "__generator_ctor",
    "__bit_generator_ctor",
    "_pickle_",
)

CYTHON = "__pyx_unpickle_"
"""How Cython makes an object of a class of its own: `__pyx_unpickle_Tree(Tree, checksum, state)`."""

REACHED = "os sys posix nt subprocess builtins shutil importlib socket ctypes pickle io runpy codecs operator"
"""Modules that other modules have as attributes, under such a name or with an underscore before it."""

CALLED = frozenset({"call", "result", "append", "setitem", "additem"})
"""Uses that run a function, a constructor or a method with what the file gives it."""


def _expanded(table: dict[str, str]) -> dict[str, str]:
    return {entry: reason for reason, entries in table.items() for entry in entries.split()}


_MODULES = _expanded(MODULES)
_NAMES = _expanded(NAMES)
_KNOWN, _MEMBERS, _REACHED = (frozenset(names.split()) for names in (KNOWN, MEMBERS, REACHED))
_KNOWN_UNDER, _PURE = tuple(f"{module}." for module in KNOWN_UNDER.split()), tuple(PURE.split())


@cache
def _built() -> frozenset[tuple[str, str]]:
    from holdfast.formats.dcp.schema import MetadataTable
    from holdfast.formats.torch.reducers import buildable

    return (
        buildable()
        | frozenset(MetadataTable().calls)
        | frozenset(MetadataTable().news)
        | frozenset(MetadataTable().values)
    )


def judge(what: Global, uses: Collection[str], *, given: bool = False) -> tuple[Severity, str]:
    """The severity of a global that was used in these ways, and the reason in a few words.

    `given` says whether `__new__` got arguments.

    >>> judge(Global("os", "system"), ("call",))
    ('dangerous', 'runs commands')
    >>> judge(Global("mymodel", "Net"), ("build", "new"))
    ('unknown', 'a class that nothing here knows; its module would be imported')
    """
    # Python 2 wrote __builtin__; to Python 3 it is the same module.
    module = "builtins" if what.module == "__builtin__" else what.module
    full = f"{module}.{what.name}"
    if "attributes" in uses:
        return "dangerous", "changes a class or a module itself"
    if module == "<copyreg extension>":
        return "suspicious", "a global by a number: which one depends on the process that loads it"
    if full == "builtins.getattr" and set(uses) == {"mention", "resolved"}:
        return "known", "reaches a name that is judged by itself"
    if full in _NAMES:
        return "dangerous", _NAMES[full]
    if not full.isascii():
        return "suspicious", "letters that look like others: a name made to mislead"
    if full == "builtins.type" and CALLED & set(uses):
        return "dangerous", "makes a class"
    if "result" in uses:
        # Whatever comes out of a call that is called itself is nothing that holds data.
        reason = _module_reason(full)
        return (
            ("dangerous", reason)
            if reason
            else ("suspicious", "what comes out of it would be called")
        )
    if (module, what.name) in _built():
        return "safe", "built as data"
    if full in _KNOWN:
        return "known", "holds data"
    if module.split(".")[0] == "__torch__":
        return "known", "a type of TorchScript, which has no Python module"
    return _judge_foreign(module, what.name, uses, given=given)


def _judge_foreign(
    module: str, name: str, uses: Collection[str], *, given: bool
) -> tuple[Severity, str]:
    full = f"{module}.{name}"
    last = name.rpartition(".")[2]
    if (
        full.startswith(_PURE)
        and full.count(".") <= 3
        and last not in _MEMBERS
        and not last.startswith("__")
    ):
        return "known", "a function of tensors"
    if last.startswith(CYTHON) and "." not in name:
        last = name = last.removeprefix(CYTHON)
        uses = {"new"} if _module_reason(full) is None else uses
        full = f"{module}.{name}"
        given = False
    if module == "numpy" and "." not in name and set(uses) <= {"mention"}:
        return "known", "a function or a class of numpy, named and not called"
    rebuilds = last.startswith(REBUILDERS) and "." not in name
    holds_data = full.startswith(_KNOWN_UNDER)
    if (
        holds_data
        and "." not in name
        and (rebuilds or (_classlike(last) and not CALLED & set(uses)))
    ):
        return "known", "part of ordinary checkpoints"
    reason = None if holds_data else _module_reason(full)
    if reason is not None:
        return "dangerous", reason
    return _judge_name(name, uses, given=given)


def _module_reason(full: str) -> str | None:
    """The reason why the module of a name is dangerous, from the nearest one that has a reason."""
    path = full.split(".")
    reasons = (_MODULES.get(".".join(path[:end])) for end in range(len(path), 0, -1))
    return next(filter(None, reasons), None)


def _judge_name(name: str, uses: Collection[str], *, given: bool) -> tuple[Severity, str]:
    parts = name.split(".")
    # Since protocol 4 a name may have dots, and each one is an attribute: `linear.os.system` of any module that imports os.
    for part in parts[:-1]:
        if part.lstrip("_") in _MODULES or part in _MODULES:
            return (
                "dangerous",
                f"{_MODULES.get(part) or _MODULES[part.lstrip('_')]}, reached through another module",
            )
    if any(part.startswith("__") for part in parts):
        return "dangerous", "reaches into the interpreter"
    if any(not _classlike(part) for part in parts[:-1]):
        return "dangerous", "reaches through a module or an object to what it holds"
    if len(parts) > 1 and parts[-1] in _MEMBERS:
        return "dangerous", "a method that touches files or calls what it is given"
    if parts[-1].lstrip("_") in _REACHED and not _classlike(parts[-1]):
        return "dangerous", "a module, reached through another one"
    if CALLED & set(uses):
        if _classlike(parts[-1]):
            return (
                "suspicious",
                "a class that nothing here knows: its constructor or its methods would run",
            )
        return "suspicious", "a function that nothing here knows would be called"
    if "new" in uses and given:
        return (
            "suspicious",
            "a class that nothing here knows would be made with arguments of this file",
        )
    if _classlike(parts[-1]):
        return "unknown", "a class that nothing here knows; its module would be imported"
    return "unknown", "mentioned and not called; its module would be imported"


def _classlike(name: str) -> bool:
    return name.lstrip("_")[:1].isupper()
