"""Runs pgbench in short slices, contenders by turns, and compares them.

Each round gives every contender one slice of a fixed number of transactions, the
same for all, so that their tables grow alike; the order turns with each round.
What is compared is always two slices of one round, so that whatever else the
machine does meets both alike.

There is a CHECKPOINT before tables are made and none later: right after one,
the first change of each page writes the whole page to the WAL.  In slices this
short that would be most of what is measured, while it is little in a server that
has a checkpoint every few minutes.  (The steady state has its checkpoints.)
"""

import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import psycopg

HERE = Path(__file__).parent
DATABASE = "bench"
TICK = os.sysconf("SC_CLK_TCK")


def say(text):
    print(text, file=sys.stderr, flush=True)


def connect():
    return psycopg.connect(dbname=DATABASE, autocommit=True)


def setup_all(server, *names, **variables):
    """Makes the objects of these contenders and of the work anew."""
    server.run("CHECKPOINT")
    for name in ("bare", *names):
        setup(name, **variables)


def setup(name, **variables):
    """Makes a contender's objects anew; :rows keys are in them."""
    command = ["psql", "-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", DATABASE]
    for variable, value in variables.items():
        command += ["-v", f"{variable}={value}"]
    subprocess.run([*command, "-f", HERE / "contenders" / name / "setup.sql"],
                   check=True, stdout=subprocess.DEVNULL)


@dataclass
class Contender:
    """One side of a comparison."""

    label: str  # in tables
    script: str | Path  # for pgbench, below contenders/
    variables: dict = field(default_factory=dict)  # of the script
    warm_up: int = 400  # transactions before the first slice
    before: str = ""  # SQL before each slice

    @property
    def path(self):
        return HERE / "contenders" / f"{self.script}.sql"


@dataclass
class Slice:
    tps: float
    cpu: float  # the server's, microseconds a transaction
    wal: float  # bytes a transaction
    latencies: list  # milliseconds, where they were asked for


class Server:
    """What is asked of the server around a slice."""

    def __init__(self):
        self.conn = connect()
        data = Path(self.ask("SHOW data_directory"))
        self.postmaster = int((data / "postmaster.pid").read_text().split()[0])

    def ask(self, query, *args):
        row = self.conn.execute(query, args).fetchone()
        return row[0] if len(row) == 1 else row

    def run(self, *statements):
        for statement in statements:
            self.conn.execute(statement)

    def cpu(self):
        """Processor time, in seconds, of all server processes that have ended."""
        with open(f"/proc/{self.postmaster}/stat") as f:
            fields = f.read().rpartition(")")[2].split()
        return (int(fields[13]) + int(fields[14])) / TICK

    def wal(self):
        return int(self.ask("SELECT pg_current_wal_insert_lsn() - '0/0'"))

    def children(self):
        """The server's processes: pid, and title, which one that comes or goes has not."""
        with open(f"/proc/{self.postmaster}/task/{self.postmaster}/children") as f:
            pids = f.read().split()
        for pid in pids:
            try:
                yield int(pid), Path("/proc", pid, "cmdline").read_text()
            except (FileNotFoundError, ProcessLookupError):
                yield int(pid), ""

    def wait_alone(self):
        """Until the backends of all others have ended and cpu() has them."""
        while any("[local]" in title or not title.startswith("postgres: ")
                  for pid, title in self.children() if pid != self.conn.info.backend_pid):
            time.sleep(0.002)


def pgbench(contender, clients, sync, *more):
    env = dict(os.environ, PGOPTIONS=f"-c synchronous_commit={sync}")
    command = ["pgbench", "-n", "-M", "prepared", "-c", clients, "-j", min(clients, 2),
               "--max-tries", 100, "-f", contender.path, *more]
    for name, value in contender.variables.items():
        command += ["-D", f"{name}={value}"]
    done = subprocess.run([*map(str, command), DATABASE], env=env, capture_output=True, text=True)
    tps = re.search(r"^tps = ([\d.]+) \(without", done.stdout, re.M)
    count = re.search(r"actually processed: (\d+)", done.stdout)
    failed = re.search(r"failed transactions: (\d+)", done.stdout)
    if done.returncode or not tps or "aborted in command" in done.stderr or failed[1] != "0":
        sys.exit(f"{contender.script}: pgbench failed\n{done.stdout}{done.stderr}")
    return float(tps[1]), int(count[1])


def run_slice(server, contender, clients, sync, *how, latencies=False):
    """One slice; how says how long: -t transactions of each client, or -T seconds."""
    if contender.before:
        server.run(contender.before)
    with tempfile.TemporaryDirectory() as tmp:
        more = ["-l", "--log-prefix", f"{tmp}/log"] if latencies else []
        server.wait_alone()
        cpu, wal = server.cpu(), server.wal()
        tps, count = pgbench(contender, clients, sync, *how, *more)
        server.wait_alone()
        cpu, wal = server.cpu() - cpu, server.wal() - wal
        took = [int(line.split()[2]) / 1000
                for log in Path(tmp).iterdir() for line in log.read_text().splitlines()]
    return Slice(tps, 1e6 * cpu / count, wal / count, took)


def compare(server, contenders, clients, sync, options, latencies=False):
    """So many rounds.  Returns, for each contender, its list of slices."""
    tps = [run_slice(server, c, clients, sync, "-t", max(1, c.warm_up // clients)).tps
           for c in contenders]
    count = max(1, round(statistics.mean(tps) * options.seconds / clients))
    slices = [[] for _ in contenders]
    for turn in range(options.pairs):
        order = range(len(contenders))
        for i in reversed(order) if turn % 2 else order:
            slices[i].append(run_slice(server, contenders[i], clients, sync, "-t", count,
                                       latencies=latencies))
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
        if self.low == self.high:
            return f"{self.median:.2f}"
        return f"{self.median:.2f} ({self.low:.2f}–{self.high:.2f})"


def ratio(over, under):
    """The spread of the ratios of what was measured in pairs."""
    return Spread.of(a / b for a, b in zip(over, under) if b)


@dataclass
class Result:
    """One comparison, as a row of the table."""

    row: str
    work: str
    against: str
    where: str  # clients, settings
    value: Spread
    target: float | None = None
    at_most: bool = False  # the target is a limit from above
    unit: str = "×"
    judges: bool = True  # this is the one that the target is meant for
    section: bool = False  # a row of the design's section "What it must cost"
    cpu: Spread | None = None  # the same ratio in processor time of the server
    sides: dict = field(default_factory=dict)  # label → {tps, cpu, wal, …}

    @property
    def holds(self):
        if self.target is None:
            return None
        if self.at_most:
            return self.value.median <= self.target
        return self.value.median >= self.target

    def __str__(self):
        text = f"{self.row:9} {self.where:22} {self.value}{self.unit}"
        if self.target is not None:
            text += f" (target {'≤' if self.at_most else '≥'} {self.target:g}: " \
                    f"{'holds' if self.holds else 'MISSED'})"
        if self.cpu:
            text += f"; server CPU {self.cpu}×"
        for label, side in self.sides.items():
            text += f"; {label}: " + ", ".join(f"{v:.0f} {k}" for k, v in side.items())
        return text


@dataclass
class Figure:
    """Something measured that is no ratio: a row of the table of figures."""

    row: str
    what: str
    values: dict  # label → text

    def __str__(self):
        return f"{self.row:9} {self.what}: " + ", ".join(f"{k} {v}" for k, v in self.values.items())


def side(slices):
    """What a table says of one contender: medians."""
    return {"/s": statistics.median(s.tps for s in slices),
            "µs CPU": statistics.median(s.cpu for s in slices),
            "B WAL": statistics.median(s.wal for s in slices)}


def where(clients, sync):
    return f"{clients} client{'s' if clients > 1 else ''}, sync {sync}"
