#!/usr/bin/python3
"""Plays a file of test/clients/contract/ through psycopg 3.

    contract.py FILE PREFIX PORT LOST-REPLY-PORT LOST-REQUEST-PORT [OPTION]...

Options: pipeline (libpq's pipeline mode: nothing is waited for before the end
of a transaction; a statement outside one is sent alone, for psycopg 3.1 loses
count if a Sync fails, as it may then), cursor=client (arguments are put into
the text, as poolers like it), prepare=0 (each statement is prepared on the
server from its first use), prepare=none (never), pooling=MODE (says what the
ports lead to).

The last line is "N passed, N failed".
"""

import contextlib
import logging
import re
import sys
import threading
import time

import psycopg

PATIENCE = 60  # seconds
logging.getLogger("psycopg").setLevel(logging.ERROR)


class Broken(Exception):
    """The contract is."""


class Step:
    def __init__(self, number, connection, verb, rest):
        self.number, self.connection = number, connection
        self.verb, self.rest = verb, rest
        self.arguments, self.rows = [], None
        self.error = self.keep = None
        self.lost = False

    def detail(self, word, rest):
        if word == "arg":
            self.arguments.append(rest)
        elif word == "int":
            self.arguments.append(int(rest))
        elif word == "null":
            self.arguments.append(None)
        elif word == "array":
            items = [None if item == "NULL" else item for item in rest.split("|")]
            self.arguments.append(items)
        elif word == "row":
            self.rows = (self.rows or []) + [rest]
        elif word == "no":
            self.rows = []
        elif word == "error":
            self.error = rest
        elif word == "keep":
            self.keep = rest
        elif word == "lost":
            self.lost = True
        else:
            raise ValueError(f"line {self.number}: what is {word}?")


def read_cases(file, options):
    """Yields (title, steps) of the cases that are for these options."""
    cases = []
    for number, line in enumerate(open(file, encoding="utf-8"), 1):
        line = line.rstrip("\n")
        if not line.strip() or line.startswith("#"):
            continue
        if line.startswith("== "):
            cases.append((line[3:], []))
            wanted = True
            continue
        title, steps = cases[-1]
        word, _, rest = line.strip(" ").partition(" ")
        if not line.startswith(" "):
            verb, _, rest = rest.partition(" ")
            steps.append(Step(number, word, verb, rest))
        elif steps:
            # a value may end in spaces, or be empty
            steps[-1].detail(word, line.lstrip(" ")[len(word) + 1 :])
        elif (rest in options) != (word == "only"):
            wanted = False
        if not wanted and cases:
            cases[-1] = (title, [])
    return [case for case in cases if case[1]]


def as_text(value):
    if value is None:
        return "NULL"
    if isinstance(value, bool):
        return "t" if value else "f"
    return str(value)


class Connection:
    def __init__(self, port, options):
        self.options = options
        cursors = {True: psycopg.ClientCursor, False: psycopg.Cursor}
        prepare = {"prepare=0": 0, "prepare=none": None}
        threshold = [prepare[option] for option in options if option in prepare]
        self.conn = psycopg.connect(
            host="127.0.0.1",
            port=port,
            autocommit=True,
            cursor_factory=cursors["cursor=client" in options],
            **({"prepare_threshold": threshold[0]} if threshold else {}),
        )
        self.pipeline, self.queue, self.thread = None, [], None

    def execute(self, sql, arguments=()):
        cursor = self.conn.cursor()
        cursor.execute(re.sub(r"\$\d+", "%s", sql), arguments or None)
        return cursor

    def enter_pipeline(self):
        if "pipeline" in self.options and not self.pipeline:
            self.pipeline = contextlib.ExitStack()
            self.pipe = self.pipeline.enter_context(self.conn.pipeline())

    def leave_pipeline(self):
        """All that was sent is answered."""
        if self.pipeline:
            pipeline, self.pipeline = self.pipeline, None
            self.pipe.sync()
            pipeline.close()

    def end_transaction(self, verb):
        try:
            if verb == "commit":
                self.conn.commit()
            self.leave_pipeline()
        finally:
            with contextlib.suppress(psycopg.Error):  # it was said before
                self.leave_pipeline()
            if not self.conn.closed:
                self.conn.rollback()  # whatever is left of it
                self.conn.autocommit = True

    def step(self, verb, rest, arguments):
        """Returns rows, or None where there can be none."""
        if verb == "begin":
            self.conn.autocommit = False
            level = psycopg.IsolationLevel.REPEATABLE_READ if rest else None
            self.conn.isolation_level = level
            self.enter_pipeline()
        elif verb in ("commit", "rollback") and not rest:
            self.end_transaction(verb)
        elif verb in ("savepoint", "rollback"):
            self.execute(f"{verb} {rest}")
        elif verb == "send":
            self.enter_pipeline()
            return self.execute(rest, arguments)
        elif verb == "sync":
            self.leave_pipeline()
        elif verb == "close":
            self.close()
        elif verb == "run":
            return self.execute(rest, arguments)
        else:
            raise ValueError(f"what is {verb}?")
        return None

    def start(self, sql, arguments):
        """In a thread, as psycopg has no call that does not wait."""
        self.outcome = None

        def run():
            try:
                cursor = self.execute(sql, arguments)
                if self.pipeline:
                    self.pipe.sync()
                self.outcome = cursor
            except psycopg.Error as error:
                self.outcome = error

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()

    def finish(self):
        self.thread.join(PATIENCE)
        if self.thread.is_alive():
            raise Broken("it never came back")
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome

    def close(self):
        if self.pipeline:  # its end would be waited for
            self.pipeline.pop_all()
            self.pipeline = None
        self.conn.close()


class Case:
    def __init__(self, key, ports, options):
        self.names, self.ports, self.options = {"key": key}, ports, options
        self.connections = {}

    def fill(self, value):
        if isinstance(value, list):
            return [self.fill(item) for item in value]
        if not isinstance(value, str):
            return value
        for name, text in self.names.items():
            value = value.replace("{" + name + "}", text)
        return value

    def settle(self, connection):
        """What was sent in a pipeline is done, and as it should be."""
        if connection.thread or connection.conn.closed:
            return
        if connection.pipeline:
            connection.pipe.sync()
        queue, connection.queue = connection.queue, []
        for step, cursor in queue:
            self.check_rows(step, cursor)

    def connection(self, name):
        if name not in self.connections:
            port = self.ports.get(name, self.ports["plain"])
            self.connections[name] = Connection(port, self.options)
        return self.connections[name]

    def check_rows(self, step, cursor):
        if step.keep:
            (row,) = cursor.fetchall()
            self.names[step.keep] = as_text(row[0])
        if step.rows is None:
            return
        rows = ["|".join(map(as_text, row)) for row in cursor.fetchall()]
        if rows != [self.fill(row) for row in step.rows]:
            raise Broken(f"line {step.number}: {rows}")

    def until(self, step, connection):
        end = time.monotonic() + PATIENCE
        while True:
            cursor = connection.step("run", step.rest, self.fill(step.arguments))
            try:
                return self.check_rows(step, cursor)
            except Broken:
                if time.monotonic() > end:
                    raise
            time.sleep(0.02)

    def attempt(self, step, connection):
        if step.verb == "until":
            self.until(step, connection)
        elif step.verb == "start":
            connection.start(step.rest, self.fill(step.arguments))
        elif step.verb == "finish":
            self.check_rows(step, connection.finish())
            connection.thread = None
        else:
            arguments = self.fill(step.arguments)
            cursor = connection.step(step.verb, step.rest, arguments)
            if cursor and not step.error:
                connection.queue.append((step, cursor))
            if not connection.pipeline or step.error or step.keep:
                self.settle(connection)

    def play(self, step):
        connection = self.connection(step.connection)
        for other in self.connections.values():
            if other is not connection or step.verb == "close":
                self.settle(other)  # this step must see what it did
        try:
            self.attempt(step, connection)
        except psycopg.Error as error:
            if step.lost and error.sqlstate is None and connection.conn.closed:
                return
            if not step.error or error.sqlstate != step.error:
                raise Broken(f"line {step.number}: {error.sqlstate} {error}") from error
            return
        if step.error or step.lost:
            raise Broken(f"line {step.number}: no error")

    def run(self, steps):
        try:
            for step in steps:
                self.play(step)
            for connection in self.connections.values():
                self.settle(connection)
        finally:
            for connection in self.connections.values():
                connection.close()


def main(file, prefix, *rest):
    ports = dict(zip(("plain", "lost-reply", "lost-request"), rest))
    options = rest[3:]
    passed = failed = 0
    for number, (title, steps) in enumerate(read_cases(file, options), 1):
        try:
            Case(f"{prefix}:{number}", ports, options).run(steps)
            passed += 1
            print(f"ok - {title}", flush=True)
        except Exception as error:
            failed += 1
            print(f"not ok - {title}: {type(error).__name__} {error}", flush=True)
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
