"""Two servers: a primary and its synchronous standby, which take turns.

Nothing is kept in memory, so every process may ask: the file "primary" names the one
that is primary.  Data is not synced to disk (fsync = off): processes crash here, not
machines.  As root they run as the OS user postgres, since PostgreSQL refuses root.
"""

import os
import pathlib
import pwd
import shutil
import socket
import subprocess
import time

import psycopg

NAMES = ("a", "b")
SETTINGS = """
shared_preload_libraries = 'idem'
idem.naptime = '1s'
idem.wait_timeout = '3s'
listen_addresses = '127.0.0.1'
unix_socket_directories = '{dir}'
max_connections = 60
max_prepared_transactions = 60
max_worker_processes = 8
shared_buffers = '48MB'
fsync = off
wal_keep_size = '64MB'
max_wal_size = '256MB'
checkpoint_timeout = '30s'
wal_receiver_status_interval = '1s'
wal_retrieve_retry_interval = '100ms'
max_standby_streaming_delay = '1s'
deadlock_timeout = '200ms'
autovacuum_naptime = '5s'
log_line_prefix = '%m [%p] %b %e '
log_min_error_statement = panic
log_error_verbosity = terse
log_checkpoints = off
"""


class Trouble(Exception):
    """A server does not do what it has to."""


class Servers:
    def __init__(self, directory, bindir):
        self.dir, self.bin = pathlib.Path(directory), pathlib.Path(bindir)
        self.as_server = []
        if os.getuid() == 0:
            pwd.getpwnam("postgres")
            self.as_server = ["runuser", "-u", "postgres", "--"]

    def create(self):
        """Makes and starts both."""
        if self.as_server:
            shutil.chown(self.dir, "postgres")
        for name in NAMES:
            (self.dir / f"port.{name}").write_text(str(free_port()))
        self.run("initdb", "-D", self.dir / "a", "-U", "postgres", "--auth=trust",
                 "--no-sync", "--locale=C.UTF-8", "--encoding=UTF8")
        with open(self.dir / "a/postgresql.conf", "a") as conf:
            conf.write(SETTINGS.format(dir=self.dir))
        self.start("a")
        self.set_primary("a")
        self.rebuild_standby()

    def run(self, program, *args, timeout=90):
        done = subprocess.run(
            [*self.as_server, self.bin / program, *args],
            cwd=self.dir,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout,
            text=True,
        )
        if done.returncode != 0:
            raise Trouble(f"{program} {args}: {done.stdout}")

    def primary(self):
        return (self.dir / "primary").read_text()

    def standby(self):
        return NAMES[self.primary() == "a"]

    def set_primary(self, name):
        new = self.dir / "primary.new"
        new.write_text(name)
        new.rename(self.dir / "primary")

    def port(self, name):
        return int((self.dir / f"port.{name}").read_text())

    def conninfo(self, name=None):
        return {
            "host": str(self.dir),
            "port": self.port(name or self.primary()),
            "user": "postgres",
            "dbname": "postgres",
        }

    def connect(self, name=None, **options):
        return psycopg.connect(**self.conninfo(name), autocommit=True, **options)

    def start(self, name):
        # The log is opened by a child that runs as the server's user.
        self.run("pg_ctl", "start", "-w", "-s", "-D", self.dir / name,
                 "-l", self.dir / f"log.{name}", "-o", f"-p {self.port(name)}")

    def stop(self, name, mode):
        if (self.dir / name / "postmaster.pid").exists():
            self.run("pg_ctl", "stop", "-w", "-s", "-D", self.dir / name, "-m", mode)

    def restart(self, mode):
        name = self.primary()
        self.stop(name, mode)
        self.start(name)

    def stop_all(self):
        for name in NAMES:
            try:
                self.stop(name, "immediate")
            except (Trouble, subprocess.TimeoutExpired):
                pass

    def wait(self, what, query, seconds=30, name=None):
        """Until the query answers true."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                with self.connect(name, connect_timeout=5) as conn:
                    while True:
                        if conn.execute(query).fetchone()[0]:
                            return
                        if time.monotonic() > deadline:
                            raise Trouble(f"waited {seconds} s in vain: {what}")
                        time.sleep(0.05)
            except psycopg.OperationalError as error:
                if time.monotonic() > deadline:
                    raise Trouble(f"waited {seconds} s in vain: {what}: {error}")
                time.sleep(0.05)

    def wait_for_standby(self, seconds=30):
        """Until the standby has all that has been visible on the primary so far."""
        with self.connect() as conn:
            lsn = conn.execute("SELECT pg_current_wal_insert_lsn()").fetchone()[0]
            conn.execute("SET synchronous_commit = local")  # flush up to there
            conn.execute("SELECT pg_logical_emit_message(true, 'torture', '')")
        self.wait(
            "the standby catches up",
            f"""
            SELECT EXISTS (SELECT FROM pg_stat_replication
                            WHERE sync_state = 'sync' AND replay_lsn >= '{lsn}')
            """,
            seconds,
        )

    def promote(self, mode):
        """The primary goes, the standby, which has caught up, takes its place."""
        old, new = self.primary(), self.standby()
        self.stop(old, mode)
        self.run("pg_ctl", "promote", "-w", "-s", "-D", self.dir / new)
        self.set_primary(new)

    def rebuild_standby(self):
        """Makes a standby anew; from then on commits wait for it."""
        name = self.standby()
        shutil.rmtree(self.dir / name, ignore_errors=True)
        self.run("pg_basebackup", "-D", self.dir / name, "-h", self.dir,
                 "-p", str(self.port(self.primary())), "-U", "postgres",
                 "-X", "stream", "-c", "fast", "-R", "--no-sync")
        self.start(name)
        with self.connect() as conn:
            conn.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
            conn.execute("SELECT pg_reload_conf()")
        self.wait_for_standby()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
