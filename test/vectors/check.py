#!/usr/bin/python3
"""Check the vector files against idem_vectors.py and against PostgreSQL.

Needs psql, and a server in PGHOST, PGPORT, PGDATABASE, ... with idem installed
and the right to make databases in it.  Each encoding is checked in a database
of its own, which is dropped again.  Ends with a line "N passed, N failed".
"""

import json
import os
import subprocess
import sys

import idem_vectors as v

HERE = os.path.dirname(os.path.abspath(__file__))

passed = 0
failed = 0


def check(what, got, expected):
    global passed, failed
    if got == expected:
        passed += 1
    else:
        failed += 1
        print(f"FAILED {what}:\n  got      {got!r}\n  expected {expected!r}")


def load(name):
    with open(os.path.join(HERE, name), encoding="ascii") as f:
        return json.load(f)["vectors"]


# The reference implementation ---------------------------------------------

def recompute(function, *args):
    try:
        return function(*args)
    except v.Refused as refused:
        return "error " + refused.sqlstate


def expected(vector, field):
    return vector[field] if field in vector else "error " + vector["error"]


def make_key(parts, types):
    return v.make_key([v.part_text(p, t) for p, t in zip(parts, types)])


def check_reference(files):
    for vec in files["fingerprint"]:
        check(f"reference, fingerprint of {vec['request']!r:.60}",
              recompute(v.fingerprint, vec["request"]),
              expected(vec, "fingerprint"))
        if "canonical" in vec:
            check(f"reference, canonical form of {vec['request']!r:.60}",
                  v.canonical(v.parse(vec["request"])).decode(),
                  vec["canonical"])
    for vec in files["key"]:
        check(f"reference, key {vec['name']}",
              recompute(make_key, vec["parts"], vec["types"]),
              expected(vec, "key"))
    for vec in files["provider_key"]:
        check(f"reference, provider key {vec['name']}",
              recompute(v.provider_key, vec["key"], vec["provider"]),
              expected(vec, "uuid"))
    for vec in files["lock_tag"]:
        check(f"reference, lock tag of {vec['key']:.30}",
              (f"{v.lock_hash(vec['store'], vec['key']):016x}",
               *v.lock_tag(vec["store"], vec["key"])),
              (vec["hash"], vec["field2"], vec["field3"], vec["field4"]))


def check_distinct(files):
    """Equal where and only where equality is meant."""
    groups = {}
    for vec in files["fingerprint"]:
        if "fingerprint" in vec:
            groups.setdefault(vec["group"], set()).add(vec["fingerprint"])
    for group, fingerprints in groups.items():
        check(f"one fingerprint of {group}", len(fingerprints), 1)
    check("groups have fingerprints of their own",
          len(set.union(*groups.values())), len(groups))

    keys = {}
    for vec in files["key"]:
        if "key" in vec:
            parts = tuple(map(v.part_text, vec["parts"], vec["types"]))
            keys.setdefault(vec["key"], set()).add(parts)
            check(f"key {vec['name']} is a key",
                  recompute(v.check_key, vec["key"]), None)
    for key, lists in keys.items():
        check(f"one list of parts for key {key:.30}", len(lists), 1)

    uuids = [vec["uuid"] for vec in files["provider_key"] if "uuid" in vec]
    check("provider keys differ", len(set(uuids)), len(uuids))


# PostgreSQL ---------------------------------------------------------------

def psql(database, script):
    """Run a script; the lines it answers."""
    done = subprocess.run(
        ["psql", "-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-f", "-"]
        + (["-d", database] if database else []),
        input=script.encode("utf-8"), stdout=subprocess.PIPE, check=False,
        env={**os.environ, "PGCLIENTENCODING": "UTF8",
             "PGOPTIONS": os.environ.get("PGOPTIONS", "")
             + " -c client_min_messages=warning"})
    if done.returncode != 0:
        sys.exit(f"psql failed with exit code {done.returncode}")
    return done.stdout.decode("utf-8").splitlines()


def quote(text):
    """A literal that no quoting rule and no line end can alter."""
    if text is None:
        return "NULL::text"
    return f"convert_from('\\x{text.encode('utf-8').hex()}', 'UTF8')"


def ask(database, expressions):
    """The answers to many expressions, as text or "error SQLSTATE"."""
    # In hex, because psql leaves out what is not valid in its encoding
    lines = psql(database, """
        CREATE FUNCTION pg_temp.answer(expression text) RETURNS text
        LANGUAGE plpgsql AS $$
        DECLARE answer text;
        BEGIN
            EXECUTE 'SELECT (' || expression || ')::text' INTO answer;
            RETURN encode(convert_to(answer, 'UTF8'), 'hex');
        EXCEPTION WHEN OTHERS THEN
            RETURN encode(convert_to('error ' || SQLSTATE, 'UTF8'), 'hex');
        END $$;
        """ + "".join(f"SELECT pg_temp.answer({quote(e)});\n"
                      for e in expressions))
    return [bytes.fromhex(line).decode("utf-8") for line in lines]


def holds(text, encoding):
    """Can a database of this encoding hold the text as its characters?"""
    if encoding == "LATIN1":
        return all(ord(c) < 256 for c in text)
    return encoding == "UTF8"


def strings(value):
    """All strings in a parsed request."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for element in value:
            yield from strings(element)
    elif isinstance(value, dict):
        for name, member in value.items():
            yield name
            yield from strings(member)


def request_applies(vec, encoding):
    if encoding == "UTF8":
        return True
    if "error" in vec:
        return False
    if encoding == "SQL_ASCII":     # bytes pass through; escapes are refused
        return "\\u" not in vec["request"]
    return holds(vec["request"] + "".join(strings(v.parse(vec["request"]))),
                 encoding)


def key_applies(vec, encoding):
    """Outside UTF8, what the key rules count and cut is other bytes."""
    text = "".join(filter(None, vec["parts"]))
    return encoding == "UTF8" or text.isascii() or (
        "key" in vec and "%sha256=" not in vec["key"] and holds(text, encoding))


def name_applies(vec, encoding):
    text = (vec["key"] or "") + (vec["provider"] or "")
    return encoding == "UTF8" or text.isascii() or holds(text, encoding)


def check_sql(database, encoding, files):
    tests = []
    for vec in files["fingerprint"]:
        if request_applies(vec, encoding):
            tests.append((f"idem_fingerprint of {vec['request']!r:.60}",
                          f"idem_fingerprint({quote(vec['request'])}::jsonb)",
                          expected(vec, "fingerprint")))
    for vec in files["key"]:
        if key_applies(vec, encoding):
            parts = [f"{quote(part)}::{sqltype}" for part, sqltype
                     in zip(vec["parts"], vec["types"])]
            call = f"idem_key({', '.join(parts)})" if parts else \
                "idem_key(VARIADIC '{}'::text[])"
            tests.append((f"idem_key, {vec['name']}", call,
                          expected(vec, "key")))
            if parts and set(vec["types"]) == {"text"}:
                tests.append((f"idem_key of an array, {vec['name']}",
                              f"idem_key(VARIADIC ARRAY[{', '.join(parts)}])",
                              expected(vec, "key")))
    for vec in files["provider_key"]:
        if name_applies(vec, encoding):
            args = quote(vec["key"]) + ", " + quote(vec["provider"])
            tests.append((f"idem_provider_key, {vec['name']}",
                          f"idem_provider_key({args})",
                          expected(vec, "uuid")))
    for vec in files["lock_tag"]:
        if encoding == "UTF8" or vec["key"].isascii():
            hashed = f"hashtextextended({quote(vec['key'])} COLLATE \"C\"," \
                f" {vec['store']})"
            tests.append((f"hash of {vec['key']:.30}",
                          f"lpad(to_hex({hashed}), 16, '0')", vec["hash"]))

    answers = ask(database, [expression for _, expression, _ in tests])
    check(f"{encoding}: answers", len(answers), len(tests))
    for (what, _, wanted), got in zip(tests, answers):
        check(f"{encoding}, {what}", got, wanted)


def check_locks(database, encoding, files):
    """The locks that claims really hold."""
    store = int(psql(database, "SELECT 'idem_completions'::regclass::oid;")[0])
    keys = [vec["key"] for vec in files["lock_tag"]
            if encoding == "UTF8" or vec["key"].isascii()]
    lines = psql(database, "".join(f"""
        BEGIN;
        SELECT status FROM idem_claim({quote(key)});
        SELECT classid, objid, objsubid, mode, granted
        FROM pg_locks, pg_database
        WHERE pid = pg_backend_pid() AND locktype = 'advisory'
        AND database = pg_database.oid AND datname = current_database();
        ROLLBACK;
        """ for key in keys))
    check(f"{encoding}: claims and locks", len(lines), 2 * len(keys))
    for key, status, lock in zip(keys, lines[0::2], lines[1::2]):
        check(f"{encoding}, claim of {key:.30}", status, "claimed")
        check(f"{encoding}, lock of {key:.30}", lock,
              "|".join(map(str, v.lock_tag(store, key))) + "|ExclusiveLock|t")


def main():
    files = {name: load(name + ".json") for name in
             ("fingerprint", "key", "provider_key", "lock_tag")}
    check_reference(files)
    check_distinct(files)

    for encoding in ("UTF8", "LATIN1", "SQL_ASCII"):
        database = f"idem_vectors_{os.getpid()}_{encoding.lower()}"
        psql(None, f"""CREATE DATABASE {database} TEMPLATE template0
            ENCODING {encoding} LOCALE_PROVIDER libc LC_COLLATE "C" LC_CTYPE "C";
            """)
        try:
            psql(database, "CREATE EXTENSION idem;")
            check_sql(database, encoding, files)
            check_locks(database, encoding, files)
        finally:
            psql(None, f"DROP DATABASE {database};")

    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
