#!/usr/bin/python3
"""Proves from a round's history that idem kept its word, or says where it did not.

    check.py DIRECTORY

The directory has what run has left there: plan, ledger/, provider, faults, and of the
tables at the end effects, records and left (what should be gone).  Needs no server.
Each violation is printed with its key, the first ten with all that is known of the
key; the last line is "N operations, N faults injected, N violations".  Exit code 1
if there are any.

An attempt has committed if its effect is in the table at the end.  Its claim was held
at least from when it was told to when COMMIT was sent, and its record counts at least
until its retention after that.  From this follows, for each key:
  - whoever asks after it was told, and is answered before the retention has passed,
    must not be told that the key is claimed;
  - what is told as completed is what a committed attempt has stored, and not before
    that one's COMMIT was sent;
  - once the COMMIT was acknowledged, nobody is told that the operation is running, or
    finds no record.
"""

import pathlib
import sys
import uuid
from collections import Counter, defaultdict, namedtuple

import ledger
from plan import STORES

SLACK = 50_000_000  # ns; clocks are adjusted, and server and ledger use two

# By the policy of a lease; besides "leased".
MAY_BE_TOLD = {
    "reconcile": ("completed", "in_progress", "extended", "uncertain"),
    "retry": ("completed", "in_progress", "extended", "uncertain"),
    "skip": ("completed", "in_progress", "extended", "skipped"),
}

# How an attempt may end; all else is a violation.  ID001 to ID004 are answers.
EXPECTED = {
    "lost", "undone",
    "40001", "40P01", "55P03", "57014",
    "57P01", "57P02", "57P03", "08006", "53300", "25006",
}  # fmt: skip

Plan = namedtuple("Plan", "op key way store policy first_sent unsynced")
Told = namedtuple("Told", "asked at attempt status claimed digest token until")
Attempt = namedtuple("Attempt", "id told sent done digest")


def table(path):
    """The fields of each line of a file that need not be there."""
    if path.exists():
        for line in path.read_text().splitlines():
            yield line.split("\t")


class History:
    def __init__(self, directory):
        self.dir = pathlib.Path(directory)
        self.plan = {row[0]: Plan(*row) for row in table(self.dir / "plan")}
        self.events = ledger.read(self.dir / "ledger")
        self.faults = list(table(self.dir / "faults"))
        self.failovers = [int(row[0]) for row in self.faults if row[1] == "failover"]
        self.effects = defaultdict(list)  # op -> (attempt, digest)
        for op, attempt, digest in table(self.dir / "effects"):
            self.effects[op].append((attempt, digest))
        self.records = {row[0]: row[1:] for row in table(self.dir / "records")}
        self.provider = defaultdict(list)  # identity -> (kind, number)
        for _, kind, key, number, _ in table(self.dir / "provider"):
            self.provider[key].append((kind, number))
        self.ended_at = int((self.dir / "ended").read_text())
        self.told = defaultdict(list)
        self.seen = defaultdict(list)  # look-ups: (asked, at, status, digest, attempt)
        self.given = defaultdict(list)  # op -> times of releases and resolutions
        self.sent, self.done = {}, {}
        self.violations = []
        self.read_events()

    def violation(self, op, what):
        self.violations.append((op, what))

    def read_events(self):
        asked, looked = {}, {}
        for at, name, attempt, words in self.events:
            op = words[0] if words else None
            if name == "ask":
                asked[attempt, op] = at
            elif name == "told":
                words = [None if word == "None" else word for word in words]
                status, claimed, digest, token, until = (words[1:] + [None] * 2)[:5]
                self.told[op].append(
                    Told(asked[attempt, op], at, attempt, status, claimed == "1",
                         digest, token, until)
                )  # fmt: skip
            elif name == "undo":
                self.told[op] = [
                    told._replace(attempt=attempt + "~") if told.attempt == attempt
                    else told for told in self.told[op]
                ]  # fmt: skip
            elif name == "send":
                self.sent.setdefault(attempt, at)
            elif name == "done":
                self.done.setdefault(attempt, at)
            elif name == "look":
                looked[attempt, op] = at
            elif name == "saw":
                self.seen[op].append((looked[attempt, op], at, *words[1:], attempt))
            elif name == "give":
                self.given[op].append(at)
            elif name == "wrong":
                self.violation(op, f"{attempt}: {words[1]}")
            elif name == "fail" and words[0] not in EXPECTED:
                if not (words[0] == "55000" and "is busy" in words[1]):  # prepared
                    self.violation(None, f"unexpected error in {attempt}: {words}")

    def check(self):
        for plan in self.plan.values():
            if plan.policy == "-":
                self.check_operation(plan)
            else:
                self.check_lease(plan)
        self.check_batches()
        self.check_tokens()
        for at, kind, *detail in self.faults:
            if kind == "wrong":
                self.violation(None, f"nemesis: {detail}")
        for row in table(self.dir / "left"):
            self.violation(None, f"left over: {' '.join(row)}")

    def committed(self, op):
        """The attempts whose effect is there, in the order of their claims."""
        result = []
        for attempt, digest in self.effects[op]:
            told = [t for t in self.told[op] if t.attempt == attempt and t.claimed]
            sent = self.sent.get(attempt)
            if attempt.endswith("~"):
                self.violation(op, f"effect of {attempt}, which was taken back")
            elif sent is None:
                self.violation(op, f"effect of {attempt}, which never sent COMMIT")
            else:
                claimed_at = told[-1].at if told else sent
                done = self.done.get(attempt)
                result.append(Attempt(attempt, claimed_at, sent, done, digest))
        return sorted(result, key=lambda a: a.sent)

    def check_operation(self, plan):
        op, retention = plan.op, STORES[plan.store] * 10**9 - SLACK
        committed = self.committed(op)
        digests = {attempt.digest for attempt in committed}

        for i, one in enumerate(committed):
            for other in committed[:i]:
                if one.id == other.id:
                    self.violation(op, f"two effects of one attempt, {one.id}")
                elif max(one.told - other.sent, other.told - one.sent) < retention:
                    self.violation(op, f"both {other.id} and {one.id} committed")
        if plan.first_sent != "0" and len(committed) > 1:
            self.violation(op, "ran twice, though first_sent was told")
        if not committed and not any(
            told.status == "too_late" or self.may_be_lost(plan, told.at)
            for told in self.told[op]
        ):
            self.violation(op, "lost: no effect")

        for told in self.told[op]:
            self.check_told(plan, told, committed, digests, retention)
        for asked, at, status, digest, attempt in self.seen[op]:
            if status == "absent":
                for a in committed:
                    if a.done and a.done < asked and at < a.sent + retention:
                        self.violation(op, f"no record found by {attempt}")
            elif status == "completed" and digest not in digests:
                if plan.unsynced == "0":  # it reads what is there, flushed or not
                    self.violation(op, f"{attempt} saw the result of no attempt")

        # Acknowledged commits are there.
        here = {attempt.id for attempt in committed}
        for told in self.told[op]:
            if told.claimed and told.attempt in self.done:
                if told.attempt not in here and plan.unsynced == "0":
                    self.violation(op, f"acknowledged, but lost: {told.attempt}")
        self.check_record(plan, committed, retention)

    def check_told(self, plan, told, committed, digests, retention):
        op = plan.op
        if told.claimed:
            for a in committed:
                if a.id == told.attempt:
                    continue
                if a.told < told.asked and told.at < a.sent + retention:
                    self.violation(
                        op, f"{told.attempt} was told claimed, but {a.id} had it"
                        f" {(told.at - a.sent) / 1e9:+.3f} s after its COMMIT was sent",
                    )  # fmt: skip
        elif told.status == "completed":
            if self.may_be_lost(plan, told.at):
                return
            if not any(a.sent < told.at for a in committed):
                self.violation(op, f"{told.attempt} was told completed before that")
            elif told.digest != "?" and told.digest not in digests:
                self.violation(op, f"{told.attempt} was told the result of no attempt")
        elif told.status == "in_progress":
            for a in committed:
                if a.done and a.done < told.asked and told.at < a.sent + retention:
                    self.violation(op, f"{told.attempt} was told in_progress")
        elif told.status == "too_late":
            if told.at < int(plan.first_sent) + retention or plan.first_sent == "0":
                self.violation(op, f"{told.attempt} was told too_late, too early")
        elif told.status != "key_reused" or not told.attempt.endswith("!"):
            self.violation(op, f"{told.attempt} was told {told.status}")

    def may_be_lost(self, plan, at):
        """An unsynced commit that was replayed just before a failover.

        It was flushed before it was told, but nobody waits for the standby.
        """
        return plan.unsynced == "1" and any(
            at - 10**9 < failover < at + 10**10 for failover in self.failovers
        )

    def was_told(self, op, status):
        return any(told.status == status for told in self.told[op])

    def check_record(self, plan, committed, retention):
        """The table has the record of the last run, if it must still be known."""
        status, digest = self.records.get(plan.key, ("absent", None))
        if status == "absent":
            if committed and self.ended_at < committed[-1].sent + retention:
                self.violation(plan.op, "effect without a record")
        elif status == "completed":
            if not committed or digest not in {a.digest for a in committed}:
                self.violation(plan.op, f"the record is that of no effect: {digest}")
        elif status != "released":
            self.violation(plan.op, f"the record says {status}")

    def check_batches(self):
        """What an attempt did, it did as a whole."""
        told = defaultdict(set)
        for op, answers in self.told.items():
            for answer in answers:
                if answer.claimed and self.plan[op].way == "batch":
                    told[answer.attempt].add(op)
        there = defaultdict(set)
        for op, rows in self.effects.items():
            for attempt, _ in rows:
                there[attempt].add(op)
        for attempt, ops in told.items():
            if there[attempt] and there[attempt] != ops:
                self.violation(min(ops), f"batch {attempt} committed in parts")

    def check_lease(self, plan):
        op = plan.op
        committed = self.committed(op)
        made = [number for kind, number in self.provider[identity(plan.key)] if kind == "new"]
        status, digest = self.records.get(plan.key, ("absent", None))
        skipped = self.was_told(op, "skipped")
        retention = STORES[plan.store] * 10**9 - SLACK
        kept = not committed or self.ended_at < committed[-1].sent + retention

        # A short store forgets: then it runs again, and the provider decides.
        for one, other in zip(committed, committed[1:]):
            if other.sent < one.sent + retention:
                self.violation(op, f"completed by {one.id} and by {other.id}")
        if plan.store != "short" and len(made) > 1:
            self.violation(op, f"made {len(made)} times")
        if plan.policy == "retry" and len(made) > 1:
            self.violation(op, f"the provider compared no keys: {made}")
        if not committed and not skipped:
            self.violation(op, "lost: neither completed nor skipped")
        if committed and not made:
            self.violation(op, "completed, but never made")
        if skipped and committed and plan.store != "short":
            self.violation(op, "both skipped and completed")
        expected = {ledger.digest(f'{{"charge" : {number} }}') for number in made}
        digests = {attempt.digest for attempt in committed}
        if not digests <= expected:
            self.violation(op, "completed with what the provider never said")
        if plan.store != "short":
            if committed and (status, digest) not in [("completed", d) for d in digests]:
                self.violation(op, f"completed, but the record says {status}")
            if not committed and status != "skipped":
                self.violation(op, f"skipped, but the record says {status}")
        elif committed and kept and status == "absent":
            self.violation(op, "completed, but there is no record")

        for told in self.told[op]:
            if told.status == "completed":
                if not any(a.sent < told.at for a in committed):
                    self.violation(op, f"{told.attempt} was told completed before that")
                elif told.digest not in digests:
                    self.violation(op, f"{told.attempt} was told another result")
            elif told.status == "leased" and told.claimed:
                self.check_granted(plan, told, committed, retention)
            elif told.status not in MAY_BE_TOLD[plan.policy]:
                self.violation(op, f"{told.attempt} was told {told.status}")

    def check_granted(self, plan, told, committed, retention):
        """Nobody else may hold the lease, or have completed it, when it is granted.

        And where the policy is not to try again, somebody must have decided that.
        """
        op = plan.op
        for a in committed:
            if a.done and a.done < told.asked and told.at < a.sent + retention:
                self.violation(op, f"{told.attempt} was leased it after {a.id}")
        for other in self.told[op]:
            if (
                other.status not in ("leased", "extended")
                or other.attempt == told.attempt
                or other.at > told.asked
                or any(other.asked < at < told.at for at in self.given[op])
                or any(a.sent < told.at for a in committed)
            ):
                continue
            if self.clock(told.at) < float(other.until) - SLACK / 1e9:
                self.violation(
                    op, f"{told.attempt} was leased it while {other.attempt} had it"
                )
            elif plan.policy != "retry" and told.at < other.asked + retention:
                self.violation(op, f"{told.attempt} was leased it, but nobody decided")

    def clock(self, at):
        """The ledger's time as the clock's, in seconds."""
        mono, wall = (int(x) for x in (self.dir / "clock").read_text().split())
        return (at - mono + wall) / 1e9

    def check_tokens(self):
        """No token is given twice."""
        holders = {}
        for op, answers in self.told.items():
            for told in answers:
                if told.status == "leased" and told.claimed:
                    other = holders.setdefault(told.token, told.attempt)
                    if other != told.attempt:
                        self.violation(op, f"token {told.token} also went to {other}")

    def tell(self, op, out):
        """All that is known of a key."""
        plan = self.plan[op]
        lines = [(0, f"plan: {plan}")]
        attempts = {told.attempt.rstrip("~") for told in self.told[op]}
        attempts |= {attempt for attempt, _ in self.effects[op]}
        for event in self.events:
            if event.words[:1] == [op] or event.attempt in attempts:
                if event.name in ("ask", "told", "undo") and event.words[0] != op:
                    continue
                lines.append((event.time, " ".join([event.name, event.attempt, *event.words])))
        first = lines[1][0] if len(lines) > 1 else 0
        for at, kind, *detail in self.faults:
            if first and first <= int(at) <= lines[-1][0] and kind in HEAVY:
                lines.append((int(at), f"fault: {kind} {detail}"))
        for at, line in sorted(lines):
            print(f"    {(at - first) / 1e9 if at else 0:9.6f}  {line}", file=out)
        print(f"    effects: {self.effects[op]}", file=out)
        print(f"    record: {self.records.get(plan.key)}", file=out)
        print(f"    provider: {self.provider.get(identity(plan.key))}", file=out)


HEAVY = ("kill_backend", "restart_fast", "restart_immediate", "failover")


def identity(key):
    """What idem_provider_key(key, 'torture') has to be: see test/vectors/README.md."""
    namespace = uuid.UUID("ddbf8d42-41af-4e59-9a06-f32f5b22f482")
    return str(uuid.uuid5(namespace, f"torture\x1f{key}"))


def check(directory, out=sys.stdout):
    """Returns the history, with its violations."""
    history = History(directory)
    history.check()
    for i, (op, what) in enumerate(history.violations):
        key = history.plan[op].key if op in history.plan else "-"
        print(f"VIOLATION: {key[:60]}: {what}", file=out)
        if i < 10 and op in history.plan:
            history.tell(op, out)
    return history


def kinds(faults):
    return Counter(kind for _, kind, *_ in faults if kind != "wrong")


def listed(counts):
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))


if __name__ == "__main__":
    history = check(sys.argv[1])
    print("told:", listed(Counter(t.status for told in history.told.values() for t in told)))
    print(f"{len(history.plan)} operations, {sum(kinds(history.faults).values())} faults"
          f" injected, {len(history.violations)} violations")
    sys.exit(1 if history.violations else 0)
