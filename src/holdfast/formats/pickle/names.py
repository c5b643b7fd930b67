"""Python 2 names of things, and what Python 3 calls them.

Protocols 0 to 2 are written with Python 2 names by every Python, so `set` comes as `__builtin__.set`. The names are text here:
the table makes look-ups and reports agree, and imports nothing.
"""

from __future__ import annotations

__all__ = ["modern"]

MODULES = {
    "__builtin__": "builtins",
    "exceptions": "builtins",
    "copy_reg": "copyreg",
    "Queue": "queue",
    "SocketServer": "socketserver",
    "ConfigParser": "configparser",
    "repr": "reprlib",
    "Tkinter": "tkinter",
    "cPickle": "pickle",
    "_pickle": "pickle",
    "commands": "subprocess",
    "thread": "_thread",
    "dummy_thread": "_dummy_thread",
    "UserList": "collections",
    "UserDict": "collections",
    "UserString": "collections",
    "StringIO": "io",
    "cStringIO": "io",
    "urllib2": "urllib.request",
    "httplib": "http.client",
    "xmlrpclib": "xmlrpc.client",
    "_abcoll": "collections.abc",
}

NAMES = {
    ("__builtin__", "xrange"): ("builtins", "range"),
    ("__builtin__", "unicode"): ("builtins", "str"),
    ("__builtin__", "basestring"): ("builtins", "str"),
    ("__builtin__", "long"): ("builtins", "int"),
    ("__builtin__", "unichr"): ("builtins", "chr"),
    ("__builtin__", "raw_input"): ("builtins", "input"),
    ("__builtin__", "reduce"): ("functools", "reduce"),
    ("__builtin__", "intern"): ("sys", "intern"),
    ("__builtin__", "reload"): ("importlib", "reload"),
    ("exceptions", "StandardError"): ("builtins", "Exception"),
    ("itertools", "izip"): ("builtins", "zip"),
    ("itertools", "imap"): ("builtins", "map"),
    ("itertools", "ifilter"): ("builtins", "filter"),
    ("itertools", "izip_longest"): ("itertools", "zip_longest"),
    ("UserDict", "IterableUserDict"): ("collections", "UserDict"),
    ("socket", "_socketobject"): ("socket", "SocketType"),
}


def modern(module: str, name: str) -> tuple[str, str]:
    """The Python 3 name of a global, whatever the protocol.

    >>> modern("__builtin__", "xrange"), modern("copy_reg", "_reconstructor"), modern("torch", "Size")
    (('builtins', 'range'), ('copyreg', '_reconstructor'), ('torch', 'Size'))
    """
    return NAMES.get((module, name)) or (MODULES.get(module, module), name)
