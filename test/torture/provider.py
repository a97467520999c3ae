"""The world outside: makes effects that nobody can take back.

A process on a Unix socket; a session is lines of words, each answered by one:
    hello SECONDS        it hangs up on this session after so long: a sender that
                         was frozen can not do harm later
    send KEY ATTEMPT     makes the effect, whatever was made before: "new N", or
                         "late" after SECONDS
    again KEY ATTEMPT    the same, but compares keys: "new N", or "old N"
    find KEY             "N" of the first effect, or "none"
What it did is in its own ledger: time, new or old, key, N, attempt.
"""

import os
import socket
import socketserver
import threading
import time


class Provider(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, path, log):
        super().__init__(path, Session)
        self.log = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self.lock = threading.Lock()
        self.effects = {}  # key -> number of its first effect
        self.count = 0

    def perform(self, key, attempt, compare, deadline):
        with self.lock:
            if time.monotonic() > deadline:
                return "late"
            first = self.effects.get(key)
            kind, number = "old", first
            if first is None or not compare:
                self.count += 1
                kind, number = "new", self.count
                self.effects.setdefault(key, number)
            words = (time.monotonic_ns(), kind, key, number, attempt)
            os.write(self.log, ("\t".join(map(str, words)) + "\n").encode())
            return f"{kind} {number}"

    def find(self, key):
        with self.lock:
            return str(self.effects.get(key, "none"))


class Session(socketserver.StreamRequestHandler):
    def handle(self):
        deadline = 0
        try:
            for line in self.rfile:
                word, *words = line.decode().split()
                if word == "hello":
                    deadline = time.monotonic() + float(words[0])
                    answer = "hello"
                elif word == "find":
                    answer = self.server.find(words[0])
                else:
                    answer = self.server.perform(*words, word == "again", deadline)
                self.wfile.write(f"{answer}\n".encode())
        except OSError:
            pass  # the other side is dead


class Call:
    """A worker's session."""

    def __init__(self, path, seconds):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(10)
        self.socket.connect(path)
        self.lines = self.socket.makefile("r")
        self.ask("hello", seconds)

    def ask(self, *words):
        self.socket.sendall((" ".join(map(str, words)) + "\n").encode())
        return self.lines.readline().strip()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.lines.close()
        self.socket.close()


def serve(path, log):
    Provider(path, log).serve_forever()
