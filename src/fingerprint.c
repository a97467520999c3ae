/*-------------------------------------------------------------------------
 *
 * fingerprint.c
 *	  The fingerprint of a request: a canonical hash of a jsonb value.
 *
 * Two requests have the same fingerprint if and only if they are the same
 * JSON value: member order, white space, escapes and the spelling of numbers
 * do not count, and of members with one name the last counts.  Unlike jsonb's
 * own hash it is a cryptographic one, is the same on every machine, server
 * version and server encoding, and can be computed in any language;
 * test/vectors/README.md is its specification for others.
 *
 * The value is written in a canonical form, in which each value begins with
 * a letter that tells its type and ends where its own text says, so that no
 * two values have the same form:
 *
 *		n				null
 *		t, f			true, false
 *		d-15e-1;		the number -1.5: sign, digits without leading or
 *						trailing zeros, decimal exponent; zero is d0e0;
 *		s5:hello		a string, counted in bytes of UTF-8
 *		a2:...			an array and how many elements follow
 *		o2:...			an object and how many members follow: for each its
 *						name, as a string, and its value.  Shorter names
 *						come first, those of one length by their bytes.
 *
 * That order is the one in which jsonb stores members, so they need to be
 * sorted only where the names had to be converted to UTF-8.
 *
 * The SHA-256 of a prefix and this form is cut down to a UUID of version 8
 * (RFC 9562), whose first byte is the version of this algorithm.  A changed
 * algorithm gets a new version and keeps this one, to compare with what is
 * stored already.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "common/sha2.h"
#include "fmgr.h"
#include "lib/stringinfo.h"
#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "port/pg_bswap.h"
#include "utils/builtins.h"
#include "utils/memutils.h"
#include "utils/numeric.h"

#include "fingerprint.h"

/* Hashed before the canonical form, so that no other hash is like this one */
#define FINGERPRINT_PREFIX "idem fingerprint 1\n"

/* Most that a letter, a count and a colon take */
#define COUNT_MAX_BYTES 16

/* Layout of numeric's binary form, which is part of the wire protocol */
#define NUMERIC_WIRE_HEADER 8	/* int16: ndigits, weight, sign, dscale */
#define NUMERIC_WIRE_POSITIVE 0x0000
#define NUMERIC_WIRE_NEGATIVE 0x4000
#define NUMERIC_WIRE_GROUP 4	/* decimal digits in one base-10000 digit */

/* Where a member of an object stands in the canonical form, for sorting */
typedef struct CanonicalMember
{
	int			start;			/* offset of the member in the buffer */
	int			len;			/* its length, name and value */
	int			name;			/* offset of the bytes of its name */
	int			name_len;		/* length of its name in bytes */
} CanonicalMember;

/* An object that is being written, where its members have to be sorted */
typedef struct OpenObject
{
	struct OpenObject *outer;	/* the object around it, or NULL */
	int			nmembers;		/* members begun so far */
	CanonicalMember members[FLEXIBLE_ARRAY_MEMBER];
} OpenObject;

static void append_canonical(StringInfo buf, JsonbContainer *root);
static void append_scalar(StringInfo buf, const JsonbValue *value);
static void append_count(StringInfo buf, char type, int count, int room);
static int	append_string(StringInfo buf, const char *str, int len);
static void append_number(StringInfo buf, Numeric number);
static bool names_need_sorting(void);
static OpenObject *begin_object(OpenObject *outer, int nmembers);
static OpenObject *end_object(OpenObject *object, StringInfo buf);

PG_FUNCTION_INFO_V1(idem_fingerprint);

/*
 * idem_fingerprint(jsonb) returns uuid
 *
 * What a claim stores for a request.  STRICT.
 */
Datum
idem_fingerprint(PG_FUNCTION_ARGS)
{
	Jsonb	   *request = PG_GETARG_JSONB_P(0);
	pg_uuid_t  *result = (pg_uuid_t *) palloc(sizeof(pg_uuid_t));

	idem_fingerprint_compute(request, result);

	PG_FREE_IF_COPY(request, 0);
	PG_RETURN_UUID_P(result);
}

/*
 * Compute the fingerprint of a detoasted jsonb value into *result.
 *
 * The canonical form is built in memory as a whole, so that nothing can fail
 * between creating and freeing the hash context.  It takes at most three
 * times the room of the jsonb value (a one-byte character may need three
 * bytes in UTF-8), which is below what a StringInfo can hold, since jsonb
 * ends at 256 MB; and were it not, enlarging the buffer raises an error.
 */
void
idem_fingerprint_compute(Jsonb *request, pg_uuid_t *result)
{
	StringInfoData buf;
	uint8		digest[PG_SHA256_DIGEST_LENGTH];

	initStringInfo(&buf);
	if (VARSIZE(request) > buf.maxlen)
		enlargeStringInfo(&buf, VARSIZE(request));

	appendBinaryStringInfo(&buf, FINGERPRINT_PREFIX,
						   sizeof(FINGERPRINT_PREFIX) - 1);
	append_canonical(&buf, &request->root);

	idem_digest(PG_SHA256, buf.data, buf.len, digest, sizeof(digest));
	pfree(buf.data);

	memcpy(result->data, digest, UUID_LEN);
	result->data[0] = IDEM_FINGERPRINT_VERSION;
	result->data[6] = (result->data[6] & 0x0F) | 0x80;	/* version 8 */
	result->data[8] = (result->data[8] & 0x3F) | 0x80;	/* RFC 9562 variant */
}

/*
 * Is this request the one whose fingerprint was stored?
 *
 * It is answered with the algorithm that made the stored one.  Where that is
 * not known here, there is no answer but an error: "differs" would refuse a
 * duplicate its result, "matches" would give it that of another request.
 */
bool
idem_fingerprint_matches(const pg_uuid_t *stored, Jsonb *request)
{
	pg_uuid_t	computed;

	if (unlikely(stored->data[0] != IDEM_FINGERPRINT_VERSION ||
				 (stored->data[6] & 0xF0) != 0x80 ||
				 (stored->data[8] & 0xC0) != 0x80))
	{
		char	   *uuid;

		uuid = DatumGetCString(DirectFunctionCall1(uuid_out,
												   UUIDPGetDatum(stored)));
		ereport(ERROR,
				(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
				 errmsg("request fingerprint of an unknown kind"),
				 errdetail("The stored fingerprint is %s; this version of idem knows those of algorithm %d.",
						   uuid, IDEM_FINGERPRINT_VERSION),
				 errhint("The record was written by a newer version of idem, or by hand. Install the version that wrote it, or repeat the call without a request.")));
	}

	idem_fingerprint_compute(request, &computed);

	return memcmp(computed.data, stored->data, UUID_LEN) == 0;
}

/*
 * Append the canonical form of a value.
 *
 * One flat loop, however deep the value: what jsonb could be made of can be
 * fingerprinted, whatever the depth of the stack here.
 */
static void
append_canonical(StringInfo buf, JsonbContainer *root)
{
	bool		sorting = names_need_sorting();
	OpenObject *object = NULL;
	JsonbIterator *it = JsonbIteratorInit(root);
	JsonbIteratorToken token;
	JsonbValue	value;

	while ((token = JsonbIteratorNext(&it, &value, false)) != WJB_DONE)
	{
		CHECK_FOR_INTERRUPTS();

		switch (token)
		{
			case WJB_BEGIN_ARRAY:
				if (!value.val.array.rawScalar)
					append_count(buf, 'a', value.val.array.nElems, 0);
				break;

			case WJB_BEGIN_OBJECT:
				append_count(buf, 'o', value.val.object.nPairs, 0);
				if (sorting)
					object = begin_object(object, value.val.object.nPairs);
				break;

			case WJB_KEY:
				{
					int			start = buf->len;
					int			name_len;

					name_len = append_string(buf, value.val.string.val,
											 value.val.string.len);
					if (object)
					{
						CanonicalMember *member;

						member = &object->members[object->nmembers++];
						member->start = start;
						member->name = buf->len - name_len;
						member->name_len = name_len;
					}
					break;
				}

			case WJB_VALUE:
			case WJB_ELEM:
				append_scalar(buf, &value);
				break;

			case WJB_END_OBJECT:
				if (object)
					object = end_object(object, buf);
				break;

			case WJB_END_ARRAY:
				break;

			default:
				elog(ERROR, "unexpected jsonb iterator token: %d",
					 (int) token);
		}
	}
}

/*
 * Append a value that is neither an array nor an object.
 */
static void
append_scalar(StringInfo buf, const JsonbValue *value)
{
	switch (value->type)
	{
		case jbvNull:
			appendStringInfoCharMacro(buf, 'n');
			break;
		case jbvBool:
			appendStringInfoCharMacro(buf, value->val.boolean ? 't' : 'f');
			break;
		case jbvNumeric:
			append_number(buf, value->val.numeric);
			break;
		case jbvString:
			(void) append_string(buf, value->val.string.val,
								 value->val.string.len);
			break;
		default:
			elog(ERROR, "unexpected jsonb value type: %d", (int) value->type);
	}
}

/*
 * Append the head of a value that is counted: its letter, the count in
 * decimal, a colon.  Makes room for as many bytes more.
 */
static void
append_count(StringInfo buf, char type, int count, int room)
{
	char	   *out;

	enlargeStringInfo(buf, room + COUNT_MAX_BYTES);
	out = buf->data + buf->len;
	*out++ = type;
	out += pg_ultoa_n(count, out);
	*out++ = ':';
	buf->len = out - buf->data;
}

/*
 * Append a string as UTF-8; returns how many bytes of it these are.
 */
static int
append_string(StringInfo buf, const char *str, int len)
{
	const char *utf8 = idem_to_utf8(str, &len);

	append_count(buf, 's', len, len);
	memcpy(buf->data + buf->len, utf8, len);
	buf->len += len;
	if (utf8 != str)
		pfree(unconstify(char *, utf8));

	return len;
}

/*
 * Append a number.
 *
 * Numeric's binary form is used, not its text: it has the digits without the
 * zeros that 1e100000 has in decimal notation, and its layout is part of the
 * wire protocol, where numeric's own structs are private to numeric.c.
 */
static void
append_number(StringInfo buf, Numeric number)
{
	bytea	   *wire;
	const char *pos;
	uint16		head[NUMERIC_WIRE_HEADER / sizeof(uint16)];
	int			ngroups;
	int			sign;
	int			exponent;
	char	   *out;
	char	   *first;
	char	   *last;

	wire = DatumGetByteaPP(DirectFunctionCall1(numeric_send,
											   NumericGetDatum(number)));
	pos = VARDATA_ANY(wire);
	memcpy(head, pos, NUMERIC_WIRE_HEADER);
	pos += NUMERIC_WIRE_HEADER;
	ngroups = pg_ntoh16(head[0]);
	sign = pg_ntoh16(head[2]);

	/* The weight is the first group's; the exponent is the last digit's */
	exponent = (int16) pg_ntoh16(head[1]) - (ngroups - 1);
	exponent *= NUMERIC_WIRE_GROUP;

	if (sign != NUMERIC_WIRE_POSITIVE && sign != NUMERIC_WIRE_NEGATIVE)
		elog(ERROR, "jsonb holds a number that is not finite");

	/* Room for all digits, and for letter, sign, exponent and semicolon */
	enlargeStringInfo(buf, ngroups * NUMERIC_WIRE_GROUP + 32);
	out = buf->data + buf->len;
	*out++ = 'd';

	/* One byte is left for the sign, which a zero has not */
	first = last = out + 1;
	for (int i = 0; i < ngroups; i++)
	{
		uint16		group;

		memcpy(&group, pos, sizeof(group));
		pos += sizeof(group);
		group = pg_ntoh16(group);
		*last++ = '0' + group / 1000;
		*last++ = '0' + group / 100 % 10;
		*last++ = '0' + group / 10 % 10;
		*last++ = '0' + group % 10;
	}
	while (first < last && *first == '0')
		first++;
	while (last > first && last[-1] == '0')
	{
		last--;
		exponent++;
	}

	if (first == last)
	{
		*out++ = '0';
		exponent = 0;
	}
	else
	{
		if (sign == NUMERIC_WIRE_NEGATIVE)
			*out++ = '-';
		memmove(out, first, last - first);
		out += last - first;
	}
	*out++ = 'e';
	out += pg_ltoa(exponent, out);
	*out++ = ';';

	buf->len = out - buf->data;
	pfree(wire);
}

/*
 * Can the order in which jsonb stores members differ from the canonical one?
 * Both are by length and bytes of the name, but jsonb's is of the name in the
 * server's encoding.
 */
static bool
names_need_sorting(void)
{
	int			encoding = GetDatabaseEncoding();

	return encoding != PG_UTF8 && encoding != PG_SQL_ASCII;
}

/* qsort_arg comparator: shorter names first, then by their bytes */
static int
compare_members(const void *a, const void *b, void *arg)
{
	const CanonicalMember *ma = (const CanonicalMember *) a;
	const CanonicalMember *mb = (const CanonicalMember *) b;
	const char *data = (const char *) arg;

	if (ma->name_len != mb->name_len)
		return ma->name_len < mb->name_len ? -1 : 1;
	return memcmp(data + ma->name, data + mb->name, ma->name_len);
}

/*
 * Begin an object whose members have to be sorted.
 */
static OpenObject *
begin_object(OpenObject *outer, int nmembers)
{
	OpenObject *object;

	object = (OpenObject *)
		palloc_extended(offsetof(OpenObject, members) +
						sizeof(CanonicalMember) * (Size) nmembers,
						MCXT_ALLOC_HUGE);
	object->outer = outer;
	object->nmembers = 0;

	return object;
}

/*
 * End an object, which is the last thing in the buffer: bring its members
 * into the canonical order.  Returns the object around it.
 */
static OpenObject *
end_object(OpenObject *object, StringInfo buf)
{
	OpenObject *outer = object->outer;
	CanonicalMember *members = object->members;
	int			nmembers = object->nmembers;
	int			end = buf->len;
	bool		in_order = true;

	/* From the last to the first: each ends where the next one begins */
	for (int i = nmembers - 1; i >= 0; i--)
	{
		members[i].len = end - members[i].start;
		end = members[i].start;
		if (i > 0 &&
			compare_members(&members[i - 1], &members[i], buf->data) > 0)
			in_order = false;
	}

	if (!in_order)
	{
		char	   *sorted = (char *) palloc(buf->len - end);
		char	   *out = sorted;

		qsort_arg(members, nmembers, sizeof(CanonicalMember),
				  compare_members, buf->data);
		for (int i = 0; i < nmembers; i++)
		{
			memcpy(out, buf->data + members[i].start, members[i].len);
			out += members[i].len;
		}
		Assert(out - sorted == buf->len - end);
		memcpy(buf->data + end, sorted, out - sorted);
		pfree(sorted);
	}

	pfree(object);
	return outer;
}

/*
 * Give a string of the server's encoding in UTF-8.
 *
 * Returns the string itself where its bytes are those of UTF-8 already (which
 * in an SQL_ASCII database has to be believed), otherwise a palloc'd one,
 * whose length is put into *len.  Raises an error for a character that has no
 * equivalent.
 */
const char *
idem_to_utf8(const char *str, int *len)
{
	int			encoding = GetDatabaseEncoding();
	const char *result;
	int			i;

	if (encoding == PG_UTF8 || encoding == PG_SQL_ASCII)
		return str;

	for (i = 0; i < *len; i++)
		if (IS_HIGHBIT_SET(str[i]))
			break;
	if (i == *len)
		return str;

	result = pg_server_to_any(str, *len, PG_UTF8);
	if (result != str)
		*len = strlen(result);
	return result;
}

/*
 * Hash a string of bytes in one go; digest_len is what the hash type gives.
 */
void
idem_digest(pg_cryptohash_type type, const void *data, size_t len,
			uint8 *digest, size_t digest_len)
{
	pg_cryptohash_ctx *ctx = pg_cryptohash_create(type);

	if (pg_cryptohash_init(ctx) < 0 ||
		pg_cryptohash_update(ctx, (const uint8 *) data, len) < 0 ||
		pg_cryptohash_final(ctx, digest, digest_len) < 0)
	{
		/* A static string, which outlives the context */
		const char *reason = pg_cryptohash_error(ctx);

		pg_cryptohash_free(ctx);
		ereport(ERROR,
				(errcode(ERRCODE_INTERNAL_ERROR),
				 errmsg("could not compute a hash: %s", reason)));
	}
	pg_cryptohash_free(ctx);
}
