/*-------------------------------------------------------------------------
 *
 * functions.c
 *	  SQL functions for effects inside the database.
 *
 * Only arguments and results are handled here; what the functions do is in
 * claim.c.  None is STRICT: a NULL key must be an error, not a NULL that a
 * WHERE clause would take for "not a duplicate".
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "catalog/pg_type.h"
#include "fmgr.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "utils/acl.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/jsonb.h"
#include "utils/lsyscache.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"
#include "utils/tuplestore.h"

#include "answer.h"
#include "arguments.h"
#include "claim.h"
#include "compat.h"
#include "idem.h"
#include "key.h"
#include "lease.h"
#include "record.h"
#include "result.h"
#include "store.h"

PG_FUNCTION_INFO_V1(idem_claim);
PG_FUNCTION_INFO_V1(idem_try_claim);
PG_FUNCTION_INFO_V1(idem_claim_batch);
PG_FUNCTION_INFO_V1(idem_complete);
PG_FUNCTION_INFO_V1(idem_complete_any);
PG_FUNCTION_INFO_V1(idem_release);
PG_FUNCTION_INFO_V1(idem_once);
PG_FUNCTION_INFO_V1(idem_lookup);
PG_FUNCTION_INFO_V1(idem_forget);

/*
 * idem_claim and idem_try_claim(key text, request jsonb, wait interval,
 *		first_sent timestamptz, store regclass) returns idem_outcome
 */
static Datum
claim(FunctionCallInfo fcinfo, const char *name, bool raise)
{
	Oid			store = idem_arg_store(fcinfo, 4);
	text	   *key = idem_arg_key(fcinfo, 0);
	Jsonb	   *request = PG_ARGISNULL(1) ? NULL : PG_GETARG_JSONB_P(1);
	IdemClaimOptions options;
	IdemRecord	record;
	IdemAnswer	answer;

	options.store = store;
	options.deadline = idem_arg_deadline(fcinfo, 2);
	options.has_first_sent = !PG_ARGISNULL(3);
	options.first_sent = options.has_first_sent ? PG_GETARG_TIMESTAMPTZ(3) : 0;

	idem_check_may_write(name);
	answer = idem_claim_key(&options, key, request, &record);
	if (raise)
		idem_raise_answer(answer, options.store, key, &record);
	PG_RETURN_DATUM(idem_outcome_datum(fcinfo, answer == ANSWER_CLAIMED, answer,
									   &record));
}

Datum
idem_claim(PG_FUNCTION_ARGS)
{
	return claim(fcinfo, "idem_claim()", true);
}

Datum
idem_try_claim(PG_FUNCTION_ARGS)
{
	return claim(fcinfo, "idem_try_claim()", false);
}

/* One key of a batch */
typedef struct BatchItem
{
	int			ordinality;
	text	   *key;
	uint64		hash;
	Jsonb	   *request;
	Datum	   *values;			/* of the row that is returned */
	bool	   *nulls;
} BatchItem;

/*
 * The order in which all batches lock: by lock, then by key, so that two
 * batches never deadlock with each other; equal keys in the given order.
 */
static int
compare_items(const void *a, const void *b)
{
	const BatchItem *x = a;
	const BatchItem *y = b;
	size_t		xlen = VARSIZE_ANY_EXHDR(x->key);
	size_t		ylen = VARSIZE_ANY_EXHDR(y->key);
	int			cmp;

	if (x->hash != y->hash)
		return x->hash < y->hash ? -1 : 1;
	cmp = memcmp(VARDATA_ANY(x->key), VARDATA_ANY(y->key), Min(xlen, ylen));
	if (cmp != 0)
		return cmp;
	if (xlen != ylen)
		return xlen < ylen ? -1 : 1;
	return x->ordinality - y->ordinality;
}

static int
compare_ordinality(const void *a, const void *b)
{
	return ((const BatchItem *) a)->ordinality -
		((const BatchItem *) b)->ordinality;
}

#define BATCH_COLUMNS	(2 + IDEM_OUTCOME_COLUMNS)

/*
 * idem_claim_batch(keys text[], requests jsonb[], wait interval,
 *		store regclass) returns setof (ordinality, key, outcome...)
 *
 * All keys are checked before the first is locked.
 */
Datum
idem_claim_batch(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;
	IdemClaimOptions options;
	Datum	   *keys;
	Datum	   *requests = NULL;
	bool	   *key_nulls;
	bool	   *request_nulls = NULL;
	int			nkeys;
	int			nrequests;
	BatchItem  *items;

	options.store = idem_arg_store(fcinfo, 3);
	if (PG_ARGISNULL(0))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("keys must not be null"),
				 errhint("Pass an empty array to claim nothing.")));
	deconstruct_array(PG_GETARG_ARRAYTYPE_P(0), TEXTOID, -1, false,
					  TYPALIGN_INT, &keys, &key_nulls, &nkeys);
	options.deadline = idem_arg_deadline(fcinfo, 2);
	options.has_first_sent = false;
	options.first_sent = 0;

	items = palloc0(sizeof(BatchItem) * Max(nkeys, 1));
	for (int i = 0; i < nkeys; i++)
	{
		items[i].ordinality = i + 1;
		items[i].key = idem_check_key_datum(keys[i], key_nulls[i]);
		items[i].hash = idem_key_hash(options.store, items[i].key);
	}
	if (!PG_ARGISNULL(1))
	{
		deconstruct_array(PG_GETARG_ARRAYTYPE_P(1), JSONBOID, -1, false,
						  TYPALIGN_INT, &requests, &request_nulls, &nrequests);
		if (nrequests != nkeys)
			ereport(ERROR,
					(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
					 errmsg("number of requests does not match number of keys"),
					 errdetail("There are %d keys and %d requests.",
							   nkeys, nrequests),
					 errhint("Pass one request for each key, NULL where there is none.")));
		for (int i = 0; i < nkeys; i++)
			if (!request_nulls[i])
				items[i].request = DatumGetJsonbP(requests[i]);
	}

	idem_check_may_write("idem_claim_batch()");
	idem_begin_rows(fcinfo, BATCH_COLUMNS);

	qsort(items, nkeys, sizeof(BatchItem), compare_items);
	for (int i = 0; i < nkeys; i++)
	{
		BatchItem  *item = &items[i];
		IdemRecord	record;
		IdemAnswer	answer;

		CHECK_FOR_INTERRUPTS();
		answer = idem_claim_key(&options, item->key, item->request, &record);
		item->values = palloc0(sizeof(Datum) * BATCH_COLUMNS);
		item->nulls = palloc0(sizeof(bool) * BATCH_COLUMNS);
		item->values[0] = Int32GetDatum(item->ordinality);
		item->values[1] = PointerGetDatum(item->key);
		idem_outcome_values(answer == ANSWER_CLAIMED, answer, &record,
							item->values + 2, item->nulls + 2);
	}
	qsort(items, nkeys, sizeof(BatchItem), compare_ordinality);
	for (int i = 0; i < nkeys; i++)
		tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc,
							 items[i].values, items[i].nulls);
	return (Datum) 0;
}

/*
 * Complete a claim, or with a token a lease, with a result that is json.
 */
static Datum
complete(FunctionCallInfo fcinfo, Oid store, text *key, Datum result,
		 bool isnull)
{
	IdemRecord	record;

	idem_check_may_write("idem_complete()");
	if (PG_ARGISNULL(2))
		idem_complete_claim(store, key, result, isnull, false, &record);
	else
		idem_complete_lease(store, key, PG_GETARG_INT64(2), result, isnull,
							&record);
	if (record.nulls[IDEM_RESULT])
		PG_RETURN_NULL();
	PG_RETURN_DATUM(record.values[IDEM_RESULT]);
}

/*
 * idem_complete(key text, result text, token bigint, store regclass)
 *		returns json
 */
Datum
idem_complete(PG_FUNCTION_ARGS)
{
	Oid			store = idem_arg_store(fcinfo, 3);
	text	   *key = idem_arg_key(fcinfo, 0);
	bool		isnull = PG_ARGISNULL(1);
	Datum		result = (Datum) 0;

	if (!isnull)
		result = idem_result_from_text(PG_GETARG_TEXT_PP(1));
	return complete(fcinfo, store, key, result, isnull);
}

/*
 * idem_complete(key text, result anyelement, token bigint, store regclass)
 *		returns json
 */
Datum
idem_complete_any(PG_FUNCTION_ARGS)
{
	Oid			store = idem_arg_store(fcinfo, 3);
	text	   *key = idem_arg_key(fcinfo, 0);
	bool		isnull = PG_ARGISNULL(1);
	Datum		result = (Datum) 0;

	if (!isnull)
		result = idem_result_from_value(PG_GETARG_DATUM(1),
										get_fn_expr_argtype(fcinfo->flinfo, 1));
	return complete(fcinfo, store, key, result, isnull);
}

/*
 * idem_release(key text, token bigint, store regclass) returns boolean
 */
Datum
idem_release(PG_FUNCTION_ARGS)
{
	text	   *key = idem_arg_key(fcinfo, 0);
	Oid			store = idem_arg_store(fcinfo, 2);

	idem_check_may_write("idem_release()");
	if (PG_ARGISNULL(1))
		PG_RETURN_BOOL(idem_release_claim(store, key));
	PG_RETURN_BOOL(idem_release_lease(store, key, PG_GETARG_INT64(1)));
}

/*
 * idem_once(key text, request jsonb, store regclass) returns boolean
 */
Datum
idem_once(PG_FUNCTION_ARGS)
{
	Oid			store = idem_arg_store(fcinfo, 2);
	text	   *key = idem_arg_key(fcinfo, 0);
	Jsonb	   *request = PG_ARGISNULL(1) ? NULL : PG_GETARG_JSONB_P(1);
	IdemClaimOptions options;
	IdemRecord	record;
	IdemAnswer	answer;

	options.store = store;
	options.deadline = idem_deadline_default();
	options.has_first_sent = false;
	options.first_sent = 0;

	idem_check_may_write("idem_once()");
	answer = idem_claim_key(&options, key, request, &record);
	if (answer != ANSWER_CLAIMED)
	{
		idem_raise_answer(answer, options.store, key, &record);
		PG_RETURN_BOOL(false);
	}
	idem_complete_claim(options.store, key, (Datum) 0, true, true, &record);
	PG_RETURN_BOOL(true);
}

/*
 * idem_lookup(key text, store regclass) returns setof idem_completion
 *
 * An ordinary read with the statement's snapshot.
 */
Datum
idem_lookup(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;
	text	   *key = idem_arg_key(fcinfo, 0);
	IdemStore  *store = idem_store_open(idem_arg_store(fcinfo, 1), ACL_SELECT,
										AccessShareLock);
	IdemRecord	record;

	idem_begin_rows(fcinfo, IDEM_NCOLUMNS);
	idem_record_find_mvcc(&store, key, GetActiveSnapshot(), &record);
	if (record.found)
		tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc,
							 record.values, record.nulls);
	return (Datum) 0;
}

/*
 * idem_forget(key text, store regclass) returns boolean
 */
Datum
idem_forget(PG_FUNCTION_ARGS)
{
	text	   *key = idem_arg_key(fcinfo, 0);
	Oid			store = idem_arg_store(fcinfo, 1);

	idem_check_may_write("idem_forget()");
	PG_RETURN_BOOL(idem_forget_key(store, key));
}
