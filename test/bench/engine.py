"""Runs pgbench in short slices, contenders by turns, and compares them.

A scenario is a list of contenders, a number of clients and a setting of
synchronous_commit.  Each round gives every contender one slice of a fixed number of
transactions; the order turns with each round.  What is compared is always two
slices of one round, so that whatever else the machine does, and whatever
grows, meets both alike.
"""

import os
import re
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import psycopg

HERE = Path(__file__).parent
DATABASE = "bench"
TICK = os.sysconf("SC_CLK_TCK")


def say(text):
    print(text, file=sys.stderr, flush=True)


def connect(**options):
    return psycopg.connect(dbname=DATABASE, autocommit=True, **options)


def setup(name, rows):
    """Makes a contender's objects anew, with that many keys in them."""
    subprocess.run(
        ["psql", "-X", "-q", "-v", "ON_ERROR_STOP=1", "-v", f"rows={rows}", "-d", DATABASE,
         "-f", HERE / "contenders" / name / "setup.sql"],
        check=True, stdout=subprocess.DEVNULL)


@dataclass
class Contender:
    """One side of a comparison: a script of pgbench's, and settings."""

    label: str  # in tables
    script: str  # below contenders/
    settings: dict = field(default_factory=dict)
    variables: dict = field(default_factory=dict)


@dataclass
class Slice:
    tps: float
    cpu: float  # the server's, microseconds a transaction
    wal: float  # bytes a transaction


class Server:
    """What is asked of the server around a slice."""

    def __init__(self):
        self.conn = connect()
        data = self.ask("SHOW data_directory")
        self.postmaster = int(Path(data, "postmaster.pid").read_text().split()[0])

    def ask(self, query, *args):
        row = self.conn.execute(query, args).fetchone()
        return row[0] if len(row) == 1 else row

    def cpu(self):
        """Processor time, in seconds, of all backends that have ended."""
        with open(f"/proc/{self.postmaster}/stat") as f:
            fields = f.read().rpartition(")")[2].split()
        return (int(fields[13]) + int(fields[14])) / TICK

    def wal(self):
        return int(self.ask("SELECT pg_current_wal_insert_lsn() - '0/0'"))

    def wait_alone(self):
        """Until all other sessions have ended, so that cpu() has seen them."""
        while self.ask("SELECT count(*) FROM pg_stat_activity"
                       " WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"):
            pass


def run_slice(server, contender, clients, sync, count):
    """One slice: each client does count transactions."""
    options = {"synchronous_commit": sync, **contender.settings}
    env = dict(os.environ, PGOPTIONS=" ".join(f"-c {k}={v}" for k, v in options.items()))
    command = ["pgbench", "-n", "-M", "prepared", "-c", str(clients), "-j", str(min(clients, 2)),
               "-t", str(count), "-f", HERE / "contenders" / f"{contender.script}.sql"]
    for name, value in contender.variables.items():
        command += ["-D", f"{name}={value}"]
    server.wait_alone()
    cpu, wal = server.cpu(), server.wal()
    done = subprocess.run(command + [DATABASE], env=env, capture_output=True, text=True)
    server.wait_alone()
    cpu, wal = server.cpu() - cpu, server.wal() - wal
    found = re.search(r"^tps = ([\d.]+) \(without", done.stdout, re.M)
    processed = re.search(r"actually processed: (\d+)", done.stdout)
    if done.returncode or not found or int(processed[1]) != count * clients:
        sys.exit(f"{contender.script}: pgbench failed\n{done.stdout}{done.stderr}")
    total = count * clients
    return Slice(float(found[1]), 1e6 * cpu / total, wal / total)


def calm(server):
    """Between slices: the work's table is emptied, what is dirty is written."""
    server.conn.execute("TRUNCATE invoice")
    server.conn.execute("CHECKPOINT")


def compare(server, contenders, clients, sync, pairs, seconds):
    """That many rounds.  Returns, for each contender, its list of slices."""
    counts = []
    for contender in contenders:  # also a warm-up, which is thrown away
        tps = run_slice(server, contender, clients, sync, max(1, 400 // clients)).tps
        counts.append(tps * seconds / clients)
    # All do the same number, so that their tables grow alike.
    count = max(10, round(sum(counts) / len(counts)))
    slices = [[] for _ in contenders]
    for turn in range(pairs):
        order = list(range(len(contenders)))
        if turn % 2:
            order.reverse()
        for i in order:
            calm(server)
            slices[i].append(run_slice(server, contenders[i], clients, sync, count))
    return slices


@dataclass
class Spread:
    """A median with its quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values):
        values = list(values)
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)

    def __str__(self):
        return f"{self.median:.2f} ({self.low:.2f}–{self.high:.2f})"


def ratio(ours, theirs, what="tps"):
    """How ours compares with theirs: the spread of the ratios of the pairs."""
    return Spread.of(getattr(a, what) / getattr(b, what) for a, b in zip(ours, theirs)
                     if getattr(b, what))
