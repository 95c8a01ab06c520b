"""Attacks on a gateway's CPU time or memory, each run by its own process.

    python -m tests.e2e.attackers NAME API_PORT ADMIN_PORT

The process attacks until its standard input ends, then prints its counters as JSON. Its own socket
buffers are small, so that nearly all socket memory on the machine is the gateway's. Attacks that
consist of a single request are in attacks.py.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import select
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from time import monotonic
from typing import Any

from tests.e2e.processes import ENV, run_process
from tests.e2e.raw_connection import post

KEY = "Authorization: Bearer sk-attacker"
HOSTILE, ALIAS, RESUMED = "hostile", "alias", "resumed"
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
BUFFER, LEAST_BUFFER = 32 * 1024, 4096
FEW, LARGE_BUFFER = 8, 512 * 1024  # up to 8 connections have large buffers and send at full speed
DRIP_S = 0.05
BURST_S = 1.0
ATTACKER = "127.0.0.9"
"""The address of the attacker, who is on another host than the regular clients."""
IP_BIND_ADDRESS_NO_PORT = 24  # from linux/in.h; the socket module of Python 3.11 lacks it
READ, WRITE = select.EPOLLIN, select.EPOLLOUT


@dataclass(frozen=True)
class Script:
    """What every connection of an attack on the gateway does.

    connections  number of connections
    sent         bytes to send
    once         True to send them once, False to repeat them
    drip         bytes to send afterwards, 20 times a second on each connection
    burst        whether all connections send `drip` at the same moment, once a second
    piece        maximum number of bytes per send()
    reads        whether the client reads the responses
    leaves       whether the client closes the connection after it has sent everything
    admin        whether the client connects to the admin server
    """

    connections: int
    sent: bytes
    once: bool = False
    drip: bytes = b""
    burst: bool = False
    piece: int = 1 << 20
    reads: bool = True
    leaves: bool = False
    admin: bool = False


class Client:
    def __init__(self, script: Script, port: int, done: Counter[str]) -> None:
        self._script, self._done, self._offset = script, done, 0
        self.socket = socket.socket()
        buffer = LARGE_BUFFER if script.connections <= FEW else BUFFER
        self.socket.setsockopt(
            socket.SOL_SOCKET, socket.SO_RCVBUF, buffer if script.reads else LEAST_BUFFER
        )
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.settimeout(10)
        self.socket.setsockopt(socket.IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, 1)
        self.socket.bind((ATTACKER, 0))
        self.socket.connect(("127.0.0.1", port))
        self.socket.setblocking(False)
        done["connections"] += 1

    @property
    def wanted(self) -> int:
        has_more = bool(self._script.sent) and not (
            self._script.once and self._offset == len(self._script.sent)
        )
        return (READ if self._script.reads else 0) | (WRITE if has_more else 0)

    @property
    def is_over(self) -> bool:
        return self._script.leaves and self._offset == len(self._script.sent)

    def step(self, ready: int) -> None:
        # Send and receive as much as possible. Raises OSError when the connection has ended.
        with suppress(BlockingIOError):
            if ready & READ and self._script.reads:
                received = self.socket.recv(1 << 20)
                if not received:
                    raise ConnectionResetError
                self._done["answers"] += received.count(b"HTTP/1.1 ")
            elif ready & (select.EPOLLHUP | select.EPOLLERR):
                raise ConnectionResetError
            if ready & WRITE:
                self._send()

    def drip(self) -> None:
        with suppress(OSError):
            self._done["bytes"] += self.socket.send(self._script.drip)

    def _send(self) -> None:
        text = self._script.sent
        if self._offset == len(text):
            self._offset = 0
        sent = self.socket.send(memoryview(text)[self._offset : self._offset + self._script.piece])
        self._offset += sent
        self._done["bytes"] += sent


class Crowd:
    def __init__(self, script: Script, api: int, admin: int) -> None:
        self.over = threading.Event()
        self.done: Counter[str] = Counter()
        self._script, self._port = script, admin if script.admin else api
        self._clients: dict[int, Client] = {}
        self._epoll = select.epoll()

    def run(self) -> None:
        due, dripping = monotonic(), list[Client]()
        while not self.over.is_set():
            for _ in range(min(64, self._script.connections - len(self._clients))):
                self._open()
            for number, ready in self._epoll.poll(0.002, 256):
                self._step(number, ready)
            if self._script.burst and monotonic() >= due:
                due += BURST_S
                for client in self._clients.values():
                    client.drip()
            elif self._script.drip and not self._script.burst:
                dripping = dripping or list(self._clients.values())
                while dripping and monotonic() >= due:
                    due += DRIP_S / len(self._clients)
                    dripping.pop().drip()

    def _open(self) -> None:
        with suppress(OSError):
            client = Client(self._script, self._port, self.done)
            self._clients[client.socket.fileno()] = client
            self._epoll.register(client.socket.fileno(), client.wanted)

    def _step(self, number: int, ready: int) -> None:
        client = self._clients[number]
        wanted = client.wanted
        try:
            client.step(ready)
        except OSError:
            self._close(number)
            return
        if client.is_over:
            self._close(number)
        elif client.wanted != wanted:
            self._epoll.modify(number, client.wanted)

    def _close(self, number: int) -> None:
        self._clients.pop(number).socket.close()


def call(path: str = CHAT, **changes: Any) -> bytes:
    # Build a valid chat request to the attacker's engine; `changes` are members of its body.
    messages = [{"role": "user", "content": "hi"}]
    return post({"model": HOSTILE, "messages": messages, **changes}, path, KEY)


def translated(user: str) -> bytes:
    # Build a valid request that is translated to a chat, because its pool's engines only have
    # chats.
    return post({"model": HOSTILE, "input": "hi", "user": user, "stream": True}, RESPONSES, KEY)


def head(*lines: str, start: str = f"POST {CHAT} HTTP/1.1") -> bytes:
    return "\r\n".join([start, "Host: 127.0.0.1", KEY, *lines, "", ""]).encode()


def body(text: bytes, path: str = CHAT) -> bytes:
    return post(text, path, KEY)


def prompts(one: bytes) -> bytes:
    return body(
        b'{"model":"hostile","prompt":[' + (one + b",") * 999_999 + one + b"]}", COMPLETIONS
    )


def messages(content: bytes, number: int) -> bytes:
    message = b'{"role":"user","content":"%b"}' % content
    return body(
        b'{"model":"hostile","messages":[' + (message + b",") * (number - 1) + message + b"]}"
    )


def members() -> bytes:
    names = b",".join(b'"k%d":1' % number for number in range(1_000_000))
    return body(b'{"model":"hostile","messages":[],' + names + b"}")


def unfinished() -> bytes:
    return head(f"X-Long: {'a' * 8000}", *(f"X-{number}: {'a' * 7000}" for number in range(7)))[:-4]


def many() -> int:
    # Return a large number of connections below `limits.connections_per_address`.
    #
    # The number is smaller if the process may not open so many files.
    return min(4000, resource.getrlimit(resource.RLIMIT_NOFILE)[1] - 100)


def dry_run() -> bytes:
    lines = ("PUT /config?dry_run=1 HTTP/1.1", "Host: 127.0.0.1", "Content-Length: 1000000", "", "")
    return "\r\n".join(lines).encode() + b"a: ${HOME}\n" * 90_909 + b"\n"


@dataclass(frozen=True)
class CostlyAttack:
    """A named attack on a gateway's CPU time or memory.

    script  function that returns what each connection does
    budget  bytes that the attack may use because the configuration allows it, in addition to the
            allowed growth MOST_GROWTH
    """

    name: str
    script: Callable[[], Script]  # some are megabytes
    budget: int = 0


MIB = 2**20
BODY_BUDGET, UNREAD_BUDGET = 64 * MIB, 16 * MIB  # limits.body_budget, limits.unread_budget
# Two bodies of 30 MiB fit into the body budget. One at a time is joined from its pieces. These lie
# between the pieces of the other one, so their memory is used again, but not given back. So the
# gateway grows by three bodies, and by 18 MiB for all else. Two joined ones would be too many.
TWO_AND_A_JOINED_ONE = 76 * MIB  # with MOST_GROWTH: 108 MiB
BODY_HEAD = '{"model":"hostile","messages":[{"role":"user","content":"'
CHUNKED = "Transfer-Encoding: chunked"
LONG = 30_000_000
GUESS = "Authorization: Bearer sk-guess"

MODELS = head(start="GET /v1/models HTTP/1.1")

CLIENT_ATTACKS = [
    CostlyAttack("pipelined refusals", lambda: Script(4, body(b"{}") * 200)),
    CostlyAttack("pipelined requests", lambda: Script(4, call() * 200)),
    CostlyAttack("pipelined GETs", lambda: Script(4, MODELS * 200)),
    CostlyAttack(
        "requests behind one that waits",
        lambda: Script(256, call(user="hold") + call() * 2000, once=True),
        # Unread bytes count towards the body budget. Bytes in the kernel's buffers do not, up to
        # limits.receive_buffer for each of the 256 connections.
        BODY_BUDGET,
    ),
    CostlyAttack(
        "refusals whose answers are not read",
        lambda: Script(64, body(b"{}") * 200, reads=False),
        UNREAD_BUDGET,
    ),
    CostlyAttack("unfinished heads", lambda: Script(500, unfinished(), once=True), UNREAD_BUDGET),
    CostlyAttack(
        "unfinished heads in small pieces",
        lambda: Script(64, unfinished(), once=True, piece=64),
        UNREAD_BUDGET,
    ),
    CostlyAttack("heads that drip", lambda: Script(1000, head("X: a")[:-4], once=True, drip=b"a")),
    CostlyAttack(
        "bodies that drip",
        lambda: Script(
            1000, head("Content-Length: 1000000") + BODY_HEAD.encode(), once=True, drip=b"x" * 100
        ),
    ),
    CostlyAttack(
        "chunks that drip",
        lambda: Script(1000, head(CHUNKED) + b"1\r\n{\r\n", once=True, drip=b"1\r\n \r\n"),
    ),
    CostlyAttack(
        "requests at once on open connections",
        lambda: Script(1000, call(), once=True, drip=call(), burst=True),
    ),
    CostlyAttack(
        "GETs at once on open connections",
        lambda: Script(1000, MODELS, once=True, drip=MODELS, burst=True),
    ),
    CostlyAttack(
        "bodies that are never whole",
        lambda: Script(8, head(f"Content-Length: {LONG}") + b" " * 28 * MIB, once=True),
        budget=BODY_BUDGET,
    ),
    CostlyAttack(
        "many bodies that are never whole",
        lambda: Script(64, head(f"Content-Length: {LONG}") + b" " * 28 * MIB, once=True),
        budget=BODY_BUDGET,
    ),
    CostlyAttack("idle connections", lambda: Script(many(), b"")),
    CostlyAttack("connections beyond the limit", lambda: Script(many() + 500, b"")),
    CostlyAttack("connections that leave", lambda: Script(16, b"P", once=True, leaves=True)),
    CostlyAttack(
        "requests whose clients leave",
        lambda: Script(16, call(stream=True), once=True, leaves=True),
    ),
    CostlyAttack(
        "clients that never read",
        lambda: Script(64, call(stream=True, user="flood"), once=True, reads=False),
    ),
    CostlyAttack(
        "clients that never read, by an alias",
        lambda: Script(64, call(stream=True, user="flood", model=ALIAS), once=True, reads=False),
    ),
    CostlyAttack(
        "Transfer-Encoding: gzip, chunked",
        lambda: Script(4, head("Transfer-Encoding: gzip, chunked")),
    ),
    CostlyAttack(
        "chunks of one byte",
        lambda: Script(4, head(CHUNKED) + b"1\r\n \r\n" * 16_000 + b"0\r\n\r\n"),
    ),
    CostlyAttack(
        "bodies beyond the limit",
        lambda: Script(4, head("Content-Length: 1000000000") + b" " * MIB),
    ),
    CostlyAttack("wrong keys", lambda: Script(4, post(b"{}", CHAT, GUESS) * 100)),
    CostlyAttack(
        "unknown paths", lambda: Script(4, head(start="GET /collective_rpc HTTP/1.1") * 100)
    ),
    CostlyAttack(
        "bytes that are not HTTP",
        lambda: Script(4, b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03" * 100),
    ),
    CostlyAttack("dry runs without the key", lambda: Script(4, dry_run(), admin=True)),
]

BODY_ATTACKS = [
    CostlyAttack("a million prompts", lambda: Script(2, prompts(b'"a"')), budget=BODY_BUDGET),
    CostlyAttack(
        "a million prompts with escapes", lambda: Script(2, prompts(rb'"\""')), budget=BODY_BUDGET
    ),
    CostlyAttack(
        "a million lists of tokens", lambda: Script(2, prompts(b"[1]")), budget=BODY_BUDGET
    ),
    CostlyAttack("a million members", lambda: Script(2, members()), budget=BODY_BUDGET),
    CostlyAttack(
        "a depth that never closes", lambda: Script(2, body(b"[" * MIB)), budget=BODY_BUDGET
    ),
    CostlyAttack(
        "a hundred thousand messages",
        lambda: Script(2, messages(b"a", 100_000)),
        budget=BODY_BUDGET,
    ),
    CostlyAttack(
        "a prompt of 8 MiB", lambda: Script(2, messages(b"a " * 4 * MIB, 1)), budget=BODY_BUDGET
    ),
    CostlyAttack(
        "30 MiB of blanks", lambda: Script(2, body(b" " * 30 * MIB)), budget=TWO_AND_A_JOINED_ONE
    ),
    CostlyAttack(
        "30 MiB that are not JSON",
        lambda: Script(2, body(b"{" + b"a" * 30 * MIB)),
        budget=TWO_AND_A_JOINED_ONE,
    ),
    CostlyAttack(
        "fifty thousand duplicates",
        lambda: Script(2, body(b'{"messages":[]' + b',"model":"hostile"' * 50_000 + b"}")),
        budget=BODY_BUDGET,
    ),
]

RESPONSE_ATTACKS = [
    CostlyAttack("an event of 30 MB", lambda: Script(2, call(stream=True, user=f"event:{LONG}"))),
    CostlyAttack(
        "an event of 30 MB, by an alias",
        lambda: Script(2, call(stream=True, user=f"event:{LONG}", model=ALIAS)),
    ),
    CostlyAttack(
        "an event of 30 MB, with resume",
        lambda: Script(2, call(stream=True, user=f"event:{LONG}", model=RESUMED)),
    ),
    CostlyAttack(
        "token ids of 8 MB in one event, with resume",
        lambda: Script(2, call(stream=True, user=f"ids:{8_000_000}", model=RESUMED)),
    ),
    CostlyAttack("an answer of 30 MB", lambda: Script(2, call(user=f"answer:{LONG}"))),
    CostlyAttack(
        "an answer of 30 MB, by an alias",
        lambda: Script(2, call(user=f"answer:{LONG}", model=ALIAS)),
    ),
    CostlyAttack("an answer with a head of 200 KB", lambda: Script(2, call(user="head:200000"))),
    CostlyAttack(
        "an answer with a head in many pieces", lambda: Script(2, call(user="headdrip:200000"))
    ),
    CostlyAttack(
        "an event in many pieces",
        lambda: Script(2, call(stream=True, user="drip:400000")),
    ),
    CostlyAttack(
        "an event in many pieces, by an alias",
        lambda: Script(2, call(stream=True, user="drip:400000", model=ALIAS)),
    ),
    CostlyAttack(
        "an event in many pieces, with resume",
        lambda: Script(2, call(stream=True, user="drip:200000", model=RESUMED)),
    ),
    CostlyAttack(
        "an event in many pieces, translated",
        lambda: Script(2, translated("drip:400000")),
    ),
    CostlyAttack("control bytes in a content type", lambda: Script(2, call(user="control"))),
]

# Attacks on the port of a KV transfer agent, by clients without the fleet's key.
AGENT_ATTACKS = [
    CostlyAttack("100 idle sockets on a KV port", lambda: Script(100, b"")),
    CostlyAttack("thousands of idle sockets on a KV port", lambda: Script(2000, b"")),
    CostlyAttack("KV handshakes that drip", lambda: Script(500, b"K", once=True, drip=b"\x01")),
]

CORPUS = {attack.name: attack for attack in (*CLIENT_ATTACKS, *BODY_ATTACKS, *RESPONSE_ATTACKS)}
AGENT_CORPUS = {attack.name: attack for attack in AGENT_ATTACKS}


@contextmanager
def attacking(name: str, api: int, admin: int, *options: str) -> Iterator[Counter[str]]:
    # Run an attack in a process during a `with` block; its counters are set at the end.
    command = [sys.executable, "-m", "tests.e2e.attackers", name, str(api), str(admin), *options]
    done: Counter[str] = Counter()
    with run_process(command, env=ENV, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        yield done
        process.stdin.close()
        done.update(json.loads(process.stdout.readline()))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "name", choices=CORPUS | AGENT_CORPUS, metavar="name", help="name of the attack to run"
    )
    parser.add_argument("api", type=int, help="port of the attacked API")
    parser.add_argument("admin", type=int, help="port of the attacked gateway's admin server")
    parser.add_argument(
        "--core", type=int, help="CPU core to which the process of the attacker is bound"
    )
    parser.add_argument(
        "--nice",
        type=int,
        default=0,
        help="priority (nice value) of the attacker's process; negative numbers need root",
    )
    options = parser.parse_args()
    if options.core is not None:
        os.sched_setaffinity(0, {options.core})
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, options.nice)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    attack = (CORPUS | AGENT_CORPUS)[options.name]
    crowd = Crowd(attack.script(), options.api, options.admin)
    running = threading.Thread(target=crowd.run)
    running.start()
    print("begun", flush=True)
    sys.stdin.read()
    crowd.over.set()
    running.join()
    print(json.dumps(crowd.done), flush=True)


if __name__ == "__main__":
    main()
