#!/usr/bin/python3
"""A proxy that loses a COMMIT, or the answer to it.

    test/clients/proxy.py SOCKET

SOCKET is the Unix socket of a PostgreSQL server or pooler.  Three TCP ports on
127.0.0.1 lead to it, whose numbers are printed on one line, in this order:

  plain          passes on everything
  lost reply     cuts the connection, both ways, instead of passing on the answer
                 to a COMMIT, or to an INSERT outside a transaction: it is done,
                 and the client does not get to know
  lost request   cuts it instead of passing on a COMMIT: it is not done, and the
                 client does not get to know that either

It speaks the messages of the protocol (version 3, without TLS), so the cut is
always at the same place.  It runs until it is killed.
"""

import asyncio
import struct
import sys

SSL_REQUEST, GSS_REQUEST, CANCEL_REQUEST = 80877103, 80877104, 80877102


class Cut(Exception):
    """Neither side gets to hear any more."""


async def read_startup(reader, writer):
    """The client's first message: it has no type.  TLS is declined."""
    while True:
        head = await reader.readexactly(8)
        length, code = struct.unpack("!ii", head)
        rest = await reader.readexactly(length - 8)
        if code not in (SSL_REQUEST, GSS_REQUEST):
            return head + rest, code
        writer.write(b"N")


async def read_message(reader):
    head = await reader.readexactly(5)
    (length,) = struct.unpack("!i", head[1:])
    return head[:1], head + await reader.readexactly(length - 4)


def is_commit(kind, message):
    """A Query, or a Parse, whose text is COMMIT."""
    if kind == b"Q":
        text = message[5:]
    elif kind == b"P":
        text = message[5:].split(b"\0")[1]
    else:
        return False
    return text.strip(b"; \0").upper() == b"COMMIT"


async def pass_requests(reader, writer, lose):
    while True:
        kind, message = await read_message(reader)
        if lose and is_commit(kind, message):
            raise Cut
        writer.write(message)
        await writer.drain()


async def pass_replies(reader, writer, lose):
    """From CommandComplete to ReadyForQuery, which says whether it committed,
    nothing is passed on before it is known whether it will be."""
    held, cut = [], False
    while True:
        kind, message = await read_message(reader)
        if kind == b"C" and lose:
            cut = cut or message[5:].startswith((b"COMMIT", b"INSERT"))
        if held or (kind == b"C" and lose):
            held.append(message)
        else:
            writer.write(message)
        if held and kind == b"Z":
            if cut and message[5:] == b"I":
                raise Cut
            writer.write(b"".join(held))
            held, cut = [], False
        await writer.drain()


async def serve(client_reader, client_writer, target, lose):
    writers = [client_writer]
    try:
        startup, code = await read_startup(client_reader, client_writer)
        server_reader, server_writer = await asyncio.open_unix_connection(target)
        writers.append(server_writer)
        server_writer.write(startup)
        await server_writer.drain()
        if code == CANCEL_REQUEST:
            await server_reader.read()
            return
        directions = {
            asyncio.ensure_future(
                pass_requests(client_reader, server_writer, lose == "request")
            ),
            asyncio.ensure_future(
                pass_replies(server_reader, client_writer, lose == "reply")
            ),
        }
        # Where one side is gone, or is to be, the other one goes, too.
        done, others = await asyncio.wait(
            directions, return_when=asyncio.FIRST_COMPLETED
        )
        for other in others:
            other.cancel()
        await asyncio.gather(*directions, return_exceptions=True)
        if not any(isinstance(one.exception(), Cut) for one in done):
            for writer in writers:  # what was passed on may still arrive
                writer.close()
            writers = []
    except (OSError, asyncio.IncompleteReadError):
        pass
    finally:
        for writer in writers:
            writer.transport.abort()


async def main(target):
    ports = []
    for lose in (None, "reply", "request"):

        def accept(reader, writer, lose=lose):
            return serve(reader, writer, target, lose)

        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        ports.append(server.sockets[0].getsockname()[1])
        asyncio.ensure_future(server.serve_forever())
    print(*ports, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    try:
        asyncio.run(main(sys.argv[1]))
    except KeyboardInterrupt:
        pass
