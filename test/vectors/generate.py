#!/usr/bin/python3
"""Write the vector files beside this script.

The inputs are below; the answers come from idem_vectors.py.  To add a vector,
add its input here and run this; check.py then asks PostgreSQL.
"""

import json
import os

import idem_vectors as v

# Fingerprints: (group, spellings).  The spellings of one group are one value,
# those of two groups are two.
REQUESTS = [
    # Scalars
    ("null", ["null", " null\n"]),
    ("false", ["false"]),
    ("true", ["true"]),
    ("empty string", ['""']),
    ("empty array", ["[]", "[ ]"]),
    ("empty object", ["{}", "{ }"]),
    ("string null", ['"null"']),
    ("string 1", ['"1"']),
    ("string that looks canonical", ['"n"']),
    ("string d1e0;", ['"d1e0;"']),

    # Numbers
    ("zero", ["0", "-0", "0.0", "-0.000", "0e10", "0E-5"]),
    ("one", ["1", "1.0", "1e0", "10e-1", "0.1e1", "1E+0", "1.000000000000"]),
    ("minus one", ["-1", "-1.00", "-1e0"]),
    ("ten", ["10", "1e1", "10.0", "0.001e4"]),
    ("one and a half", ["1.5", "15e-1", "1.50"]),
    ("a tenth", ["0.1", "1e-1", "0.10"]),
    ("a double's tenth", ["0.1000000000000000055511151231257827"]),
    ("4200", ["4200", "4.2e3", "42e2", "4200.00"]),
    ("2^53", ["9007199254740992"]),
    ("2^53+1", ["9007199254740993", "9007199254740993.0"]),
    ("big integer", ["1533947986218845197", "1533947986218845197e0"]),
    ("big integer, one more", ["1533947986218845198"]),
    ("10^4, 10^8 and their halves",
     ["[10000, 100000000, 5000, 50000000]", "[1e4, 1e8, 5e3, 5e7]"]),
    ("digits across groups of four", ["12345.678901", "12345678901e-6"]),
    ("long decimal",
     ["12345678901234567890.0000123", "12345678901234567890.000012300"]),
    ("1e-4 and neighbours",
     ["[0.001, 0.0001, 0.00001]", "[1e-3, 1e-4, 1e-5]"]),
    ("1e100", ["1e100", "1" + "0" * 100]),
    ("1e-200", ["1e-200", "0." + "0" * 199 + "1"]),
    ("1e100000", ["1e100000", "10e99999"]),
    ("the greatest exponent", ["1e131071"]),
    ("the least exponent", ["1e-16383"]),
    ("-1.5e300", ["-1.5e300", "-15e299"]),

    # Strings
    ("letter a", ['"a"', '"\\u0061"']),
    ("letter A", ['"A"']),
    ("trailing space", ['"a "']),
    ("e acute, composed", ['"\u00e9"', '"\\u00e9"', '"\\u00E9"']),
    ("e acute, decomposed", ['"e\u0301"', '"e\\u0301"']),
    ("emoji", ['"\U0001f600"', '"\\ud83d\\ude00"', '"\\uD83D\\uDE00"']),
    ("solidus", ['"/"', '"\\/"']),
    ("reverse solidus", ['"\\\\"', '"\\u005c"']),
    ("quote", ['"\\""', '"\\u0022"']),
    ("controls", ['"\\b\\f\\n\\r\\t"', '"\\u0008\\u000c\\u000a\\u000d\\u0009"']),
    ("U+0001", ['"\\u0001"']),
    ("DEL and C1", ['"\\u007f\\u0085"', '"\u007f\u0085"']),
    ("byte order mark", ['"\ufeffa"', '"\\ufeffa"']),
    ("U+FFFF and U+10FFFF", ['"\uffff\U0010ffff"', '"\\uffff\\udbff\\udfff"']),
    ("escaped text of an escape", ['"\\\\u0061"']),
    ("200 bytes", ['"' + "x" * 200 + '"']),

    # Arrays
    ("a, b", ['["a","b"]', ' [ "a" ,\t"b" ] ']),
    ("b, a", ['["b","a"]']),
    ("ab", ['["ab"]']),
    ("ab and empty", ['["ab",""]']),
    ("array of null", ["[null]"]),
    ("array of empty array", ["[[]]"]),
    ("array of two empty arrays", ["[[],[]]"]),
    ("array of array of empty array", ["[[[]]]"]),
    ("array of empty object", ["[{}]"]),
    ("1 in an array", ["[1]", "[1.0]"]),
    ("nested 1", ["[[1],2]"]),
    ("nested 1 and 2", ["[[1,2]]"]),
    ("40 elements",
     ["[" + ",".join(map(str, range(40))) + "]",
      "[" + ", ".join(f"{i}.0" for i in range(40)) + "]"]),
    ("200 levels", ["[" * 200 + "]" * 200]),

    # Objects
    ("amount", ['{"amount": 4200}', '{"amount":4.2e3}', '{ "\\u0061mount" :4200.0 }']),
    ("amount as text", ['{"amount": "4200"}']),
    ("member order", ['{"a":1,"b":2,"aa":3}', '{"aa":3,"b":2,"a":1}']),
    ("members swapped", ['{"a":2,"b":1,"aa":3}']),
    ("empty name", ['{"":1}']),
    ("name and value swapped", ['{"1":"a"}']),
    ("1 under a", ['{"a":"1"}']),
    ("duplicate names", ['{"a":1,"a":2}', '{"a":2}', '{"a":{"b":1},"\\u0061":2}']),
    ("duplicate names, the other way", ['{"a":2,"a":1}', '{"a":1}']),
    ("names by length in UTF-8",
     ['{"\u00e9":1,"ab":2,"z":3}', '{"z":3,"ab":2,"\\u00e9":1}']),
    ("names by bytes, not UTF-16",
     ['{"\U0001f600":1,"\uff5ea":2}', '{"\\uff5ea":2,"\\ud83d\\ude00":1}']),
    ("names NFC and NFD",
     ['{"\u00e9":1,"e\u0301":2}', '{"e\\u0301":2,"\\u00e9":1}']),
    ("names in Latin-1 of several lengths",
     ['{"\u00e9":1,"\u00ff\u00e8":2,"zzz":{"\u00fc":[],"ab":{}},"a":null}',
      '{"a":null,"zzz":{"ab":{},"\u00fc":[]},"\u00ff\u00e8":2,"\u00e9":1}']),
    ("null member", ['{"a":null}']),
    ("member in a member", ['{"a":{"b":1}}']),
    ("two members", ['{"a":{},"b":1}']),
    ("an invoice",
     ['{"invoice":"inv_2048","amount":1999.90,"currency":"EUR","lines":'
      '[{"sku":"A-1","n":3},{"sku":"B-2","n":1}],"note":null,"paid":false}',
      '{"paid":false, "note":null, "lines":[{"n":3.0,"sku":"A-1"},'
      '{"n":1,"sku":"B-2"}], "currency":"EUR", "amount":1999.9,'
      ' "invoice":"inv_2048"}']),
    ("40 members",
     ["{" + ",".join(f'"k{i}":{i}' for i in range(40)) + "}",
      "{" + ",".join(f'"k{i}":{i}e0' for i in reversed(range(40))) + "}"]),
]

# What jsonb refuses has no fingerprint
REFUSED_REQUESTS = [
    ("U+0000", '"\\u0000"'),
    ("U+0000 in a name", '{"a\\u0000":1}'),
    ("high surrogate alone", '"\\ud83d"'),
    ("surrogates in the wrong order", '"\\ude00\\ud83d"'),
    ("more than numeric holds", "1e131072"),
    ("finer than numeric holds", "1e-16384"),
    ("not a number", "NaN"),
    ("leading zero", "01"),
    ("nothing", ""),
]

T, I, B, U = "text", "integer", "boolean", "uuid"
UUID_TEXT = "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"

# idem_key(): (name, [(part, type), ...])
KEYS = [
    ("one part", [("invoice", T)]),
    ("three parts", [("invoice", T), ("2048", I), ("collect", T)]),
    ("the type does not matter", [("invoice", T), ("2048", T), ("collect", T)]),
    ("every type", [("t", T), ("v", "varchar"), ("-1", "smallint"),
                    ("2147483647", I), ("-9223372036854775808", "bigint"),
                    ("true", B), (UUID_TEXT, U)]),
    ("boolean false", [("paid", T), ("f", B)]),
    ("uuid in capitals", [(UUID_TEXT.upper(), U)]),
    ("the text of a uuid in capitals", [(UUID_TEXT.upper(), T)]),
    ("integer with leading zeros", [("007", I)]),
    ("text with leading zeros", [("007", T)]),
    ("colon in a part", [("a:b", T)]),
    ("colon between parts", [("a", T), ("b", T)]),
    ("escaped colon", [("a%3Ab", T)]),
    ("percent", [("100%", T)]),
    ("escaped percent", [("100%25", T)]),
    ("only colons", [(":", T), ("::", T)]),
    ("only spaces", [(" ", T), ("  ", T)]),
    ("capitals", [("INVOICE", T)]),
    ("trailing space", [("invoice ", T)]),
    ("composed", [("caf\u00e9", T)]),
    ("decomposed", [("cafe\u0301", T)]),
    ("emoji", [("\U0001f600", T), ("\U0001f600:", T)]),
    ("no-break space", [("a\u00a0b", T)]),
    ("quotes and backslashes", [("'\"\\", T)]),
    ("URL", [("https://example.org/hook?id=1&x=50%", T), ("evt_1", T)]),
    ("looks shortened", [("a%sha256=" + "0" * 64, T)]),
    ("512 bytes", [("x" * 512, T)]),
    ("513 bytes", [("x" * 513, T)]),
    ("513 bytes, another end", [("x" * 512 + "y", T)]),
    ("512 bytes before the escape", [(":" + "x" * 511, T)]),
    ("long, character across the cut", [("x" * 127 + "\u00e9" * 300, T)]),
    ("long, emoji across the cut", [("x" * 126 + "\U0001f600" * 200, T)]),
    ("long, escape across the cut", [("x" * 127 + ":" * 500, T)]),
    ("long, two parts", [("tenant", T), ("y" * 1000, T)]),
    ("long, the colon inside a part", [("tenant:" + "y" * 1000, T)]),
    ("256 characters of two bytes", [("\u00e9" * 256, T)]),
    ("257 characters of two bytes", [("\u00e9" * 257, T)]),
    ("no parts", []),
    ("empty part", [("a", T), ("", T)]),
    ("null part", [("a", T), (None, T)]),
    ("line end", [("a\n", T)]),
    ("tab in a long key", [("x" * 600, T), ("\t", T)]),
    ("DEL", [("\x7f", T)]),
    ("C1", [("a\u0085", T)]),
]

# idem_provider_key(): (name, provider, key)
PROVIDER_KEYS = [
    ("no provider", "", "invoice:inv_2048:collect:v1"),
    ("provider", "stripe", "invoice:inv_2048:collect:v1"),
    ("another provider", "adyen", "invoice:inv_2048:collect:v1"),
    ("another key", "stripe", "invoice:inv_2048:collect:v2"),
    ("provider and key differ in where they meet", "strip", "einvoice"),
    ("the same letters", "stripe", "invoice"),
    ("capitals", "Stripe", "invoice"),
    ("composed", "", "caf\u00e9"),
    ("decomposed", "", "cafe\u0301"),
    ("emoji", "\U0001f4b3", "\U0001f600"),
    ("trailing space", "", "invoice "),
    ("one byte", "", "a"),
    ("512 bytes", "p", "x" * 512),
    ("513 bytes", "p", "x" * 513),
    ("empty key", "p", ""),
    ("null key", "p", None),
    ("null provider", None, "k"),
    ("separator in the key", "p", "a\x1fb"),
    ("separator in the provider", "p\x1fa", "b"),
    ("long provider", "p" * 513, "k"),
]

# Lock tags: keys of every length modulo 12, each with several stores
LOCK_KEYS = ["invoice:inv_2048:collect:v1", "caf\u00e9", "\U0001f600"] + [
    "abcdefghijklmnopqrstuvwxyz"[:n] for n in range(1, 26)] + ["x" * 512]
LOCK_STORES = [16384, 16385, 4294967295]


def answer(vector, field, function, *args):
    try:
        vector[field] = function(*args)
    except v.Refused as refused:
        vector["error"] = refused.sqlstate
    return vector


def fingerprints():
    for group, spellings in REQUESTS:
        for spelling in spellings:
            yield {"group": group, "request": spelling,
                   "canonical": v.canonical(v.parse(spelling)).decode("utf-8"),
                   "fingerprint": v.fingerprint(spelling)}
    for name, spelling in REFUSED_REQUESTS:
        yield answer({"group": name, "request": spelling}, "fingerprint",
                     v.fingerprint, spelling)


def keys():
    for name, parts in KEYS:
        vector = {"name": name, "parts": [part for part, _ in parts],
                  "types": [sqltype for _, sqltype in parts]}
        yield answer(vector, "key", lambda p: v.make_key(
            [v.part_text(part, sqltype) for part, sqltype in p]), parts)


def provider_keys():
    for name, provider, key in PROVIDER_KEYS:
        yield answer({"name": name, "provider": provider, "key": key},
                     "uuid", v.provider_key, key, provider)


def lock_tags():
    for i, key in enumerate(LOCK_KEYS):
        store = LOCK_STORES[i % len(LOCK_STORES)]
        field2, field3, field4 = v.lock_tag(store, key)
        yield {"store": store, "key": key, "hash": f"{v.lock_hash(store, key):016x}",
               "field2": field2, "field3": field3, "field4": field4}


def write(name, about, vectors):
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), name)
    with open(path, "w", encoding="ascii") as f:
        json.dump({"about": about, "vectors": list(vectors)}, f, indent=1)
        f.write("\n")


if __name__ == "__main__":
    write("fingerprint.json",
          "idem_fingerprint(request::jsonb); one group is one JSON value",
          fingerprints())
    write("key.json", "idem_key(part, ...), each part of the type given", keys())
    write("provider_key.json", "idem_provider_key(key, provider)", provider_keys())
    write("lock_tag.json",
          "fields 2 to 4 of the lock tag of a key in the store with that oid",
          lock_tags())
