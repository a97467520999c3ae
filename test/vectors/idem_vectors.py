"""An independent implementation of what README.md beside this file specifies.

It shares nothing with the C code and needs nothing but the standard library.
Each function either answers or raises Refused with the SQLSTATE that
PostgreSQL raises for the same input.
"""

import hashlib
import json
import re
import uuid

KEY_MAX_BYTES = 512
LONG_KEY_PREFIX_BYTES = 128
LOCK_CLASS = 0x4944
PROVIDER_NAMESPACE = uuid.UUID("ddbf8d42-41af-4e59-9a06-f32f5b22f482")


class Refused(Exception):
    """The input is refused; .sqlstate says how."""

    def __init__(self, sqlstate):
        super().__init__(sqlstate)
        self.sqlstate = sqlstate


# Fingerprints -------------------------------------------------------------

class Number(str):
    """A JSON number as it was spelled."""


def parse(text):
    """Parse JSON, keeping numbers as spelled.  Of duplicate names the last
    wins, which is what a dict does."""
    def refuse(_):                      # NaN and Infinity are not JSON
        raise Refused("22P02")

    try:
        return json.loads(text, parse_int=Number, parse_float=Number,
                          parse_constant=refuse)
    except json.JSONDecodeError:
        raise Refused("22P02") from None


def canonical_number(spelled):
    sign, whole, fraction, exponent = re.fullmatch(
        r"(-?)(\d+)(?:\.(\d+))?(?:[eE]([+-]?\d+))?", spelled).groups("")
    exponent = int(exponent or 0)
    if len(fraction) - exponent > 16383:
        raise Refused("22003")
    exponent -= len(fraction)
    digits = (whole + fraction).lstrip("0")
    if len(digits) + exponent > 131072:
        raise Refused("22003")
    stripped = digits.rstrip("0")
    if not stripped:
        return "0e0"
    return f"{sign}{stripped}e{exponent + len(digits) - len(stripped)}"


def utf8(string):
    if "\0" in string:
        raise Refused("22P05")
    try:
        return string.encode("utf-8")
    except UnicodeEncodeError:          # half of a surrogate pair
        raise Refused("22P02") from None


def canonical(value):
    """The canonical form of a parsed JSON value, as bytes."""
    if value is None:
        return b"n"
    if value is True:
        return b"t"
    if value is False:
        return b"f"
    if isinstance(value, Number):
        return b"d" + canonical_number(value).encode() + b";"
    if isinstance(value, str):
        data = utf8(value)
        return b"s%d:" % len(data) + data
    if isinstance(value, list):
        return b"a%d:" % len(value) + b"".join(map(canonical, value))
    names = sorted(value, key=lambda name: (len(utf8(name)), utf8(name)))
    return b"o%d:" % len(names) + b"".join(
        canonical(name) + canonical(value[name]) for name in names)


def fingerprint(text):
    """The fingerprint of a JSON text."""
    form = canonical(parse(text))
    data = bytearray(hashlib.sha256(b"idem fingerprint 1\n" + form).digest()[:16])
    data[0] = 1
    data[6] = data[6] & 0x0F | 0x80
    data[8] = data[8] & 0x3F | 0x80
    return str(uuid.UUID(bytes=bytes(data)))


# Keys ---------------------------------------------------------------------

def has_control(string):
    return any(ord(c) < 0x20 or 0x7F <= ord(c) <= 0x9F for c in string)


def check_key(key):
    if not 1 <= len(key.encode("utf-8")) <= KEY_MAX_BYTES or has_control(key):
        raise Refused("22023")


def part_text(part, sqltype):
    """The text of a part; its type matters no further."""
    if part is None:
        raise Refused("22004")
    if sqltype == "boolean":
        return {"t": "true", "f": "false"}[part[0]]
    if sqltype == "uuid":
        return str(uuid.UUID(part))
    if sqltype in ("smallint", "integer", "bigint"):
        return str(int(part))
    return part


def make_key(parts):
    """idem_key() of parts that are text already."""
    if not parts:
        raise Refused("22023")
    for part in parts:
        if not part or has_control(part):
            raise Refused("22023")
    key = ":".join(
        part.replace("%", "%25").replace(":", "%3A") for part in parts)
    data = key.encode("utf-8")
    if len(data) <= KEY_MAX_BYTES:
        return key
    prefix = data[:LONG_KEY_PREFIX_BYTES].decode("utf-8", errors="ignore")
    return prefix + "%sha256=" + hashlib.sha256(data).hexdigest()


def provider_key(key, provider=""):
    """idem_provider_key()"""
    if key is None or provider is None:
        raise Refused("22004")
    check_key(key)
    if len(provider.encode("utf-8")) > KEY_MAX_BYTES or has_control(provider):
        raise Refused("22023")
    return str(uuid.uuid5(PROVIDER_NAMESPACE, provider + "\x1f" + key))


# The lock tag -------------------------------------------------------------

def lock_hash(store, key):
    """The 64-bit hash of a store's oid and a key: Bob Jenkins' lookup3 as
    PostgreSQL has it (hash_bytes_extended), on a little-endian machine."""
    mask = 0xFFFFFFFF

    def rot(x, k):
        return (x << k | x >> (32 - k)) & mask

    def mix(a, b, c):
        a = (a - c) & mask ^ rot(c, 4)
        c = (c + b) & mask
        b = (b - a) & mask ^ rot(a, 6)
        a = (a + c) & mask
        c = (c - b) & mask ^ rot(b, 8)
        b = (b + a) & mask
        a = (a - c) & mask ^ rot(c, 16)
        c = (c + b) & mask
        b = (b - a) & mask ^ rot(a, 19)
        a = (a + c) & mask
        c = (c - b) & mask ^ rot(b, 4)
        b = (b + a) & mask
        return a, b, c

    data = key.encode("utf-8")
    a = b = c = (0x9E3779B9 + len(data) + 3923095) & mask
    if store != 0:
        a, b, c = mix((a + (store >> 32)) & mask, (b + store) & mask, c)

    full = len(data) // 12 * 12
    for i in range(0, full, 12):
        a = (a + int.from_bytes(data[i:i + 4], "little")) & mask
        b = (b + int.from_bytes(data[i + 4:i + 8], "little")) & mask
        c = (c + int.from_bytes(data[i + 8:i + 12], "little")) & mask
        a, b, c = mix(a, b, c)

    # The lowest byte of c is reserved for the length, hence the shift
    rest = data[full:]
    a = (a + int.from_bytes(rest[0:4], "little")) & mask
    b = (b + int.from_bytes(rest[4:8], "little")) & mask
    c = (c + (int.from_bytes(rest[8:11], "little") << 8)) & mask

    c = (c ^ b) - rot(b, 14) & mask
    a = (a ^ c) - rot(c, 11) & mask
    b = (b ^ a) - rot(a, 25) & mask
    c = (c ^ b) - rot(b, 16) & mask
    a = (a ^ c) - rot(c, 4) & mask
    b = (b ^ a) - rot(a, 14) & mask
    c = (c ^ b) - rot(b, 24) & mask
    return b << 32 | c


def lock_tag(store, key):
    """Fields 2 to 4 of the lock tag; field 1 is the oid of the database."""
    check_key(key)
    value = lock_hash(store, key)
    return value >> 32, value & 0xFFFFFFFF, LOCK_CLASS
