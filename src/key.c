/*-------------------------------------------------------------------------
 *
 * key.c
 *	  Rules of an idempotency key, its lock tag, and how to make one.
 *
 * A key is 1 to 512 bytes of text without control characters, compared byte
 * by byte.  Nothing here trims, folds or normalises: a key that is refused is
 * an error, never silently another key.
 *
 * The lock that stands for a key has a tag of its own class (IDEM_LOCK_CLASS)
 * in the space of advisory locks, made of a 64-bit hash of store and key.
 * Two keys with one hash only wait for each other; it is the key itself that
 * decides.  The tag is a contract between versions of this library that are
 * loaded side by side, so it can not be changed; nor can what idem_key() and
 * idem_provider_key() answer, since keys are stored and handed out to others.
 * test/vectors/README.md specifies all of them for other languages.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "catalog/pg_type.h"
#include "common/hashfn.h"
#include "common/sha1.h"
#include "common/sha2.h"
#include "fmgr.h"
#include "funcapi.h"
#include "lib/stringinfo.h"
#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/lsyscache.h"
#include "utils/uuid.h"

#include "fingerprint.h"
#include "idem.h"
#include "key.h"

/*
 * The two parts of a key that was too long.  The marker can not occur in a
 * key that was not shortened: there a % is always followed by 25 or 3A.
 */
#define LONG_KEY_PREFIX_BYTES 128
#define LONG_KEY_MARKER "%sha256="

/* Stands between provider and key, neither of which can hold it */
#define PROVIDER_SEPARATOR '\x1F'

/*
 * The namespace of idem_provider_key()'s UUIDs, drawn at random for this:
 * ddbf8d42-41af-4e59-9a06-f32f5b22f482.
 */
static const unsigned char provider_namespace[UUID_LEN] = {
	0xdd, 0xbf, 0x8d, 0x42, 0x41, 0xaf, 0x4e, 0x59,
	0x9a, 0x06, 0xf3, 0x2f, 0x5b, 0x22, 0xf4, 0x82
};

static int	find_control(const char *str, int len);
static void report_bad_key(const text *key);
static const char *part_to_string(Datum value, Oid type, int partno,
								  int *len);
static void append_part(StringInfo buf, const char *part, int len);
static void append_utf8(StringInfo buf, const char *str, int len);
static void shorten_key(StringInfo buf);

PG_FUNCTION_INFO_V1(idem_key);
PG_FUNCTION_INFO_V1(idem_provider_key);

/*
 * Is this a key?  The same rules as idem_check_key().
 */
bool
idem_key_is_valid(const text *key)
{
	int			len = VARSIZE_ANY_EXHDR(key);

	return len >= 1 && len <= IDEM_KEY_MAX_BYTES &&
		find_control(VARDATA_ANY(key), len) < 0;
}

/*
 * Raise an error unless this is a key.  It must not be NULL, and must be in
 * line, as PG_GETARG_TEXT_PP gives it.
 */
void
idem_check_key(const text *key)
{
	if (unlikely(!idem_key_is_valid(key)))
		report_bad_key(key);
}

/*
 * The 64-bit hash of a key in a store.
 */
uint64
idem_key_hash(Oid store, const text *key)
{
#ifdef USE_ASSERT_CHECKING
	if (idem_debug_lock_collisions)
		return 42;
#endif

	return hash_bytes_extended((const unsigned char *) VARDATA_ANY(key),
							   VARSIZE_ANY_EXHDR(key), store);
}

/*
 * The tag of the lock that stands for all keys with this hash.
 */
void
idem_key_locktag(LOCKTAG *tag, uint64 hash)
{
	SET_LOCKTAG_ADVISORY(*tag, MyDatabaseId, (uint32) (hash >> 32),
						 (uint32) hash, IDEM_LOCK_CLASS);
}

/*
 * idem_key(VARIADIC "any") returns text
 *
 * Joins the parts with ':', having replaced '%' by '%25' and ':' by '%3A' in
 * each of them, so that different lists of parts never give the same key.
 * The type of a part does not matter, only its text.  A key that gets too
 * long is cut after 128 bytes and followed by a SHA-256 of the whole.
 *
 * Not STRICT: a NULL part is an error.  Immutable, since the text of the
 * accepted types depends on no setting; only a renamed enum label changes
 * what the same parts give.
 */
Datum
idem_key(PG_FUNCTION_ARGS)
{
	Datum	   *values;
	Oid		   *types;
	bool	   *nulls;
	int			nparts;
	StringInfoData buf;

	nparts = extract_variadic_args(fcinfo, 0, true, &values, &types, &nulls);
	if (nparts < 0)
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("array of key parts must not be null"),
				 errhint("Pass an array with at least one part.")));
	if (nparts == 0)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("a key needs at least one part"),
				 errhint("Pass the parts that name the operation, such as idem_key('invoice', invoice_id, 'collect').")));

	initStringInfo(&buf);
	for (int i = 0; i < nparts; i++)
	{
		const char *part;
		int			len;

		if (nulls[i])
			ereport(ERROR,
					(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
					 errmsg("part %d of the key is null", i + 1),
					 errhint("Each part of a key must be known. Use coalesce() where a missing value is meant.")));

		part = part_to_string(values[i], types[i], i + 1, &len);
		if (len == 0)
			ereport(ERROR,
					(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
					 errmsg("part %d of the key is empty", i + 1),
					 errhint("Leave the part out, or name what is missing.")));
		if (find_control(part, len) >= 0)
			ereport(ERROR,
					(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
					 errmsg("part %d of the key contains a control character",
							i + 1),
					 errhint("Encode the part, for example with encode() or md5(), or leave such characters out.")));

		if (i > 0)
			appendStringInfoChar(&buf, ':');
		append_part(&buf, part, len);
	}

	if (buf.len > IDEM_KEY_MAX_BYTES)
		shorten_key(&buf);

	PG_RETURN_TEXT_P(cstring_to_text_with_len(buf.data, buf.len));
}

/*
 * idem_provider_key(key text, provider text) returns uuid
 *
 * The identity to hand to the destination of an effect: the UUID of version 5
 * (RFC 9562) of the name "provider, 0x1F, key" in a namespace of our own.
 *
 * Not STRICT: a NULL is an error.
 */
Datum
idem_provider_key(PG_FUNCTION_ARGS)
{
	text	   *key;
	text	   *provider;
	StringInfoData buf;
	uint8		digest[SHA1_DIGEST_LENGTH];
	pg_uuid_t  *result;

	if (PG_ARGISNULL(0))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("idempotency key must not be null"),
				 errhint("Pass the key of the operation.")));
	if (PG_ARGISNULL(1))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("provider must not be null"),
				 errhint("Pass the name of the destination, or leave it out.")));

	key = PG_GETARG_TEXT_PP(0);
	provider = PG_GETARG_TEXT_PP(1);
	idem_check_key(key);
	if (VARSIZE_ANY_EXHDR(provider) > IDEM_KEY_MAX_BYTES ||
		find_control(VARDATA_ANY(provider), VARSIZE_ANY_EXHDR(provider)) >= 0)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("invalid provider"),
				 errdetail("The name of a provider has at most %d bytes and no control characters.",
						   IDEM_KEY_MAX_BYTES),
				 errhint("Pass a short name for the destination, such as 'stripe'.")));

	initStringInfo(&buf);
	appendBinaryStringInfo(&buf, (const char *) provider_namespace, UUID_LEN);
	append_utf8(&buf, VARDATA_ANY(provider), VARSIZE_ANY_EXHDR(provider));
	appendStringInfoChar(&buf, PROVIDER_SEPARATOR);
	append_utf8(&buf, VARDATA_ANY(key), VARSIZE_ANY_EXHDR(key));
	idem_digest(PG_SHA1, buf.data, buf.len, digest, sizeof(digest));

	result = (pg_uuid_t *) palloc(sizeof(pg_uuid_t));
	memcpy(result->data, digest, UUID_LEN);
	result->data[6] = (result->data[6] & 0x0F) | 0x50;	/* version 5 */
	result->data[8] = (result->data[8] & 0x3F) | 0x80;	/* RFC 9562 variant */

	PG_RETURN_UUID_P(result);
}

/*
 * Where in a string is the first control character?  -1 if there is none.
 *
 * These are C0 and DEL in every encoding: in those that a server can have,
 * the bytes of longer characters have their high bit set.  C1, U+0080 to
 * U+009F, is looked for in UTF-8 only.
 */
static int
find_control(const char *str, int len)
{
	const unsigned char *s = (const unsigned char *) str;
	bool		utf8 = GetDatabaseEncoding() == PG_UTF8;

	for (int i = 0; i < len; i++)
	{
		unsigned char c = s[i];

		if (c < 0x20 || c == 0x7F)
			return i;
		if (c == 0xC2 && utf8 && i + 1 < len && s[i + 1] < 0xA0)
			return i;
	}
	return -1;
}

/*
 * Say what is wrong with a key.
 */
static void
report_bad_key(const text *key)
{
	const char *str = VARDATA_ANY(key);
	int			len = VARSIZE_ANY_EXHDR(key);
	int			pos;
	unsigned char control;

	if (len == 0)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("idempotency key must not be empty"),
				 errdetail("A key has 1 to %d bytes.", IDEM_KEY_MAX_BYTES),
				 errhint("Pass a key that names the intended operation.")));
	if (len > IDEM_KEY_MAX_BYTES)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("idempotency key is too long"),
				 errdetail("The key has %d bytes; a key has 1 to %d bytes.",
						   len, IDEM_KEY_MAX_BYTES),
				 errhint("Make the key with idem_key(), which turns the end of long ones into a hash.")));

	pos = find_control(str, len);
	Assert(pos >= 0);
	control = str[pos];
	if (control == 0xC2)		/* the second byte is the number of the C1 */
		control = str[pos + 1];
	ereport(ERROR,
			(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
			 errmsg("idempotency key contains a control character"),
			 errdetail("Byte %d of the key begins the control character U+%04X.",
					   pos + 1, control),
			 errhint("Leave control characters, such as line ends and tabs, out of keys.")));
}

/*
 * The text of one part of a key, and its length in bytes.
 *
 * Accepted are types whose text depends on no setting, and domains over them.
 */
static const char *
part_to_string(Datum value, Oid type, int partno, int *len)
{
	char	   *str;

	switch (getBaseType(type))
	{
		case TEXTOID:
		case VARCHAROID:
			{
				text	   *txt = DatumGetTextPP(value);

				*len = VARSIZE_ANY_EXHDR(txt);
				return VARDATA_ANY(txt);
			}
		case INT2OID:
			str = palloc(MAXINT8LEN + 1);
			*len = pg_ltoa(DatumGetInt16(value), str);
			return str;
		case INT4OID:
			str = palloc(MAXINT8LEN + 1);
			*len = pg_ltoa(DatumGetInt32(value), str);
			return str;
		case INT8OID:
			str = palloc(MAXINT8LEN + 1);
			*len = pg_lltoa(DatumGetInt64(value), str);
			return str;
		case BOOLOID:
			str = DatumGetBool(value) ? "true" : "false";
			break;
		case UUIDOID:
			str = DatumGetCString(DirectFunctionCall1(uuid_out, value));
			break;
		default:
			if (!type_is_enum(getBaseType(type)))
				ereport(ERROR,
						(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
						 errmsg("type %s cannot be part of a key",
								format_type_be(type)),
						 errdetail("Part %d has this type; text, integers, uuid, boolean and enums are accepted.",
								   partno),
						 errhint("Cast the part to text, in a form that does not depend on settings such as the time zone.")));
			str = DatumGetCString(DirectFunctionCall1(enum_out, value));
	}

	*len = strlen(str);
	return str;
}

/*
 * Append a part with what would make it ambiguous replaced.
 */
static void
append_part(StringInfo buf, const char *part, int len)
{
	enlargeStringInfo(buf, len);
	for (int i = 0; i < len; i++)
	{
		if (part[i] == '%')
			appendStringInfoString(buf, "%25");
		else if (part[i] == ':')
			appendStringInfoString(buf, "%3A");
		else
			appendStringInfoCharMacro(buf, part[i]);
	}
}

/*
 * Append a string in UTF-8.
 */
static void
append_utf8(StringInfo buf, const char *str, int len)
{
	const char *utf8 = idem_to_utf8(str, &len);

	appendBinaryStringInfo(buf, utf8, len);
}

/*
 * Replace a key that is too long by its first bytes, up to the end of a
 * character, the marker, and the SHA-256 of the whole (as UTF-8) in hex.
 */
static void
shorten_key(StringInfo buf)
{
	int			len = buf->len;
	const char *utf8 = idem_to_utf8(buf->data, &len);
	uint8		digest[PG_SHA256_DIGEST_LENGTH];
	char		hex[PG_SHA256_DIGEST_STRING_LENGTH];

	idem_digest(PG_SHA256, utf8, len, digest, sizeof(digest));
	hex_encode((const char *) digest, sizeof(digest), hex);

	buf->len = pg_mbcliplen(buf->data, buf->len, LONG_KEY_PREFIX_BYTES);
	appendStringInfoString(buf, LONG_KEY_MARKER);
	appendBinaryStringInfo(buf, hex, sizeof(digest) * 2);
}
