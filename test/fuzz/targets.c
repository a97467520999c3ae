/*-------------------------------------------------------------------------
 *
 * targets.c
 *	  Fuzzing of the parts of idem that read what others have made: requests,
 *	  keys, and the file of the counters.
 *
 * A module for a single-user backend, linked with libFuzzer and with the real
 * src/ files, instrumented; test/fuzz/run builds and loads it.  So the jsonb,
 * the errors and the memory contexts are the server's own.  The server itself
 * is not instrumented: what is written beyond a palloc'ed chunk is noticed
 * only by a server that checks its memory contexts (--enable-cassert).
 *
 *		SELECT idem_fuzz(target, options and corpus directories)
 *
 * never returns: libFuzzer ends the process.  Whatever a target finds wrong
 * is an abort(), and so is an internal error (class XX).
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "catalog/pg_type.h"
#include "fmgr.h"
#include "mb/pg_wchar.h"
#include "nodes/makefuncs.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/jsonb.h"
#include "utils/memutils.h"
#include "utils/uuid.h"

#include "../../src/fingerprint.h"
#include "../../src/key.h"

/* For read_rows(), which is static */
#include "../../src/stats_file.c"

PG_MODULE_MAGIC;

/* A setting of idem's, in builds with assertions */
bool		idem_debug_lock_collisions = false;

PG_FUNCTION_INFO_V1(idem_fuzz);

extern Datum idem_key(PG_FUNCTION_ARGS);
extern int	LLVMFuzzerRunDriver(int *argc, char ***argv,
								int (*callback) (const uint8_t *data,
												 size_t size));

#define MUST(condition) \
	do { \
		if (!(condition)) \
		{ \
			fprintf(stderr, "violated: %s\n", #condition); \
			abort(); \
		} \
	} while (0)

static void (*target) (const char *data, int size);
static MemoryContext input_context;

/*
 * One or two JSON values, with a zero byte between: their fingerprints are
 * equal if and only if the values are.
 */
static void
fuzz_fingerprint(const char *data, int size)
{
	char	   *first = pnstrdup(data, size);
	int			len = strlen(first);
	char	   *second = len < size ? pnstrdup(data + len + 1, size - len - 1) : NULL;
	Jsonb	   *a;
	Jsonb	   *b;
	pg_uuid_t	fingerprint_a;
	pg_uuid_t	fingerprint_b;
	bool		same;

	if (!pg_verifymbstr(first, len, true) ||
		(second != NULL && !pg_verifymbstr(second, strlen(second), true)))
		return;
	a = DatumGetJsonbP(DirectFunctionCall1(jsonb_in, CStringGetDatum(first)));
	if (second == NULL)
		second = JsonbToCStringIndent(NULL, &a->root, VARSIZE(a));
	b = DatumGetJsonbP(DirectFunctionCall1(jsonb_in, CStringGetDatum(second)));

	idem_fingerprint_compute(a, &fingerprint_a);
	idem_fingerprint_compute(b, &fingerprint_b);
	same = memcmp(&fingerprint_a, &fingerprint_b, UUID_LEN) == 0;
	MUST(same == (compareJsonbContainers(&a->root, &b->root) == 0));
	MUST(idem_fingerprint_matches(&fingerprint_a, a));
	MUST(idem_fingerprint_matches(&fingerprint_a, b) == same);
	MUST(fingerprint_a.data[0] == IDEM_FINGERPRINT_VERSION);
}

/*
 * The rules of a key, said once more.
 */
static bool
has_control(const char *str, int len)
{
	const unsigned char *s = (const unsigned char *) str;

	for (int i = 0; i < len; i += pg_utf_mblen(s + i))
	{
		pg_wchar	c = utf8_to_unicode((unsigned char *) s + i);

		if (c < 0x20 || (c >= 0x7F && c < 0xA0))
			return true;
	}
	return false;
}

static bool
is_refused(const text *key)
{
	volatile bool refused = false;
	MemoryContext context = CurrentMemoryContext;

	PG_TRY();
	{
		idem_check_key(key);
	}
	PG_CATCH();
	{
		MemoryContextSwitchTo(context);
		MUST(geterrcode() == ERRCODE_INVALID_PARAMETER_VALUE);
		FlushErrorState();
		refused = true;
	}
	PG_END_TRY();
	return refused;
}

/*
 * idem_key(VARIADIC parts), or NULL where a part is refused.
 */
static text *
make_key(char **parts, int nparts)
{
	LOCAL_FCINFO(fcinfo, 1);
	FmgrInfo	flinfo;
	Datum		values[8];
	ArrayType  *array;
	FuncExpr   *call;
	MemoryContext context = CurrentMemoryContext;
	text	   *volatile result = NULL;
	bool		good = true;

	for (int i = 0; i < nparts; i++)
	{
		good = good && parts[i][0] != '\0' &&
			!has_control(parts[i], strlen(parts[i]));
		values[i] = CStringGetTextDatum(parts[i]);
	}
	array = construct_array(values, nparts, TEXTOID, -1, false, TYPALIGN_INT);
	call = makeFuncExpr(InvalidOid, TEXTOID,
						list_make1(makeConst(TEXTARRAYOID, -1, InvalidOid, -1,
											 PointerGetDatum(array), false,
											 false)),
						InvalidOid, InvalidOid, COERCE_EXPLICIT_CALL);
	call->funcvariadic = true;
	memset(&flinfo, 0, sizeof(flinfo));
	flinfo.fn_addr = idem_key;
	flinfo.fn_mcxt = context;
	fmgr_info_set_expr((Node *) call, &flinfo);
	InitFunctionCallInfoData(*fcinfo, &flinfo, 1, InvalidOid, NULL, NULL);
	fcinfo->args[0].value = PointerGetDatum(array);
	fcinfo->args[0].isnull = false;

	PG_TRY();
	{
		result = DatumGetTextPP(idem_key(fcinfo));
	}
	PG_CATCH();
	{
		MemoryContextSwitchTo(context);
		MUST(geterrcode() == ERRCODE_INVALID_PARAMETER_VALUE);
		FlushErrorState();
	}
	PG_END_TRY();
	MUST((result != NULL) == good);
	MUST(result == NULL || idem_key_is_valid(result));
	return result;
}

/*
 * A key, and lists of parts of keys: \1 between the two lists, \2 between
 * parts.  Keys are the same if and only if their parts are.
 */
static void
fuzz_key(const char *data, int size)
{
	char	   *str = pnstrdup(data, size);
	text	   *key = cstring_to_text_with_len(data, size);
	char	   *lists[2];
	char	   *parts[2][8];
	int			nparts[2] = {0, 0};
	text	   *keys[2];
	bool		valid = idem_key_is_valid(key);
	bool		same;

	if (!pg_verifymbstr(data, size, true))
		return;
	MUST(valid == (size >= 1 && size <= IDEM_KEY_MAX_BYTES &&
				   !has_control(data, size)));
	MUST(is_refused(key) == !valid);
	MUST(idem_key_hash(1, key) == idem_key_hash(1, key));

	lists[0] = str;
	lists[1] = strchr(str, 1);
	if (lists[1] == NULL)
		return;
	*lists[1]++ = '\0';
	for (int l = 0; l < 2; l++)
		for (char *part = lists[l]; part != NULL && nparts[l] < 8;)
		{
			char	   *next = strchr(part, 2);

			if (next != NULL)
				*next++ = '\0';
			parts[l][nparts[l]++] = part;
			part = next;
		}
	same = nparts[0] == nparts[1];
	for (int i = 0; same && i < nparts[0]; i++)
		same = strcmp(parts[0][i], parts[1][i]) == 0;
	keys[0] = make_key(parts[0], nparts[0]);
	keys[1] = make_key(parts[1], nparts[1]);
	if (keys[0] != NULL && keys[1] != NULL)
		MUST(same == (VARSIZE_ANY(keys[0]) == VARSIZE_ANY(keys[1]) &&
					  memcmp(keys[0], keys[1], VARSIZE_ANY(keys[0])) == 0));
}

/*
 * A file of counters.  The first byte says what of the header is to be
 * corrected, since nobody finds a checksum by chance.
 */
static void
fuzz_stats_file(const char *data, int size)
{
	enum {CAPACITY = 3};
	IdemStatsRow *rows = malloc(sizeof(IdemStatsRow) * CAPACITY);
	int			len = size - 1;
	char	   *content;
	FileHeader	header;
	FILE	   *file;
	int			nrows;

	if (len < 1)
	{
		free(rows);
		return;
	}
	content = malloc(len);
	memcpy(content, data + 1, len);
	if (len >= sizeof(header))
	{
		int			held = (len - sizeof(header)) / sizeof(IdemStatsRow);

		memcpy(&header, content, sizeof(header));
		if (data[0] & 1)
		{
			header.magic = FILE_MAGIC;
			header.version = FILE_VERSION;
			header.row_size = sizeof(IdemStatsRow);
		}
		if (data[0] & 2)
			header.nrows = held;
		if ((data[0] & 4) && header.nrows <= held)
			header.crc = checksum((IdemStatsRow *) (content + sizeof(header)),
								  header.nrows);
		memcpy(content, &header, sizeof(header));
	}
	file = fmemopen(content, len, "rb");
	MUST(file != NULL);
	nrows = read_rows(file, rows, CAPACITY);
	fclose(file);
	MUST(nrows >= -1 && nrows <= CAPACITY);
	if (nrows >= 0)
	{
		MUST(len == sizeof(header) + nrows * sizeof(IdemStatsRow));
		MUST(memcmp(rows, content + sizeof(header),
					nrows * sizeof(IdemStatsRow)) == 0);
	}
	free(content);
	free(rows);
}

static int
run_one(const uint8_t *data, size_t size)
{
	MemoryContext old = MemoryContextSwitchTo(input_context);

	PG_TRY();
	{
		target((const char *) data, (int) size);
	}
	PG_CATCH();
	{
		int			sqlstate = geterrcode();

		MemoryContextSwitchTo(input_context);
		MUST(ERRCODE_TO_CATEGORY(sqlstate) != ERRCODE_INTERNAL_ERROR);
		FlushErrorState();
	}
	PG_END_TRY();
	MemoryContextSwitchTo(old);
	MemoryContextReset(input_context);
	return 0;
}

Datum
idem_fuzz(PG_FUNCTION_ARGS)
{
	char	   *name = text_to_cstring(PG_GETARG_TEXT_PP(0));
	Datum	   *options;
	int			noptions;
	char	  **argv;
	int			argc = 1;

	if (strcmp(name, "fingerprint") == 0)
		target = fuzz_fingerprint;
	else if (strcmp(name, "key") == 0)
		target = fuzz_key;
	else if (strcmp(name, "stats_file") == 0)
		target = fuzz_stats_file;
	else
		elog(ERROR, "no target %s", name);

	MUST(GetDatabaseEncoding() == PG_UTF8);
	deconstruct_array(PG_GETARG_ARRAYTYPE_P(1), TEXTOID, -1, false,
					  TYPALIGN_INT, &options, NULL, &noptions);
	argv = palloc0(sizeof(char *) * (noptions + 2));
	argv[0] = name;
	while (argc <= noptions)
	{
		argv[argc] = TextDatumGetCString(options[argc - 1]);
		argc++;
	}
	input_context = AllocSetContextCreate(TopMemoryContext, "fuzz",
										  ALLOCSET_DEFAULT_SIZES);
	exit(LLVMFuzzerRunDriver(&argc, &argv, run_one));
}
