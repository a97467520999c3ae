#!/usr/bin/python3
"""A TCP proxy that breaks PostgreSQL connections at chosen statements.

    proxy.py --to HOST:PORT [--cut before|reply REGEX]...

It passes the protocol through, and knows which message runs which statement: in
simple queries, and in Parse, Bind and Execute, with named and unnamed statements.
HOST may be the directory of a Unix socket.  TLS is declined, so sslmode=require fails.

Once it listens, on 127.0.0.1, it prints "ready", and numbers of ports: of one that
passes everything on until it is told otherwise; of the control port; and of one for
each --cut, where every statement that matches REGEX (without regard to case, at the
start of its text) cuts the connection, both sides of it:
    before    instead of being passed on: it is not done, and nobody was told
    reply     once the server has answered, whose answer is dropped: it is done, and
              nobody was told

The control port takes one command a line, and answers each with a line:
    arm before|reply       the next COMMIT on the first port is cut so
    disarm                 takes back what was armed
    target HOST:PORT       where later connections go
    stats                  JSON: cut_before, cut_reply: how many were
"""

import argparse
import asyncio
import json
import re
import struct
import sys

COMMIT = re.compile(r"\s*(COMMIT|END)\b", re.I)
SSL_REQUEST, GSS_REQUEST, CANCEL_REQUEST = 80877103, 80877104, 80877102
READY = ord("Z")


class Proxy:
    def __init__(self, target):
        self.target = target
        self.armed = []  # how to cut the next COMMITs, the next one last
        self.counts = {"cut_before": 0, "cut_reply": 0}

    def at_next_commit(self, text):
        """How to cut at this statement, or None; for the first port."""
        return self.armed.pop() if self.armed and COMMIT.match(text) else None

    async def connect(self, protocol):
        host, _, port = self.target.rpartition(":")
        loop = asyncio.get_running_loop()
        if host.startswith("/"):
            return await loop.create_unix_connection(protocol, f"{host}/.s.PGSQL.{port}")
        return await loop.create_connection(protocol, host, int(port))

    def command(self, line):
        match line.split():
            case ["arm", ("before" | "reply") as how]:
                self.armed.insert(0, how)
            case ["disarm"]:
                self.armed.clear()
            case ["target", target]:
                self.target = target
            case ["stats"]:
                return json.dumps(self.counts)
            case _:
                return "error: what?"
        return "ok"

    async def control(self, reader, writer):
        try:
            while line := await reader.readline():
                writer.write(f"{self.command(line.decode())}\n".encode())
                await writer.drain()
        except OSError:
            pass
        writer.close()


class Session(asyncio.Protocol):
    """One connection, as the client's side of it sees it."""

    def __init__(self, proxy, decide):
        self.proxy = proxy
        self.decide = decide  # how to cut at a statement, or None
        self.client = self.server = None
        self.started = False  # the startup packet has been seen
        self.buffer = b""  # from the client, not yet a whole message
        self.answers = b""  # from the server, likewise
        self.statements, self.portals = {}, {}  # name -> text
        self.asked = 1  # ReadyForQuery messages that are due; one for the startup
        self.ready = 0  # ... and that have come
        self.dropping = False  # the reply of a statement in the batch being sent
        self.cut_at = None  # the number of the ReadyForQuery to cut at

    def connection_made(self, transport):
        self.client = transport
        asyncio.ensure_future(self.reach_server())

    async def reach_server(self):
        try:
            await self.proxy.connect(lambda: ServerSide(self))
        except OSError:
            self.cut()
        else:
            if self.client.is_closing():
                self.cut()
            else:
                self.data_received(b"")  # what has come meanwhile

    def connection_lost(self, error):
        if self.server:  # what the client said last still arrives
            self.server.close()

    def pause_writing(self):
        self.server.pause_reading()

    def resume_writing(self):
        self.server.resume_reading()

    def cut(self):
        for transport in (self.client, self.server):
            if transport:
                transport.abort()

    def data_received(self, data):
        self.buffer += data
        if self.server is None:
            return
        if not self.started and not self.startup():
            return
        at = 0
        for start, end in messages(self.buffer):
            text = self.statement(self.buffer[start:start+1], self.buffer, start, end)
            how = self.decide(text) if text is not None else None
            if how == "before":
                self.proxy.counts["cut_before"] += 1
                self.server.write(self.buffer[:start])
                self.server.close()
                self.client.abort()
                return
            if how == "reply":
                self.dropping = True
            if self.buffer[start] in b"QSF":  # answered by ReadyForQuery
                self.asked += 1
                if self.dropping and self.cut_at is None:
                    self.cut_at = self.asked
            at = end
        self.server.write(self.buffer[:at])
        self.buffer = self.buffer[at:]

    def startup(self):
        while len(self.buffer) >= 8:
            length, code = struct.unpack("!ii", self.buffer[:8])
            if code in (SSL_REQUEST, GSS_REQUEST):
                self.client.write(b"N")
                self.buffer = self.buffer[8:]
            elif len(self.buffer) < length:
                return False
            else:
                self.server.write(self.buffer[:length])
                self.buffer = self.buffer[length:]
                self.started = code != CANCEL_REQUEST
                return self.started
        return False

    def statement(self, kind, buffer, start, end):
        """The text of the statement that this message runs, if it runs one."""
        if kind not in (b"Q", b"P", b"B", b"E"):
            return None
        first, _, rest = buffer[start + 5 : end].partition(b"\0")
        if kind == b"Q":
            return first.decode(errors="replace")
        if kind == b"P":
            text = rest.partition(b"\0")[0]
            self.statements[first] = text.decode(errors="replace")
        elif kind == b"B":
            self.portals[first] = self.statements.get(rest.partition(b"\0")[0], "")
        else:
            return self.portals.get(first, "")
        return None

    def answered(self, data):
        """What the server sends goes to the client, up to what is to be dropped."""
        self.answers += data
        at = 0
        for start, end in messages(self.answers):
            if self.cut_at is not None and self.ready == self.cut_at - 1:
                if self.answers[start] == READY:
                    self.proxy.counts["cut_reply"] += 1
                    return self.cut()
                continue
            self.ready += self.answers[start] == READY
            at = end
        self.client.write(self.answers[:at])
        self.answers = self.answers[at:]


class ServerSide(asyncio.Protocol):
    def __init__(self, session):
        self.session = session

    def connection_made(self, transport):
        self.session.server = transport

    def data_received(self, data):
        self.session.answered(data)

    def connection_lost(self, error):
        if self.session.client:  # what the server said last still goes out
            self.session.client.close()

    def pause_writing(self):
        self.session.client.pause_reading()

    def resume_writing(self):
        self.session.client.resume_reading()


def messages(buffer):
    """Start and end of each whole message."""
    start = 0
    while len(buffer) - start >= 5:
        end = start + 1 + int.from_bytes(buffer[start + 1 : start + 5], "big")
        if end > len(buffer):
            return
        yield start, end
        start = end


async def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--to", required=True, metavar="HOST:PORT")
    parser.add_argument(
        "--cut", nargs=2, action="append", default=[], metavar=("before|reply", "REGEX")
    )
    options = parser.parse_args()

    proxy = Proxy(options.to)
    decisions = [proxy.at_next_commit]
    for how, regex in options.cut:
        matches = re.compile(regex, re.I).match
        decisions.append(lambda text, how=how, matches=matches: matches(text) and how)
    loop = asyncio.get_running_loop()
    servers = [
        await loop.create_server(lambda decide=decide: Session(proxy, decide), "127.0.0.1", 0)
        for decide in decisions
    ]
    servers.insert(1, await asyncio.start_server(proxy.control, "127.0.0.1", 0))
    ports = [server.sockets[0].getsockname()[1] for server in servers]
    print("ready", *ports, flush=True)
    await asyncio.gather(*(server.serve_forever() for server in servers))


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except KeyboardInterrupt:
        sys.exit(130)
