"""Safetensors files made by hand, honest and not, and a source in memory to open them from."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import numpy as np

from holdfast.core.limits import Limits
from holdfast.core.protocols import Request, Store
from holdfast.core.tensor import LazyTensor
from holdfast.errors import StoreError, Truncated


class MemoryStore(Store):
    """Just enough of a store."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.files = dict(files)
        self.name = "memory"

    def list(self) -> list[str]:
        return sorted(self.files)

    def size(self, key: str) -> int:
        if key not in self.files:
            raise StoreError("no such file", file=key)
        return len(self.files[key])

    def read(self, key: str, start: int, out: memoryview) -> None:
        part = self.files[key][start : start + len(out)]
        if len(part) != len(out):
            raise Truncated("the file ends here", file=key)
        out[:] = part

    def map(self, key: str) -> memoryview | None:
        return None

    def close(self) -> None:
        pass


class MemorySource:
    """Files as a format sees them. It counts the bytes that were read, so that a test can see that no data was."""

    mapped = False

    def __init__(self, files: Mapping[str, bytes] | bytes, limits: Limits | None = None) -> None:
        self.store = MemoryStore({"file": files} if isinstance(files, bytes) else files)
        self.limits = limits or Limits()
        self.nbytes_read = 0

    def read_head(self, key: str, nbytes: int) -> bytes:
        return self.bytes(key, 0, min(nbytes, self.store.size(key)))

    def bytes(self, key: str, start: int, stop: int) -> bytes:
        out = bytearray(stop - start)
        self.store.read(key, start, memoryview(out))
        self.nbytes_read += len(out)
        return bytes(out)

    def read(self, requests: Sequence[Request]) -> None:
        for request in requests:
            for chunk in request.tensor.chunks:
                raw = stored(request.tensor.source, chunk.storage)
                request.out[chunk.box.slices] = np.frombuffer(
                    raw, request.tensor.dtype.numpy
                ).reshape(chunk.shape)

    def arrays(self, tensors: Sequence[LazyTensor]) -> list[np.ndarray]:
        requests = [Request(tensor, tensor.empty()) for tensor in tensors]
        self.read(requests)
        return [request.out for request in requests]


def stored(source, storage) -> bytes:
    """The bytes of a storage."""
    return source.bytes(storage.key, storage.start, storage.start + storage.nbytes)


def frame(header: bytes | str, data: bytes = b"", *, length: int | None = None) -> bytes:
    """A file out of its parts, with a length that may lie."""
    raw = header.encode() if isinstance(header, str) else header
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw + data


def entry(dtype: str, shape: Sequence[object], begin: object, end: object) -> dict[str, object]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def craft(entries: Mapping[str, object], nbytes: int = 0, metadata: object = None) -> bytes:
    """A file with this header and so many bytes of data 0, 1, 2, …"""
    document = {} if metadata is None else {"__metadata__": metadata}
    document.update(entries)
    return frame(json.dumps(document), bytes(i % 251 for i in range(nbytes)))


def shards(**files: Mapping[str, tuple[Sequence[int], Sequence[int]]]) -> dict[str, bytes]:
    """A directory as torch's writer leaves it: file=… {name: (saved offsets, shape)}, all int32 that count up."""
    made = {}
    for key, pieces in files.items():
        document: dict[str, object] = {}
        info, position = {}, 0
        for name, (offsets, shape) in pieces.items():
            nbytes = int(np.prod(shape, dtype=int)) * 4
            document[name] = entry("I32", shape, position, position + nbytes)
            info[name] = {"saved_offsets": list(offsets)}
            position += nbytes
        data = np.arange(position // 4, dtype="<i4").tobytes()
        meta = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(info)}
        made[f"{key}.safetensors"] = frame(json.dumps({"__metadata__": meta, **document}), data)
    return made


def index(weight_map: Mapping[str, object], **more: object) -> bytes:
    return json.dumps({**more, "weight_map": weight_map}, indent=2).encode()
