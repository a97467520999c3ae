"""A worker: takes a delivery, handles it in the way it says, and answers.

An answer is {"done": bool}: acknowledged or not, and what the queue has to know of
prepared transactions.  Every step is in the worker's ledger.
"""

import json
import os
import random
import time
import zlib

import psycopg

import leases
import ways
from ledger import Ledger

# A state that is told by an error, where the function raises for it.
TOLD_BY_ERROR = {
    "ID001": "key_reused",
    "ID002": "in_progress",
    "ID003": "uncertain",
    "ID004": "too_late",
}


class Worker:
    def __init__(self, slot, servers, schema, directory, seed, proxy_port, provider):
        self.slot, self.servers, self.schema = slot, servers, schema
        self.ledger = Ledger(directory, f"{slot}.{os.getpid()}")
        self.seed = seed
        self.rng = random.Random(f"{seed}/{slot}/{os.getpid()}")
        self.proxy_port, self.provider = proxy_port, provider
        self.conn, self.count = None, 0

    def serve(self, jobs, pipe):
        for line in jobs:
            answer = self.handle(json.loads(line))
            os.write(pipe, (json.dumps(answer) + "\n").encode())

    def connect(self):
        """A third of the connections go through the proxy that cuts them."""
        info = self.servers.conninfo()
        if self.rng.random() < 0.35:
            info.update(host="127.0.0.1", port=self.proxy_port)
        self.conn = psycopg.connect(
            **info,
            autocommit=True,
            application_name="torture",
            connect_timeout=5,
            options=f"-c search_path={self.schema},public -c lock_timeout=10s",
        )

    def handle(self, job):
        attempt = None
        try:
            if self.conn is None or self.conn.closed or self.rng.random() < 0.02:
                self.disconnect()
                self.connect()
            if job["kind"] == "sweep":
                return self.sweep()
            self.count += 1
            attempt = Attempt(self, job)
            return attempt.handle()
        except psycopg.Error as error:
            if attempt:
                attempt.failed(error)
            else:
                time.sleep(0.05)  # no connection to be had
            self.reset()
            return {"done": False}

    def reset(self):
        try:
            self.conn.execute("ROLLBACK")
        except (psycopg.Error, AttributeError):
            self.disconnect()

    def disconnect(self):
        if self.conn:
            self.conn.close()
        self.conn = None

    def sweep(self):
        """Prepared transactions whose workers could not tell the queue."""
        rows = self.conn.execute(
            "SELECT gid FROM pg_prepared_xacts WHERE prepared < now() - interval '5 s'"
        )
        return {"done": True, "found": [gid for (gid,) in rows]}


class Attempt:
    """One delivery, and what is noted of it."""

    def __init__(self, worker, job):
        self.worker, self.conn, self.job = worker, worker.conn, job
        self.id = f"{worker.slot}.{os.getpid()}.{worker.count}"
        words = (worker.seed, job.get("number"), job.get("delivery"), job.get("try"))
        self.rng = random.Random("/".join(map(str, words)))
        self.told_by_error = False
        self.ops = {}  # op -> key
        for op, key in job.get("keys", []):
            self.ops[op] = key

    def handle(self):
        kind = self.job["kind"]
        if kind == "finish":
            return self.finish(self.job["gid"])
        if kind == "look":
            return {"done": ways.look(self)}
        if kind == "impostor":
            return {"done": ways.impostor(self)}
        module = leases if self.job["way"] == "lease" else ways
        done = getattr(module, self.job["way"])(self)
        return done if isinstance(done, dict) else {"done": done}

    def note(self, event, *words):
        self.worker.ledger.note(event, self.id, *words)

    def failed(self, error):
        what = " ".join(str(error).split())[:200]
        lost = "lost" if isinstance(error, psycopg.OperationalError) else "client"
        self.note("fail", error.sqlstate or lost, what)

    def sql(self, query, *args):
        return self.conn.execute(query, args)

    def tell(self, op, query, *args):
        """Asks for a claim; a row of claimed, status and more, also for an error.

        For an error that tells a state the transaction is over.
        """
        self.note("ask", op)
        try:
            return self.sql(query, *args).fetchone()
        except psycopg.Error as error:
            if error.sqlstate not in TOLD_BY_ERROR:
                raise
            self.sql("ROLLBACK")
            status = TOLD_BY_ERROR[error.sqlstate]
            self.note("told", op, status, 0, "?")
            self.told_by_error = True
            return False, status, None

    def commit(self):
        """Returns whether the operation is known to be done for good.

        After an unsynced COMMIT it is not, but once it is replayed.
        """
        self.note("send")
        if self.sql("COMMIT").statusmessage != "COMMIT":
            self.note("fail", "undone", "COMMIT answered ROLLBACK")
            return False
        self.note("done")
        return not self.job["unsynced"]

    def finish(self, gid):
        """The second half of a prepared transaction, whoever prepared it.

        Its fate is a matter of its name, so that everybody decides alike.
        """
        try:
            if zlib.crc32(gid.encode()) % 5 == 0:
                self.sql(f"ROLLBACK PREPARED '{gid}'")
            else:
                self.worker.ledger.note("send", gid)
                self.sql(f"COMMIT PREPARED '{gid}'")
                self.worker.ledger.note("done", gid)
        except psycopg.Error as error:
            if error.sqlstate != "42704":  # somebody else was faster
                raise
        return {"done": True}

    def pause(self):
        """Mostly none; now and then long enough for things to happen."""
        milliseconds = self.rng.choices((0, 3, 20, 300), (60, 28, 10, 2))[0]
        if milliseconds:
            time.sleep(milliseconds / 1000 * self.rng.random())


def work(slot, jobs, pipe, *args):
    Worker(slot, *args).serve(jobs, pipe)
