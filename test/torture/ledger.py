"""The outside ledger: what each process asked and was told, and when.

One append-only file a process, a line an event, each line one write(): what was
written survives the writer, and no server's crash touches it.  Fields are separated
by tabs: time (CLOCK_MONOTONIC in ns, the same for all processes), event, attempt,
and what belongs to the event:

    ask ATTEMPT OP              a claim or lease is about to be asked for
    told ATTEMPT OP STATUS CLAIMED DIGEST [TOKEN LEASE_END]
    undo ATTEMPT OP             ROLLBACK TO took back what was told before
    send ATTEMPT                COMMIT, or COMMIT PREPARED, is about to be sent
    done ATTEMPT                ... and was acknowledged
    fail ATTEMPT SQLSTATE WHAT  it ended with an error; SQLSTATE may be "lost"
    look ATTEMPT OP             idem_lookup is about to be called
    saw ATTEMPT OP STATUS DIGEST   STATUS may be "absent"
    give ATTEMPT OP             idem_release with a token, or idem_resolve, is about
                                to be sent
    wrong ATTEMPT OP WHAT       the worker saw the contract broken by itself

An attempt is one delivery; "!" after it marks an impostor's.  DIGEST stands for a
result: its MD5, "-" for NULL, "?" where the way in does not tell it.
"""

import hashlib
import os
import pathlib
import time
from collections import namedtuple

Event = namedtuple("Event", "time name attempt words")


class Ledger:
    def __init__(self, directory, name):
        path = os.path.join(directory, name)
        self.fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def note(self, event, *words):
        line = "\t".join([str(time.monotonic_ns()), event, *map(str, words)])
        os.write(self.fd, f"{line}\n".encode())


def read(directory):
    """All events of all processes, in their order."""
    events = []
    for path in pathlib.Path(directory).iterdir():
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):  # the writer was killed in the middle of it
                at, name, attempt, *words = line[:-1].split("\t")
                events.append(Event(int(at), name, attempt, words))
    events.sort()
    return events


def digest(result):
    """What stands for a result in the ledger; the same as md5() in SQL."""
    if result is None:
        return "-"
    return hashlib.md5(result.encode(), usedforsecurity=False).hexdigest()
