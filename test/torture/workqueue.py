"""An at-least-once queue, and the workers that it delivers to.

It keeps one promise: a delivery comes again until a worker has acknowledged it.  A
worker that dies loses its delivery at once; one that does not answer in time may
have it delivered to another one besides.  It lives outside the database, and is the
conductor of a round: it also signals workers where the nemesis asks for that.
"""

import collections
import ctypes
import heapq
import json
import os
import random
import selectors
import signal
import sys
import time

import plan

READY = 16  # deliveries that wait for a worker: new operations are made below that
VISIBILITY_TIMEOUT = 3  # s
STALLED_AFTER = 45  # s in which nothing is acknowledged
PR_SET_PDEATHSIG = 1


def start(target, *args):
    """A process that ends when this one does, even if it is stopped then."""
    parent = os.getpid()
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the conductor's
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            target(*args)
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


class Worker:
    def __init__(self, slot, work):
        self.slot, self.job, self.since = slot, None, 0
        from_conductor, self.to = os.pipe()
        self.reports, to_conductor = os.pipe()

        def serve():
            os.close(self.to)
            os.close(self.reports)
            work(slot, os.fdopen(from_conductor), to_conductor)

        self.pid = start(serve)
        os.close(from_conductor)
        os.close(to_conductor)
        self.rest = b""
        self.thaw_at = None

    def give(self, job):
        self.job, self.since = job, time.monotonic()
        os.write(self.to, (json.dumps(job) + "\n").encode())

    def reap(self):
        signal_worker(self, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.to)
        os.close(self.reports)


def signal_worker(worker, number):
    try:
        os.kill(worker.pid, number)
    except ProcessLookupError:
        pass


class Queue:
    """One round."""

    def __init__(self, seed, number, plan_file, work, crew, nemesis):
        self.seed, self.number, self.work = seed, number, work
        self.rng = random.Random(f"{seed}/{number}/queue")
        self.plan_file = plan_file
        self.nemesis = nemesis  # the conductor's end of its pipe
        self.operations = {}  # number -> Operation, while it is not done
        self.open = {}  # number -> deliveries to be acknowledged
        self.ready = collections.deque()  # jobs for whoever is free
        self.heap = []  # of (due, sequence, job), for later
        self.sequence = self.made = self.finished = self.deliveries = 0
        self.prepared = set()  # of transactions that wait for a second process
        self.healed = self.stuck = False
        self.moved = time.monotonic()
        self.problem = None
        self.selector = selectors.DefaultSelector()
        self.selector.register(nemesis, selectors.EVENT_READ, None)
        self.workers = [None] * crew
        for slot in range(crew):
            self.hire(slot)

    def hire(self, slot):
        self.workers[slot] = worker = Worker(slot, self.work)
        self.selector.register(worker.reports, selectors.EVENT_READ, worker)

    def run(self, seconds, drain_seconds):
        """Works for so long, then works off what is left; self.problem if not."""
        end = time.monotonic() + seconds
        next_sweep = time.monotonic() + 2
        told = False
        while self.problem is None:
            now = time.monotonic()
            if now < end:
                self.make_operations()
            elif not told:
                os.write(self.nemesis, b"heal\n")
                told, self.moved = True, now
            elif self.healed and not self.open and not self.prepared:
                break
            elif now > end + drain_seconds:
                keys = [o.keys[0][1][:40] for o in self.operations.values()]
                self.problem = f"not worked off after {drain_seconds} s: {keys[:10]}"
            if now > next_sweep:  # prepared by those who could not tell
                next_sweep = now + 2
                self.push(0, {"kind": "sweep"})
            if now - self.moved > STALLED_AFTER:
                self.problem = f"nothing was acknowledged for {STALLED_AFTER} s"
            if self.stuck:
                self.problem = "the servers did not come back"
            self.deliver(now)
            for key, _ in self.selector.select(0.02):
                if key.data is None:
                    self.hear_nemesis()
                else:
                    self.hear_worker(key.data)

    def close(self):
        for worker in self.workers:
            worker.reap()
        self.selector.close()

    def push(self, delay, job):
        if delay <= 0:
            return self.ready.append(job)
        self.sequence += 1
        heapq.heappush(self.heap, (time.monotonic() + delay, self.sequence, job))

    def make_operations(self):
        while len(self.ready) < READY:
            op = plan.operation(self.seed, self.number, self.made)
            self.made += 1
            sent = time.time()
            os.write(self.plan_file, plan.describe(op, time.monotonic_ns()).encode())
            self.operations[op.number] = op
            self.open[op.number] = len(op.deliveries)
            for i, (delay, kind) in enumerate(op.deliveries):
                job = {
                    "kind": kind,
                    "number": op.number,
                    "delivery": i,
                    "way": op.way,
                    "store": op.store,
                    "keys": op.keys,
                    "policy": op.policy,
                    "first_sent": sent if op.first_sent else None,
                    "unsynced": op.unsynced,
                    "try": 0,
                }
                self.push(delay, job)

    def deliver(self, now):
        while self.heap and self.heap[0][0] <= now:
            self.ready.append(heapq.heappop(self.heap)[2])
        for worker in self.workers:
            if worker.thaw_at and worker.thaw_at < now:
                worker.thaw_at = None
                signal_worker(worker, signal.SIGCONT)
            if worker.job:
                # A copy for somebody else, once; the first may still answer.
                job = worker.job
                if now - worker.since > VISIBILITY_TIMEOUT and not job.get("copied"):
                    job["copied"] = True
                    if job["kind"] in ("work", "finish"):
                        self.push(0, {**job, "copy": True})
            elif self.ready:
                self.deliveries += 1
                try:
                    worker.give(self.ready.popleft())
                except OSError:  # it is dead; hear_worker() finds out
                    pass

    def hear_worker(self, worker):
        data = os.read(worker.reports, 65536)
        if not data:
            return self.bury(worker)
        *lines, worker.rest = (worker.rest + data).split(b"\n")
        for line in lines:
            job, worker.job = worker.job, None
            self.answered(job, json.loads(line))

    def bury(self, worker):
        self.selector.unregister(worker.reports)
        if worker.job:
            self.again(worker.job)
        worker.reap()
        self.hire(worker.slot)

    def again(self, job):
        if job["kind"] == "sweep" or job.get("copy"):
            return
        job.pop("copied", None)
        if "try" in job:
            job["try"] += 1
        self.push(self.rng.choice((0, 0.02, 0.2)), job)

    def answered(self, job, answer):
        for gid in answer.get("found", []):  # prepared, but nobody has told us
            self.finish_later(gid, 0)
        if answer.get("prepared"):
            slow = job["store"] == "short" and self.rng.random() < 0.4
            delay = self.rng.uniform(3, 4) if slow else self.rng.choice((0, 0, 0.2))
            self.finish_later(answer["prepared"], delay)
        if not answer["done"]:
            return self.again(job)
        self.moved = time.monotonic()
        if job["kind"] == "finish":
            self.prepared.discard(job["gid"])
        elif job["kind"] != "sweep" and not job.get("copy"):
            number = job["number"]
            self.open[number] -= 1
            if self.open[number] == 0:
                del self.open[number]
                self.finished += len(self.operations.pop(number).keys)

    def finish_later(self, gid, delay):
        if gid not in self.prepared:
            self.prepared.add(gid)
            self.push(delay, {"kind": "finish", "gid": gid})

    def hear_nemesis(self):
        data = os.read(self.nemesis, 4096)
        if not data:
            self.problem = "the nemesis has died"
        for line in data.decode().splitlines():
            word, *rest, slot = line.split()
            worker = self.workers[int(slot) % len(self.workers)]
            if word == "KILL":
                signal_worker(worker, signal.SIGKILL)
            elif word == "STOP":
                signal_worker(worker, signal.SIGSTOP)
                worker.thaw_at = time.monotonic() + float(rest[0])
            elif word == "stuck":
                self.stuck = True
            else:
                self.healed = True
