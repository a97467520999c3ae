/*-------------------------------------------------------------------------
 *
 * arguments.c
 *	  Arguments and results that many SQL functions share.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "funcapi.h"
#include "utils/builtins.h"
#include "utils/lsyscache.h"
#include "utils/timestamp.h"
#include "utils/typcache.h"

#include "answer.h"
#include "arguments.h"
#include "claim.h"
#include "compat.h"
#include "idem.h"
#include "key.h"
#include "record.h"
#include "store.h"

/* Longer than any wait or window, and safe to add to a timestamp */
#define MAX_USECS	(INT64CONST(1) << 62)

/*
 * The library and the SQL objects can be of different versions: between
 * installing the files and ALTER EXTENSION UPDATE, and in whatever still has
 * the old library loaded.  What the C code takes for granted of them is asked
 * for here.  Types are not: a C function's SQL declaration never changes, a new
 * one has a new name.
 */
void
idem_check_fits(bool fits)
{
	if (!fits)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("SQL objects of extension \"idem\" do not fit its library"),
				 errdetail("They are of different versions."),
				 errhint("Run ALTER EXTENSION idem UPDATE and reconnect; where idem is preloaded, restart the server after installing its files.")));
}

void
idem_check_nargs(FunctionCallInfo fcinfo, int nargs)
{
	idem_check_fits(PG_NARGS() == nargs);
}

/*
 * Begin to return a set of rows of "natts" columns.
 */
void
idem_begin_rows(FunctionCallInfo fcinfo, int natts)
{
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;

	InitMaterializedSRF(fcinfo, 0);
	idem_check_fits(rsinfo->setDesc->natts == natts);
}

/*
 * A key that was checked: NULL is 22004, a bad one 22023.
 */
text *
idem_check_key_datum(Datum key, bool isnull)
{
	text	   *result;

	if (isnull)
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("idempotency key must not be null"),
				 errhint("Build keys from parts that are always there, for example with idem_key().")));
	result = DatumGetTextPP(key);
	idem_check_key(result);
	return result;
}

text *
idem_arg_key(FunctionCallInfo fcinfo, int n)
{
	return idem_check_key_datum(PG_GETARG_DATUM(n), PG_ARGISNULL(n));
}

/*
 * The store is the last argument of every function.  To be asked for before
 * the others are looked at.
 */
Oid
idem_arg_store(FunctionCallInfo fcinfo, int n)
{
	idem_check_nargs(fcinfo, n + 1);
	if (PG_ARGISNULL(n))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("store must not be null"),
				 errhint("Leave the argument out to use idem_completions.")));
	return PG_GETARG_OID(n);
}

/*
 * An interval in microseconds, at most MAX_USECS; a month counts as 30
 * days.  Error 22023 if it is negative.
 */
int64
idem_interval_usecs(const void *interval, const char *what)
{
	const Interval *span = interval;
	double		usecs = (double) span->time +
		((double) span->month * DAYS_PER_MONTH + span->day) * USECS_PER_DAY;

	if (usecs < 0)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("%s must not be negative", what),
				 errhint("Pass an interval of 0 or more.")));
	return usecs < (double) MAX_USECS ? (int64) usecs : MAX_USECS;
}

/*
 * The length of a lease in microseconds.
 */
int64
idem_arg_lease(FunctionCallInfo fcinfo, int n)
{
	int64		usecs;

	if (PG_ARGISNULL(n))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("lease must not be null"),
				 errhint("Pass how long the effect can take, for example '5 min'.")));
	usecs = idem_interval_usecs(PG_GETARG_INTERVAL_P(n), "lease");
	if (usecs < 1000 || usecs > 30 * USECS_PER_DAY)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("lease is out of range"),
				 errdetail("It must be between 1 millisecond and 30 days."),
				 errhint("Pass how long the effect can take; idem_extend() makes it longer.")));
	return usecs;
}

int64
idem_arg_token(FunctionCallInfo fcinfo, int n)
{
	if (PG_ARGISNULL(n))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("token must not be null"),
				 errhint("Pass the token that idem_lease() has returned.")));
	return PG_GETARG_INT64(n);
}

/*
 * The end of a wait that begins now: an interval, or NULL for the setting.
 */
TimestampTz
idem_arg_deadline(FunctionCallInfo fcinfo, int n)
{
	int64		usecs;
	TimestampTz now;

	if (PG_ARGISNULL(n))
		return idem_deadline_default();
	usecs = idem_interval_usecs(PG_GETARG_INTERVAL_P(n), "wait");
	now = GetCurrentTimestamp();
	return usecs >= END_TIMESTAMP - now ? DT_NOEND : now + usecs;
}

/*
 * The columns of an idem_outcome.  "answer" is an IdemAnswer; "claimed" says
 * whether the caller is to do the work (or, of idem_run, whether it ran).
 */
void
idem_outcome_values(bool claimed, int answer, const IdemRecord *record,
					Datum *values, bool *nulls)
{
	static const int columns[IDEM_OUTCOME_COLUMNS] = {
		-1, -1, IDEM_RESULT, IDEM_COMPLETED_AT, IDEM_TOKEN, IDEM_LEASE_UNTIL,
		IDEM_CHECKPOINT
	};

	for (int i = 2; i < IDEM_OUTCOME_COLUMNS; i++)
	{
		bool		shown;

		switch (columns[i])
		{
			case IDEM_RESULT:
			case IDEM_COMPLETED_AT:
				shown = answer == ANSWER_COMPLETED || answer == ANSWER_SKIPPED;
				break;
			case IDEM_LEASE_UNTIL:
				shown = answer == ANSWER_LEASED ||
					answer == ANSWER_UNCERTAIN ||
					(answer == ANSWER_IN_PROGRESS &&
					 record->status == IDEM_LEASED);
				break;
			default:
				shown = answer == ANSWER_LEASED || answer == ANSWER_UNCERTAIN;
				break;
		}
		shown = shown && record->found && !record->nulls[columns[i]];
		nulls[i] = !shown;
		values[i] = shown ? record->values[columns[i]] : (Datum) 0;
	}
	values[0] = BoolGetDatum(claimed);
	values[1] = CStringGetTextDatum(idem_answer_name(answer));
	nulls[0] = nulls[1] = false;
}

/*
 * A row of the function's composite result type, which must have "natts"
 * columns.
 */
static Datum
form_row(FunctionCallInfo fcinfo, int natts, Datum *values, bool *nulls)
{
	Oid			type = get_fn_expr_rettype(fcinfo->flinfo);
	TupleDesc	desc;
	HeapTuple	tuple;

	if (!OidIsValid(type))
		type = get_func_rettype(fcinfo->flinfo->fn_oid);
	desc = lookup_rowtype_tupdesc(type, -1);
	idem_check_fits(desc->natts == natts);
	tuple = heap_form_tuple(desc, values, nulls);
	ReleaseTupleDesc(desc);
	return HeapTupleGetDatum(tuple);
}

Datum
idem_outcome_datum(FunctionCallInfo fcinfo, bool claimed, int answer,
				   const IdemRecord *record)
{
	Datum		values[IDEM_OUTCOME_COLUMNS];
	bool		nulls[IDEM_OUTCOME_COLUMNS];

	idem_outcome_values(claimed, answer, record, values, nulls);
	return form_row(fcinfo, IDEM_OUTCOME_COLUMNS, values, nulls);
}

Datum
idem_completion_datum(FunctionCallInfo fcinfo, const IdemRecord *record)
{
	return form_row(fcinfo, IDEM_NCOLUMNS, record->values, record->nulls);
}
