"""What both stories are played on: processes, the conductor of an act, a table.

A story has acts.  An act has jobs in a queue, and workers that are harmed while
they work them off.  Its conductor harms them, replaces the dead, and counts
afterwards.
"""

import ctypes
import multiprocessing
import os
import pathlib
import select
import signal
import sys
import time
from collections import Counter

import jobs

STALLED_AFTER = 30  # seconds without an acknowledgement: give up
FORK = multiprocessing.get_context("fork")
PR_SET_PDEATHSIG = 1


def start(target, *args):
    """Starts a process that ends when this one does, even if it is stopped then."""
    process = FORK.Process(target=run_child, args=(os.getpid(), target, args))
    process.start()
    return process


def run_child(parent, target, args):
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the conductor's
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == parent:
        target(*args)


class Act:
    """The conductor of an act.  Subclasses say what happens to the workers."""

    schema_sql = None  # the file that makes what there is beside the queue

    def __init__(self, db, schema, title, size, workers):
        self.db, self.schema, self.title = db, schema, title
        self.size, self.crew = size, workers
        self.seen = Counter()  # reports and deaths, by kind
        self.workers = []
        self.reports, self.pipe = os.pipe()
        self.rest = b""  # of a report that has not been read whole

    def work(self):
        """What a worker process does: returns once all jobs are acknowledged."""
        raise NotImplementedError

    def note(self, kind, *words):
        """Takes down a worker's report."""
        raise NotImplementedError

    def step(self):
        """Called all the time while the act is on."""
        raise NotImplementedError

    def died(self, status):
        """Takes down the death of a worker; False if it is not a planned one."""
        raise NotImplementedError

    def faults(self):
        """How many there have been."""
        raise NotImplementedError

    def count(self):
        """The outcome, as a dictionary in the table's order."""
        raise NotImplementedError

    def play(self):
        """Plays to the end and returns the outcome."""
        set_the_stage(self.db, self.schema, self.size, self.schema_sql)
        progress = Progress(self)
        try:
            self.workers = [start(self.work) for _ in range(self.crew)]
            while self.workers:
                self.read_reports(timeout=0.05)
                self.step()
                self.replace_the_dead()
                progress.show()
        finally:
            for process in self.workers:
                process.kill()
                process.join()
        while self.read_reports(timeout=0):
            pass
        progress.show(end="\n")
        self.wait_for_orphans()
        return self.count()

    def read_reports(self, timeout):
        """Takes down what workers have reported; False if that is nothing."""
        if not select.select([self.reports], [], [], timeout)[0]:
            return False
        *lines, self.rest = (self.rest + os.read(self.reports, 65536)).split(b"\n")
        for line in lines:
            kind, *words = line.decode().split()
            self.seen[kind] += 1
            self.note(kind, *words)
        return True

    def replace_the_dead(self):
        """A worker that returns has found all jobs acknowledged."""
        for process in [p for p in self.workers if p.exitcode is not None]:
            self.workers.remove(process)
            if process.exitcode == 0:
                continue
            if not self.died(process.exitcode):
                sys.exit(f"{self.title}: a worker failed, status {process.exitcode}")
            self.workers.append(start(self.work))

    def backends(self):
        rows = self.db.execute(
            "SELECT pid FROM pg_stat_activity WHERE application_name = %s ORDER BY pid",
            (jobs.APPLICATION,),
        )
        return [pid for (pid,) in rows]

    def acked(self):
        return self.db.execute("SELECT count(*) FROM job WHERE acked").fetchone()[0]

    def stalled(self):
        sys.exit(f"{self.title}: nothing moves any more")

    def wait_for_orphans(self):
        """Backends outlive their killed clients for a moment, and may commit."""
        deadline = time.monotonic() + STALLED_AFTER
        while self.backends():
            if time.monotonic() > deadline:
                sys.exit(f"{self.title}: backends of dead workers do not end")
            time.sleep(0.01)


def set_the_stage(db, schema, size, schema_sql=None):
    db.execute(f"CREATE SCHEMA {schema}")
    db.execute(f"SET search_path = {schema}, public")
    db.execute(pathlib.Path(__file__).with_name("jobs.sql").read_text())
    if schema_sql:
        db.execute(schema_sql.read_text())
    db.execute(
        """
        INSERT INTO job (id, customer, amount)
        SELECT i, 'customer ' || i %% 97, 100 + i * 7919 %% 50000
          FROM generate_series(1, %s) i
        """,
        (size,),
    )


class Progress:
    """One line that changes on a terminal, a line now and then elsewhere."""

    def __init__(self, act):
        self.act, self.tty = act, sys.stdout.isatty()
        self.start = self.shown = self.moved = time.monotonic()
        self.acked = 0

    def show(self, end=None):
        now = time.monotonic()
        if end is None and now - self.shown < (0.1 if self.tty else 2):
            return
        acked = self.act.acked()
        if acked > self.acked:
            self.acked, self.moved = acked, now
        elif now - self.moved > STALLED_AFTER:
            self.act.stalled()
        self.shown = now
        print(
            f"{self.act.title:15} {now - self.start:6.1f} s"
            f" {acked:6,} of {self.act.size:,} acknowledged"
            f" {self.act.faults():6} faults",
            end=end or ("\r" if self.tty else "\n"),
            flush=True,
        )


def print_table(titles, rows):
    """Prints rows: a name and a cell for each title."""
    width = 2 + max(len(name) for name, _ in rows)
    print()
    for name, cells in [("", titles), *rows]:
        cells = (cell if isinstance(cell, str) else f"{cell:,}" for cell in cells)
        print(f"{name:{width}}" + "".join(f"{cell:>16}" for cell in cells).rstrip())
